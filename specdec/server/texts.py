"""The text of single tokens, for log-probabilities."""

from functools import lru_cache

from transformers import PreTrainedTokenizerBase

from specdec.engine.text import IncrementalDetokenizer

MAX_KNOWN = 65_536
"""Tokens whose text is kept."""


class TokenTexts:
    """Texts of tokens as they stand behind others, the space before a word included.

    Args:
        tokenizer: None for a model without one, whose tokens have no text.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None) -> None:
        self._tokenizer = tokenizer
        self._before = tokenizer("a", add_special_tokens=False)["input_ids"] if tokenizer else []
        self._known = lru_cache(MAX_KNOWN)(self._text)

    def __getitem__(self, token_id: int) -> str:
        """Return the text of a token; parts of a character show as U+FFFD."""
        return self._known(token_id)

    def utf8(self, token_id: int) -> list[int] | None:
        """Return the bytes of a token's text; None where it is part of a character, whose bytes aren't known."""
        text = self[token_id]
        return None if "\ufffd" in text else list(text.encode())

    def _text(self, token_id: int) -> str:
        if self._tokenizer is None:
            return ""
        detokenizer = IncrementalDetokenizer(self._tokenizer, self._before, skip_special_tokens=False)
        return detokenizer.push(token_id) + detokenizer.finish()
