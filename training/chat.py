"""Conversations as a tokenizer's chat template writes them: where the answers stand, and how a user's turn opens.

Knows templates and tokens; reads no files.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os.path import commonprefix
from typing import Any

from transformers import PreTrainedTokenizerBase

from specdec.errors import DataError

Messages = Sequence[Mapping[str, str]]

_MARKER = "specdec4b1d0c7e"  # stands for a user's message; no template writes it by itself


@dataclass(frozen=True, slots=True)
class UserTurn:
    """How a chat template frames what a user says.

    Args:
        opening: token ids from the beginning (a default system prompt included) to where the user's text begins.
        end_ids: tokens that end the user's turn.
        end_text: text that ends it where the template ends it with no special token; else empty.
    """

    opening: tuple[int, ...]
    end_ids: frozenset[int]
    end_text: str


def check_messages(value: Any) -> Messages:
    """Return messages that have roles and texts.

    Args:
        value: what a data file says.

    Raises:
        DataError: it isn't a list of {"role", "content"} with texts.
    """
    if not isinstance(value, list) or not value:
        raise DataError(f"'messages' is {_short(value)}; give a list of {{'role', 'content'}} objects")
    for message in value:
        if not isinstance(message, dict) or not all(isinstance(message.get(k), str) for k in ("role", "content")):
            raise DataError(f"the message {_short(message)} must be an object with texts as 'role' and 'content'")
    return value


def encode_prompt(tokenizer: PreTrainedTokenizerBase, messages: Messages) -> list[int]:
    """Return the token ids of a conversation, ready for an answer: what the engine is asked with.

    Raises:
        DataError: the tokenizer has no chat template, or it refuses the messages.
    """
    return encode(tokenizer, _render(tokenizer, messages, open_answer=True))


def encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Return the token ids of text that a template wrote: special tokens are in it already."""
    ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return ids


def encode_answers(tokenizer: PreTrainedTokenizerBase, messages: Messages) -> tuple[list[int], list[bool]]:
    """Tokenize a conversation and say which tokens the assistant wrote.

    Where the template marks answers with `{% generation %}`, its marks hold. Else an answer is what the rendering up to
    its turn has more than the rendering of the messages before, opened for an answer. It includes the end-of-turn
    token but no white space behind that, which no model writes. A token that begins before the answer is no label.

    Returns:
        The token ids [T], and for each whether it is an answer's [T].

    Raises:
        DataError: there is no template, it refuses the messages, or it rewrites earlier text as a conversation grows.
    """
    fast = bool(getattr(tokenizer, "is_fast", False))
    if fast and _marks_answers(tokenizer):
        return _marked_answers(tokenizer, messages)
    text, spans = _answer_spans(tokenizer, messages)
    if not fast:
        return _mask_by_length(tokenizer, text, spans)
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    offsets = encoded["offset_mapping"]
    return encoded["input_ids"], [any(_inside(token, span) for span in spans) for token in offsets]


def user_turn(tokenizer: PreTrainedTokenizerBase) -> UserTurn:
    """Find out from the template how a user's first turn opens and ends, by rendering one with a marker in it.

    Raises:
        DataError: there is no template, or the user's text can't be found in what it writes.
    """
    text = _render(tokenizer, [{"role": "user", "content": _MARKER}], open_answer=True)
    if text.count(_MARKER) != 1 or text.startswith(_MARKER):
        raise DataError(
            f"the chat template of {_name(tokenizer)} opens a user's turn with no text of its own or writes the "
            f"message {text.count(_MARKER)} times, so no prompts can be made from it; give a file of prompts"
        )
    before, behind = text.split(_MARKER)
    # A space before the user's text belongs to the token that follows, in most vocabularies.
    opening = encode(tokenizer, before.rstrip(" "))
    follows = encode(tokenizer, behind.lstrip())[:1]
    special = _special_ids(tokenizer)
    ends = {token for token in (*follows, tokenizer.eos_token_id) if token in special}
    end_text = "" if follows and follows[0] in special else behind.strip()
    return UserTurn(tuple(opening), frozenset(ends), end_text)


def special_tokens(tokenizer: PreTrainedTokenizerBase) -> tuple[str, ...]:
    """Return the names of all tokens that are no text, as they stand in a rendering."""
    return tuple(tokenizer.convert_ids_to_tokens(sorted(_special_ids(tokenizer))))


def _special_ids(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    added = {index for index, token in tokenizer.added_tokens_decoder.items() if token.special}
    return added | set(tokenizer.all_special_ids)


def _render(tokenizer: PreTrainedTokenizerBase, messages: Messages, open_answer: bool) -> str:
    if not tokenizer.chat_template:
        raise DataError(f"{_name(tokenizer)} has no chat template; train on a plain text file")
    try:
        text: str = tokenizer.apply_chat_template(list(messages), add_generation_prompt=open_answer, tokenize=False)
    except Exception as error:  # a template is a program: whatever it raises, the messages don't fit it
        raise DataError(f"the chat template of {_name(tokenizer)} refuses these messages: {error}") from error
    return text


def _marks_answers(tokenizer: PreTrainedTokenizerBase) -> bool:
    template = tokenizer.chat_template and tokenizer.get_chat_template()
    return bool(re.search(r"\{%[-+]?\s*generation\s*[-+]?%\}", template or ""))


def _marked_answers(tokenizer: PreTrainedTokenizerBase, messages: Messages) -> tuple[list[int], list[bool]]:
    _render(tokenizer, messages, open_answer=False)  # names the error if there is one
    encoded = tokenizer.apply_chat_template(
        list(messages), tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    return list(encoded["input_ids"]), [bool(mark) for mark in encoded["assistant_masks"]]


def _answer_spans(tokenizer: PreTrainedTokenizerBase, messages: Messages) -> tuple[str, list[tuple[int, int]]]:
    """The whole rendering, and where each answer begins and ends in it."""
    text = _render(tokenizer, messages, open_answer=False)
    specials = special_tokens(tokenizer)
    spans = []
    for turn, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        if turn == 0:
            raise DataError("the conversation begins with an answer; put the user's turn before it")
        prompt = _render(tokenizer, messages[:turn], open_answer=True)
        answered = _render(tokenizer, messages[: turn + 1], open_answer=False)
        _check_prefix(tokenizer, prompt, answered, turn)
        _check_prefix(tokenizer, answered, text, turn)
        trimmed = answered.rstrip()
        end = len(trimmed) if trimmed.endswith(specials) else len(answered)
        spans.append((len(prompt), end))
    return text, spans


def _check_prefix(tokenizer: PreTrainedTokenizerBase, shorter: str, longer: str, turn: int) -> None:
    if not longer.startswith(shorter):
        at = len(commonprefix([shorter, longer]))
        raise DataError(
            f"the chat template of {_name(tokenizer)} rewrites earlier text as the conversation grows (message "
            f"{turn + 1}: {_short(shorter[at:])} became {_short(longer[at:])}), so its answers can't be told from the "
            "rest; mark them in the template with {% generation %}, or cut conversations behind the first answer"
        )


def _inside(token: tuple[int, int], span: tuple[int, int]) -> bool:
    """Tokens of nothing but trimmed white space are empty and stand behind their space."""
    (first, last), (start, end) = token, span
    return first >= start and last > start and (first < end or last == end)


def _mask_by_length(
    tokenizer: PreTrainedTokenizerBase, text: str, spans: list[tuple[int, int]]
) -> tuple[list[int], list[bool]]:
    """For tokenizers that can't say where their tokens stand: the beginnings must have the tokens of the whole."""
    ids = encode(tokenizer, text)
    mask = [False] * len(ids)
    for span in spans:
        start, end = (_num_tokens(tokenizer, text[:at], ids) for at in span)
        mask[start:end] = [True] * (end - start)
    return ids, mask


def _num_tokens(tokenizer: PreTrainedTokenizerBase, prefix: str, ids: list[int]) -> int:
    part = encode(tokenizer, prefix)
    if ids[: len(part)] != part:
        raise DataError(
            f"{_name(tokenizer)} gives no offsets, and its tokens run across the end of {_short(prefix[-20:])}, where "
            "an answer begins or ends; use the model's fast tokenizer"
        )
    return len(part)


def _name(tokenizer: PreTrainedTokenizerBase) -> str:
    return str(tokenizer.name_or_path or type(tokenizer).__name__)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
