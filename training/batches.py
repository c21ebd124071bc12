"""From examples to batches: an order that follows from the seed alone, padding, labels. Knows no models."""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count
from typing import TypeVar

import torch
from torch import Tensor

from specdec.errors import InvalidRequest
from specdec.training.config import TrainConfig
from specdec.training.data import Example

S = TypeVar("S")
T = TypeVar("T")
IGNORE = -100  # cross_entropy's own default: no label here

_WINDOW = 64  # batches whose examples are sorted by length together


@dataclass(frozen=True, slots=True)
class Batch:
    """Examples padded on the right, and the positions that heads learn from.

    Args:
        input_ids: [B, L] int64, padded with 0.
        attention_mask: [B, L] int64, 0 where padded.
        rows: [T] int64, places in the flattened [B * L] from which some head has a label.
        labels: [T, K] int64; that of head k at position t is token t + 2 + k, IGNORE where that is no answer token.
        following: [T, K] int64; token t + 1 + k, which head k may see; 0 behind the end, where no label is.
        sources: [T, K] int64, the places in the flattened [B * L] that yield the labels; any place where no label is.
    """

    input_ids: Tensor
    attention_mask: Tensor
    rows: Tensor
    labels: Tensor
    following: Tensor
    sources: Tensor

    def to(self, device: torch.device) -> "Batch":
        """Return the batch on a device."""
        tensors = (self.input_ids, self.attention_mask, self.rows, self.labels, self.following, self.sources)
        return Batch(*(tensor.to(device) for tensor in tensors))


def make_batch(examples: Sequence[Example], num_heads: int) -> Batch:
    """Pad examples and find their labels.

    Args:
        examples: B of them; none makes a batch without rows.
        num_heads: K.
    """
    length = max((len(example.input_ids) for example in examples), default=1)
    ids = torch.zeros(len(examples), length + num_heads + 1, dtype=torch.int64)  # the padding is read as labels too
    answer = torch.zeros_like(ids, dtype=torch.bool)
    mask = torch.zeros_like(ids)
    for i, example in enumerate(examples):
        n = len(example.input_ids)
        ids[i, :n] = torch.tensor(example.input_ids)
        answer[i, :n] = torch.tensor(example.answer)
        mask[i, :n] = 1
    tokens, is_label = (x.unfold(1, num_heads + 2, 1).flatten(0, 1) for x in (ids, answer))  # [B * L, K + 2]
    labels = tokens[:, 2:].masked_fill(~is_label[:, 2:], IGNORE)
    rows = (labels != IGNORE).any(1).nonzero()[:, 0]
    sources = (rows[:, None] + 1 + torch.arange(num_heads)).clamp(max=len(labels) - 1)
    return Batch(ids[:, :length], mask[:, :length], rows, labels[rows], tokens[rows, 1 : num_heads + 1], sources)


def label_counts(examples: Sequence[Example], num_heads: int) -> list[int]:
    """Return how many labels each head has in these examples."""
    whole = sum(sum(example.answer) for example in examples)
    return [whole - sum(sum(example.answer[: k + 2]) for example in examples) for k in range(num_heads)]


class BatchOrder:
    """The batches of a run, epoch after epoch: the same for the same examples, batch_tokens and seed.

    Examples are shuffled, those that come close together sorted by length, so that little is padding, then cut into
    batches of at most `batch_tokens`, which are shuffled again. Batches with no label are skipped.

    Args:
        examples: all of the training set.
        config: batch_tokens and seed.

    Raises:
        InvalidRequest: an example is longer than a batch, or none has a label.
    """

    def __init__(self, examples: Sequence[Example], config: TrainConfig) -> None:
        for i, example in enumerate(examples):
            if len(example.input_ids) > config.batch_tokens:
                raise InvalidRequest(
                    f"example {i} has {len(example.input_ids)} tokens, a batch {config.batch_tokens}; cut the examples "
                    "or raise batch_tokens"
                )
        if not any(any(example.answer[2:]) for example in examples):
            raise InvalidRequest(f"none of the {len(examples)} examples has an answer token to learn from")
        self._examples = examples
        self._config = config
        self.num_skipped = 0

    def __iter__(self) -> Iterator[list[Example]]:
        self.num_skipped = 0
        for epoch in count():
            for batch in self._epoch(epoch):
                examples = [self._examples[i] for i in batch]
                if any(any(example.answer[2:]) for example in examples):
                    yield examples
                else:
                    self.num_skipped += 1

    def _epoch(self, epoch: int) -> Iterator[list[int]]:
        generator = torch.Generator().manual_seed((self._config.seed * 1_000_003 + epoch) % (1 << 63))
        order = torch.randperm(len(self._examples), generator=generator).tolist()
        tokens = self._config.batch_tokens
        mean = sum(len(example.input_ids) for example in self._examples) / len(order)
        window = max(1, int(_WINDOW * tokens / max(mean, 1)))
        batches = [
            batch
            for start in range(0, len(order), window)
            for batch in cut(sorted(order[start : start + window], key=self._length), self._length, tokens)
        ]
        for i in torch.randperm(len(batches), generator=generator).tolist():
            yield batches[i]

    def _length(self, index: int) -> int:
        return len(self._examples[index].input_ids)


def cut(sorted_items: Iterable[T], length: Callable[[T], int], batch_tokens: int) -> Iterator[list[T]]:
    """Cut what is sorted by length into batches of at most that many tokens, padding included; or of one item.

    The longest item of a batch is its last, so it sets the padding.
    """
    batch: list[T] = []
    for item in sorted_items:
        if batch and (len(batch) + 1) * length(item) > batch_tokens:
            yield batch
            batch = []
        batch.append(item)
    if batch:
        yield batch


def ahead(items: Iterable[S], make: Callable[[S], T]) -> Iterator[T]:
    """Yield what is made of each item, the next one being made in another thread while one is used."""
    with ThreadPoolExecutor(1) as pool:
        waiting: Future[T] | None = None
        for item in items:
            made = pool.submit(make, item)
            if waiting is not None:
                yield waiting.result()
            waiting = made
        if waiting is not None:
            yield waiting.result()


def fingerprint(*sets: Sequence[Example]) -> str:
    """Return a hash of sets of examples: 32 hexadecimal digits."""
    digest = hashlib.blake2b(digest_size=16)
    for examples in sets:
        digest.update(f"{len(examples)};".encode())
        for example in examples:
            digest.update(f"{example.input_ids}{[int(flag) for flag in example.answer]}".encode())
    return digest.hexdigest()
