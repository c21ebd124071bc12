"""Training examples: token ids, and which of them are answers. Reads conversations and plain text."""

import hashlib
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from specdec.errors import ConfigError, DataError
from specdec.training.chat import check_messages, encode_answers
from specdec.training.jsonl import decode, read_bytes, read_objects

Report = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Example:
    """One text to train on.

    Args:
        input_ids: the token ids [T].
        answer: for each whether the assistant wrote it: then it is a label [T].
        category: what kind of text it is, by which results are reported; empty if that isn't known.
    """

    input_ids: tuple[int, ...]
    answer: tuple[bool, ...]
    category: str = ""

    def __post_init__(self) -> None:
        if len(self.input_ids) != len(self.answer):
            raise ValueError(f"{len(self.input_ids)} token ids have {len(self.answer)} answer marks; give one for each")


def warn(message: str) -> None:
    """Report what was left out, where nobody says how else."""
    warnings.warn(message, UserWarning, stacklevel=3)


def read_examples(
    path: str | Path, tokenizer: PreTrainedTokenizerBase, max_len: int, report: Report = warn
) -> list[Example]:
    """Read a file of conversations or plain text.

    Args:
        path: a `.txt` file of documents with blank lines between them, all of whose tokens are labels; any other
            name is read as JSONL with {"messages": [{"role", "content"}, …]} on each line, where answers are labels;
            a line may have a "category".
        tokenizer: the base model's.
        max_len: longer examples are cut here, in tokens.
        report: is told how many examples were cut, and how many were dropped because no label was left.

    Returns:
        The examples in the file's order; nothing follows the last label.

    Raises:
        DataError: a line can't be used (the message names it), or the file holds no label at all.
        ConfigError: `max_len` is too small for anything.
    """
    path = Path(path)
    if max_len < 2:
        raise ConfigError(f"max_len is {max_len}; an example needs 2 tokens at least")
    read = _read_text if path.suffix.lower() == ".txt" else _read_chats
    texts = list(read(path, tokenizer))
    made = [make_example(ids, mask, max_len, category) for ids, mask, category in texts]
    examples = [example for example in made if example is not None]
    num_cut = sum(len(ids) > max_len for ids, _, _ in texts)
    if num_cut:
        report(f"{path}: {num_cut} of {len(texts)} examples were cut at {max_len} tokens")
    if len(examples) < len(texts):
        dropped = len(texts) - len(examples)
        report(f"{path}: {dropped} of {len(texts)} examples were dropped: no label in {max_len} tokens")
    if not examples:
        raise DataError(f"{path}: holds no example with a label; give conversations with answers, or a longer max_len")
    return examples


def make_example(ids: Sequence[int], mask: Sequence[bool], max_len: int, category: str = "") -> Example | None:
    """Cut a marked text; None where no label is left. What follows the last label teaches nothing and is cut as well.

    Args:
        ids: token ids [T].
        mask: whether each is a label [T].
        max_len: how many tokens to keep at most.
        category: the example's.
    """
    labels = [i for i, label in enumerate(mask[:max_len]) if label]
    if not labels:
        return None
    return Example(tuple(ids[: labels[-1] + 1]), tuple(mask[: labels[-1] + 1]), category)


def split(examples: Sequence[Example], held_out: int) -> tuple[list[Example], list[Example]]:
    """Set prompts apart that are never trained on, by a hash of what they say.

    All examples of one prompt (the tokens before the first label; the whole text, where it begins with one) go to the
    same side, so duplicates of a held-out prompt are held out too, whatever their answers. The order of the file
    doesn't matter.

    Args:
        examples: all of them.
        held_out: how many different prompts to hold out.

    Returns:
        The examples to train on and the held-out ones, each in their order.

    Raises:
        ConfigError: nothing would be left to train on, or `held_out` is negative.
    """
    keys = [_prompt_hash(example) for example in examples]
    prompts = sorted(set(keys))
    if not 0 <= held_out < len(prompts):
        raise ConfigError(
            f"held_out is {held_out}, but there are {len(prompts)} different prompts; leave at least one to train on: "
            "give examples of more prompts"
        )
    chosen = set(prompts[:held_out])
    sides: tuple[list[Example], list[Example]] = ([], [])
    for key, example in zip(keys, examples, strict=True):
        sides[key in chosen].append(example)
    return sides


def num_prompts(examples: Iterable[Example]) -> int:
    """Return how many different prompts there are, as `split` tells them apart."""
    return len({_prompt_hash(example) for example in examples})


def _prompt_hash(example: Example) -> str:
    first = example.answer.index(True) if any(example.answer) else 0
    text = example.input_ids[:first] or example.input_ids
    return hashlib.blake2b(repr(tuple(text)).encode(), digest_size=16).hexdigest()


def _read_chats(path: Path, tokenizer: PreTrainedTokenizerBase) -> Iterator[tuple[list[int], list[bool], str]]:
    for where, item in read_objects(path):
        try:
            if "messages" not in item:
                raise DataError(f"has the keys {sorted(item)}; each line needs 'messages'")
            category = item.get("category", "")
            if not isinstance(category, str):
                raise DataError(f"has the category {category!r}; give a text, or none")
            yield *encode_answers(tokenizer, check_messages(item["messages"])), category
        except DataError as error:
            raise DataError(f"{where}: {error}") from error


def _read_text(path: Path, tokenizer: PreTrainedTokenizerBase) -> Iterator[tuple[list[int], list[bool], str]]:
    text = decode(read_bytes(path), path).replace("\r\n", "\n")
    for document in re.split(r"\n(?:[^\S\n]*\n)+", text):
        if document.strip():
            ids: list[int] = tokenizer(document.strip("\n"), verbose=False)["input_ids"]
            yield ids, [True] * len(ids), ""
