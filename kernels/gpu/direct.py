"""Attention over quantized pages whose codes become values on their way to the tensor cores. In Gluon.

`chain_kernel` and `context_kernel` bring codes to shared memory, from there to registers, as values to shared memory
again, and to the tensor cores. Here tiles of codes are copied to shared memory ahead, and each thread takes from there
the very codes that it hands to the tensor cores. Which values of a row a thread holds is ours to choose, as long as the
sixteen that a product sums at once stay the same: it takes four that stand together, of a key and of a value; queries
and sums are put in that order. The state of each split is left as those kernels leave it, for those that merge.

The bits are those of the other kernels (`tests/test_direct.py`). It is for tiles of 16 rows of a few sequences;
`gpu/single.py` is for those of many, and `gpu/wide.py` for tiles of 64 rows.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from specdec.kernels.gpu.codes import (
    HEAD_DIM,
    KINDS,
    blocks_of,
    fetch_both,
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
    stage_after,
    store_state,
    wait_unless_idle,
)

WARPS = gl.constexpr(4)
STAGES = gl.constexpr(2)
"""Tiles that have room in shared memory, one that is read and one on its way."""
ROWS = gl.constexpr(16)
"""Rows × grouped heads of a tile."""

_SUM = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [1, WARPS.value], [16, 8]))
_LEFT = gl.constexpr(gl.DotOperandLayout(0, _SUM.value, 2))
_RIGHT = gl.constexpr(gl.DotOperandLayout(1, _SUM.value, 2))
_KEPT_LEFT = gl.constexpr(gl.SwizzledSharedLayout(8, 1, 8, [1, 0]))

_KEYS = gl.constexpr(
    words_layout([[0, 4], [0, 8], [0, 16], [32, 0]], [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]], [[8, 0], [16, 0]])
)
"""A thread hands over every fourth word of two keys: of each sixteen values that a product sums at once four."""
_VALUES = gl.constexpr(
    words_layout([[1, 0], [8, 0], [16, 0], [32, 0]], [[2, 0], [4, 0], [0, 1], [0, 2], [0, 4]], [[0, 8], [0, 16]])
)
"""A thread hands over one word of sixteen rows: four columns, and of each sixteen rows four."""

_OUT = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [8, 0]], [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]], [[0, 32], [0, 64]],
        block_bases=[], shape=[ROWS.value, HEAD_DIM.value],
    )
)  # fmt: skip
"""What a thread has of values, in their own order: eight next to each other."""


@gluon.jit
def _values(words, scales, head, pages, G: gl.constexpr):
    """[KEY_TILE, HEAD_DIM] fp16, the columns in the order 0, 4, …, 124, 1, 5, …."""
    x = gl.permute(values_of(words, scales, head, pages, G), (0, 2, 3, 4, 1))
    return gl.convert_layout(gl.reshape(x, [KEY_TILE, HEAD_DIM]), _RIGHT, assert_trivial=True)


@gluon.jit
def _weights(kept, s, factor, m):
    """Weights of a tile's keys as a product takes them, what earlier ones are worth beside them, the new maximum."""
    top, finite, keep = new_maximum(m, gl.max(s, 1) * factor)
    kept.store(gl.exp2(gl.fma(s, factor, -finite[:, None])).to(gl.float16))
    return kept.load(_LEFT), keep, top


@gluon.jit
def _attend(
    first, end, state, left, right, k_pages, v_pages, head, scale,
    MASKED: gl.constexpr, G: gl.constexpr, BLOCK_SIZE: gl.constexpr,
):  # fmt: skip
    """Put tiles behind those before, and start to copy what follows them.

    Args:
        first, end: which tiles.
        state: maximum [ROWS], sum of weights [ROWS, n], weighted values [ROWS, HEAD_DIM], the blocks of the tile that
            is to be copied next, the stage of the first tile, and the one that is free.
        left: the queries, and room for a tile's weights.
        right: the stages, the block table, where the copies end, and the last key that any row sees and that of each.
        MASKED: whether rows may see a part of a tile only.
    """
    m, total, acc, blocks, stage, free = state
    q_kept, p_kept = left
    kept, table, to_tile, bounds = right
    last, position = bounds
    ones = gl.full([KEY_TILE, 8 * WARPS], 1.0, gl.float16, _RIGHT)
    none = gl.zeros([ROWS, KEY_TILE], gl.float32, _SUM)
    factor = scale * 1.4426950408889634
    for tile in range(first, end):
        async_copy.wait_group(STAGES - 2)
        k_words, k_scales = take_words(kept[0], stage, _KEYS, k_pages)
        v_words, v_scales = take_words(kept[1], stage, _VALUES, v_pages)
        some = tile + (STAGES - 1) < to_tile
        fetch_both(kept, k_pages, v_pages, head, blocks, free, some, BLOCK_SIZE, G, WARPS)
        blocks = blocks_of(table, tile + STAGES, k_pages, BLOCK_SIZE, WARPS)
        keys = right_keys(k_words, k_scales, head, k_pages, _RIGHT, G)
        s = mma_v2(q_kept.load(_LEFT), keys, none)
        if MASKED:
            key = gl.arange(0, KEY_TILE, gl.SliceLayout(0, _SUM))
            s = gl.where(key[None, :] <= (position - tile * KEY_TILE)[:, None], s, float("-inf"))
            v_scales = only_seen(v_scales, tile, last)
        p, keep, m = _weights(p_kept, s, factor, m)
        values = _values(v_words, v_scales, head, v_pages, G)
        total = mma_v2(p, ones, total * keep[:, None])
        acc = mma_v2(p, values, acc * keep[:, None])
        free = stage
        stage = stage_after(stage, STAGES)
    return m, total, acc, blocks, stage, free


@gluon.jit(do_not_specialize=["table_stride", "num_states", "early"])
def direct_kernel(
    q_ptr, k_pages, v_pages, m_ptr, total_ptr, acc_ptr, tiles_ptr, table_ptr, context_ptr, positions_ptr, ancestors_ptr,
    table_stride, num_states, early, scale,
    CHAINS: gl.constexpr, H: gl.constexpr, G: gl.constexpr, D: gl.constexpr, BLOCK_SIZE: gl.constexpr,
    SMALL: gl.constexpr, NUM: gl.constexpr, LARGE: gl.constexpr, FIRST: gl.constexpr, PDL: gl.constexpr,
    ROWS: gl.constexpr,
):  # fmt: skip
    """One split of one tile of nodes: of chains with their own keys, of trees without."""
    TILE: gl.constexpr = KEY_TILE
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
        kept = room(STAGES, k_pages), room(STAGES, k_pages)
        for ahead in gl.static_range(STAGES - 1):
            at = from_tile + ahead
            blocks = blocks_of(table, at, k_pages, BLOCK_SIZE, WARPS)
            fetch_both(kept, k_pages, v_pages, kv_head, blocks, ahead, at < to_tile, BLOCK_SIZE, G, WARPS)
        blocks = blocks_of(table, from_tile + (STAGES - 1), k_pages, BLOCK_SIZE, WARPS)
        q = load_queries(q_ptr, tile, kv_head, k_pages.kind, _LEFT, ROWS, H, GROUP)
        left = (
            gl.allocate_shared_memory(gl.float16, [ROWS, D], _KEPT_LEFT, q),
            gl.allocate_shared_memory(gl.float16, [ROWS, TILE], _KEPT_LEFT),
        )
        m = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, _SUM))
        total = gl.zeros([ROWS, 8 * WARPS], gl.float32, _SUM)
        acc = gl.zeros([ROWS, D], gl.float32, _SUM)
        state = m, total, acc, blocks, from_tile * 0, from_tile * 0 + (STAGES - 1)
        right = kept, table, to_tile, bounds
        state = _attend(from_tile, whole, state, left, right, k_pages, v_pages, kv_head, scale, False, G, BLOCK_SIZE)
        rest = gl.maximum(from_tile, whole)
        state = _attend(rest, to_tile, state, left, right, k_pages, v_pages, kv_head, scale, True, G, BLOCK_SIZE)
        m, total, acc, _, _, _ = state
        async_copy.wait_group(0)
        acc = gl.reshape(gl.permute(gl.reshape(acc, [ROWS, 4, D // 4]), (0, 2, 1)), [ROWS, D])
        acc = gl.convert_layout(acc, _OUT, assert_trivial=True)  # the columns' own order, not that of `_values`
        states = m_ptr, total_ptr, acc_ptr
        store_state(states, tile, kv_head, split, num_states, m, total, acc, H, GROUP)


DIRECT = HopperKernel(
    direct_kernel,
    ROWS.value,
    WARPS.value,
    max_registers={HEAD_DIM.value: 168},
    kinds=KINDS,
    min_context=1024,
)
"""It is ahead of `chain_kernel` from there on, of 1 to 32 sequences (`benchmarks/results/direct_h200.json`)."""
