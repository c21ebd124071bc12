"""Attention of wide tiles over quantized pages whose codes become values on their way to the tensor cores. In Gluon.

Hopper's instructions for 64 rows take their left operand from registers and their right one from shared memory. So the
operands of `gpu/direct.py` change places: keys and values stand left, as they come out of their codes, queries and
weights right, and scores and sums are found with rows × grouped heads as columns. Copies, stages and the choice of the
codes that a thread takes are as there.

The bits are those of the other kernels (`tests/test_direct.py`), whose operands stand the other way round: each sum is
of the same products in the same sixteens, one after the other.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from specdec.kernels.gpu.codes import (
    HEAD_DIM,
    KINDS,
    Bases,
    as_half,
    blocks_of,
    fetch_both,
    keys_of,
    only_seen,
    room,
    take_words,
    values_of,
    words_layout,
)
from specdec.kernels.gpu.hopper import (
    KEY_TILE,
    HopperKernel,
    ends_of,
    new_maximum,
    part_of,
    program_of,
    query_rows,
    stage_after,
    store_state,
    tiles_of,
    wait_unless_idle,
)
from specdec.kernels.gpu.online import part_of_last, part_with, splits_of

WARPS = gl.constexpr(4)
STAGES = gl.constexpr(2)
"""Tiles that have room in shared memory, one that is read and one on its way."""
ROWS = gl.constexpr(64)
"""Rows × grouped heads of a tile."""

_SUM = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [WARPS.value, 1], [16, ROWS.value, 16]))
"""Scores of 64 keys, or 64 of the columns of values: each thread has two of them, of sixteen rows."""
_LEFT = gl.constexpr(gl.DotOperandLayout(0, _SUM.value, 2))
_TOTAL = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [WARPS.value, 1], [16, 8, 16]))
"""Sums of weights, eight times each row's: a thread has those of two rows, and so their maxima."""
_KEPT = gl.constexpr(gl.NVMMASharedLayout(128, 16))


def _placed(registers: Bases, lanes: Bases, warps: Bases, shape: list[int]) -> gl.DistributedLinearLayout:
    """Where elements are, by 1, 2, 4, … of a thread's registers, of the lanes, of the warps."""
    return gl.DistributedLinearLayout(registers, lanes, warps, block_bases=[], shape=shape)


_KEYS = gl.constexpr(
    words_layout([[0, 4], [0, 8], [0, 16], [8, 0]], [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]])
)
"""A thread hands over every fourth word of two keys: of each sixteen values that a product sums at once four."""
_VALUES = gl.constexpr(
    words_layout([[1, 0], [8, 0], [16, 0], [32, 0]], [[2, 0], [4, 0], [0, 1], [0, 2], [0, 4]], [[0, 8], [0, 16]])
)
"""A thread hands over one word of sixteen rows: four columns, and of each sixteen rows four."""
_PARTS = gl.constexpr(
    _placed([[1, 0], [2, 0], [4, 0], [0, 8]], [[8, 0], [16, 0], [0, 1], [0, 2], [0, 4]], [[0, 16], [0, 32]], [32, 64])
)
"""Maxima of two keys each: a thread has eight of two rows, those that it has in `_TOTAL`."""
_BOTH = gl.constexpr(
    _placed([[0, 1], [1, 0], [8, 0], [16, 0], [32, 0]], [[2, 0], [4, 0]] + [[0, 0]] * 3, [[0, 0]] * 2, [64, 2])
)
"""Two numbers of each row where `_SUM` has the row."""
_OUT = gl.constexpr(
    _placed(
        [[1, 0], [2, 0], [0, 1], [0, 8], [0, 16], [0, 32]], [[0, 2], [0, 4], [4, 0], [8, 0], [16, 0]],
        [[32, 0], [64, 0]], [128, 64],
    )
)  # fmt: skip
"""What a thread has of values, in their own order: it has four next to each other."""
_KEPT_BOTH = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
_KEPT_ACC = gl.constexpr(gl.SwizzledSharedLayout(8, 1, 8, [1, 0]))
"""Eight columns of `_SUM` are four lanes' of a row, and those of eight rows never share a bank."""
_QUERIES = gl.constexpr(gl.BlockedLayout([1, 16], [4, 8], [WARPS.value, 1], [1, 0]))
"""A thread puts sixteen values of a query, which a product sums at once, in the order of `_keys`."""


@gluon.jit
def _keys(words, scales, head, pages, G: gl.constexpr):
    """[KEY_TILE, HEAD_DIM] fp16, the values of a key in the order of `_queries`."""
    x = gl.reshape(keys_of(words, scales, head, pages, G), [KEY_TILE, HEAD_DIM // 16, 4, 2, 2])
    x = gl.reshape(gl.permute(x, (0, 1, 4, 2, 3)), [KEY_TILE, HEAD_DIM])
    return gl.convert_layout(x, _LEFT, assert_trivial=True)


@gluon.jit
def _values(words, scales, head, pages, G: gl.constexpr):
    """[HEAD_DIM, KEY_TILE] fp16, the columns in the order 0, 4, …, 28, 1, …, 29, 32, …, 125, 2, 6, …, 127."""
    x = gl.reshape(values_of(words, scales, head, pages, G), [KEY_TILE // 2, WARPS, 8, 2, 2, 2])
    x = gl.reshape(gl.permute(x, (4, 1, 5, 2, 0, 3)), [HEAD_DIM, KEY_TILE])
    return gl.convert_layout(x, _LEFT, assert_trivial=True)


@gluon.jit
def _tops(s):
    """The largest of each row's scores."""
    x = gl.max(gl.reshape(s, [WARPS, 2, 8, ROWS]), 1)  # of what a thread has
    x = gl.convert_layout(gl.reshape(x, [KEY_TILE // 2, ROWS]), _PARTS)
    return gl.convert_layout(gl.max(x, 0), gl.SliceLayout(1, _TOTAL), assert_trivial=True)


@gluon.jit
def _as_columns(both_kept, a, b):
    """Two numbers of each row, from where `_TOTAL` has the row to where `_SUM` does."""
    both_kept.store(gl.join(a, b))
    a, b = gl.split(both_kept.load(_BOTH))
    a = gl.convert_layout(a, gl.SliceLayout(0, _SUM), assert_trivial=True)
    return a, gl.convert_layout(b, gl.SliceLayout(0, _SUM), assert_trivial=True)


@gluon.jit
def _attend(
    first, end, state, right, left, k_pages, v_pages, head, scale,
    MASKED: gl.constexpr, G: gl.constexpr, BLOCK_SIZE: gl.constexpr,
):  # fmt: skip
    """Put tiles behind those before, and start to copy what follows them.

    Codes become values while products run: values of a tile's own words beside its scores, and the next one's keys
    beside the sums.

    Args:
        first, end: which tiles.
        state: maximum [ROWS], sum of weights [ROWS, 8], weighted values [HEAD_DIM, ROWS], the blocks of the tile that
            is to be copied next, the stage of the first tile, and the values of its keys.
        right: the queries, room for a tile's weights, ones, and room for two numbers of each row.
        left: the stages, the block table, where the copies end, and the last key that any row sees and that of each.
        MASKED: whether rows may see a part of a tile only.
    """
    m, total, acc, blocks, stage, keys = state
    q_kept, p_kept, ones, both_kept = right
    kept, table, to_tile, bounds = left
    last, position = bounds
    none = gl.zeros([KEY_TILE, ROWS], gl.float32, _SUM)
    factor = scale * 1.4426950408889634
    position = gl.convert_layout(position, gl.SliceLayout(0, _SUM))
    for tile in range(first, end):
        s = warpgroup_mma(keys, q_kept.permute((1, 0)), none, use_acc=False, is_async=True)
        # Asked for early: the compiler wants them at the end of this tile.
        following = blocks_of(table, tile + (STAGES + 1), k_pages, BLOCK_SIZE, WARPS)
        words, scales = take_words(kept[1], stage, _VALUES, v_pages)
        if MASKED:
            scales = only_seen(scales, tile, last)
        values = _values(words, scales, head, v_pages, G)
        s, keys, values = warpgroup_mma_wait(0, deps=(s, keys, values))
        some = tile + STAGES < to_tile
        fetch_both(kept, k_pages, v_pages, head, blocks, stage, some, BLOCK_SIZE, G, WARPS)
        blocks = following
        if MASKED:
            key = gl.arange(0, KEY_TILE, gl.SliceLayout(1, _SUM))
            s = gl.where((key + tile * KEY_TILE)[:, None] <= position[None, :], s, float("-inf"))
        m, finite, keep = new_maximum(m, _tops(s) * factor)
        finite, of_acc = _as_columns(both_kept, finite, keep)
        p_kept.store(gl.exp2(gl.fma(s, factor, -finite[None, :])).to(gl.float16))
        fence_async_shared()
        total = warpgroup_mma(p_kept.permute((1, 0)), ones, total * keep[:, None], is_async=True)
        acc = warpgroup_mma(values, p_kept, acc * of_acc[None, :], is_async=True)
        stage = stage_after(stage, STAGES)
        async_copy.wait_group(STAGES - 1)
        keys = _next_keys(kept[0], stage, k_pages, head, G)
        total, acc, values, keys = warpgroup_mma_wait(0, deps=(total, acc, values, keys))
    return m, total, acc, blocks, stage, keys


@gluon.jit
def _next_keys(kept, stage, pages, head, G: gl.constexpr):
    """The values of a tile's keys, whose copies have come."""
    words, scales = take_words(kept, stage, _KEYS, pages)
    return _keys(words, scales, head, pages, G)


@gluon.jit
def _queries(q_ptr, tile, head, kind: gl.constexpr, H: gl.constexpr, GROUP: gl.constexpr):
    """[ROWS, HEAD_DIM] fp16, in the order of `keys_of`."""
    rows, ok = query_rows(q_ptr, tile, head, gl.arange(0, ROWS, gl.SliceLayout(1, _QUERIES)), H, HEAD_DIM, GROUP)
    d = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, _QUERIES))
    q = as_half(gl.load(rows[:, None] + d[None, :], mask=ok[:, None], other=0.0))
    if kind == "int4":
        q = gl.permute(gl.reshape(q, [ROWS, HEAD_DIM // 16, 2, 2, 2, 2]), (0, 1, 5, 2, 4, 3))
    elif kind == "int8":
        q = gl.permute(gl.reshape(q, [ROWS, HEAD_DIM // 16, 4, 2, 2]), (0, 1, 3, 2, 4))
    else:
        q = gl.permute(gl.reshape(q, [ROWS, HEAD_DIM // 16, 4, 2, 2]), (0, 1, 4, 2, 3))
    return gl.reshape(q, [ROWS, HEAD_DIM])


@gluon.jit
def _empty():
    """The state before any key."""
    m = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, _TOTAL))
    return m, gl.zeros([ROWS, 8], gl.float32, _TOTAL), gl.zeros([HEAD_DIM, ROWS], gl.float32, _SUM)


@gluon.jit
def _split(tiles, state, right, left, k_pages, v_pages, head, scale, G: gl.constexpr, BLOCK_SIZE: gl.constexpr):
    """All tiles of a split: its first one, where those end that all rows see, and where all end."""
    first, whole, end = tiles
    state = _attend(first, whole, state, right, left, k_pages, v_pages, head, scale, False, G, BLOCK_SIZE)
    rest = gl.maximum(first, whole)
    return _attend(rest, end, state, right, left, k_pages, v_pages, head, scale, True, G, BLOCK_SIZE)


@gluon.jit
def _merge(before, both_kept, m_next, total_next, acc_next):
    """Put a split behind those before it, whose state is in shared memory."""
    m, total = gl.split(before[0].load(gl.join(m_next, m_next).type.layout))
    top, finite, a = new_maximum(m, m_next)
    b = gl.exp2(m_next - finite)
    a_of_acc, b_of_acc = _as_columns(both_kept, a, b)
    total = total[:, None] * a[:, None] + total_next * b[:, None]
    return top, total, before[1].load(_SUM) * a_of_acc[None, :] + acc_next * b_of_acc[None, :]


@gluon.jit
def _store(to, part, m, total, acc, H: gl.constexpr, GROUP: gl.constexpr):
    """Put down where a part ended."""
    states, tile, head, num_states = to
    acc = gl.permute(gl.reshape(acc, [2, WARPS, 2, 8, ROWS]), (1, 3, 0, 2, 4))  # the order of `_values`
    acc = gl.convert_layout(gl.reshape(acc, [HEAD_DIM, ROWS]), _OUT)
    store_state(states, tile, head, part, num_states, m, total, gl.permute(acc, (1, 0)), H, GROUP)


@gluon.jit(do_not_specialize=["table_stride", "num_states", "early"])
def wide_kernel(
    q_ptr, k_pages, v_pages, m_ptr, total_ptr, acc_ptr, tiles_ptr, table_ptr, context_ptr, positions_ptr, ancestors_ptr,
    table_stride, num_states, early, scale,
    CHAINS: gl.constexpr, H: gl.constexpr, G: gl.constexpr, D: gl.constexpr, BLOCK_SIZE: gl.constexpr,
    SMALL: gl.constexpr, NUM: gl.constexpr, LARGE: gl.constexpr, FIRST: gl.constexpr, PDL: gl.constexpr,
    ROWS: gl.constexpr,
):  # fmt: skip
    """One part of one tile of nodes: of chains with their own keys, of trees without."""
    TILE: gl.constexpr = KEY_TILE
    GROUP: gl.constexpr = H // G
    tile, kv_head, part = program_of(tiles_ptr, early, FIRST, PDL)
    splits = splits_of(part, FIRST)
    reads = context_ptr, positions_ptr, ancestors_ptr
    lane = gl.arange(0, ROWS, gl.SliceLayout(1, _TOTAL))
    asked, tiles, table, bounds = part_of(
        tile, splits, lane, reads, table_ptr, table_stride, GROUP, CHAINS, BLOCK_SIZE, SMALL, NUM, LARGE
    )
    wait_unless_idle(asked, part, PDL)
    if asked:
        from_tile, whole, to_tile = tiles
        kept = room(STAGES, k_pages), room(STAGES, k_pages)
        for ahead in gl.static_range(STAGES):
            at = from_tile + ahead
            blocks = blocks_of(table, at, k_pages, BLOCK_SIZE, WARPS)
            fetch_both(kept, k_pages, v_pages, kv_head, blocks, ahead, at < to_tile, BLOCK_SIZE, G, WARPS)
        blocks = blocks_of(table, from_tile + STAGES, k_pages, BLOCK_SIZE, WARPS)
        q = _queries(q_ptr, tile, kv_head, k_pages.kind, H, GROUP)
        right = (
            gl.allocate_shared_memory(gl.float16, [ROWS, D], _KEPT, q),
            gl.allocate_shared_memory(gl.float16, [TILE, ROWS], _KEPT),
            gl.allocate_shared_memory(
                gl.float16, [8, TILE], _KEPT, gl.full([8, TILE], 1.0, gl.float16, _QUERIES)
            ).permute((1, 0)),
            gl.allocate_shared_memory(gl.float32, [ROWS, 2], _KEPT_BOTH),
        )
        fence_async_shared()
        m, total, acc = _empty()
        async_copy.wait_group(STAGES - 1)
        stage = from_tile * 0
        ahead = blocks, stage, _next_keys(kept[0], stage, k_pages, kv_head, G)
        left = kept, table, to_tile, bounds
        to = (m_ptr, total_ptr, acc_ptr), tile, kv_head, num_states
        if FIRST == 1:
            state = m, total, acc, ahead[0], ahead[1], ahead[2]
            tiles = from_tile, whole, to_tile
            m, total, acc, _, _, _ = _split(tiles, state, right, left, k_pages, v_pages, kv_head, scale, G, BLOCK_SIZE)
            async_copy.wait_group(0)
            _store(to, part, m, total, acc, H, GROUP)
        else:
            before = (
                gl.allocate_shared_memory(gl.float32, [ROWS, 2], _KEPT_BOTH, gl.join(m, gl.max(total, 1))),
                gl.allocate_shared_memory(gl.float32, [D, ROWS], _KEPT_ACC, acc),
            )
            end_merged, end_split = ends_of(splits, to_tile, CHAINS, SMALL, NUM, LARGE)
            for split in range(splits[0], end_split):
                tiles = tiles_of(split, whole, to_tile, SMALL, NUM, LARGE)
                m_of, total_of, acc_of = _empty()
                state = m_of, total_of, acc_of, ahead[0], ahead[1], ahead[2]
                state = _split(tiles, state, right, left, k_pages, v_pages, kv_head, scale, G, BLOCK_SIZE)
                m_of, total_of, acc_of, blocks, stage, keys = state
                ahead = blocks, stage, keys
                to_part = part_with(split, FIRST)
                if split < end_merged:
                    m_of, total_of, acc_of = _merge(before, right[3], m_of, total_of, acc_of)
                else:
                    to_part = part_of_last(split, FIRST, FIRST)
                if (split >= end_merged) | (split + 1 == end_merged):
                    _store(to, to_part, m_of, total_of, acc_of, H, GROUP)
                else:
                    before[0].store(gl.join(m_of, gl.max(total_of, 1)))
                    before[1].store(acc_of)
            async_copy.wait_group(0)


WIDE = HopperKernel(
    wide_kernel, ROWS.value, WARPS.value, max_registers={HEAD_DIM.value: 255}, kinds=KINDS, min_context=4096,
    merged=(2, 1 << 25),
)  # fmt: skip
"""In shorter contexts, whose splits are two tiles each, the other kernels are about as fast or ahead
(`benchmarks/results/wide_h200.json`, of before a program took those splits together). Where one does, this kernel is
ahead of them, too: `benchmarks/kernels_gpu.py wide` has such cases."""
