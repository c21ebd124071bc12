"""Prompts to be answered: from a file, or written by the instruct model itself."""

import json
import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import cycle, islice
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from specdec.errors import ConfigError, DataError
from specdec.hub.cache import replace_file
from specdec.training.chat import Messages, UserTurn, check_messages, special_tokens, user_turn
from specdec.training.jsonl import read_objects

Ask = Callable[[list[list[int]]], list[list[int]]]
"""Answers prompts of token ids: a list of new token ids for each, in order, with the token that ended it, if any."""

_MIN_PRINTABLE = 0.95


def read_prompts(path: str | Path) -> list[Messages]:
    """Read a JSONL file of {"prompt": text} or {"messages": [...]}; an answer at the end of the messages is left out.

    Raises:
        DataError: a line can't be used (the message names it), or there is none.
    """
    prompts: list[Messages] = []
    for where, item in read_objects(Path(path)):
        try:
            prompts.append(_prompt(item))
        except DataError as error:
            raise DataError(f"{where}: {error}") from error
    if not prompts:
        raise DataError(f"{path}: holds no prompt; each line must be {{'prompt': …}} or {{'messages': …}}")
    return prompts


def write_prompts(path: str | Path, prompts: Sequence[Messages]) -> None:
    """Write prompts so that `read_prompts` finds them again; the file is there whole or not at all.

    Raises:
        DataError: the file can't be written.
    """
    lines = [json.dumps({"messages": list(messages)}, ensure_ascii=False) + "\n" for messages in prompts]
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        replace_file(Path(path), lambda file: file.write_text("".join(lines), encoding="utf-8"))
    except OSError as error:
        raise DataError(f"{path}: can't be written ({error.strerror}); free space or choose another place") from error


def self_prompts(
    ask: Ask,
    tokenizer: PreTrainedTokenizerBase,
    count: int,
    *,
    openings: Sequence[str] = (),
    batch: int = 256,
    max_tries: int = 200,
    min_chars: int = 8,
    max_chars: int = 2000,
    go_on: Callable[[], bool] = lambda: True,
) -> list[Messages]:
    """Let the instruct model write users' first messages: it continues its chat template, opened for a user's turn.

    Every other message begins with one of the openings, in turn, and the model writes the rest.

    Kept are messages that came to their end, have a sensible length, hold no special token, are mostly printable, and
    are no repetition of another (case, white space and Unicode forms aside). After Magpie (Xu et al., 2024, section 2).

    Args:
        ask: must sample at temperature 1, each request of a call and each call with other seeds.
        tokenizer: the model's.
        count: how many prompts to return.
        openings: beginnings of messages; none leaves all to the model.
        batch: how many to ask for at once.
        max_tries: how many batches to ask for at most.
        min_chars: shorter messages are left out.
        max_chars: longer messages are left out.
        go_on: whether there is time for more, asked before each batch but the first.

    Returns:
        One user message each, in the order in which they were written; fewer than `count` if time was up.

    Raises:
        DataError: the template doesn't show how a user's turn opens, or too few messages were found.
        ConfigError: a number is out of bounds.
    """
    for name, value in (("count", count), ("batch", batch), ("max_tries", max_tries), ("min_chars", min_chars)):
        if value < 1:
            raise ConfigError(f"{name} is {value}; it must be at least 1")
    turn, special = user_turn(tokenizer), special_tokens(tokenizer)
    found: dict[str, str] = {}
    beginnings = cycle(x for opening in openings or ("",) for x in (("", opening) if opening else ("",)))
    for _ in range(max_tries):
        begun = list(islice(beginnings, batch))
        asked = [[*turn.opening, *tokenizer(text, add_special_tokens=False)["input_ids"]] for text in begun]
        for beginning, output in zip(begun, ask(asked), strict=True):
            text = _message(turn, special, tokenizer, beginning, output)
            if text is not None and min_chars <= len(text) <= max_chars and _is_printable(text):
                found.setdefault(_normalised(text), text)
        if len(found) >= count or (found and not go_on()):
            return [[{"role": "user", "content": text}] for text in list(found.values())[:count]]
    raise DataError(
        f"only {len(found)} of {count} different prompts were found in {max_tries} batches of {batch}; allow more "
        "tries or longer messages, or give a file of prompts (a model that isn't tuned for chat writes few that end)"
    )


def without_known(prompts: Sequence[Messages], known: Iterable[str], words: int = 8) -> list[Messages]:
    """Leave out prompts that have a run of words in common with a known text, or are as short and all the same.

    Args:
        prompts: conversations; all that is said in them counts.
        known: texts that nothing is to be trained on, such as a benchmark's prompts.
        words: how long the run is, in words; case, punctuation and white space don't count.
    """
    runs = {run for text in known for run in _runs(text, words)}
    return [p for p in prompts if not any(run in runs for message in p for run in _runs(message["content"], words))]


def _runs(text: str, count: int) -> Iterator[tuple[str, ...]]:
    """Each run of so many words; the whole of a text that has fewer."""
    words = re.findall(r"\w+", unicodedata.normalize("NFKC", text).casefold())
    for start in range(max(1, len(words) - count + 1)):
        yield tuple(words[start : start + count])


def _prompt(item: dict[str, object]) -> Messages:
    if ("prompt" in item) == ("messages" in item):
        raise DataError(f"has the keys {sorted(item)}; each line needs either 'prompt' or 'messages'")
    if "messages" not in item:
        return check_messages([{"role": "user", "content": item["prompt"]}])
    messages = list(check_messages(item["messages"]))
    while messages and messages[-1]["role"] == "assistant":
        messages.pop()
    if not messages:
        raise DataError("the messages hold answers only; put the user's turn before them")
    return messages


def _message(
    turn: UserTurn,
    special: tuple[str, ...],
    tokenizer: PreTrainedTokenizerBase,
    beginning: str,
    output: Sequence[int],
) -> str | None:
    """What the user says; None where it doesn't end, goes nowhere, or a special token stands in it."""
    end = next((i for i, token in enumerate(output) if token in turn.end_ids), None)
    text: str = tokenizer.decode(list(output[:end]), clean_up_tokenization_spaces=False)
    ended = end is not None
    if turn.end_text and turn.end_text in text:
        text, ended = text.split(turn.end_text)[0], True
    if not ended or not text.strip() or any(name in text for name in special):
        return None
    return (beginning + text).strip()


def _is_printable(text: str) -> bool:
    printable = sum(char.isprintable() or char in "\n\t" for char in text)
    return "\ufffd" not in text and printable >= _MIN_PRINTABLE * len(text)


def _normalised(text: str) -> str:
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())
