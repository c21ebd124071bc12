"""Attention of a packed batch over paged keys and values, in Triton: prompt chunks and token trees.

A row's result doesn't depend on what shares the launch, bit for bit. For that, each row reduces over its keys in one
order, whichever kernel it goes through: the keys of positions 0, 1, 2, … in tiles of a fixed size, online softmax from
tile to tile within a split, the splits merged from the first to the last. Splits are fixed ranges of positions. A tree
node's keys are those of its own path, so that its result is that of the same tokens decoded one by one.

- `_chunk_kernel` runs the rows of prompt chunks from the first tile to the last.
- `_context_kernel` runs the nodes of a tree through the tiles that they all share, split by split, all nodes and grouped
  heads in one tile of queries, so that each key is read once. It leaves the state of each split.
- `_tail_kernel` goes on, node by node, from the last split's state through the rest of the context and the node's own
  path, and merges the splits.

Fused multiply-adds are off (`enable_fp_fusion`): whether the compiler fuses depends on the code around. Row sums are
taken by a dot with ones, since the order of a reduction depends on the layout of the tile.

Sources: Dao, "FlashAttention-2" (2023); split keys as in Flash-Decoding (2023).
"""

import torch
import triton
import triton.language as tl

from specdec.kernels.attention import AttentionMetadata
from specdec.kernels.gpu.launch import overlap, wait_for_inputs
from specdec.kernels.work import AttentionWork, max_block

SMALL_SPLIT, NUM_SMALL, LARGE_SPLIT = 128, 16, 1024
"""The first 16 splits hold 128 positions each, the others 1,024: short contexts need parallel programs, long ones few
partial results."""


def num_splits(max_keys: int) -> int:
    """Splits that `max_keys` positions reach into."""
    small = SMALL_SPLIT * NUM_SMALL
    if max_keys <= small:
        return -(-max_keys // SMALL_SPLIT)
    return NUM_SMALL + -(-(max_keys - small) // LARGE_SPLIT)


@triton.jit
def _split_of(tile, SMALL: tl.constexpr, NUM: tl.constexpr, LARGE: tl.constexpr):
    return tl.where(tile < SMALL * NUM, tile // SMALL, NUM + (tile - SMALL * NUM) // LARGE)


@triton.jit
def _start_of(split, SMALL: tl.constexpr, NUM: tl.constexpr, LARGE: tl.constexpr):
    return tl.where(split < NUM, split * SMALL, SMALL * NUM + (split - NUM) * LARGE)


@triton.jit
def _empty(BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr):
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    return m, tl.zeros([BLOCK_M, 16], tl.float32), tl.zeros([BLOCK_M, BLOCK_D], tl.float32)


@triton.jit
def _update(m, total, acc, q, k, v, see, scale, softcap, SOFTCAP: tl.constexpr, MASKED: tl.constexpr):
    """One more tile of keys: maximum [M], sum of weights [M, 16], weighted values [M, D]."""
    s = tl.dot(q, tl.trans(k), input_precision="ieee")  # [M, TILE]
    if SOFTCAP:
        x = s * scale / softcap
        s = softcap * (1.0 - 2.0 / (tl.exp2(x * 2.8853900817779268) + 1.0)) * 1.4426950408889634
    else:
        s = s * (scale * 1.4426950408889634)
    if MASKED:
        s = tl.where(see, s, float("-inf"))
    top = tl.maximum(m, tl.max(s, 1))
    finite = tl.where(top == float("-inf"), 0.0, top)
    p = tl.exp2(s - finite[:, None]).to(v.dtype)
    keep = tl.exp2(m - finite)
    ones = tl.full([p.shape[1], 16], 1.0, v.dtype)
    total = tl.dot(p, ones, total * keep[:, None], input_precision="ieee")
    acc = tl.dot(p, v, acc * keep[:, None], input_precision="ieee")
    return top, total, acc


@triton.jit
def _merge(m, total, acc, m_next, total_next, acc_next):
    """Put a split behind those before it."""
    top = tl.maximum(m, m_next)
    finite = tl.where(top == float("-inf"), 0.0, top)
    a, b = tl.exp2(m - finite), tl.exp2(m_next - finite)
    total = total * a[:, None] + total_next * b[:, None]
    acc = acc * a[:, None] + acc_next * b[:, None]
    return top, total, acc


@triton.jit
def _load_q(q_ptr, row, head, ok, H: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr):
    d = tl.arange(0, BLOCK_D)
    at = (row.to(tl.int64) * H + head)[:, None] * D + d[None, :]
    return tl.load(q_ptr + at, mask=ok[:, None] & (d < D)[None, :], other=0.0)


@triton.jit
def _slots(table_ptr, key, ok, BLOCK_SIZE: tl.constexpr):
    block = tl.load(table_ptr + key // BLOCK_SIZE, mask=ok, other=0).to(tl.int64)
    return block * BLOCK_SIZE + key % BLOCK_SIZE


@triton.jit
def _load_kv(k_ptr, v_ptr, slot, ok, head, G: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr):
    d = tl.arange(0, BLOCK_D)
    at = (slot * G + head)[:, None] * D + d[None, :]
    see = ok[:, None] & (d < D)[None, :]
    return tl.load(k_ptr + at, mask=see, other=0.0), tl.load(v_ptr + at, mask=see, other=0.0)


@triton.jit
def _store_out(out_ptr, row, head, ok, total, acc, H: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr):
    d = tl.arange(0, BLOCK_D)
    weight = tl.max(total, 1)  # all 16 columns are the same
    out = acc / tl.where(weight == 0.0, 1.0, weight)[:, None]
    at = (row.to(tl.int64) * H + head)[:, None] * D + d[None, :]
    tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), mask=ok[:, None] & (d < D)[None, :])


@triton.jit
def _chunk_kernel(
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
    NODES: tl.constexpr,
    PDL: tl.constexpr,
):
    GROUP: tl.constexpr = H // G
    wait_for_inputs(PDL)
    tile_at = tiles_ptr + tl.program_id(0) * 3
    sequence, first, count = tl.load(tile_at), tl.load(tile_at + 1), tl.load(tile_at + 2)
    kv_head = tl.program_id(1)
    lane = tl.arange(0, BLOCK_M)
    row, head, ok = first + lane // GROUP, kv_head * GROUP + lane % GROUP, lane // GROUP < count
    position = tl.load(positions_ptr + row, mask=ok, other=0).to(tl.int32)
    start, last = tl.load(positions_ptr + first).to(tl.int32), tl.max(position, 0)
    q = _load_q(q_ptr, row, head, ok, H, D, BLOCK_D)
    table_at = table_ptr + tl.cast(sequence, tl.int64) * table_stride
    lowest = start * 0
    if WINDOW > 0:
        lowest = tl.maximum(start - WINDOW + 1, 0) // TILE
    end = last // TILE + 1
    m, total, acc = _empty(BLOCK_M, BLOCK_D)
    for split in range(_split_of(lowest, SMALL, NUM, LARGE), _split_of(end - 1, SMALL, NUM, LARGE) + 1):
        m_of, total_of, acc_of = _empty(BLOCK_M, BLOCK_D)
        from_tile = tl.maximum(_start_of(split, SMALL, NUM, LARGE), lowest)
        to_tile = tl.minimum(_start_of(split + 1, SMALL, NUM, LARGE), end)
        for tile in range(from_tile, to_tile):
            key = tile * TILE + tl.arange(0, TILE)
            there = key <= last
            slot = _slots(table_at, key, there, BLOCK_SIZE)
            k, v = _load_kv(k_ptr, v_ptr, slot, there, kv_head, G, D, BLOCK_D)
            see = key[None, :] <= position[:, None]
            if WINDOW > 0:
                see = see & (key[None, :] > position[:, None] - WINDOW)
            m_of, total_of, acc_of = _update(m_of, total_of, acc_of, q, k, v, see, scale, softcap, SOFTCAP, True)
        m, total, acc = _merge(m, total, acc, m_of, total_of, acc_of)
    _store_out(out_ptr, row, head, ok, total, acc, H, D, BLOCK_D)


@triton.jit
def _context_kernel(
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
    num_rows,
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
    NODES: tl.constexpr,
    PDL: tl.constexpr,
):
    GROUP: tl.constexpr = H // G
    wait_for_inputs(PDL)
    tile_of, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if NODES > 0:  # every load less on the way to the keys is half a microsecond less
        ROWS: tl.constexpr = BLOCK_M // GROUP
        TILES: tl.constexpr = (NODES + ROWS - 1) // ROWS
        sequence, first = tile_of // TILES, tile_of // TILES * NODES + tile_of % TILES * ROWS
        count = tl.minimum(NODES - tile_of % TILES * ROWS, ROWS)
    else:
        tile_at = tiles_ptr + tile_of * 3
        sequence, first, count = tl.load(tile_at), tl.load(tile_at + 1), tl.load(tile_at + 2)
    context = tl.load(context_ptr + sequence).to(tl.int32)
    shared = context // TILE  # tiles that every node sees
    if _start_of(split, SMALL, NUM, LARGE) <= shared:
        lane = tl.arange(0, BLOCK_M)
        row, head, ok = first + lane // GROUP, kv_head * GROUP + lane % GROUP, lane // GROUP < count
        q = _load_q(q_ptr, row, head, ok, H, D, BLOCK_D)
        table_at = table_ptr + tl.cast(sequence, tl.int64) * table_stride
        from_tile = _start_of(split, SMALL, NUM, LARGE)
        if WINDOW > 0:
            position = tl.load(positions_ptr + row, mask=ok, other=0).to(tl.int32)
            from_tile = tl.maximum(from_tile, tl.maximum(context - WINDOW + 1, 0) // TILE)
        to_tile = tl.minimum(_start_of(split + 1, SMALL, NUM, LARGE), shared)
        m, total, acc = _empty(BLOCK_M, BLOCK_D)
        for tile in range(from_tile, to_tile):
            key = tile * TILE + tl.arange(0, TILE)
            there = key >= 0
            slot = _slots(table_at, key, there, BLOCK_SIZE)
            k, v = _load_kv(k_ptr, v_ptr, slot, there, kv_head, G, D, BLOCK_D)
            see = there[None, :]
            if WINDOW > 0:
                see = key[None, :] > position[:, None] - WINDOW
            m, total, acc = _update(m, total, acc, q, k, v, see, scale, softcap, SOFTCAP, WINDOW > 0)
        state = (split * num_rows + row).to(tl.int64) * H + head
        d = tl.arange(0, BLOCK_D)
        tl.store(m_ptr + state, m, mask=ok)
        tl.store(total_ptr + state, tl.max(total, 1), mask=ok)
        tl.store(acc_ptr + state[:, None] * D + d[None, :], acc, mask=ok[:, None] & (d < D)[None, :])


@triton.jit
def _load_state(
    m_ptr, total_ptr, acc_ptr, split, num_rows, row, head, ok, H: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr
):
    state = (split * num_rows + row).to(tl.int64) * H + head
    d = tl.arange(0, BLOCK_D)
    m = tl.load(m_ptr + state, mask=ok, other=float("-inf"))
    total = tl.load(total_ptr + state, mask=ok, other=0.0)
    acc = tl.load(acc_ptr + state[:, None] * D + d[None, :], mask=ok[:, None] & (d < D)[None, :], other=0.0)
    return m, tl.broadcast_to(total[:, None], [total.shape[0], 16]), acc


@triton.jit
def _path_keys(position, context, ancestors):
    """Keys of a node's path at the given positions: those before the root, then its ancestors in their order."""
    node = tl.arange(0, 64)
    bit = ((ancestors >> node) & 1).to(tl.int32)
    depth = tl.cumsum(bit, 0) - 1
    match = (depth[None, :] == (position - context)[:, None]) & (bit[None, :] == 1)  # [TILE, 64]
    return tl.where(position < context, position, context + tl.sum(tl.where(match, node[None, :], 0), 1))


@triton.jit
def _load_path(
    k_ptr, v_ptr, table_at, tile, position, context, ancestors, kv_head,
    WINDOW: tl.constexpr, TILE: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    G: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """A tile of keys and values of a node's path, and which of them the node sees."""
    at = tile * TILE + tl.arange(0, TILE)
    see = (at <= position) & (ancestors != 0)
    if WINDOW > 0:
        see = see & (at > position - WINDOW)
    key = at
    if (ancestors & (ancestors + 1)) != 0:  # else it is a chain, whose nodes stand in their order
        key = _path_keys(at, context, ancestors)
    slot = _slots(table_at, key, see, BLOCK_SIZE)
    k, v = _load_kv(k_ptr, v_ptr, slot, see, kv_head, G, D, BLOCK_D)
    return k, v, see


@triton.jit
def _tail_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    m_ptr,
    total_ptr,
    acc_ptr,
    rows_ptr,
    sequences_ptr,
    table_ptr,
    context_ptr,
    positions_ptr,
    ancestors_ptr,
    table_stride,
    num_rows,
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
    NODES: tl.constexpr,
    PDL: tl.constexpr,
):
    GROUP: tl.constexpr = H // G
    wait_for_inputs(PDL)
    node, kv_head = tl.program_id(0), tl.program_id(1)
    if NODES > 0:
        row_of, sequence = node, node // NODES
    else:
        row_of, sequence = tl.load(rows_ptr + node), tl.load(sequences_ptr + node)
    context = tl.load(context_ptr + sequence).to(tl.int32)
    position = tl.load(positions_ptr + row_of).to(tl.int32)
    ancestors = tl.load(ancestors_ptr + row_of)
    lane = tl.arange(0, BLOCK_M)
    row, head, ok = row_of + lane * 0, kv_head * GROUP + lane, lane < GROUP
    q = _load_q(q_ptr, row, head, ok, H, D, BLOCK_D)
    table_at = table_ptr + tl.cast(sequence, tl.int64) * table_stride
    shared = context // TILE
    # The first tile's keys are under way while the splits before are merged.
    k, v, see = _load_path(k_ptr, v_ptr, table_at, shared, position, context, ancestors, kv_head,
                           WINDOW, TILE, BLOCK_SIZE, G, D, BLOCK_D)  # fmt: skip
    last_split = _split_of(shared, SMALL, NUM, LARGE)
    m_of, total_of, acc_of = _load_state(m_ptr, total_ptr, acc_ptr, last_split, num_rows, row, head, ok, H, D, BLOCK_D)
    first_split = last_split * 0
    if WINDOW > 0:
        first_split = tl.minimum(_split_of(tl.maximum(position - WINDOW + 1, 0) // TILE, SMALL, NUM, LARGE), last_split)
    m, total, acc = _empty(BLOCK_M, BLOCK_D)
    for split in range(first_split, last_split, 4):  # four loads under way; a split behind the last one is empty
        a = _load_state(m_ptr, total_ptr, acc_ptr, split, num_rows, row, head, ok, H, D, BLOCK_D)
        b = _load_state(
            m_ptr, total_ptr, acc_ptr, split + 1, num_rows, row, head, ok & (split + 1 < last_split), H, D, BLOCK_D
        )
        c = _load_state(
            m_ptr, total_ptr, acc_ptr, split + 2, num_rows, row, head, ok & (split + 2 < last_split), H, D, BLOCK_D
        )
        d = _load_state(
            m_ptr, total_ptr, acc_ptr, split + 3, num_rows, row, head, ok & (split + 3 < last_split), H, D, BLOCK_D
        )
        m, total, acc = _merge(m, total, acc, a[0], a[1], a[2])
        m, total, acc = _merge(m, total, acc, b[0], b[1], b[2])
        m, total, acc = _merge(m, total, acc, c[0], c[1], c[2])
        m, total, acc = _merge(m, total, acc, d[0], d[1], d[2])
    m_of, total_of, acc_of = _update(m_of, total_of, acc_of, q, k, v, see[None, :], scale, softcap, SOFTCAP, True)
    for tile in range(shared + 1, position // TILE + 1):
        if _start_of(_split_of(tile, SMALL, NUM, LARGE), SMALL, NUM, LARGE) == tile:
            m, total, acc = _merge(m, total, acc, m_of, total_of, acc_of)
            m_of, total_of, acc_of = _empty(BLOCK_M, BLOCK_D)
        k, v, see = _load_path(k_ptr, v_ptr, table_at, tile, position, context, ancestors, kv_head,
                               WINDOW, TILE, BLOCK_SIZE, G, D, BLOCK_D)  # fmt: skip
        m_of, total_of, acc_of = _update(m_of, total_of, acc_of, q, k, v, see[None, :], scale, softcap, SOFTCAP, True)
    m, total, acc = _merge(m, total, acc, m_of, total_of, acc_of)
    _store_out(out_ptr, row, head, ok, total, acc, H, D, BLOCK_D)


def _tile(head_dim: int) -> int:
    """Keys of a tile: the same in all kernels, since it decides the order of sums."""
    return 64 if head_dim <= 128 else 32


def _chunk_options(block: int) -> dict[str, int]:
    return {"num_warps": 8 if block >= 128 else 4, "num_stages": 2}


def _context_options(block: int) -> dict[str, int]:
    return {"num_warps": 4, "num_stages": 2}


def _tail_options(num_programs: int) -> dict[str, int]:
    return {"num_warps": 4 if num_programs <= 256 else 2, "num_stages": 1}


def tree_attention(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    meta: AttentionMetadata | AttentionWork,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """Attend each row to the keys that `meta` lets it see; see the reference, `specdec.kernels.attention`.

    Args:
        q: [N, num_heads, D] contiguous; num_heads is a multiple of num_kv_heads.
        k_pages, v_pages: [num_blocks, block_size, num_kv_heads, D] contiguous, q's dtype. Slots outside a sequence are
            never read.
        meta: the batch.
        scale: factor on the scores.
        window: a row at position p sees keys at positions above p - window.
        softcap: scores become softcap · tanh(score / softcap) before masking.

    Returns:
        [N, num_heads, D], q's dtype. Rows of padding, whose ancestors are 0, hold 0.
    """
    num_heads, head_dim = q.shape[1:]
    block_size, num_kv_heads = k_pages.shape[1:3]
    assert q.is_contiguous() and k_pages.is_contiguous() and v_pages.is_contiguous()
    work = meta.work(num_heads // num_kv_heads, max_block(head_dim))
    tile = _tile(head_dim)
    shape = {
        "SOFTCAP": softcap is not None,
        "WINDOW": window or 0,
        "H": num_heads,
        "G": num_kv_heads,
        "D": head_dim,
        "BLOCK_SIZE": block_size,
        "BLOCK_D": max(16, triton.next_power_of_2(head_dim)),
        "TILE": tile,
        "SMALL": SMALL_SPLIT // tile,
        "NUM": NUM_SMALL,
        "LARGE": LARGE_SPLIT // tile,
        "NODES": work.nodes_per_sequence,
        "enable_fp_fusion": False,
        **overlap(q.device),
    }
    out = torch.empty_like(q)
    table, stride = work.block_table, work.block_table.stride(0)
    factors = (scale, 0.0 if softcap is None else softcap)
    if len(work.chunk_tiles):
        _chunk_kernel[(len(work.chunk_tiles), num_kv_heads)](
            q, k_pages, v_pages, out, work.chunk_tiles, table, work.positions, stride, *factors,
            BLOCK_M=work.chunk_block, **_chunk_options(work.chunk_block), **shape,
        )  # fmt: skip
    if len(work.tree_rows):
        splits = num_splits(work.max_context + 1)
        state = torch.empty(splits, *q.shape[:2], head_dim + 2, dtype=torch.float32, device=q.device)
        size = splits * q.shape[0] * num_heads
        flat = state.view(-1)
        m, total, acc = flat[:size], flat[size : 2 * size], flat[2 * size :]
        _context_kernel[(len(work.tree_tiles), num_kv_heads, splits)](
            q, k_pages, v_pages, m, total, acc, work.tree_tiles, table, work.context_lens, work.positions, stride,
            len(q), *factors, BLOCK_M=work.tree_block, **_context_options(work.tree_block),
            **shape,
        )  # fmt: skip
        _tail_kernel[(len(work.tree_rows), num_kv_heads)](
            q, k_pages, v_pages, out, m, total, acc, work.tree_rows, work.tree_sequences, table, work.context_lens,
            work.positions, work.ancestors, stride, len(q), *factors,
            BLOCK_M=max(16, triton.next_power_of_2(num_heads // num_kv_heads)), **_tail_options(len(work.tree_rows) * num_kv_heads), **shape,
        )  # fmt: skip
    return out
