"""Attention of prompt chunks: causal rows, from the first tile of keys to the last in one program."""

import triton
import triton.language as tl

from specdec.kernels.gpu.launch import wait_for_inputs
from specdec.kernels.gpu.online import attend_tiles, empty, load_q, merge, split_of, start_of, store_out


@triton.jit(do_not_specialize=["table_stride"])
def chunk_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    tiles_ptr,
    table_ptr,
    positions_ptr,
    table_stride,
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
    PDL: tl.constexpr,
):
    """One tile of rows."""
    GROUP: tl.constexpr = H // G
    wait_for_inputs(PDL)
    tile_at = tiles_ptr + tl.program_id(0) * 3
    sequence, first, count = tl.load(tile_at), tl.load(tile_at + 1), tl.load(tile_at + 2)
    kv_head = tl.program_id(1)
    lane = tl.arange(0, BLOCK_M)
    row, head, ok = first + lane // GROUP, kv_head * GROUP + lane % GROUP, lane // GROUP < count
    position = tl.load(positions_ptr + row, mask=ok, other=0).to(tl.int32)
    start, last = tl.load(positions_ptr + first).to(tl.int32), tl.max(position, 0)
    q = load_q(q_ptr, k_ptr, row, head, ok, H, D, BLOCK_D)
    table_at = table_ptr + tl.cast(sequence, tl.int64) * table_stride
    lowest = start * 0
    if WINDOW > 0:
        lowest = tl.maximum(start - WINDOW + 1, 0) // TILE
    end = tl.where(count > 0, last // TILE + 1, 0)  # a tile without rows is padding
    m, total, acc = empty(BLOCK_M, BLOCK_D)
    for split in range(split_of(lowest, SMALL, NUM, LARGE), split_of(end - 1, SMALL, NUM, LARGE) + 1):
        m_of, total_of, acc_of = empty(BLOCK_M, BLOCK_D)
        from_tile = tl.maximum(start_of(split, SMALL, NUM, LARGE), lowest)
        to_tile = tl.minimum(start_of(split + 1, SMALL, NUM, LARGE), end)
        m_of, total_of, acc_of = attend_tiles(
            m_of, total_of, acc_of, q, k_ptr, v_ptr, table_at, from_tile, to_tile, kv_head, position, last,
            scale, softcap, True, SOFTCAP, WINDOW, TILE, BLOCK_SIZE, G, D, BLOCK_D,
        )  # fmt: skip
        m, total, acc = merge(m, total, acc, m_of, total_of, acc_of)
    store_out(out_ptr, row, head, ok, total, acc, H, D, BLOCK_D)
