"""Attention of many sequences over quantized pages, by programs of one warp, none of which waits for another. In Gluon.

The warps of a `direct_kernel` share a tile of keys: for each they wait for each other, and hand weights around. Here a
warp has a tile of its own, whose weights are where its next product takes them from. That is the faster way where there
are enough sequences to put every multiprocessor to work so.

The bits are those of the other kernels (`tests/test_direct.py`). It is for tiles of 16 rows.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from specdec.kernels.gpu.codes import (
    HEAD_DIM,
    KINDS,
    blocks_of,
    fetch_tile,
    load_queries,
    only_seen,
    right_keys,
    room,
    take_words,
    values_of,
    words_layout,
)
from specdec.kernels.gpu.hopper import (
    KEY_TILE,
    HopperKernel,
    new_maximum,
    part_of,
    program_of,
    store_state,
    wait_unless_idle,
)

ROWS = gl.constexpr(16)
"""Rows × grouped heads of a tile."""
WARPS = gl.constexpr(1)

_SUM = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [1, WARPS.value], [16, 8]))
_LEFT = gl.constexpr(gl.DotOperandLayout(0, _SUM.value, 2))
_RIGHT = gl.constexpr(gl.DotOperandLayout(1, _SUM.value, 2))

_KEYS = gl.constexpr(
    words_layout([[0, 4], [0, 8], [0, 16], [8, 0], [16, 0], [32, 0]], [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]], [])
)
"""A thread hands over every fourth word of eight keys: of each sixteen values that a product sums at once four."""
_VALUES = gl.constexpr(
    words_layout([[0, 1], [0, 2], [1, 0], [8, 0], [16, 0], [32, 0]], [[2, 0], [4, 0], [0, 4], [0, 8], [0, 16]], [])
)
"""A thread hands over four words of sixteen rows: sixteen columns, and of each sixteen rows four."""
_OUT = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [0, 8], [0, 16], [8, 0]], [[0, 32], [0, 64], [1, 0], [2, 0], [4, 0]], [],
        block_bases=[], shape=[ROWS.value, HEAD_DIM.value],
    )
)  # fmt: skip
"""What a thread has of values, in their own order: 32 next to each other."""


@gluon.jit
def _values(words, scales, head, pages, G: gl.constexpr):
    """[KEY_TILE, HEAD_DIM] fp16, the columns in the order 0, 16, …, 112, 4, 20, …, 124, 1, 17, …."""
    x = gl.reshape(values_of(words, scales, head, pages, G), [KEY_TILE // 2, 8, 4, 2, 2, 2])
    x = gl.reshape(gl.permute(x, (0, 3, 4, 5, 2, 1)), [KEY_TILE, HEAD_DIM])
    return gl.convert_layout(x, _RIGHT, assert_trivial=True)


@gluon.jit
def _attend(
    first, end, state, q, right, k_pages, v_pages, head, scale,
    MASKED: gl.constexpr, G: gl.constexpr, BLOCK_SIZE: gl.constexpr,
):  # fmt: skip
    """Put tiles behind those before. What a tile's keys leave free the next one's are copied to, and so of values.

    Args:
        first, end: which tiles.
        state: maximum [ROWS], sum of weights [ROWS, 8], weighted values [ROWS, HEAD_DIM], and the blocks of the tile
            that is to be copied next.
        q: the queries.
        right: room for a tile's keys, and for its values, the block table, where the copies end, and the last key that
            any row sees and that of each.
        MASKED: whether rows may see a part of a tile only.
    """
    m, total, acc, blocks = state
    k_kept, v_kept, table, to_tile, bounds = right
    last, position = bounds
    ones = gl.full([KEY_TILE, 8], 1.0, gl.float16, _RIGHT)
    none = gl.zeros([ROWS, KEY_TILE], gl.float32, _SUM)
    factor = scale * 1.4426950408889634
    for tile in range(first, end):
        async_copy.wait_group(1)
        words, scales = take_words(k_kept, 0, _KEYS, k_pages)
        s = mma_v2(q, right_keys(words, scales, head, k_pages, _RIGHT, G), none)
        fetch_tile(k_kept, k_pages, head, blocks, 0, tile + 1 < to_tile, BLOCK_SIZE, G, WARPS)
        async_copy.commit_group()
        if MASKED:
            key = gl.arange(0, KEY_TILE, gl.SliceLayout(0, _SUM))
            s = gl.where(key[None, :] <= (position - tile * KEY_TILE)[:, None], s, float("-inf"))
        m, finite, keep = new_maximum(m, gl.max(s, 1) * factor)
        p = gl.convert_layout(gl.exp2(gl.fma(s, factor, -finite[:, None])).to(gl.float16), _LEFT, assert_trivial=True)
        async_copy.wait_group(1)
        words, scales = take_words(v_kept, 0, _VALUES, v_pages)
        if MASKED:
            scales = only_seen(scales, tile, last)
        values = _values(words, scales, head, v_pages, G)
        total = mma_v2(p, ones, total * keep[:, None])
        acc = mma_v2(p, values, acc * keep[:, None])
        fetch_tile(v_kept, v_pages, head, blocks, 0, tile + 1 < to_tile, BLOCK_SIZE, G, WARPS)
        async_copy.commit_group()
        blocks = blocks_of(table, tile + 2, k_pages, BLOCK_SIZE, WARPS)
    return m, total, acc, blocks


@gluon.jit(do_not_specialize=["table_stride", "num_states", "early"])
def single_kernel(
    q_ptr, k_pages, v_pages, m_ptr, total_ptr, acc_ptr, tiles_ptr, table_ptr, context_ptr, positions_ptr, ancestors_ptr,
    table_stride, num_states, early, scale,
    CHAINS: gl.constexpr, H: gl.constexpr, G: gl.constexpr, D: gl.constexpr, BLOCK_SIZE: gl.constexpr,
    SMALL: gl.constexpr, NUM: gl.constexpr, LARGE: gl.constexpr, FIRST: gl.constexpr, PDL: gl.constexpr,
    ROWS: gl.constexpr,
):  # fmt: skip
    """One split of one tile of nodes: of chains with their own keys, of trees without."""
    GROUP: gl.constexpr = H // G
    gl.static_assert(FIRST == 1, "a program takes one split")
    tile, kv_head, split = program_of(tiles_ptr, early, FIRST, PDL)
    reads = context_ptr, positions_ptr, ancestors_ptr
    lane = gl.arange(0, ROWS, gl.SliceLayout(1, _SUM))
    asked, tiles, table, bounds = part_of(
        tile, (split, split + 1), lane, reads, table_ptr, table_stride, GROUP, CHAINS, BLOCK_SIZE, SMALL, NUM, LARGE
    )
    wait_unless_idle(asked, split, PDL)
    if asked:
        from_tile, whole, to_tile = tiles
        k_kept, v_kept = room(1, k_pages), room(1, k_pages)
        blocks = blocks_of(table, from_tile, k_pages, BLOCK_SIZE, WARPS)
        fetch_tile(k_kept, k_pages, kv_head, blocks, 0, from_tile < to_tile, BLOCK_SIZE, G, WARPS)
        async_copy.commit_group()
        fetch_tile(v_kept, v_pages, kv_head, blocks, 0, from_tile < to_tile, BLOCK_SIZE, G, WARPS)
        async_copy.commit_group()
        blocks = blocks_of(table, from_tile + 1, k_pages, BLOCK_SIZE, WARPS)
        q = load_queries(q_ptr, tile, kv_head, k_pages.kind, _LEFT, ROWS, H, GROUP)
        m = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, _SUM))
        total = gl.zeros([ROWS, 8], gl.float32, _SUM)
        acc = gl.zeros([ROWS, D], gl.float32, _SUM)
        state = m, total, acc, blocks
        right = k_kept, v_kept, table, to_tile, bounds
        state = _attend(from_tile, whole, state, q, right, k_pages, v_pages, kv_head, scale, False, G, BLOCK_SIZE)
        rest = gl.maximum(from_tile, whole)
        state = _attend(rest, to_tile, state, q, right, k_pages, v_pages, kv_head, scale, True, G, BLOCK_SIZE)
        m, total, acc, _ = state
        async_copy.wait_group(0)
        acc = gl.reshape(gl.permute(gl.reshape(acc, [ROWS, 4, 4, 8]), (0, 3, 2, 1)), [ROWS, D])
        acc = gl.convert_layout(acc, _OUT, assert_trivial=True)  # the columns' own order, not that of `_values`
        states = m_ptr, total_ptr, acc_ptr
        store_state(states, tile, kv_head, split, num_states, m, total, acc, H, GROUP)


SINGLE = HopperKernel(
    single_kernel,
    ROWS.value,
    WARPS.value,
    max_registers={HEAD_DIM.value: 224},
    kinds=KINDS,
    min_context=1024,
    min_programs=2048,
    min_keys=1 << 20,
)
"""Of fewer sequences the four warps of a `direct_kernel` read a tile faster than one does
(`benchmarks/results/direct_h200.json`)."""
