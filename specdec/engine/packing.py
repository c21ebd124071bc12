"""Builds the tensors of a step from its plan and its trees."""

from dataclasses import dataclass
from itertools import accumulate

import torch

from specdec.engine.scheduler import Plan
from specdec.models.batch import Batch, Rows, pack_rows
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
    starts: tuple[int, ...]


def pack(plan: Plan, tree: TokenTree, block_size: int, device: torch.device) -> Packed:
    """Lay out each item as its causal rows followed by its tree nodes.

    Args:
        plan: the step.
        tree: one tree for each decoding item of the plan, in order.
        block_size: slots a block.
        device: where the tensors go.
    """
    tokens, depth, ancestors = (t.tolist() for t in (tree.tokens, tree.depth, tree.ancestors))
    nodes = iter(zip(tree.cu_nodes, tree.cu_nodes[1:], strict=False))
    sequences: list[Rows] = []
    tree_rows: list[int] = []
    num_rows = 0
    for item in plan.items:
        first, last = next(nodes) if item.max_nodes else (0, 0)
        computed = item.request.num_computed
        context = computed + item.num_causal
        sequences.append(
            Rows(
                block_table=item.request.block_table,
                start=computed,
                tokens=item.request.tokens[computed:context] + tokens[first:last],
                context=context,
                depth=depth[first:last],
                ancestors=ancestors[first:last],
            )
        )
        tree_rows += range(num_rows + item.num_causal, num_rows + item.num_causal + last - first)
        num_rows += item.num_causal + last - first
    batch = pack_rows(sequences, block_size, device)
    rows = torch.tensor(tree_rows, dtype=torch.int64, device=device)
    starts = accumulate((len(s.tokens) for s in sequences[:-1]), initial=0)
    return Packed(batch, rows, tuple(starts))
