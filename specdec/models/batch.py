"""The tensors of one step: the rows that the model runs and the slots they write."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain

import numpy as np
import torch

from specdec.kernels.attention import AttentionMetadata
from specdec.kernels.work import AttentionWork


@dataclass(frozen=True, slots=True)
class Batch:
    """A packed batch of N rows, no padding.

    Args:
        input_ids: [N] int64, the rows' tokens.
        slot_mapping: [N] int64, the slot that each row's keys and values go to.
        attention: who sees what, and the rows' positions.
    """

    input_ids: torch.Tensor
    slot_mapping: torch.Tensor
    attention: AttentionMetadata | AttentionWork


@dataclass(frozen=True, slots=True)
class Rows:
    """One sequence's part of a packed batch: causal rows, then nodes of its tree.

    Args:
        block_table: the blocks of its keys.
        start: key of the first row.
        tokens: of the causal rows and then of the nodes.
        context: key of the tree's root; keys before it are seen by every node.
        depth: of each node.
        ancestors: of each node, as in `TokenTree`; bit j is the key at `context` + j.
    """

    block_table: Sequence[int]
    start: int
    tokens: Sequence[int]
    context: int
    depth: Sequence[int] = ()
    ancestors: Sequence[int] = ()

    @property
    def end(self) -> int:
        """Key behind the last row."""
        return self.start + len(self.tokens)

    @property
    def num_causal(self) -> int:
        """Rows that stand before the nodes."""
        return len(self.tokens) - len(self.depth)


def pack_rows(sequences: Sequence[Rows], block_size: int, device: torch.device) -> Batch:
    """Put the rows of several sequences behind each other.

    Args:
        sequences: at least one.
        block_size: slots a block.
        device: where the tensors go.
    """
    lens = [len(s.tokens) for s in sequences]
    ends = [*accumulate(lens)]
    width = max(len(s.block_table) for s in sequences)
    table = np.array([[*s.block_table, *[0] * (width - len(s.block_table))] for s in sequences], dtype=np.int64)
    sequence = np.repeat(np.arange(len(sequences)), lens)  # [N], of each row
    bounds = np.array([(end - n, s.start, s.context) for s, n, end in zip(sequences, lens, ends, strict=True)])
    first, start, context = bounds[sequence].T
    keys = np.arange(ends[-1]) - first + start
    in_tree = keys >= context
    columns = np.zeros((5, ends[-1]), dtype=np.int64)
    tokens, positions, slots, visible, ancestors = columns
    tokens[:] = [*chain(*(s.tokens for s in sequences))]
    positions[:] = keys
    positions[in_tree] = context[in_tree] + [*chain(*(s.depth for s in sequences))]
    slots[:] = table[sequence, keys // block_size] * block_size + keys % block_size
    visible[:] = np.minimum(keys + 1, context)
    ancestors[in_tree] = [*chain(*(s.ancestors for s in sequences))]
    on_device = torch.from_numpy(columns).to(device)
    attention = AttentionMetadata(
        cu_seqlens_q=(0, *ends),
        context_lens=tuple(s.context for s in sequences),
        seq_lens=tuple(s.end for s in sequences),
        block_table=torch.from_numpy(table).to(device),
        positions=on_device[1],
        visible=on_device[3],
        ancestors=on_device[4],
        block_size=block_size,
    )
    return Batch(input_ids=on_device[0], slot_mapping=on_device[2], attention=attention)


def slot(block_table: Sequence[int], key: int, block_size: int) -> int:
    """Slot of a sequence's key."""
    return block_table[key // block_size] * block_size + key % block_size
