"""Answers of the base model itself, cached on disk prompt by prompt, so that a run that was cut off goes on."""

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from specdec.errors import ConfigError, DataError
from specdec.training.chat import Messages, encode_prompt
from specdec.training.data import Example, Report, make_example, warn
from specdec.training.jsonl import decode, parse_object, read_bytes
from specdec.training.prompts import Ask


def distill(
    ask: Ask,
    prompts: Sequence[Messages],
    tokenizer: PreTrainedTokenizerBase,
    cache_file: str | Path,
    *,
    settings: Mapping[str, Any],
    fingerprint: str,
    max_len: int,
    batch: int = 64,
    report: Report = warn,
    go_on: Callable[[], bool] = lambda: True,
) -> list[Example]:
    """Let the base model answer prompts, and make examples whose labels are its answers.

    Each answer is appended to the cache as soon as its batch is done. A later call finds it there if prompt, settings
    and model are the same; an answer whose line was cut off is asked for again. One run at a time may use a cache file.

    Args:
        ask: answers a batch; what it samples with must be what `settings` says.
        prompts: conversations that end before an answer; equal ones share one answer.
        tokenizer: the model's.
        cache_file: a JSONL file, made if it isn't there, with a line {"key", "messages", "answer"} a prompt.
        settings: how answers are sampled (temperature, their longest length, …), as JSON values.
        fingerprint: of the model that answers.
        max_len: examples are cut here, in tokens; prompts that leave no room for an answer are dropped.
        batch: how many prompts to ask at once.
        report: is told how many examples were cut and how many dropped.
        go_on: whether there is time for more, asked before each batch; prompts without an answer by then are left out,
            and if there is no other, no example is returned.

    Returns:
        One example a prompt, in order: prompt, answer, and the end-of-turn token if the answer came to its end.

    Raises:
        DataError: the cache can't be read or written (answers stored before are kept), a template refuses a prompt, or
            no example is left.
        ConfigError: `batch` or `max_len` is out of bounds.
    """
    if batch < 1 or max_len < 2:
        raise ConfigError(f"batch is {batch} and max_len {max_len}; they must be at least 1 and 2")
    encoded = [_encode(tokenizer, messages, number) for number, messages in enumerate(prompts, start=1)]
    keys = [_key(ids, settings, fingerprint) for ids in encoded]
    cache = _Cache(Path(cache_file))
    indices = {key: i for i, key in enumerate(keys) if key not in cache.answers and len(encoded[i]) < max_len}
    todo = list(indices.values())
    if todo:
        cache.open()
    for start in range(0, len(todo), batch):
        if not go_on():
            break
        part = todo[start : start + batch]
        answers = ask([encoded[i] for i in part])
        cache.append([(keys[i], prompts[i], answer) for i, answer in zip(part, answers, strict=True)])
    late = {keys[i] for i in todo if keys[i] not in cache.answers}
    if late:
        report(f"{len(late)} of {len(indices)} prompts without an answer were left out: the time for answers was up")
    asked = [(ids, cache.answers.get(key, [])) for ids, key in zip(encoded, keys, strict=True) if key not in late]
    return _examples(asked, max_len, report) if asked or not late else []


def _encode(tokenizer: PreTrainedTokenizerBase, messages: Messages, number: int) -> list[int]:
    try:
        return encode_prompt(tokenizer, messages)
    except DataError as error:
        raise DataError(f"prompt {number}: {error}") from error


def _examples(asked: list[tuple[list[int], list[int]]], max_len: int, report: Report) -> list[Example]:
    """Examples of prompts and answers."""
    made = []
    for prompt, answer in asked:
        mask = [False] * len(prompt) + [True] * len(answer)
        made.append(make_example(prompt + answer, mask, max_len))
    examples = [example for example in made if example is not None]
    num_cut = sum(len(prompt) < max_len < len(prompt) + len(answer) for prompt, answer in asked)
    if num_cut:
        report(f"{num_cut} of {len(asked)} answers were cut at {max_len} tokens of prompt and answer")
    if len(examples) < len(asked):
        num_long = sum(len(prompt) >= max_len for prompt, _ in asked)
        num_empty = len(asked) - len(examples) - num_long
        report(
            f"{num_long} of {len(asked)} prompts were dropped as longer than {max_len - 1} tokens, {num_empty} "
            "because the answer is empty"
        )
    if not examples:
        raise DataError(f"none of {len(asked)} prompts gave an example; give shorter prompts or a larger max_len")
    return examples


def _key(prompt: list[int], settings: Mapping[str, Any], fingerprint: str) -> str:
    text = json.dumps([prompt, dict(settings), fingerprint], sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


class _Cache:
    """The file of answers, and what it held: answers by key. A last line without its newline is torn: not read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.answers: dict[str, list[int]] = {}
        data = read_bytes(path) if path.exists() else b""
        self._num_whole_bytes = data.rfind(b"\n") + 1
        for number, line in enumerate(data[: self._num_whole_bytes].split(b"\n")[:-1], start=1):
            self._read(line, number)

    def _read(self, line: bytes, number: int) -> None:
        where = f"{self.path}:{number}"
        try:
            item = parse_object(decode(line, self.path, number), where)
        except DataError as error:
            raise DataError(f"{error}; take the line out, and its prompt is asked again") from error
        key, answer = item.get("key"), item.get("answer")
        if not isinstance(key, str) or not isinstance(answer, list) or not all(type(t) is int for t in answer):
            raise DataError(f"{where}: has no 'key' and 'answer' of token ids; this is no cache of answers")
        self.answers[key] = answer

    def open(self) -> None:
        """Make the file, or cut off its torn line: before any answer is made, so that none is lost to a bad path."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("ab") as file:
                file.truncate(self._num_whole_bytes)
        except OSError as error:
            raise self._failed(error) from error

    def append(self, entries: list[tuple[str, Messages, list[int]]]) -> None:
        """Write a line for each answer, and have them on the disk before the next batch."""
        try:
            with self.path.open("ab") as file:
                for key, messages, answer in entries:
                    item = {"key": key, "messages": list(messages), "answer": answer}
                    file.write(json.dumps(item, ensure_ascii=False).encode() + b"\n")
                    file.flush()
                    self.answers[key] = answer
                os.fsync(file.fileno())
        except OSError as error:
            raise self._failed(error) from error

    def _failed(self, error: OSError) -> DataError:
        return DataError(
            f"{self.path}: can't be written ({error.strerror}); free space or choose another place and start again: "
            "the answers that are stored are kept"
        )
