"""Attention of nodes over native pages, whose keys and values come through a ring of shared memory. In Gluon.

A ring of three places holds keys, values, keys, … of one tile after the other: while one is used, two are on their way.
It takes so little room that three programs or more run on a multiprocessor: one's products beside another's weights.
Where the kernel before writes none of it, the first copies begin while that one still runs.

The bits are those of `gpu/chain.py` and `gpu/tree.py` (`tests/test_direct.py`): the same sums, one after the other.
Those kernels are for all else: other sizes of heads than 64 and 128, fp32, windows, other GPUs.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from specdec.kernels.gpu.gluon_names import copy_values
from specdec.kernels.gpu.hopper import (
    KEY_TILE,
    HopperKernel,
    along_dim,
    blocks_in,
    ends_of,
    new_maximum,
    only_dim,
    part_of,
    program_of,
    query_rows,
    stage_after,
    store_state,
    tiles_of,
    wait_unless_idle,
)
from specdec.kernels.gpu.online import MANY_HEADS, part_of_last, part_with, splits_of

WARPS = gl.constexpr(4)
PLACES = gl.constexpr(3)
"""Of the ring."""

_RIGHT = gl.constexpr(gl.DotOperandLayout(1, gl.NVMMADistributedLayout([2, 0], [1, WARPS.value], [16, 8]), 2))
"""Keys, values and ones as 16 rows' products take them; those of 64 rows take them from shared memory."""
KEPT = gl.constexpr(gl.NVMMASharedLayout(128, 16))
_KEPT_BOTH = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
_KEPT_ACC = gl.constexpr(gl.SwizzledSharedLayout(8, 1, 8, [1, 0]))
"""Eight columns are four threads' of a row, and those of eight rows never share a bank."""


@gluon.constexpr_function
def sums_layout(rows, columns):
    """The layout of sums: of 16 rows each warp has some columns, of 64 rows it has sixteen rows."""
    if rows == 16:
        return gl.NVMMADistributedLayout([2, 0], [1, WARPS.value], [16, 8])
    return gl.NVMMADistributedLayout([3, 0], [WARPS.value, 1], [16, columns, 16])


@gluon.constexpr_function
def row_layout(rows, columns):
    """The layout of what there is one of in each row of these; a thread has the same rows whatever the columns."""
    return gl.SliceLayout(1, sums_layout(rows, columns))


@gluon.constexpr_function
def left_layout(rows, columns):
    """The layout of a left operand in registers, of as many columns of sums."""
    return gl.DotOperandLayout(0, sums_layout(rows, columns), 2)


@gluon.constexpr_function
def times(rows):
    """How many times a row's sum of weights is found."""
    return 8 * WARPS.value if rows == 16 else 8


@gluon.constexpr_function
def query_layout(rows, dim):
    """The layout in which queries are loaded: as an operand in registers, or sixteen bytes a thread."""
    if rows == 16:
        return left_layout(rows, 8)
    return gl.BlockedLayout([1, 8], [256 // dim, dim // 8], [WARPS.value, 1], [1, 0])


@gluon.constexpr_function
def _copies(dim):
    """The layout in which a tile is copied, [blocks, rows, values]: sixteen bytes a thread."""
    return gl.BlockedLayout([1, 1, 8], [1, 256 // dim, dim // 8], [1, WARPS.value, 1], [2, 1, 0])


@gluon.jit
def _fetch(
    kept, place, pages, head, blocks, tile, bounds, WHOLE: gl.constexpr, BLOCK_SIZE: gl.constexpr, G: gl.constexpr
):
    """Start to copy a tile's keys or values to a place of the ring, as a group: 0 of those that no row sees.

    Nothing is copied of a tile behind the last one; the group is empty then.

    Args:
        kept, place: the ring, and where in it.
        pages, head, blocks: where the tile is.
        tile: which one.
        bounds: where tiles end, and the last key that any row sees.
        WHOLE: that rows see all of the tile is known.
    """
    D: gl.constexpr = kept.shape[2]
    COPIES: gl.constexpr = _copies(D)
    to_tile, last = bounds
    BLOCKS: gl.constexpr = KEY_TILE // BLOCK_SIZE
    within = along_dim(gl.arange(0, BLOCK_SIZE, only_dim(1, COPIES)), 1)
    at = (within * G + head) * D + along_dim(gl.arange(0, D, only_dim(2, COPIES)), 2)
    key = tile * KEY_TILE + along_dim(gl.arange(0, BLOCKS, only_dim(0, COPIES)), 0) * BLOCK_SIZE + within
    start = pages.codes + blocks.to(gl.int64) * (BLOCK_SIZE * G * D)
    to = kept.index(place).reshape([BLOCKS, BLOCK_SIZE, D])
    if WHOLE:
        copy_values(to, start + at)
    elif tile < to_tile:
        copy_values(to, start + at, mask=key <= last)
    async_copy.commit_group()


@gluon.jit
def _begin(kept, k_pages, v_pages, head, blocks, tile, bounds, BLOCK_SIZE: gl.constexpr, G: gl.constexpr):
    """Start to copy what the ring has room for: a tile's keys and values, and the next one's keys."""
    _fetch(kept, tile * 0, k_pages, head, blocks[0], tile, bounds, False, BLOCK_SIZE, G)
    _fetch(kept, tile * 0 + 1, v_pages, head, blocks[0], tile, bounds, False, BLOCK_SIZE, G)
    _fetch(kept, tile * 0 + 2, k_pages, head, blocks[1], tile + 1, bounds, False, BLOCK_SIZE, G)


@gluon.jit
def _scores(q, keys, ROWS: gl.constexpr):
    """[ROWS, KEY_TILE], the products of queries and a tile's keys, which stand in a place of the ring."""
    none = gl.zeros([ROWS, KEY_TILE], gl.float32, sums_layout(ROWS, KEY_TILE))
    keys = keys.permute((1, 0))
    if ROWS == 16:
        s = mma_v2(q, keys.load(_RIGHT), none)
    else:
        s = warpgroup_mma(q, keys, none, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(0, deps=(s,))
    return s


@gluon.jit
def tops(s, ROWS: gl.constexpr):
    """The maximum of each row's scores; of 64 rows, of which a thread has many, by chains half as long side by side."""
    if ROWS == 64:
        s = gl.max(gl.reshape(s, [ROWS, KEY_TILE // 8, 8]), 1)
    return row_values(gl.max(s, 1), ROWS, KEY_TILE)


@gluon.jit
def _weigh(total, acc, p, ones, values, ROWS: gl.constexpr):
    """Sums of weights and of weighted values, with a tile's weights [ROWS, KEY_TILE]."""
    p = gl.convert_layout(p, left_layout(ROWS, acc.shape[1]))
    if ROWS == 16:
        total = mma_v2(p, ones, total)
        acc = mma_v2(p, values.load(_RIGHT), acc)
    else:
        total = warpgroup_mma(p, ones, total, is_async=True)
        acc = warpgroup_mma(p, values, acc, is_async=True)
        total, acc, p = warpgroup_mma_wait(0, deps=(total, acc, p))
    return total, acc


@gluon.jit
def _attend(
    first, end, state, right, left, k_pages, v_pages, head, scale,
    MASKED: gl.constexpr, WHOLE: gl.constexpr, ROWS: gl.constexpr, G: gl.constexpr, BLOCK_SIZE: gl.constexpr,
):  # fmt: skip
    """Put tiles behind those before, and start to copy what follows them.

    Args:
        first, end: which tiles.
        state: maximum [ROWS], sum of weights [ROWS, n], weighted values [ROWS, D], the blocks of the second
            tile, and the place of the first one's keys.
        right: the queries, and ones.
        left: the ring, the block table, where the copies end, where those do that all rows see, and the last key that
            any row sees and that of each.
        MASKED: whether rows may see a part of a tile only.
        WHOLE: whether all rows see the two tiles behind each of these, too.
    """
    m, total, acc, blocks, place = state
    D: gl.constexpr = acc.shape[1]
    q, ones = right
    kept, table, to_tile, _, last, position = left
    bounds = to_tile, last
    factor = scale * 1.4426950408889634
    for tile in range(first, end):
        following = blocks_in(table, tile + 2, _copies(D), BLOCK_SIZE)
        async_copy.wait_group(PLACES - 1)
        s = _scores(q, kept.index(place), ROWS)
        _fetch(kept, place, v_pages, head, blocks, tile + 1, bounds, WHOLE, BLOCK_SIZE, G)
        blocks = following
        place = stage_after(place, PLACES)
        if MASKED:
            key = gl.arange(0, KEY_TILE, gl.SliceLayout(0, sums_layout(ROWS, KEY_TILE)))
            s = gl.where((key + tile * KEY_TILE)[None, :] <= position[:, None], s, float("-inf"))
        m, finite, keep = new_maximum(m, tops(s, ROWS) * factor)
        p = gl.exp2(gl.fma(s, factor, -finite[:, None])).to(q.dtype)
        total = total * row_values(keep, ROWS, times(ROWS))[:, None]
        acc = acc * row_values(keep, ROWS, D)[:, None]
        async_copy.wait_group(PLACES - 1)
        total, acc = _weigh(total, acc, p, ones, kept.index(place), ROWS)
        _fetch(kept, place, k_pages, head, blocks, tile + 2, bounds, WHOLE, BLOCK_SIZE, G)
        place = stage_after(place, PLACES)
    return m, total, acc, blocks, place


@gluon.jit
def row_values(x, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """What there is one of in each row, where sums of as many columns have it."""
    return gl.convert_layout(x, row_layout(ROWS, COLUMNS), assert_trivial=True)


@gluon.jit
def empty(ROWS: gl.constexpr, D: gl.constexpr):
    """The state before any key."""
    m = gl.full([ROWS], float("-inf"), gl.float32, row_layout(ROWS, KEY_TILE))
    total = gl.zeros([ROWS, times(ROWS)], gl.float32, sums_layout(ROWS, times(ROWS)))
    return m, total, gl.zeros([ROWS, D], gl.float32, sums_layout(ROWS, D))


@gluon.jit
def _split(
    tiles, state, right, left, k_pages, v_pages, head, scale,
    ROWS: gl.constexpr, G: gl.constexpr, BLOCK_SIZE: gl.constexpr,
):  # fmt: skip
    """All tiles of a split: its first one, where those end that all rows see, and where all end.

    Where copies have nothing to leave out they take fewer instructions, in a loop of their own.
    """
    first, whole, end = tiles
    near = gl.maximum(first, gl.minimum(whole, left[3] - 2))
    state = _attend(first, near, state, right, left, k_pages, v_pages, head, scale, False, True, ROWS, G, BLOCK_SIZE)
    state = _attend(near, whole, state, right, left, k_pages, v_pages, head, scale, False, False, ROWS, G, BLOCK_SIZE)
    rest = gl.maximum(first, whole)
    return _attend(rest, end, state, right, left, k_pages, v_pages, head, scale, True, False, ROWS, G, BLOCK_SIZE)


@gluon.jit
def _keep(before, m, total, acc, ROWS: gl.constexpr):
    """Keep a state in shared memory."""
    before[0].store(gl.join(m, row_values(gl.max(total, 1), ROWS, KEY_TILE)))
    before[1].store(acc)


@gluon.jit
def _merge(before, m_next, total_next, acc_next, ROWS: gl.constexpr):
    """Put a split behind those before it, whose state is in shared memory."""
    TIMES: gl.constexpr = times(ROWS)
    D: gl.constexpr = acc_next.shape[1]
    m, total = gl.split(before[0].load(gl.join(m_next, m_next).type.layout))
    m, total = row_values(m, ROWS, KEY_TILE), row_values(total, ROWS, TIMES)
    top, finite, a = new_maximum(m, m_next)
    b = gl.exp2(m_next - finite)
    total = total[:, None] * row_values(a, ROWS, TIMES)[:, None] + total_next * row_values(b, ROWS, TIMES)[:, None]
    acc = before[1].load(sums_layout(ROWS, D)) * row_values(a, ROWS, D)[:, None]
    return top, total, acc + acc_next * row_values(b, ROWS, D)[:, None]


@gluon.jit
def _store(to, part, m, total, acc, H: gl.constexpr, GROUP: gl.constexpr, ROWS: gl.constexpr):
    """Put down where a part ended."""
    states, tile, head, num_states = to
    store_state(states, tile, head, part, num_states, row_values(m, ROWS, times(ROWS)), total, acc, H, GROUP)


@gluon.jit(do_not_specialize=["table_stride", "num_states", "early"])
def native_kernel(
    q_ptr, k_pages, v_pages, m_ptr, total_ptr, acc_ptr, tiles_ptr, table_ptr, context_ptr, positions_ptr, ancestors_ptr,
    table_stride, num_states, early, scale,
    CHAINS: gl.constexpr, H: gl.constexpr, G: gl.constexpr, D: gl.constexpr, BLOCK_SIZE: gl.constexpr,
    SMALL: gl.constexpr, NUM: gl.constexpr, LARGE: gl.constexpr, FIRST: gl.constexpr, PDL: gl.constexpr,
    ROWS: gl.constexpr,
):  # fmt: skip
    """One part of one tile of nodes: of chains with their own keys, of trees without."""
    GROUP: gl.constexpr = H // G
    QUERIES: gl.constexpr = query_layout(ROWS, D)
    tile, kv_head, part = program_of(tiles_ptr, early, FIRST, PDL)
    splits = splits_of(part, FIRST)
    reads = context_ptr, positions_ptr, ancestors_ptr
    lane = gl.arange(0, ROWS, row_layout(ROWS, KEY_TILE))
    asked, tiles, table, seen = part_of(
        tile, splits, lane, reads, table_ptr, table_stride, GROUP, CHAINS, BLOCK_SIZE, SMALL, NUM, LARGE
    )
    from_tile, whole, to_tile = tiles
    bounds = to_tile, seen[0]
    kept = gl.allocate_shared_memory(q_ptr.dtype.element_ty, [PLACES, KEY_TILE, D], KEPT)
    COPIES: gl.constexpr = _copies(D)
    blocks = blocks_in(table, from_tile, COPIES, BLOCK_SIZE), blocks_in(table, from_tile + 1, COPIES, BLOCK_SIZE)
    of_context = (from_tile + 2) * KEY_TILE <= gl.load(context_ptr + tile[0]).to(gl.int32)
    begun = asked & of_context  # which the kernel before has no part in, or has ended
    if begun:
        _begin(kept, k_pages, v_pages, kv_head, blocks, from_tile, bounds, BLOCK_SIZE, G)
    wait_unless_idle(asked, part, PDL)
    if asked:
        if not begun:
            _begin(kept, k_pages, v_pages, kv_head, blocks, from_tile, bounds, BLOCK_SIZE, G)
        rows, ok = query_rows(q_ptr, tile, kv_head, gl.arange(0, ROWS, gl.SliceLayout(1, QUERIES)), H, D, GROUP)
        d = gl.arange(0, D, gl.SliceLayout(0, QUERIES))
        q = gl.load(rows[:, None] + d[None, :], mask=ok[:, None], other=0.0)
        if ROWS == 16:
            right = q, gl.full([KEY_TILE, times(ROWS)], 1.0, q.dtype, _RIGHT)
        else:
            ones = gl.full([8, KEY_TILE], 1.0, q.dtype, QUERIES)
            right = (
                gl.allocate_shared_memory(q.dtype, [ROWS, D], KEPT, q),
                gl.allocate_shared_memory(q.dtype, [8, KEY_TILE], KEPT, ones).permute((1, 0)),
            )
            fence_async_shared()
        m, total, acc = empty(ROWS, D)
        left = kept, table, to_tile, whole, seen[0], seen[1]
        to = (m_ptr, total_ptr, acc_ptr), tile, kv_head, num_states
        ahead = blocks[1], from_tile * 0
        if FIRST == 1:
            state = m, total, acc, ahead[0], ahead[1]
            m, total, acc, _, _ = _split(
                tiles, state, right, left, k_pages, v_pages, kv_head, scale, ROWS, G, BLOCK_SIZE
            )
            async_copy.wait_group(0)  # the ring's room is taken for other things now
            _store(to, part, m, total, acc, H, GROUP, ROWS)
        else:
            before = (
                gl.allocate_shared_memory(gl.float32, [ROWS, 2], _KEPT_BOTH),
                gl.allocate_shared_memory(gl.float32, [ROWS, D], _KEPT_ACC),
            )
            _keep(before, m, total, acc, ROWS)
            end_merged, end_split = ends_of(splits, to_tile, CHAINS, SMALL, NUM, LARGE)
            for split in range(splits[0], end_split):
                tiles = tiles_of(split, whole, to_tile, SMALL, NUM, LARGE)
                m_of, total_of, acc_of = empty(ROWS, D)
                state = m_of, total_of, acc_of, ahead[0], ahead[1]
                m_of, total_of, acc_of, of_next, place = _split(
                    tiles, state, right, left, k_pages, v_pages, kv_head, scale, ROWS, G, BLOCK_SIZE
                )
                ahead = of_next, place
                to_part = part_with(split, FIRST)
                if split < end_merged:
                    m_of, total_of, acc_of = _merge(before, m_of, total_of, acc_of, ROWS)
                else:
                    to_part = part_of_last(split, FIRST, FIRST)
                if (split >= end_merged) | (split + 1 == end_merged):
                    _store(to, to_part, m_of, total_of, acc_of, H, GROUP, ROWS)
                else:
                    _keep(before, m_of, total_of, acc_of, ROWS)
            async_copy.wait_group(0)


NATIVE = HopperKernel(
    native_kernel, 64, WARPS.value, max_registers={64: 168, 128: 168}, kinds=("native",), min_rows=32,
    merged=(3, 1 << 31), max_merged=16384, few_programs=2,
)  # fmt: skip
NATIVE_NARROW = HopperKernel(
    native_kernel, 16, WARPS.value, max_registers={64: 128, 128: 168}, kinds=("native",),
    max_heads=MANY_HEADS[16],
)  # fmt: skip
