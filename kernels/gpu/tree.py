"""Attention of token trees: what all nodes share, then each node's own path.

`context_kernel` runs the nodes of a tree through the tiles that they all see, split by split, all nodes and grouped
heads in one tile of queries, so that each key is read once. It leaves the state of each split. `tail_kernel` goes on,
node by node, from the last split's state through the rest of the context and the node's own path, in the path's order,
and merges the splits. So a node's bits are those of the same tokens decoded one by one, wherever the nodes stand.
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
    load_state,
    merge,
    merge_splits,
    part_of_last,
    part_of_program,
    part_with,
    scores,
    split_of,
    splits_of,
    start_of,
    store_out,
    store_state,
    update,
    weigh,
)
from specdec.kernels.gpu.pages import load_values


@triton.jit(do_not_specialize=["table_stride", "num_nodes"])
def context_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    m_ptr,
    total_ptr,
    acc_ptr,
    tiles_ptr,
    table_ptr,
    context_ptr,
    positions_ptr,
    table_stride,
    num_nodes,
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
    PDL: tl.constexpr,
):
    """One part of the context of one tile of nodes. The last split, which goes on, is never merged with others."""
    GROUP: tl.constexpr = H // G
    wait_for_inputs(PDL)
    kv_head, tile_of, part = tl.program_id(0), tl.program_id(1), part_of_program(FIRST)
    tile_at = tiles_ptr + tile_of * 4
    sequence, first, count = tl.load(tile_at), tl.load(tile_at + 1), tl.load(tile_at + 2)
    context = tl.load(context_ptr + sequence).to(tl.int32)
    shared = context // TILE  # tiles that every node sees
    last_split = split_of(shared, SMALL, NUM, LARGE)
    split, end_split = splits_of(part, FIRST)
    if split <= last_split:
        lane = tl.arange(0, BLOCK_M)
        row, head, ok = first + lane // GROUP, kv_head * GROUP + lane % GROUP, lane // GROUP < count
        q = load_q(q_ptr, k_ptr, row, head, ok, H, D, BLOCK_D)
        table_at = table_ptr + tl.cast(sequence, tl.int64) * table_stride
        node = tl.load(tile_at + 3) + lane // GROUP
        tile, position = start_of(split, SMALL, NUM, LARGE), lane
        if WINDOW > 0:
            position = tl.load(positions_ptr + row, mask=ok, other=0).to(tl.int32)
            tile = tl.maximum(tile, tl.maximum(context - WINDOW + 1, 0) // TILE)
        m, total, acc = empty(BLOCK_M, BLOCK_D)
        if FIRST == 1:
            end = tl.minimum(start_of(split + 1, SMALL, NUM, LARGE), shared)
            m, total, acc = attend_tiles(
                m, total, acc, q, k_ptr, v_ptr, table_at, tile, end, kv_head, position, context, scale, softcap,
                False, SOFTCAP, WINDOW, TILE, BLOCK_SIZE, G, D, BLOCK_D,
            )  # fmt: skip
            store_state(m_ptr, total_ptr, acc_ptr, split, num_nodes, node, head, ok, m, total, acc, H, D, BLOCK_D)
        else:
            tl.static_assert(WINDOW == 0, "a window may begin within a part")
            end_split = tl.minimum(end_split, last_split + 1)
            for split_of_part in range(split, end_split):
                m_of, total_of, acc_of = attend_split(
                    q, k_ptr, v_ptr, table_at, split_of_part, shared, kv_head, position, context, scale, softcap,
                    False, SOFTCAP, TILE, SMALL, NUM, LARGE, BLOCK_SIZE, G, D, BLOCK_D,
                )  # fmt: skip
                is_last = split_of_part == last_split
                if is_last:
                    m, total, acc = m_of, total_of, acc_of
                else:
                    m, total, acc = merge(m, total, acc, m_of, total_of, acc_of)
                if is_last or split_of_part + 1 == tl.minimum(end_split, last_split):
                    to = part_with(split_of_part, FIRST)
                    if is_last:
                        to = part_of_last(split_of_part, FIRST, FIRST)
                    store_state(m_ptr, total_ptr, acc_ptr, to, num_nodes, node, head, ok, m, total, acc, H, D, BLOCK_D)


@triton.jit
def _load_path(
    k_ptr, v_ptr, slots_at, tile, position, kv_head, dtype: tl.constexpr, WINDOW: tl.constexpr, TILE: tl.constexpr,
    G: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A tile of keys and values of a node's path, whose slots are given, and which of them the node sees."""
    slot = tl.load(slots_at + tl.arange(0, TILE), cache_modifier=".cg")
    see = slot >= 0
    if WINDOW > 0:
        see = see & (tile * TILE + tl.arange(0, TILE) > position - WINDOW)
    place = tl.maximum(slot, 0).to(tl.int64) * G + kv_head
    row = place & -2, (place & 1).to(tl.int32)  # the first part is even, as a block's is
    k, v = load_values(k_ptr, row, see, dtype, D, BLOCK_D), load_values(v_ptr, row, see, dtype, D, BLOCK_D)
    if PDL and k_ptr.kind == "native":
        k = _behind_both(k, v)
    return k, v, see


@triton.jit
def _behind_both(k, v):
    """The same keys, as what the compiler leaves behind both loads: it would wait for keys before it loads values."""
    WORDS: tl.constexpr = 32 // k.dtype.primitive_bitwidth
    return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r,r", [k, v], dtype=k.dtype, is_pure=False, pack=WORDS)


@triton.jit
def _repeated(x, ROWS: tl.constexpr):
    """Rows over and over again, until there are as many."""
    TIMES: tl.constexpr = ROWS // x.shape[0]
    if len(x.shape) == 1:
        return tl.reshape(tl.broadcast_to(x[None, :], [TIMES, x.shape[0]]), [ROWS])
    else:
        return tl.reshape(tl.broadcast_to(x[None, :, :], [TIMES, x.shape[0], x.shape[1]]), [ROWS, x.shape[1]])


@triton.jit(do_not_specialize=["num_nodes", "nodes", "programs", "next_early"])
def tail_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    m_ptr,
    total_ptr,
    acc_ptr,
    slots_ptr,
    rows_ptr,
    sequences_ptr,
    context_ptr,
    positions_ptr,
    ancestors_ptr,
    num_nodes,
    nodes,
    programs,
    next_early,
    scale,
    softcap,
    SOFTCAP: tl.constexpr,
    WINDOW: tl.constexpr,
    H: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    TILE: tl.constexpr,
    LENGTH: tl.constexpr,
    SMALL: tl.constexpr,
    NUM: tl.constexpr,
    LARGE: tl.constexpr,
    FIRST: tl.constexpr,
    AT_ONCE: tl.constexpr,
    PDL: tl.constexpr,
):
    """The rest of the keys of one node, and all parts of its context.

    Nothing but the states comes from the kernel before, which has waited for all others: a node's first tile is asked
    for while that one still runs. Where each split is a part, and so there are many, what the tile is worth is found
    when they are merged. Where each sequence has as many `nodes` and no other rows, a node's row and sequence are known
    without a load; 0 says that they aren't. `programs` is for `FIRST` by the context.
    """
    if next_early:
        let_next_begin(PDL)
    GROUP: tl.constexpr = H // G
    node_of, kv_head = tl.program_id(0), tl.program_id(1)
    row_of, sequence = node_of, node_of
    if nodes > 0:
        sequence = node_of // nodes
    else:
        row_of, sequence = tl.load(rows_ptr + node_of), tl.load(sequences_ptr + node_of)
    context = tl.load(context_ptr + sequence).to(tl.int32)
    position = tl.load(positions_ptr + row_of).to(tl.int32)
    ancestors = tl.load(ancestors_ptr + row_of)
    lane = tl.arange(0, BLOCK_M)
    row, node, head, ok = row_of + lane * 0, node_of + lane * 0, kv_head * GROUP + lane, lane < GROUP
    q = load_q(q_ptr, k_ptr, row, head, ok, H, D, BLOCK_D)
    shared, slots_at = context // TILE, slots_ptr + node_of * LENGTH
    k, v, see = _load_path(k_ptr, v_ptr, slots_at, shared, position, kv_head, q.dtype, WINDOW, TILE, G, D, BLOCK_D, PDL)
    if FIRST != 1:
        s, factor = scores(q, k, see[None, :], scale, softcap, SOFTCAP, True)
    wait_for_inputs(PDL)
    last_split = split_of(shared, SMALL, NUM, LARGE)
    live = ok & (ancestors != 0)  # nobody may have put down a state of padding
    first = FIRST
    if FIRST == 0:
        first = first_by_context(context, programs, TILE, SMALL, NUM, LARGE)
    last_part = part_of_last(last_split, first, FIRST)
    m_of, total_of, acc_of = load_state(
        m_ptr, total_ptr, acc_ptr, last_part, num_nodes, node, head, live, H, D, BLOCK_D
    )
    first_part, end_part = last_split * 0, tl.where(last_split == 0, 0, last_part)
    if WINDOW > 0:
        tl.static_assert(FIRST == 1, "a window may begin within a part")
        first_part = tl.minimum(split_of(tl.maximum(position - WINDOW + 1, 0) // TILE, SMALL, NUM, LARGE), last_split)
    FEW: tl.constexpr = triton.next_power_of_2(GROUP)  # rows that are the node's own
    of = tl.arange(0, FEW)
    m, total, acc = merge_splits(
        m_ptr, total_ptr, acc_ptr, first_part, end_part, num_nodes, node_of + of * 0, kv_head * GROUP + of,
        (of < GROUP) & (ancestors != 0), position >> 31, H, D, FEW, BLOCK_D, AT_ONCE,
    )  # fmt: skip
    m, total, acc = _repeated(m, BLOCK_M), _repeated(total, BLOCK_M), _repeated(acc, BLOCK_M)
    total = tl.broadcast_to(total[:, None], [BLOCK_M, 16])
    if FIRST == 1:
        s, factor = scores(q, k, see[None, :], scale, softcap, SOFTCAP, True)
    m_of, total_of, acc_of = weigh(m_of, total_of, acc_of, s, factor, v)
    for tile in range(shared + 1, position // TILE + 1):
        if start_of(split_of(tile, SMALL, NUM, LARGE), SMALL, NUM, LARGE) == tile:
            m, total, acc = merge(m, total, acc, m_of, total_of, acc_of)
            m_of, total_of, acc_of = empty(BLOCK_M, BLOCK_D)
        slots_at += TILE
        k, v, see = _load_path(
            k_ptr, v_ptr, slots_at, tile, position, kv_head, q.dtype, WINDOW, TILE, G, D, BLOCK_D, PDL
        )
        m_of, total_of, acc_of = update(m_of, total_of, acc_of, q, k, v, see[None, :], scale, softcap, SOFTCAP, True)
    m, total, acc = merge(m, total, acc, m_of, total_of, acc_of)
    store_out(out_ptr, row, head, ok, total, acc, H, D, BLOCK_D)
