"""Builds the tensors of a step from its plan and its trees."""

from dataclasses import dataclass

import torch

from specdec.engine.scheduler import Plan, Scheduled
from specdec.kernels.attention import AttentionMetadata
from specdec.models.batch import Batch
from specdec.verifier.tree import TokenTree


@dataclass(frozen=True, slots=True)
class Packed:
    """A step's batch and where its trees lie in it.

    Args:
        batch: the model's input.
        tree_rows: [nodes of all trees] int64, row of each node, in the tree's order.
        starts: first row of each of the plan's items.
    """

    batch: Batch
    tree_rows: torch.Tensor
    starts: list[int]


def pack(plan: Plan, tree: TokenTree, block_size: int, device: torch.device) -> Packed:
    """Lay out each item as its causal rows followed by its tree nodes.

    Args:
        plan: the step.
        tree: one tree for each decoding item of the plan, in order.
        block_size: slots a block.
        device: where the tensors go.
    """
    tokens: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    visible: list[int] = []
    ancestors: list[int] = []
    tree_rows: list[int] = []
    cu_seqlens_q, context_lens, seq_lens = [0], [], []
    node_tokens, node_depth, node_ancestors = (t.tolist() for t in (tree.tokens, tree.depth, tree.ancestors))
    nodes = iter(zip(tree.cu_nodes, tree.cu_nodes[1:], strict=False))
    for item in plan.items:
        first, last = next(nodes) if item.max_nodes else (0, 0)
        computed = item.request.num_computed
        context = computed + item.num_causal
        total = context + last - first
        tokens += item.request.tokens[computed:context] + node_tokens[first:last]
        positions += [*range(computed, context), *(context + d for d in node_depth[first:last])]
        slots += _slots(item, computed, total, block_size)
        visible += [*range(computed + 1, context + 1), *[context] * (last - first)]
        ancestors += [0] * item.num_causal + node_ancestors[first:last]
        tree_rows += range(cu_seqlens_q[-1] + item.num_causal, cu_seqlens_q[-1] + total - computed)
        cu_seqlens_q.append(cu_seqlens_q[-1] + total - computed)
        context_lens.append(context)
        seq_lens.append(total)
    columns = torch.tensor([tokens, positions, slots, visible, ancestors], device=device)
    attention = AttentionMetadata(
        cu_seqlens_q=tuple(cu_seqlens_q),
        context_lens=tuple(context_lens),
        seq_lens=tuple(seq_lens),
        block_table=_block_table(plan, device),
        positions=columns[1],
        visible=columns[3],
        ancestors=columns[4],
        block_size=block_size,
    )
    batch = Batch(input_ids=columns[0], slot_mapping=columns[2], attention=attention)
    return Packed(batch, torch.tensor(tree_rows, dtype=torch.int64, device=device), cu_seqlens_q[:-1])


def slot(item: Scheduled, key: int, block_size: int) -> int:
    """Slot of a key of an item's request."""
    return item.request.block_table[key // block_size] * block_size + key % block_size


def _slots(item: Scheduled, start: int, end: int, block_size: int) -> list[int]:
    return [slot(item, key, block_size) for key in range(start, end)]


def _block_table(plan: Plan, device: torch.device) -> torch.Tensor:
    """[B, M] int64, padded with 0."""
    width = max(len(item.request.block_table) for item in plan.items)
    rows = [item.request.block_table + [0] * (width - len(item.request.block_table)) for item in plan.items]
    return torch.tensor(rows, device=device)
