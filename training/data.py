"""Examples to train on, read from files. Knows tokenizers and chat templates; no models."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from specdec.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class Example:
    """One text to train on.

    Args:
        input_ids: its tokens.
        answer: for each token whether it belongs to an answer: only those are labels.
    """

    input_ids: tuple[int, ...]
    answer: tuple[bool, ...]


def read_examples(path: Path, tokenizer: PreTrainedTokenizerBase, max_len: int) -> list[Example]:
    """Read chat JSONL: one object a line with `messages`, whose assistant turns are the answers.

    Args:
        path: the file.
        tokenizer: has a chat template.
        max_len: longer examples are cut there.

    Raises:
        InvalidRequest: a line can't be read; the message names it.
    """
    examples = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            examples.append(_example(json.loads(line)["messages"], tokenizer, max_len))
        except (ValueError, KeyError, TypeError) as error:
            raise InvalidRequest(f"{path}:{number}: isn't an object with `messages` ({error!r})") from error
    return examples


def _example(messages: list[dict[str, Any]], tokenizer: PreTrainedTokenizerBase, max_len: int) -> Example:
    ids: list[int] = []
    answer: list[bool] = []
    for i, message in enumerate(messages):
        is_answer = message["role"] == "assistant"
        if is_answer:  # the generation prompt before it is no answer
            ids = tokenizer.apply_chat_template(messages[:i], add_generation_prompt=True, return_dict=False)
            answer += [False] * (len(ids) - len(answer))
        ids = tokenizer.apply_chat_template(messages[: i + 1], return_dict=False)
        answer += [is_answer] * (len(ids) - len(answer))
    return Example(tuple(ids[:max_len]), tuple(answer[:max_len]))
