"""From texts and conversations to token ids, and what can't be made into them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from specdec.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class Encoder:
    """A model's tokenizer and chat template. Not for several threads at once.

    Args:
        tokenizer: None for a model without one: nothing can be encoded then.
        name: the model's, for messages.
    """

    tokenizer: PreTrainedTokenizerBase | None
    name: str

    def text(self, text: str) -> list[int]:
        """Return the token ids of a prompt.

        Raises:
            InvalidRequest: the model has no tokenizer, or the text holds half a character.
        """
        if self.tokenizer is None:
            raise InvalidRequest(f"model {self.name!r} has no tokenizer; give the prompt as token ids")
        _check_unicode(text)
        ids: list[int] = self.tokenizer(text)["input_ids"]
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of token ids, special tokens included.

        Raises:
            InvalidRequest: the model has no tokenizer, or an id is none of its tokens.
        """
        if self.tokenizer is None:
            raise InvalidRequest(f"model {self.name!r} has no tokenizer")
        bad = next((token for token in token_ids if not 0 <= token < len(self.tokenizer)), None)
        if bad is not None:
            raise InvalidRequest(f"token id {bad} is outside the vocabulary of {len(self.tokenizer)} tokens")
        return str(self.tokenizer.decode(list(token_ids), clean_up_tokenization_spaces=False))

    def chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Return the token ids of a conversation, ready for an answer.

        Raises:
            InvalidRequest: the model has no chat template, or the template refuses the messages.
        """
        if self.tokenizer is None or not self.tokenizer.chat_template:
            raise InvalidRequest(f"model {self.name!r} has no chat template; use generate() with a plain prompt")
        if not messages:
            raise InvalidRequest("the conversation is empty; give at least one message")
        try:
            text = self.tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, tokenize=False)
        except Exception as error:  # a template is a program: whatever it raises, the messages don't fit it
            raise InvalidRequest(f"the chat template of {self.name!r} refuses these messages: {error}") from error
        assert isinstance(text, str)
        _check_unicode(text)
        ids: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids


def _check_unicode(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        what = f"half of a surrogate pair at character {error.start}"
        raise InvalidRequest(f"the text holds {what}, which is no character; send whole characters") from error
