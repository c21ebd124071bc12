"""Attention of many nodes over long contexts of native pages: two tiles of nodes read the same keys. In Gluon.

A program takes two tiles of one sequence's nodes and a range of splits. A warp of its own has the tensor memory
accelerator (TMA) bring keys and values to a ring, each tile of them once for both. Each tile of nodes has a warp group:
its product with the next keys runs while it finds what these keys are worth. A program reads its splits one behind the
other: nothing is begun anew where one ends, and no other program has to share its multiprocessor.

Two tiles of nodes ask the cache for half of what they would ask alone, which is what bounds `gpu/native.py` with many
nodes. The bits are its own: the same sums, one after the other. It is for tiles of 64 rows that come in pairs, where
there are keys enough for all multiprocessors.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from specdec.kernels.gpu.gluon_names import copy_box, group_barrier
from specdec.kernels.gpu.hopper import (
    KEY_TILE,
    HopperKernel,
    new_maximum,
    query_rows,
    seen,
    stage_after,
    store_state,
    tile_at,
    wait_for_kernels,
)
from specdec.kernels.gpu.launch import multiprocessors
from specdec.kernels.gpu.native import (
    KEPT,
    empty,
    left_layout,
    query_layout,
    row_layout,
    row_values,
    sums_layout,
    times,
    tops,
)
from specdec.kernels.gpu.online import BY_CONTEXT, first_by_context, num_splits, split_of, start_of
from specdec.kernels.gpu.pages import PagePointers
from specdec.kernels.work import AttentionWork

ROWS = gl.constexpr(64)
"""Rows × grouped heads of each of two tiles."""
SLOTS = gl.constexpr(4)
"""Of the ring. A slot is for a tile's values and the next one's keys, which are used at the same time."""
GROUP_REGISTERS = gl.constexpr(232)
PRODUCER_REGISTERS = gl.constexpr(40)
"""Of a thread of a warp group, and of the warp that has keys and values brought; together what three times 168 are."""
LEAST, LEAST_OF_BOUND = 6, 8
"""Tiles of keys a program from which on this kernel is the faster one, where contexts are known and where the longest
is a bound (`benchmarks/kernels_gpu.py pairs`)."""


@gluon.constexpr_function
def _cleared(dim):
    """The layout in which one warp clears eight keys' values: sixteen bytes a thread."""
    return gl.BlockedLayout([1, 8], [256 // dim, dim // 8], [1, 1], [1, 0])


@gluon.constexpr_function
def _rows_of_warp(warps):
    """The layout in which each of some warps has one number for each row."""
    return gl.BlockedLayout([ROWS // 32], [32], [warps], [0])


@gluon.jit
def _blocks_of(table, tile, BLOCK_SIZE: gl.constexpr):
    """The blocks of a tile, four numbers, of which those behind the last one repeat it."""
    table_at, num_blocks = table
    BLOCKS: gl.constexpr = KEY_TILE // BLOCK_SIZE
    first, last = tile * BLOCKS, num_blocks - 1
    a = gl.load(table_at + gl.minimum(first, last))
    b = gl.load(table_at + gl.minimum(first + 1 % BLOCKS, last))
    c = gl.load(table_at + gl.minimum(first + 2 % BLOCKS, last))
    d = gl.load(table_at + gl.minimum(first + 3 % BLOCKS, last))
    return a, b, c, d


@gluon.jit
def _bring(to, done, desc, head, blocks, BLOCK_SIZE: gl.constexpr):
    """Have a tile's keys or values brought, block by block."""
    D: gl.constexpr = to.shape[1]
    for i in gl.static_range(KEY_TILE // BLOCK_SIZE):
        at = [blocks[i] * BLOCK_SIZE, head * D]
        copy_box(desc, at, done, to.slice(i * BLOCK_SIZE, BLOCK_SIZE, 0))


@gluon.jit
def _clear(values, tile, last):
    """Put zeros where a tile's values are behind the last key that any row sees: there may be what is no number."""
    D: gl.constexpr = values.shape[1]
    LAYOUT: gl.constexpr = _cleared(D)
    for i in gl.static_range(KEY_TILE // 8):
        part = values.slice(8 * i, 8, 0)
        key = tile * KEY_TILE + 8 * i + gl.arange(0, 8, gl.SliceLayout(1, LAYOUT))
        part.store(gl.where((key <= last)[:, None], part.load(LAYOUT), 0.0))
    fence_async_shared()


@gluon.jit
def _after(slot, phase):
    """The slot behind one, and which of its turns it is, 0 or 1."""
    return stage_after(slot, SLOTS), gl.where(slot + 1 == SLOTS, phase ^ 1, phase)


@gluon.jit
def _splits_of(part, parts, first, end, last_split, SMALL: gl.constexpr, NUM: gl.constexpr, LARGE: gl.constexpr):
    """The first of a program's splits and where they end, if so many programs share them all, as evenly as they can.

    The first program takes the `first` splits. Each other one begins with the split that its share of the tiles behind
    them, up to `end`, begins in.
    """
    start = start_of(first, SMALL, NUM, LARGE)
    rest = gl.maximum(end - start, 0)
    others = gl.maximum(parts - 1, 1)
    first_split = split_of(start + gl.maximum(part - 1, 0) * rest // others, SMALL, NUM, LARGE)
    end_split = split_of(start + part * rest // others, SMALL, NUM, LARGE)
    first_split = gl.where(part == 0, 0, gl.minimum(first_split, last_split + 1))
    return first_split, gl.where(part + 1 == parts, last_split + 1, gl.minimum(end_split, last_split + 1))


@gluon.jit
def _seen_by(tile, other, reads, WARPS: gl.constexpr, GROUP: gl.constexpr, CHAINS: gl.constexpr):
    """As `seen` for two tiles of one sequence: the last key that any row sees, the end, and that of what all see.

    Where a tile is padding alone, what the other one sees. Each warp has all rows, and waits for no other.
    """
    lane = gl.arange(0, ROWS, _rows_of_warp(WARPS))
    _, last, end, whole = seen(tile, lane, reads, GROUP, CHAINS)
    if CHAINS:
        _, last_of, end_of, whole_of = seen(other, lane, reads, GROUP, CHAINS)
        both = gl.minimum(whole, whole_of)
        whole = gl.where(last_of < 0, whole, gl.where(last < 0, whole_of, both))
        last, end = gl.maximum(last, last_of), gl.maximum(end, end_of)
    return last, end, whole


@gluon.jit
def _part_of(
    where, reads, WARPS: gl.constexpr, CHAINS: gl.constexpr, GROUP: gl.constexpr, SMALL: gl.constexpr,
    NUM: gl.constexpr, LARGE: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """What a program is for, which each of its groups of warps finds for itself, so that nothing is handed over.

    Args:
        where: tiles, the block table, its stride, and whether these may be read while the kernel before still runs.
        reads: contexts, positions, ancestors.
        WARPS: of the group.

    Returns:
        Both tiles; the first split, where they end, the last one that there is, and where those of the first part end;
        the first tile of keys, where they end, where those end that all rows see, and the last key that any row sees.
    """
    tiles_ptr, _, _, early = where
    if early == 0:
        wait_for_kernels(PDL)
    pair, part, parts = gl.program_id(1), gl.program_id(2), gl.num_programs(2)
    tile, other = tile_at(tiles_ptr, 2 * pair), tile_at(tiles_ptr, 2 * pair + 1)
    last, end, whole = _seen_by(tile, other, reads, WARPS, GROUP, CHAINS)
    MERGED: gl.constexpr = 1 if CHAINS else 0
    last_split = split_of(gl.maximum(end - MERGED, 0), SMALL, NUM, LARGE)
    context_ptr, _, _ = reads
    first_part = first_by_context(gl.load(context_ptr + tile[0]).to(gl.int32), parts, KEY_TILE, SMALL, NUM, LARGE)
    end_merged = gl.minimum(first_part, last_split + MERGED)
    first_split, end_split = _splits_of(part, parts, first_part, end, last_split, SMALL, NUM, LARGE)
    first = start_of(first_split, SMALL, NUM, LARGE)
    end = gl.minimum(start_of(end_split, SMALL, NUM, LARGE), end)
    return tile, other, (first_split, end_split, last_split, end_merged), (first, end, whole, last)


@gluon.jit
def _produce(
    k_desc, v_desc, where, reads, ring,
    CHAINS: gl.constexpr, H: gl.constexpr, G: gl.constexpr, BLOCK_SIZE: gl.constexpr, SMALL: gl.constexpr,
    NUM: gl.constexpr, LARGE: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Bring what two warp groups use, as there is room.

    Args:
        k_desc, v_desc: pages, [slots, heads × D].
        where, reads: as for `_part_of`.
        ring: keys and values, and barriers: what was brought, what is free, and values that are to be cleared.
    """
    nodes, _, _, tiles = _part_of(where, reads, 1, CHAINS, H // G, SMALL, NUM, LARGE, PDL)
    sequence, head = nodes[0], gl.program_id(0)
    first, end, whole, last = tiles
    _, table_ptr, table_stride, _ = where
    table_at = table_ptr + sequence.to(gl.int64) * table_stride
    table = table_at, gl.maximum((last + BLOCK_SIZE) // BLOCK_SIZE, 1)
    context_ptr, _, _ = reads
    context = gl.load(context_ptr + sequence).to(gl.int32)  # keys that are there while the kernel before still runs
    keys, values, there, free, landed = ring
    BYTES: gl.constexpr = KEY_TILE * keys.shape[2] * 2
    if (first + 1) * KEY_TILE > context:
        wait_for_kernels(PDL)
    blocks = _blocks_of(table, first, BLOCK_SIZE)
    if first < end:
        mbarrier.expect(there.index(0), BYTES)
        _bring(keys.index(0), there.index(0), k_desc, head, blocks, BLOCK_SIZE)
    slot, phase, landing = first * 0 + 1, first * 0, first * 0
    for tile in range(first, end):
        following = _blocks_of(table, tile + 1, BLOCK_SIZE)
        if (tile + 2) * KEY_TILE > context:
            wait_for_kernels(PDL)
        mbarrier.wait(free.index(slot), phase ^ 1)
        k, v, done = keys.index(slot), values.index(slot), there.index(slot)
        more = tile + 1 < end
        if CHAINS and tile >= whole:
            mbarrier.expect(landed.index(0), BYTES)
            _bring(v, landed.index(0), v_desc, head, blocks, BLOCK_SIZE)
            mbarrier.wait(landed.index(0), landing)
            landing = landing ^ 1
            _clear(v, tile, last)
            if more:
                mbarrier.expect(done, BYTES)
                _bring(k, done, k_desc, head, following, BLOCK_SIZE)
            else:
                mbarrier.arrive(done, count=1)
        elif more:
            mbarrier.expect(done, 2 * BYTES)
            _bring(k, done, k_desc, head, following, BLOCK_SIZE)
            _bring(v, done, v_desc, head, blocks, BLOCK_SIZE)
        else:
            mbarrier.expect(done, BYTES)
            _bring(v, done, v_desc, head, blocks, BLOCK_SIZE)
        blocks = following
        slot, phase = _after(slot, phase)


@gluon.jit
def _scores(q, keys):
    """[ROWS, KEY_TILE], the products of queries and a tile's keys, which nobody has waited for."""
    none = gl.zeros([ROWS, KEY_TILE], gl.float32, sums_layout(ROWS, KEY_TILE))
    return warpgroup_mma(q, keys.permute((1, 0)), none, use_acc=False, is_async=True)


@gluon.jit
def _attend(first, end, begin, state, right, ring, position, factor, MASKED: gl.constexpr, TIMES: gl.constexpr):
    """Put tiles behind those before.

    The next tile's scores are asked for before this one's are weighed, and their maximum is found while this one's
    values are multiplied. Weights are found before their product is asked for, which the compiler would not heed if
    only a wait told it so.

    Args:
        first, end: which tiles.
        begin: the first tile of their split, whose sums don't go on from those before.
        state: maximum [ROWS], sum of weights [ROWS, n], weighted values [ROWS, D], the first tile's scores
            [ROWS, KEY_TILE] and their maximum [ROWS], and the slot of its values and whose turn that is.
        right: the queries, and ones.
        ring: as for `_produce`.
        position: the last key that each row sees.
        factor: on the scores.
        MASKED: whether rows may see a part of a tile only.
        TIMES: how many tiles a turn of the loop takes, of which their number is a multiple. In two by turns the next
            tile's scores find registers that are free: one tile a turn has to move them.

    Returns:
        The state, with the scores of tile `end`, or what stands there where a program's tiles end.
    """
    m, total, acc, s, top, slot, phase = state
    q, ones = right
    keys, values, there, free, _ = ring
    D: gl.constexpr = acc.shape[1]
    for at in range(first, end, TIMES):
        for more in gl.static_range(TIMES):
            tile = at + more
            if MASKED:
                key = gl.arange(0, KEY_TILE, gl.SliceLayout(0, sums_layout(ROWS, KEY_TILE)))
                s = gl.where((key + tile * KEY_TILE)[None, :] <= position[:, None], s, float("-inf"))
                top = tops(s, ROWS)
            mbarrier.wait(there.index(slot), phase)
            s_next = _scores(q, keys.index(slot))
            m, finite, keep = new_maximum(m, top * factor)
            p = gl.convert_layout(gl.exp2(gl.fma(s, factor, -finite[:, None])).to(q.dtype), left_layout(ROWS, D))
            total = total * row_values(keep, ROWS, times(ROWS))[:, None]
            acc = acc * row_values(keep, ROWS, D)[:, None]
            total = warpgroup_mma(p, ones, total, use_acc=tile > begin, is_async=True)
            acc = warpgroup_mma(p, values.index(slot), acc, use_acc=tile > begin, is_async=True)
            s = warpgroup_mma_wait(2, deps=(s_next,))  # but not for the two behind them
            top = tops(s, ROWS)
            total, acc, p = warpgroup_mma_wait(0, deps=(total, acc, p))
            group_barrier()
            mbarrier.arrive(free.index(slot), count=1)
            slot, phase = _after(slot, phase)
    return m, total, acc, s, top, slot, phase


@gluon.jit
def _complete(to, before, split, end, m, total, acc, H: gl.constexpr, GROUP: gl.constexpr):
    """Put a split behind those before it, if it is one of the first part, up to `end`, and store what is a part's.

    A tree's last split goes on, and is a part of its own. Returns the state of the first part until here, which stays
    where it is: to move it to other registers would take an instruction for each of them, split by split.
    """
    states, tile, head, num_states = to
    D: gl.constexpr = acc.shape[1]
    m_before, total_before, acc_before = before
    if split < end:
        m_before, finite, a = new_maximum(m_before, m)
        b = gl.exp2(m - finite)
        a_of, b_of = row_values(a, ROWS, times(ROWS)), row_values(b, ROWS, times(ROWS))
        total_before = total_before * a_of[:, None] + total * b_of[:, None]
        acc_before = acc_before * row_values(a, ROWS, D)[:, None] + acc * row_values(b, ROWS, D)[:, None]
        if split + 1 == end:
            m_of = row_values(m_before, ROWS, times(ROWS))
            store_state(states, tile, head, 0, num_states, m_of, total_before, acc_before, H, GROUP)
    else:
        part = gl.maximum(split + 1 - end, 1)
        store_state(states, tile, head, part, num_states, row_values(m, ROWS, times(ROWS)), total, acc, H, GROUP)
    return m_before, total_before, acc_before


@gluon.jit
def _consume(
    q_ptr, states, num_states, where, reads, scale, query, ones, ring, SECOND: gl.constexpr,
    CHAINS: gl.constexpr, H: gl.constexpr, G: gl.constexpr, SMALL: gl.constexpr, NUM: gl.constexpr,
    LARGE: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """One tile of nodes, by one warp group.

    Args:
        q_ptr: queries.
        states, num_states: where states go, and their number.
        where, reads: as for `_part_of`.
        scale: on the scores.
        query, ones: room for the queries, and ones, in shared memory.
        ring: as for `_produce`.
        SECOND: which of the two tiles.
    """
    keys, _, there, free, _ = ring
    D: gl.constexpr = keys.shape[2]
    GROUP: gl.constexpr = H // G
    tile, other, splits, tiles = _part_of(where, reads, 4, CHAINS, GROUP, SMALL, NUM, LARGE, PDL)
    if SECOND:
        tile = other
    head = gl.program_id(0)
    to = states, tile, head, num_states
    first, end, whole, _ = tiles
    first_split, end_split, last_split, end_merged = splits
    lane = gl.arange(0, ROWS, row_layout(ROWS, KEY_TILE))
    position = lane
    if CHAINS:
        position, _, _, _ = seen(tile, lane, reads, GROUP, CHAINS)
    wait_for_kernels(PDL)
    QUERIES: gl.constexpr = query_layout(ROWS, D)
    rows, ok = query_rows(q_ptr, tile, head, gl.arange(0, ROWS, gl.SliceLayout(1, QUERIES)), H, D, GROUP)
    d = gl.arange(0, D, gl.SliceLayout(0, QUERIES))
    query.store(gl.load(rows[:, None] + d[None, :], mask=ok[:, None], other=0.0))
    fence_async_shared()
    group_barrier()
    right = query, ones.permute((1, 0))
    factor = scale * 1.4426950408889634
    m, total, acc = empty(ROWS, D)
    before = m, total, acc
    if first < end:
        mbarrier.wait(there.index(0), 0)
        s = warpgroup_mma_wait(0, deps=(_scores(query, keys.index(0)),))
        group_barrier()
        mbarrier.arrive(free.index(0), count=1)
        top = tops(s, ROWS)
        slot, phase = first * 0 + 1, first * 0
        last_read = split_of(end - 1, SMALL, NUM, LARGE)
        for split in range(first_split, last_read + 1):
            to_tile = gl.minimum(start_of(split + 1, SMALL, NUM, LARGE), end)
            near = first + gl.maximum(gl.minimum(whole, to_tile) - first, 0) // 2 * 2
            m = gl.full([ROWS], float("-inf"), gl.float32, m.type.layout)
            state = m, total, acc, s, top, slot, phase
            state = _attend(first, near, first, state, right, ring, position, factor, False, 2)
            state = _attend(near, to_tile, first, state, right, ring, position, factor, CHAINS, 1)
            m, total, acc, s, top, slot, phase = state
            before = _complete(to, before, split, end_merged, m, total, acc, H, GROUP)
            first = to_tile
    if not CHAINS:  # of which the last split may have no tile that all nodes see
        mine = (first_split <= last_split) & (end_split > last_split)
        if mine & (start_of(last_split, SMALL, NUM, LARGE) >= end):
            m, total, acc = empty(ROWS, D)
            _complete(to, before, last_split, end_merged, m, total, acc, H, GROUP)


@gluon.jit(do_not_specialize=["table_stride", "num_states", "early"])
def pair_kernel(
    q_ptr, k_desc, v_desc, m_ptr, total_ptr, acc_ptr, tiles_ptr, table_ptr, context_ptr, positions_ptr, ancestors_ptr,
    table_stride, num_states, early, scale,
    CHAINS: gl.constexpr, H: gl.constexpr, G: gl.constexpr, D: gl.constexpr, BLOCK_SIZE: gl.constexpr,
    SMALL: gl.constexpr, NUM: gl.constexpr, LARGE: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Some of the splits of two tiles of nodes: of chains with their own keys, of trees without."""
    DTYPE: gl.constexpr = q_ptr.dtype.element_ty
    keys = gl.allocate_shared_memory(DTYPE, [SLOTS, KEY_TILE, D], KEPT)
    values = gl.allocate_shared_memory(DTYPE, [SLOTS, KEY_TILE, D], KEPT)
    query = gl.allocate_shared_memory(DTYPE, [2, ROWS, D], KEPT)
    one = gl.full([8, KEY_TILE], 1.0, DTYPE, query_layout(ROWS, D))
    ones = gl.allocate_shared_memory(DTYPE, [8, KEY_TILE], KEPT, one)
    there = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    landed = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(SLOTS):
        mbarrier.init(there.index(i), count=1)
        mbarrier.init(free.index(i), count=2)
    mbarrier.init(landed.index(0), count=1)
    fence_async_shared()
    group_barrier()
    ring = keys, values, there, free, landed
    where, reads = (tiles_ptr, table_ptr, table_stride, early), (context_ptr, positions_ptr, ancestors_ptr)
    states = m_ptr, total_ptr, acc_ptr
    gl.warp_specialize(
        [
            (_consume, (q_ptr, states, num_states, where, reads, scale, query.index(0), ones, ring, False,
                        CHAINS, H, G, SMALL, NUM, LARGE, PDL)),
            (_consume, (q_ptr, states, num_states, where, reads, scale, query.index(1), ones, ring, True,
                        CHAINS, H, G, SMALL, NUM, LARGE, PDL)),
            (_produce, (k_desc, v_desc, where, reads, ring,
                        CHAINS, H, G, BLOCK_SIZE, SMALL, NUM, LARGE, PDL)),
        ],
        [4, 1],
        [GROUP_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip


class PairKernel(HopperKernel):
    """`pair_kernel`, whose programs each take as many splits as give all multiprocessors one program."""

    def first(self, work: AttentionWork, num_kv_heads: int) -> int:
        """Return BY_CONTEXT: in captured steps contexts may be much shorter than the longest one, which is a bound."""
        return BY_CONTEXT

    def takes(self, q: Tensor, pages: PagePointers, work: AttentionWork, sizes: dict[str, Any]) -> bool:
        """Return whether this kernel is the faster one for a batch: where programs have tiles enough of its keys."""
        if not work.pairs or not super().takes(q, pages, work, sizes):
            return False
        return self._share(work, int(sizes["G"])) >= (LEAST_OF_BOUND if work.early else LEAST)

    def programs(self, work: AttentionWork, num_kv_heads: int) -> int:
        """Return how many programs two tiles of nodes and a key head have, of which none is without a split."""
        most = multiprocessors(work.block_table.device) // (len(work.tree_tiles) // 2 * num_kv_heads)
        return max(1, min(most, num_splits(work.max_context + 1)))

    def _share(self, work: AttentionWork, num_kv_heads: int) -> float:
        """Tiles of keys that each of these programs has, of the longest context."""
        return work.max_context / int(KEY_TILE.value) / self.programs(work, num_kv_heads)

    def attend(
        self, q: Tensor, pages: Sequence[PagePointers], state: Sequence[Tensor], work: AttentionWork, scale: float,
        num_parts: int, first: int, sizes: dict[str, Any],
    ) -> None:  # fmt: skip
        """Put down the states of parts; see `HopperKernel.attend`. The first part is the first program's."""
        assert first == BY_CONTEXT and work.pairs
        width, block = sizes["G"] * q.shape[2], [sizes["BLOCK_SIZE"], q.shape[2]]
        boxes = [
            TensorDescriptor(x, [x.shape[0] * x.shape[1], width], [width, 1], block, KEPT.value)
            for x in (side.codes for side in pages)
        ]
        names = ("H", "G", "D", "BLOCK_SIZE", "SMALL", "NUM", "LARGE", "PDL")
        constants = work.chains, *(sizes[name] for name in names)
        self.kernel[(sizes["G"], len(work.tree_tiles) // 2, self.programs(work, sizes["G"]))](
            q, *boxes, *state, work.tree_tiles, work.block_table, work.context_lens, work.positions, work.ancestors,
            work.block_table.stride(0), len(work.tree_rows), int(work.early), scale, *constants, num_warps=self.warps,
            maxnreg=self.max_registers[q.shape[2]], enable_fp_fusion=False, launch_pdl=sizes["PDL"],
        )  # fmt: skip


PAIR = PairKernel(pair_kernel, ROWS.value, 4, max_registers={64: 168, 128: 168}, kinds=("native",))
