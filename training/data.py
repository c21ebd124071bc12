"""What heads are trained and measured on: token ids, and which of them are answers."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specdec.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True)
class Example:
    """One text.

    Args:
        input_ids: its tokens.
        answer: for each token, whether it belongs to an answer, and so is a label.
    """

    input_ids: tuple[int, ...]
    answer: tuple[bool, ...]


def read_examples(path: Path, tokenizer: "PreTrainedTokenizerBase", max_len: int) -> list[Example]:
    """Read texts: a `.jsonl` file of conversations (`{"messages": [...]}` a line), or plain text, all of it answer.

    Args:
        path: the file.
        tokenizer: a fast one; its chat template renders conversations.
        max_len: tokens; longer conversations are cut, plain text is cut into pieces.

    Raises:
        ConfigError: the file can't be read or holds nothing, or a line is no conversation; the message names it.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} can't be read: {error}") from error
    if path.suffix == ".jsonl":
        lines = [(i, line) for i, line in enumerate(text.splitlines(), 1) if line.strip()]
        examples = [_conversation(line, f"{path}, line {i}", tokenizer, max_len) for i, line in lines]
    else:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        pieces = [tuple(ids[i : i + max_len]) for i in range(0, len(ids), max_len)]
        examples = [Example(piece, (True,) * len(piece)) for piece in pieces]
    if not examples:
        raise ConfigError(f"{path} holds no text")
    return examples


def _conversation(line: str, where: str, tokenizer: "PreTrainedTokenizerBase", max_len: int) -> Example:
    try:
        messages = json.loads(line)["messages"]
        spans = list(_answer_spans(messages, tokenizer))
        text = _render(messages, tokenizer)
    except Exception as error:  # a template is a program: whatever it raises, the messages don't fit it
        raise ConfigError(f"{where}: is no conversation that the chat template takes ({error!r})") from error
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    answer = [any(start <= a < end for start, end in spans) for a, _ in encoded["offset_mapping"]]
    return Example(tuple(encoded["input_ids"][:max_len]), tuple(answer[:max_len]))


def _answer_spans(messages: list[Any], tokenizer: "PreTrainedTokenizerBase") -> Iterator[tuple[int, int]]:
    """Characters of each assistant turn, the template's end of turn included."""
    for i, message in enumerate(messages):
        if message["role"] == "assistant":
            before = _render(messages[:i], tokenizer, add_generation_prompt=True)
            yield len(before), len(_render(messages[: i + 1], tokenizer))


def _render(messages: list[Any], tokenizer: "PreTrainedTokenizerBase", **options: bool) -> str:
    text: str = tokenizer.apply_chat_template(messages, tokenize=False, **options)
    return text
