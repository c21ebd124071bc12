"""Where the keys of each tree node's path stand, in Triton: found once a step, and read in every layer.

A node's path is what follows the tiles that all nodes of its sequence see: the rest of the context, and its ancestors
in their order. Each layer's attention goes through it node by node and head by head. Were the keys found there, each
time three loads would wait for each other, and now two do.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.kernels.gpu.launch import overlap, wait_for_inputs
from specdec.kernels.gpu.rows import slots_of
from specdec.kernels.work import AttentionWork

LENGTH = 128
"""Most keys of a path: less than a tile of the context, and 64 nodes."""


@triton.jit
def _past(counts, at, rank, WIDTH: tl.constexpr):
    """Go past WIDTH bits if not enough of them are set for the rank: where it goes on, and the rank there."""
    count = (counts >> at) & (2 * WIDTH - 1)
    past = rank >= count
    return tl.where(past, at + WIDTH, at), tl.where(past, rank - count, rank)


@triton.jit
def _half(x, high):
    """The lower or the upper 32 bits."""
    return tl.where(high, (x >> 32).to(tl.int32), x.to(tl.int32))


@triton.jit
def path_keys(position, context, ancestors):
    """Keys of a node's path at the given positions: those before the root, then its ancestors in their order.

    The one at depth n is the n-th bit that is set. It is looked for by halves, with the numbers of bits that are set in
    each two, four, … of them, which stand where those begin.
    """
    of_2 = ancestors - ((ancestors >> 1) & 0x5555555555555555)
    of_4 = (of_2 & 0x3333333333333333) + ((of_2 >> 2) & 0x3333333333333333)
    of_8 = (of_4 + (of_4 >> 4)) & 0x0F0F0F0F0F0F0F0F
    of_16 = (of_8 + (of_8 >> 8)) & 0x00FF00FF00FF00FF
    low = ((of_16 + (of_16 >> 16)) & 63).to(tl.int32)  # of the lower 32
    rank = tl.maximum(position - context, 0)
    high = rank >= low
    rank = tl.where(high, rank - low, rank)
    at, rank = _past(_half(of_16, high), rank * 0, rank, 16)
    at, rank = _past(_half(of_8, high), at, rank, 8)
    at, rank = _past(_half(of_4, high), at, rank, 4)
    at, rank = _past(_half(of_2, high), at, rank, 2)
    at, _ = _past(_half(ancestors, high), at, rank, 1)
    return tl.where(position < context, position, context + tl.where(high, at + 32, at))


@triton.jit(do_not_specialize=["table_stride", "num_blocks"])
def paths_kernel(
    slots_ptr, rows_ptr, sequences_ptr, table_ptr, context_ptr, positions_ptr, ancestors_ptr, table_stride,
    num_blocks, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, LENGTH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The path of one node: slots [LENGTH], -1 behind its end."""
    wait_for_inputs(PDL)
    node = tl.program_id(0)
    row, sequence = tl.load(rows_ptr + node), tl.load(sequences_ptr + node)
    context = tl.load(context_ptr + sequence).to(tl.int32)
    position = tl.load(positions_ptr + row).to(tl.int32)
    ancestors = tl.load(ancestors_ptr + row)
    at = context // TILE * TILE + tl.arange(0, LENGTH)
    there = (at <= position) & (ancestors != 0)
    keys, table_at = path_keys(at, context, ancestors), table_ptr + tl.cast(sequence, tl.int64) * table_stride
    slots = slots_of(table_at, keys, there, num_blocks, BLOCK_SIZE)
    tl.store(slots_ptr + node * LENGTH + tl.arange(0, LENGTH), slots.to(tl.int32))


def path_slots(work: AttentionWork, tile: int, block_size: int) -> Tensor:
    """Return where the keys of each node's path stand; found when it is asked for the first time.

    Args:
        work: the batch; its T tree nodes stay what they are.
        tile: keys of a tile: as many tiles of its context as are whole are not of a node's path.
        block_size: slots a block.

    Returns:
        [T, LENGTH] int32: slots, block · block_size + offset, in the path's order; -1 behind its end, and for padding.
    """
    if (tile, block_size) not in work.paths:
        num_nodes, table = len(work.tree_rows), work.block_table
        slots = torch.empty(num_nodes, LENGTH, dtype=torch.int32, device=table.device)
        paths_kernel[(num_nodes,)](
            slots, work.tree_rows, work.tree_sequences, table, work.context_lens, work.positions, work.ancestors,
            table.stride(0), table.shape[1], BLOCK_SIZE=block_size, TILE=tile, LENGTH=LENGTH, num_warps=4,
            **overlap(table.device),
        )  # fmt: skip
        work.paths[tile, block_size] = slots
    return work.paths[tile, block_size]
