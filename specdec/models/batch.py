"""The tensors of one step: the rows that the model runs and the slots they write."""

from collections.abc import Sequence
from dataclasses import dataclass

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
    tokens: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    visible: list[int] = []
    ancestors: list[int] = []
    cu_seqlens_q = [0]
    for s in sequences:
        causal_end = s.start + s.num_causal
        tokens += s.tokens
        positions += [*range(s.start, causal_end), *(s.context + d for d in s.depth)]
        slots += [slot(s.block_table, key, block_size) for key in range(s.start, s.end)]
        visible += [*range(s.start + 1, causal_end + 1), *[s.context] * len(s.depth)]
        ancestors += [*[0] * s.num_causal, *s.ancestors]
        cu_seqlens_q.append(len(tokens))
    width = max(len(s.block_table) for s in sequences)
    table = [[*s.block_table, *[0] * (width - len(s.block_table))] for s in sequences]
    columns = torch.tensor([tokens, positions, slots, visible, ancestors], device=device)
    attention = AttentionMetadata(
        cu_seqlens_q=tuple(cu_seqlens_q),
        context_lens=tuple(s.context for s in sequences),
        seq_lens=tuple(s.end for s in sequences),
        block_table=torch.tensor(table, device=device),
        positions=columns[1],
        visible=columns[3],
        ancestors=columns[4],
        block_size=block_size,
    )
    return Batch(input_ids=columns[0], slot_mapping=columns[2], attention=attention)


def slot(block_table: Sequence[int], key: int, block_size: int) -> int:
    """Slot of a sequence's key."""
    return block_table[key // block_size] * block_size + key % block_size
