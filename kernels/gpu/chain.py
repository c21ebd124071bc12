"""Attention of chains: nodes that stand in their order behind the context, so that each is a causal row.

A program a part of the keys, with all nodes and grouped heads in one tile of queries; then the parts are merged, row by
row. Were they merged by the program of a tile that ends last, each would wait for its stores and then for an atomic
count before it ends: that was slower than a kernel that is ready and waits.
"""

import triton
import triton.language as tl

from specdec.kernels.gpu.launch import let_next_begin, wait_for_inputs
from specdec.kernels.gpu.online import (
    attend_split,
    attend_tiles,
    empty,
    first_by_context,
    load_q,
    merge,
    merge_states,
    part_of_program,
    part_with,
    split_of,
    splits_of,
    start_of,
    store_out,
    store_state,
)


@triton.jit(do_not_specialize=["table_stride", "num_rows", "nodes", "early"])
def chain_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    m_ptr,
    total_ptr,
    acc_ptr,
    table_ptr,
    positions_ptr,
    ancestors_ptr,
    table_stride,
    num_rows,
    nodes,
    early,
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
    FIRST: tl.constexpr,
    WHOLE: tl.constexpr,
    PDL: tl.constexpr,
):
    """One part of the keys of one tile of nodes; `WHOLE` says that it is all of them.

    If `early`, where rows stand and what they see is read while the kernel before still runs (`AttentionWork`).
    """
    if early == 0:
        wait_for_inputs(PDL)
    GROUP: tl.constexpr = H // G
    ROWS: tl.constexpr = BLOCK_M // GROUP
    tiles = (nodes + ROWS - 1) // ROWS  # of a sequence
    kv_head, tile_of, part = tl.program_id(0), tl.program_id(1), part_of_program(FIRST)
    sequence, inside = tile_of // tiles, tile_of % tiles * ROWS
    lane = tl.arange(0, BLOCK_M)
    row, head = sequence * nodes + inside + lane // GROUP, kv_head * GROUP + lane % GROUP
    ok = (lane // GROUP < ROWS) & (inside + lane // GROUP < nodes)
    position = tl.load(positions_ptr + row, mask=ok, other=0).to(tl.int32)
    ancestors = tl.load(ancestors_ptr + row, mask=ok, other=0)
    position = tl.where(ancestors != 0, position, -1)  # padding sees nothing
    last = tl.max(position, 0)
    end = (last + TILE) // TILE
    count = split_of(tl.maximum(end - 1, 0), SMALL, NUM, LARGE) + 1  # splits that some row sees
    split, end_split = splits_of(part, FIRST)
    if (split < count) | (part == 0):  # a program with nothing to do leaves its room to others at once
        wait_for_inputs(PDL)
    if split < count:
        q = load_q(q_ptr, k_ptr, row, head, ok, H, D, BLOCK_D)
        table_at = table_ptr + tl.cast(sequence, tl.int64) * table_stride
        tile = start_of(split, SMALL, NUM, LARGE)
        if WINDOW > 0:
            first = tl.min(tl.where(position >= 0, position, last), 0)
            tile = tl.maximum(tile, tl.maximum(first - WINDOW + 1, 0) // TILE)
        m, total, acc = empty(BLOCK_M, BLOCK_D)
        if FIRST == 1:
            end = tl.minimum(start_of(split + 1, SMALL, NUM, LARGE), end)
            m, total, acc = attend_tiles(
                m, total, acc, q, k_ptr, v_ptr, table_at, tile, end, kv_head, position, last, scale, softcap,
                True, SOFTCAP, WINDOW, TILE, BLOCK_SIZE, G, D, BLOCK_D,
            )  # fmt: skip
            tl.static_assert(not WHOLE, "the kernel that merges gives zeros their sign")
        else:
            tl.static_assert(WINDOW == 0, "a window may begin within a part")
            for split_of_part in range(split, tl.minimum(end_split, count)):
                m_of, total_of, acc_of = attend_split(
                    q, k_ptr, v_ptr, table_at, split_of_part, end, kv_head, position, last, scale, softcap,
                    True, SOFTCAP, TILE, SMALL, NUM, LARGE, BLOCK_SIZE, G, D, BLOCK_D,
                )  # fmt: skip
                m, total, acc = merge(m, total, acc, m_of, total_of, acc_of)
        if WHOLE:
            store_out(out_ptr, row, head, ok, total, acc, H, D, BLOCK_D)
        else:
            store_state(m_ptr, total_ptr, acc_ptr, part, num_rows, row, head, ok, m, total, acc, H, D, BLOCK_D)


@triton.jit
def _merge_parts(
    out_ptr, m_ptr, total_ptr, acc_ptr, row, head, count, nothing, num_rows,
    H: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Merge as many parts of one row and head, and store what they come to; `nothing` is 0."""
    at, stride = row.to(tl.int64) * H + head, tl.cast(num_rows, tl.int64) * H
    d = tl.arange(0, BLOCK_D)
    zero = (row * 0).to(tl.float32)
    state = zero + float("-inf"), zero, tl.zeros([BLOCK_D], tl.float32)
    ptrs = m_ptr + at, total_ptr + at, acc_ptr + at * D + d
    _, total, acc = merge_states(state, ptrs, stride, count, count > 0, d < D, nothing, D, AT_ONCE)
    out = acc / tl.where(total == 0.0, 1.0, total)
    tl.store(out_ptr + at * D + d, out.to(out_ptr.dtype.element_ty), mask=d < D)


@triton.jit(do_not_specialize=["num_rows", "nodes", "programs", "next_early"])
def merge_kernel(
    out_ptr,
    m_ptr,
    total_ptr,
    acc_ptr,
    context_ptr,
    positions_ptr,
    ancestors_ptr,
    num_rows,
    nodes,
    programs,
    next_early,
    H: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    TILE: tl.constexpr,
    SMALL: tl.constexpr,
    NUM: tl.constexpr,
    LARGE: tl.constexpr,
    FIRST: tl.constexpr,
    HEADS: tl.constexpr,
    AT_ONCE: tl.constexpr,
    PDL: tl.constexpr,
):
    """All parts of one node's keys for a few heads, in their order, with eight loads under way, or sixteen.

    Only their states come from the kernel before, which has waited for all others. A program of one warp takes a few
    instructions a part, since maximum and sum of weights are two numbers: it waits for its loads, as many others do.
    `nodes` of a sequence and `programs` are for `FIRST` by the context; `next_early` is what `lets_begin` of
    `gpu/launch.py` says.
    """
    if next_early:
        let_next_begin(PDL)
    row = tl.program_id(0)
    position = tl.load(positions_ptr + row).to(tl.int32)
    first = FIRST
    if FIRST == 0:
        context = tl.load(context_ptr + row // nodes).to(tl.int32)
        first = first_by_context(context, programs, TILE, SMALL, NUM, LARGE)
    count = part_with(split_of(position // TILE, SMALL, NUM, LARGE), first) + 1
    if tl.load(ancestors_ptr + row) == 0:
        count = 0
    nothing = position >> 31  # a row's that sees keys
    wait_for_inputs(PDL)
    for i in range(HEADS):
        head = tl.program_id(1) * HEADS + i
        if HEADS == 1 or head < H:
            _merge_parts(
                out_ptr, m_ptr, total_ptr, acc_ptr, row, head, count, nothing, num_rows, H, D, BLOCK_D, AT_ONCE
            )
