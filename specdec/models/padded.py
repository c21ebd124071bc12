"""Batches of few shapes, which any batch can be put into: what a captured forward reads."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain

import torch

from specdec.kernels.attention import AttentionMetadata
from specdec.kernels.work import assemble, divide, max_block, tile_block, tree_tile_block
from specdec.models.batch import Batch

CONTEXTS = (1024, 2048, 8192, 32768)
"""Bounds of contexts; beyond the last one it is the longest sequence."""


def bound_of(longest: int, max_model_len: int) -> int:
    """Return the bound that a context of so many tokens is run under, of sequences of `max_model_len` at most."""
    return min([*(bound for bound in CONTEXTS if bound >= longest), max_model_len])


@dataclass(frozen=True, slots=True)
class PaddedShape:
    """What a batch is padded to.

    Args:
        num_rows: R; at least one row is padding.
        num_seqs: S.
        num_nodes: no tree has more.
        max_context: no context is longer.
    """

    num_rows: int
    num_seqs: int
    num_nodes: int
    max_context: int


class PaddedBatch:
    """A batch of one shape. Its tensors stay where they are; `fill` puts another batch into them.

    Padding is causal rows at position -1, before all keys; they write nothing.

    Args:
        shape: what is padded to.
        max_blocks: M, most blocks of a sequence.
        group: query heads that share a key head.
        head_dim: D.
        device: where its tensors are.
    """

    def __init__(self, shape: PaddedShape, max_blocks: int, group: int, head_dim: int, device: torch.device) -> None:
        rows, seqs = shape.num_rows, shape.num_seqs
        chunk_block, tree_block = tile_block(rows, group, max_block(head_dim)), tree_tile_block(shape.num_nodes, group)
        self._tile_rows = chunk_block // group, tree_block // group
        nodes = min(rows, seqs * shape.num_nodes)
        nothing = rows - 1  # a row of padding
        self._room = [  # entries of each part, and one that is padding
            (seqs + 1, [0]),  # contexts
            (nodes, [nothing]),
            (nodes, [seqs]),
            (seqs * -(-shape.num_nodes // self._tile_rows[1]), [seqs, nothing, 0, 0]),
            (rows // self._tile_rows[0] + seqs + 1, [seqs, nothing, 0]),
        ]
        ends = list(accumulate((count * len(padding) for count, padding in self._room), initial=0))
        self._parts = torch.zeros(ends[-1], dtype=torch.int32, device=device)
        self._columns = torch.zeros(4, rows, dtype=torch.int64, device=device)
        tokens, slots, positions, ancestors = self._columns
        self._table = torch.zeros(seqs + 1, max_blocks, dtype=torch.int32, device=device)
        blocks = chunk_block, tree_block
        work = assemble(self._parts, ends, self._table, positions, ancestors, blocks, shape.max_context)
        self.batch = Batch(tokens, slots, work)
        """[R] rows, for the Triton kernels."""

    def fill(self, batch: Batch) -> None:
        """Put a batch into the first rows and sequences."""
        meta, n = batch.attention, len(batch.input_ids)
        assert isinstance(meta, AttentionMetadata) and n < self._columns.shape[1]
        num_rows = self._columns.shape[1]
        parts = divide((*meta.cu_seqlens_q, num_rows), [*meta.num_causal, num_rows - n], *self._tile_rows)
        flat = chain(*(_padded(x, *room) for x, room in zip((meta.context_lens, *parts), self._room, strict=True)))
        self._parts.copy_(torch.tensor([*flat], dtype=torch.int32))
        columns = (batch.input_ids, batch.slot_mapping, meta.positions, meta.ancestors)
        for i, (column, padding) in enumerate(zip(columns, (0, -1, -1, 0), strict=True)):
            self._columns[i, :n] = column
            self._columns[i, n:] = padding
        table = meta.block_table[:, : self._table.shape[1]]
        self._table[: len(table), : table.shape[1]] = table


def _padded(part: Sequence[int], count: int, padding: list[int]) -> list[int]:
    """A part of `count` entries."""
    return [*part, *padding * (count - len(part) // len(padding))]
