"""Where the nodes of each sequence's tree stand, in Triton; reference and contract in `kernels/rows.py`."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.kernels.rows import TreeRows, check_tree_shapes


@triton.jit
def slots_of(block_table_ptr, keys, wanted, num_blocks, BLOCK_SIZE: tl.constexpr):
    """Slots of one sequence's keys, -1 where they aren't wanted or lie behind its block table."""
    wanted = wanted & (keys < num_blocks * BLOCK_SIZE)
    blocks = tl.load(block_table_ptr + keys // BLOCK_SIZE, mask=wanted, other=0).to(tl.int64)
    return tl.where(wanted, blocks * BLOCK_SIZE + keys % BLOCK_SIZE, -1)


@triton.jit(
    do_not_specialize=["n", "parents_row", "num_blocks"],
    do_not_specialize_on_alignment=["parents_ptr", "num_nodes_ptr"],  # callers may give views
)
def _tree_rows_kernel(
    parents_ptr,
    num_nodes_ptr,
    max_nodes_ptr,
    lengths_ptr,
    prompt_lens_ptr,
    block_table_ptr,
    left_ptr,
    contexts_ptr,
    positions_ptr,
    outputs_ptr,
    slots_ptr,
    ancestors_ptr,
    n,
    parents_row,
    num_blocks,
    BLOCK_SIZE: tl.constexpr,
    NODES: tl.constexpr,
):
    sequence = tl.program_id(0).to(tl.int64)
    node = tl.arange(0, NODES)
    num_nodes = tl.minimum(tl.load(num_nodes_ptr + sequence), tl.load(max_nodes_ptr + sequence))
    inside = node < tl.minimum(num_nodes, n)
    up = tl.load(parents_ptr + sequence * parents_row + node, mask=inside, other=-1).to(tl.int32)
    up = tl.where(up < node, up, -1)  # so that no wrong tree is a circle
    ancestors = tl.where(inside, tl.full([NODES], 1, tl.int64) << node.to(tl.int64), 0)
    depth = (up >= 0).to(tl.int32)
    for _ in tl.static_range(6 if NODES > 32 else 5):  # each time twice as far up
        at, there = tl.maximum(up, 0), up >= 0
        ancestors |= tl.where(there, tl.gather(ancestors, at, 0), 0)
        depth += tl.where(there, tl.gather(depth, at, 0), 0)
        up = tl.where(there, tl.gather(up, at, 0), -1)
    context = tl.load(lengths_ptr + sequence) - 1
    slots = slots_of(block_table_ptr + sequence * num_blocks, context + node, inside, num_blocks, BLOCK_SIZE)
    positions = tl.where(inside, context + depth, 0)
    tl.store(left_ptr + sequence, num_nodes)
    tl.store(contexts_ptr + sequence, context.to(tl.int32))
    tl.store(positions_ptr + sequence * n + node, positions, mask=node < n)
    outputs = positions + 1 - tl.load(prompt_lens_ptr + sequence)
    tl.store(outputs_ptr + sequence * n + node, outputs, mask=node < n)
    tl.store(slots_ptr + sequence * n + node, slots, mask=node < n)
    tl.store(ancestors_ptr + sequence * n + node, ancestors, mask=node < n)


def block_of_nodes(num_nodes: int) -> int:
    """Return how many nodes a program of one warp holds: 32 at least, so that trees of any size take two kernels."""
    block: int = triton.next_power_of_2(max(32, num_nodes))
    return block


def tree_rows(
    parents: Tensor,
    num_nodes: Tensor,
    max_nodes: Tensor,
    lengths: Tensor,
    prompt_lens: Tensor,
    block_table: Tensor,
    block_size: int,
) -> TreeRows:
    """Lay out one padded tree a sequence behind its context; the root is the last known token.

    One program a sequence; its time grows with the logarithm of its nodes.

    Args:
        parents: [B, n] int64, n at most 64; index of the parent, before its children; -1 for node 0. Rows may be
            strided, or one row for all.
        num_nodes: [B] int32; nodes from there on are padding, whatever they hold. 0: the sequence is inactive.
        max_nodes: [B] int32, at least 1; nodes from there on are cut off. Parents stand before their children, so that
            what is left is a tree.
        lengths: [B] int64, tokens known, root included; the root's key and position is lengths - 1.
        prompt_lens: [B] int64.
        block_table: [B, M] int32, block ids of each sequence.
        block_size: slots a block.

    Raises:
        ValueError: the shapes don't fit each other.
    """
    check_tree_shapes(parents, num_nodes, max_nodes, lengths, prompt_lens, block_table)
    num_sequences, num_columns = parents.shape
    parents = parents if parents.stride(1) == 1 else parents.contiguous()
    # Parts of one tensor would be aligned for some sizes only, and kernels that read them be compiled for both.
    left, contexts = (torch.empty(num_sequences, dtype=torch.int32, device=parents.device) for _ in range(2))
    positions, outputs, slots, ancestors = (
        torch.empty(parents.shape, dtype=torch.int64, device=parents.device) for _ in range(4)
    )
    _tree_rows_kernel[(num_sequences,)](
        parents,
        num_nodes,
        max_nodes,
        lengths,
        prompt_lens,
        block_table.contiguous(),
        left,
        contexts,
        positions,
        outputs,
        slots,
        ancestors,
        num_columns,
        parents.stride(0),
        block_table.shape[1],
        block_size,
        block_of_nodes(num_columns),
        num_warps=1,
    )
    return TreeRows(left, contexts, positions, outputs, slots, ancestors)
