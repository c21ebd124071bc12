"""Where the nodes of each sequence's tree stand, in Triton; reference and contract in `kernels/rows.py`."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.kernels.rows import TreeRows, check_shapes


@triton.jit
def slots_of(block_table_ptr, keys, wanted, num_blocks, BLOCK_SIZE: tl.constexpr):
    """Slots of one sequence's keys, -1 where they aren't wanted or lie behind its block table."""
    wanted = wanted & (keys < num_blocks * BLOCK_SIZE)
    blocks = tl.load(block_table_ptr + keys // BLOCK_SIZE, mask=wanted, other=0).to(tl.int64)
    return tl.where(wanted, blocks * BLOCK_SIZE + keys % BLOCK_SIZE, -1)


@triton.jit
def _tree_rows_kernel(
    parents_ptr,
    num_nodes_ptr,
    lengths_ptr,
    block_table_ptr,
    positions_ptr,
    slots_ptr,
    ancestors_ptr,
    n,
    num_blocks,
    BLOCK_SIZE: tl.constexpr,
    NODES: tl.constexpr,
):
    sequence = tl.program_id(0).to(tl.int64)
    node = tl.arange(0, NODES)
    inside = node < tl.minimum(tl.load(num_nodes_ptr + sequence), n)
    ancestors = tl.zeros([NODES], tl.int64)
    depth = tl.full([NODES], -1, tl.int64)
    current = tl.where(inside, node, -1)
    while tl.max(current, 0) >= 0:  # all nodes climb to the root side by side
        climbing = current >= 0
        bit = tl.full([NODES], 1, tl.int64) << tl.maximum(current, 0).to(tl.int64)
        ancestors = tl.where(climbing, ancestors | bit, ancestors)
        depth += climbing.to(tl.int64)
        parent = tl.load(parents_ptr + sequence * n + current, mask=climbing, other=-1).to(tl.int32)
        current = tl.where(parent < current, parent, -1)  # so that no wrong tree can hold the climb in a circle
    context = tl.load(lengths_ptr + sequence) - 1
    slots = slots_of(block_table_ptr + sequence * num_blocks, context + node, inside, num_blocks, BLOCK_SIZE)
    tl.store(positions_ptr + sequence * n + node, tl.where(inside, context + depth, 0), mask=node < n)
    tl.store(slots_ptr + sequence * n + node, slots, mask=node < n)
    tl.store(ancestors_ptr + sequence * n + node, ancestors, mask=node < n)


def tree_rows(parents: Tensor, num_nodes: Tensor, lengths: Tensor, block_table: Tensor, block_size: int) -> TreeRows:
    """Lay out one padded tree a sequence behind its context; the root is the last known token.

    One program a sequence; its time grows with the depth of the tree.

    Args:
        parents: [B, n] int64, n at most 64; index of the parent, before its children; -1 for node 0.
        num_nodes: [B] int32; nodes from there on are padding, whatever they hold. 0: the sequence is inactive.
        lengths: [B] int64, tokens known, root included; the root's key and position is lengths - 1.
        block_table: [B, M] int32, block ids of each sequence.
        block_size: slots a block.

    Returns:
        positions: [B, n] int64, root's position + depth; 0 for padding.
        slot_mapping: [B, n] int64, slot of key root + i; -1 for padding and for keys behind the block table.
        ancestors: [B, n] int64 bitmask over the sequence's nodes, the node itself included; 0 for padding.

    Raises:
        ValueError: the shapes don't fit each other.
    """
    check_shapes(parents, num_nodes, lengths, block_table)
    num_sequences, num_columns = parents.shape
    positions, slots, ancestors = torch.empty(3, *parents.shape, dtype=torch.int64, device=parents.device)
    _tree_rows_kernel[(num_sequences,)](
        parents.contiguous(),
        num_nodes,
        lengths,
        block_table.contiguous(),
        positions,
        slots,
        ancestors,
        num_columns,
        block_table.shape[1],
        block_size,
        triton.next_power_of_2(num_columns),
        num_warps=1,
    )
    return positions, slots, ancestors
