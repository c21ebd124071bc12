"""Attention of chains: nodes that stand in their order behind the context, so that each is a causal row.

One launch: a program a split of the keys, with all nodes and grouped heads in one tile of queries. Few rows are merged
by the program that comes last; which one that is doesn't matter, since it merges the splits in their order. Many rows
are merged by a kernel of their own, row by row.
"""

import triton
import triton.language as tl

from specdec.kernels.gpu.launch import wait_for_inputs
from specdec.kernels.gpu.online import (
    empty,
    load_kv,
    load_q,
    long_splits_first,
    merge,
    merge_splits,
    places,
    split_of,
    start_of,
    store_out,
    store_state,
    update,
)


@triton.jit(do_not_specialize=["table_stride", "num_rows", "nodes"])
def chain_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    m_ptr,
    total_ptr,
    acc_ptr,
    arrived_ptr,
    table_ptr,
    positions_ptr,
    ancestors_ptr,
    table_stride,
    num_rows,
    nodes,
    scale,
    softcap,
    SOFTCAP: tl.constexpr,
    WINDOW: tl.constexpr,
    H: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    TILE: tl.constexpr,
    SMALL: tl.constexpr,
    NUM: tl.constexpr,
    LARGE: tl.constexpr,
    MERGE: tl.constexpr,
    PDL: tl.constexpr,
):
    """One split of one tile of nodes."""
    GROUP: tl.constexpr = H // G
    ROWS: tl.constexpr = BLOCK_M // GROUP
    wait_for_inputs(PDL)
    tiles = (nodes + ROWS - 1) // ROWS  # of a sequence
    tile_of, kv_head, split = tl.program_id(0), tl.program_id(1), long_splits_first()
    sequence, inside = tile_of // tiles, tile_of % tiles * ROWS
    lane = tl.arange(0, BLOCK_M)
    row, head = sequence * nodes + inside + lane // GROUP, kv_head * GROUP + lane % GROUP
    ok = (lane // GROUP < ROWS) & (inside + lane // GROUP < nodes)
    position = tl.load(positions_ptr + row, mask=ok, other=0).to(tl.int32)
    ancestors = tl.load(ancestors_ptr + row, mask=ok, other=0)
    q = load_q(q_ptr, k_ptr, row, head, ok, H, D, BLOCK_D)
    position = tl.where(ancestors != 0, position, -1)  # padding sees nothing
    last = tl.max(position, 0)
    end = (last + TILE) // TILE
    count = split_of(tl.maximum(end - 1, 0), SMALL, NUM, LARGE) + 1  # splits that some row sees
    if split < count:
        table_at = table_ptr + tl.cast(sequence, tl.int64) * table_stride
        from_tile = start_of(split, SMALL, NUM, LARGE)
        if WINDOW > 0:
            first = tl.min(tl.where(position >= 0, position, last), 0)
            from_tile = tl.maximum(from_tile, tl.maximum(first - WINDOW + 1, 0) // TILE)
        to_tile = tl.minimum(start_of(split + 1, SMALL, NUM, LARGE), end)
        m, total, acc = empty(BLOCK_M, BLOCK_D)
        for tile in range(from_tile, to_tile):
            key = tile * TILE + tl.arange(0, TILE)
            there = key <= last
            within = places(tile, TILE, BLOCK_SIZE)
            k, v = load_kv(k_ptr, v_ptr, table_at, key, within, there, kv_head, q.dtype, BLOCK_SIZE, G, D, BLOCK_D)
            see = key[None, :] <= position[:, None]
            if WINDOW > 0:
                see = see & (key[None, :] > position[:, None] - WINDOW)
            m, total, acc = update(m, total, acc, q, k, v, see, scale, softcap, SOFTCAP, True)
        if MERGE and count == 1:
            m_0, total_0, acc_0 = empty(BLOCK_M, BLOCK_D)
            m, total, acc = merge(m_0, total_0, acc_0, m, total, acc)
            store_out(out_ptr, row, head, ok, total, acc, H, D, BLOCK_D)
        else:
            store_state(m_ptr, total_ptr, acc_ptr, split, num_rows, row, head, ok, m, total, acc, H, D, BLOCK_D)
            if MERGE:
                tl.debug_barrier()  # all of the program's stores come before its arrival
                arrived_at = arrived_ptr + tile_of * G + kv_head
                if tl.atomic_add(arrived_at, 1, sem="acq_rel") == count - 1:
                    _, all_total, all_acc = merge_splits(
                        m_ptr, total_ptr, acc_ptr, 0, count, num_rows, row, head, ok, H, D, BLOCK_M, BLOCK_D
                    )
                    store_out(out_ptr, row, head, ok, all_total, all_acc, H, D, BLOCK_D)
                    tl.store(arrived_at, 0)  # for the next launch


@triton.jit(do_not_specialize=["num_rows"])
def merge_kernel(
    out_ptr,
    m_ptr,
    total_ptr,
    acc_ptr,
    positions_ptr,
    ancestors_ptr,
    num_rows,
    H: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    TILE: tl.constexpr,
    SMALL: tl.constexpr,
    NUM: tl.constexpr,
    LARGE: tl.constexpr,
    FOURS: tl.constexpr,
    PDL: tl.constexpr,
):
    """All splits of BLOCK_D columns of one node.

    Only their states come from the kernel before, which has waited for all others.
    """
    GROUP: tl.constexpr = H // G
    row_of, kv_head, first = tl.program_id(0), tl.program_id(1), tl.program_id(2) * BLOCK_D
    lane = tl.arange(0, BLOCK_M)
    row, head, ok = row_of + lane * 0, kv_head * GROUP + lane, lane < GROUP
    position = tl.load(positions_ptr + row_of).to(tl.int32)
    count = split_of(position // TILE, SMALL, NUM, LARGE) + 1
    if tl.load(ancestors_ptr + row_of) == 0:
        count = 0
    wait_for_inputs(PDL)
    _, total, acc = merge_splits(
        m_ptr, total_ptr, acc_ptr + first, 0, count, num_rows, row, head, ok, H, D, BLOCK_M, BLOCK_D, FOURS
    )
    store_out(out_ptr + first, row, head, ok, total, acc, H, D, BLOCK_D)
