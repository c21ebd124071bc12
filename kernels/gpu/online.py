"""The arithmetic of attention that all kernels share, so that a row's bits are the same through each of them.

A row reduces over its keys in one order: the keys of positions 0, 1, 2, … in tiles of a fixed size, online softmax from
tile to tile within a split, the splits merged from the first to the last. Splits are fixed ranges of positions. A tile
or a split of which a row sees nothing leaves its state as it was, bit for bit.

A weight's exponent is one multiply-add of a score, the factor and the row's maximum. But for that one, which is asked
for, kernels that use this are compiled without fused multiply-adds (`enable_fp_fusion`): whether the compiler fuses
depends on the code around. Row sums are taken by a dot with ones: the order of a reduction depends on the layout.

Sources: Dao, "FlashAttention-2" (2023); split keys as in Flash-Decoding (2023).
"""

import triton
import triton.language as tl

from specdec.kernels.gpu.pages import load_values

SMALL_SPLIT, NUM_SMALL, LARGE_SPLIT = 128, 16, 1024
"""The first 16 splits hold 128 positions each, the others 1,024: short contexts need parallel programs, long ones few
partial results."""


MANY_HEADS = {16: 384, 32: 256, 64: 256}
"""By rows × grouped heads of a tile: from so many tiles × key heads on, a program of `chain_kernel` or `context_kernel`
takes the small splits of a tile together. Of fewer heads it would be the last one to end."""


BY_CONTEXT = 0
"""In place of how many splits the first part of a context takes: the device finds it by the context's length, where so
many programs share one (`first_by_context`)."""


def key_tile(head_dim: int) -> int:
    """Keys of a tile."""
    return 64 if head_dim <= 128 else 32


def num_splits(max_keys: int) -> int:
    """Splits that `max_keys` positions reach into."""
    small = SMALL_SPLIT * NUM_SMALL
    if max_keys <= small:
        return -(-max_keys // SMALL_SPLIT)
    return NUM_SMALL + -(-(max_keys - small) // LARGE_SPLIT)


def num_parts(max_keys: int, first: int, least: int) -> int:
    """Parts that as many positions reach into, if the first one takes so many splits, or `least` where it takes many.

    A tree's last split is a part of its own: it has at least two, then. Where each context says how many that are, each
    split may be a part.
    """
    splits = num_splits(max_keys)
    return splits if first == 1 else max(least, splits - max(first - 1, 0))


def first_part(context: int, programs: int, head_dim: int) -> int:
    """How many splits the first part of a context takes, where so many programs share it; see `first_by_context`."""
    tile = key_tile(head_dim)
    tiles, small, large = context // tile, SMALL_SPLIT // tile, LARGE_SPLIT // tile
    if programs == 1:
        return NUM_SMALL + tiles
    unit = large if tiles > small * NUM_SMALL else small
    mine = -(-tiles // (programs * unit)) * unit
    theirs = -(-max(tiles - mine, 0) // ((programs - 1) * unit)) * unit
    return num_splits(max(mine - unit if theirs < mine else mine, unit) * tile)


@triton.jit
def split_of(tile, SMALL: tl.constexpr, NUM: tl.constexpr, LARGE: tl.constexpr):
    """The split that a tile is in."""
    return tl.where(tile < SMALL * NUM, tile // SMALL, NUM + (tile - SMALL * NUM) // LARGE)


@triton.jit
def first_by_context(
    context, programs, TILE: tl.constexpr, SMALL: tl.constexpr, NUM: tl.constexpr, LARGE: tl.constexpr
):
    """How many splits the first part takes where so many programs share a context: all that the first of them has.

    It has as many tiles as another one may have: those are of whole splits, where there are large ones of such.
    """
    tiles, others = context // TILE, tl.maximum(programs - 1, 1)
    unit = tl.where(tiles > SMALL * NUM, LARGE, SMALL)
    mine = tl.cdiv(tl.cdiv(tiles, programs), unit) * unit
    theirs = tl.cdiv(tl.cdiv(tl.maximum(tiles - mine, 0), others), unit) * unit
    mine = tl.maximum(tl.where(theirs < mine, mine - unit, mine), unit)
    return tl.where(programs > 1, split_of(mine, SMALL, NUM, LARGE), NUM + tiles)


@triton.jit
def part_of_program(FIRST: tl.constexpr):
    """A program's part of a context: programs run about in their order, and what takes long is not to be the last one.

    Part 0 are the first splits, as many as `FIRST`; each other split is a part of its own.
    """
    if FIRST > 1:
        return tl.program_id(2)
    else:
        return tl.num_programs(2) - 1 - tl.program_id(2)


@triton.jit
def splits_of(part, FIRST: tl.constexpr):
    """The first split of a part, and where they end."""
    return tl.where(part == 0, 0, part + (FIRST - 1)), part + FIRST


@triton.jit
def part_with(split, first):
    """The part that a split is in, if the first one takes so many."""
    return tl.maximum(split - (first - 1), 0)


@triton.jit
def part_of_last(split, first, FIRST: tl.constexpr):
    """Where the state of a tree's last split is, which is never merged with those before it."""
    if FIRST == 1:
        return split
    else:
        return tl.maximum(split - (first - 1), 1)


@triton.jit
def start_of(split, SMALL: tl.constexpr, NUM: tl.constexpr, LARGE: tl.constexpr):
    """The first tile of a split."""
    return tl.where(split < NUM, split * SMALL, SMALL * NUM + (split - NUM) * LARGE)


@triton.jit
def empty(BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr):
    """The state before any key: maximum [M], sum of weights [M, 16], weighted values [M, D]."""
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    return m, tl.zeros([BLOCK_M, 16], tl.float32), tl.zeros([BLOCK_M, BLOCK_D], tl.float32)


@triton.jit
def scores(q, k, see, scale, softcap, SOFTCAP: tl.constexpr, MASKED: tl.constexpr):
    """What a tile of keys [TILE, D] is worth to queries [M, D], [M, TILE], and a factor above 0 for powers of two."""
    s = tl.dot(q, tl.trans(k), input_precision="ieee")
    if SOFTCAP:
        x = s * scale / softcap
        s = softcap * (1.0 - 2.0 / (tl.exp2(x * 2.8853900817779268) + 1.0))
    factor = 1.4426950408889634 if SOFTCAP else scale * 1.4426950408889634
    if MASKED:
        s = tl.where(see, s, float("-inf"))
    return s, factor


@triton.jit
def weigh(m, total, acc, s, factor, v):
    """Put values [TILE, D] behind those before, by their scores [M, TILE]; see `scores`."""
    top = tl.maximum(m, tl.max(s, 1) * factor)
    finite = tl.where(top == float("-inf"), 0.0, top)
    p = tl.exp2(tl.fma(s, factor, -finite[:, None])).to(v.dtype)
    keep = tl.exp2(m - finite)
    ones = tl.full([p.shape[1], 16], 1.0, v.dtype)
    total = tl.dot(p, ones, total * keep[:, None], input_precision="ieee")
    acc = tl.dot(p, v, acc * keep[:, None], input_precision="ieee")
    return top, total, acc


@triton.jit
def update(m, total, acc, q, k, v, see, scale, softcap, SOFTCAP: tl.constexpr, MASKED: tl.constexpr):
    """One more tile of keys: maximum [M], sum of weights [M, 16], weighted values [M, D]."""
    s, factor = scores(q, k, see, scale, softcap, SOFTCAP, MASKED)
    return weigh(m, total, acc, s, factor, v)


@triton.jit
def both_worth(m, m_next):
    """The maximum of two splits, and what either is worth beside the other."""
    top = tl.maximum(m, m_next)
    finite = tl.where(top == float("-inf"), 0.0, top)
    return top, tl.exp2(m - finite), tl.exp2(m_next - finite)


@triton.jit
def merge(m, total, acc, m_next, total_next, acc_next):
    """Put a split behind those before it."""
    top, a, b = both_worth(m, m_next)
    total = total * a[:, None] + total_next * b[:, None]
    acc = acc * a[:, None] + acc_next * b[:, None]
    return top, total, acc


@triton.jit
def load_q(q_ptr, pages, row, head, ok, H: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Queries of rows and heads in the dtype that is computed in with these pages: [M, D], 0 where not ok.

    Quantized pages make fp16 of bf16: codes become values of fp16 in fewer instructions, and nearer to what they are
    worth. What is larger than fp16 holds stops at its largest number.
    """
    d = tl.arange(0, BLOCK_D)
    at = (row.to(tl.int64) * H + head)[:, None] * D + d[None, :]
    q = tl.load(q_ptr + at, mask=ok[:, None] & (d < D)[None, :], other=0.0)
    if pages.kind != "native" and q.dtype == tl.bfloat16:
        x = q.to(tl.float32)
        x = tl.where(x > 65504.0, 65504.0, tl.where(x < -65504.0, -65504.0, x))  # and NaN stays
        return x.to(tl.float16)
    else:
        return q


@triton.jit
def places(tile, TILE: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """Where a tile's keys stand in their blocks: [TILE]. A block may hold several tiles, or a tile several blocks."""
    if BLOCK_SIZE > TILE:
        within = tile * TILE % BLOCK_SIZE + tl.arange(0, TILE)
    else:  # the same in each tile
        within = tl.arange(0, TILE) % BLOCK_SIZE
    return within


@triton.jit
def load_kv(
    k_ptr, v_ptr, table_ptr, key, within, ok, head, dtype: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, G: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Keys and values from `PagePointers`: [TILE, D] each, 0 where not ok.

    `key` [TILE] are places under a block table, `within` [TILE] those in their blocks; `places` gives a tile's.
    """
    block = tl.load(table_ptr + key // BLOCK_SIZE, mask=ok, other=0).to(tl.int64)
    row = (block * (BLOCK_SIZE * G), within * G + head)
    return load_values(k_ptr, row, ok, dtype, D, BLOCK_D), load_values(v_ptr, row, ok, dtype, D, BLOCK_D)


@triton.jit
def attend_tiles(
    m, total, acc, q, k_ptr, v_ptr, table_at, first, end, head, position, last, scale, softcap,
    CAUSAL: tl.constexpr, SOFTCAP: tl.constexpr, WINDOW: tl.constexpr, TILE: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    G: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Put tiles behind those before.

    Args:
        m, total, acc: the state.
        q: the queries.
        k_ptr, v_ptr, table_at: `PagePointers` of keys and of values, and where the block table starts.
        first, end: which tiles.
        head: which head of them.
        position: [M] int32, of each row: it sees keys up to there, and above it less `WINDOW`, if there is one.
        last: the largest position.
        scale, softcap: of the scores.
        CAUSAL: whether keys may lie behind a row; else all rows see all of them, but for their window.
    """
    for tile in range(first, end):
        key = tile * TILE + tl.arange(0, TILE)
        if CAUSAL:
            there = key <= last
        else:
            there = key >= 0
        within = places(tile, TILE, BLOCK_SIZE)
        k, v = load_kv(k_ptr, v_ptr, table_at, key, within, there, head, q.dtype, BLOCK_SIZE, G, D, BLOCK_D)
        see = there[None, :]
        if CAUSAL:
            see = key[None, :] <= position[:, None]
            if WINDOW > 0:
                see = see & (key[None, :] > position[:, None] - WINDOW)
        elif WINDOW > 0:
            see = key[None, :] > position[:, None] - WINDOW
        m, total, acc = update(m, total, acc, q, k, v, see, scale, softcap, SOFTCAP, CAUSAL or WINDOW > 0)
    return m, total, acc


@triton.jit
def attend_split(
    q, k_ptr, v_ptr, table_at, split, end, head, position, last, scale, softcap,
    CAUSAL: tl.constexpr, SOFTCAP: tl.constexpr, TILE: tl.constexpr, SMALL: tl.constexpr, NUM: tl.constexpr,
    LARGE: tl.constexpr, BLOCK_SIZE: tl.constexpr, G: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """The state of one split, up to tile `end`, where there is no window; the rest is as for `attend_tiles`."""
    tile = start_of(split, SMALL, NUM, LARGE)
    end = tl.minimum(start_of(split + 1, SMALL, NUM, LARGE), end)
    m, total, acc = empty(q.shape[0], BLOCK_D)
    return attend_tiles(
        m, total, acc, q, k_ptr, v_ptr, table_at, tile, end, head, position, last, scale, softcap,
        CAUSAL, SOFTCAP, 0, TILE, BLOCK_SIZE, G, D, BLOCK_D,
    )  # fmt: skip


@triton.jit
def store_out(out_ptr, row, head, ok, total, acc, H: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Divide by the weights and store; what saw nothing is 0."""
    d = tl.arange(0, BLOCK_D)
    weight = tl.max(total, 1)  # all 16 columns are the same
    out = acc / tl.where(weight == 0.0, 1.0, weight)[:, None]
    at = (row.to(tl.int64) * H + head)[:, None] * D + d[None, :]
    tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), mask=ok[:, None] & (d < D)[None, :])


@triton.jit
def load_state(
    m_ptr, total_ptr, acc_ptr, split, num_rows, row, head, ok, H: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr
):
    """Where a split ended, read past the first-level cache: another program may have put it down."""
    state = (split * num_rows + row).to(tl.int64) * H + head
    d = tl.arange(0, BLOCK_D)
    m = tl.load(m_ptr + state, mask=ok, other=float("-inf"), cache_modifier=".cg")
    total = tl.load(total_ptr + state, mask=ok, other=0.0, cache_modifier=".cg")
    see = ok[:, None] & (d < D)[None, :]
    acc = tl.load(acc_ptr + state[:, None] * D + d[None, :], mask=see, other=0.0, cache_modifier=".cg")
    return m, tl.broadcast_to(total[:, None], [total.shape[0], 16]), acc


@triton.jit
def store_state(
    m_ptr, total_ptr, acc_ptr, split, num_rows, row, head, ok, m, total, acc,
    H: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Put down where a split ended; its values stay in the cache until they are merged."""
    state = (split * num_rows + row).to(tl.int64) * H + head
    d = tl.arange(0, BLOCK_D)
    tl.store(m_ptr + state, m, mask=ok)
    tl.store(total_ptr + state, tl.max(total, 1), mask=ok)  # all 16 columns are the same
    see = ok[:, None] & (d < D)[None, :]
    tl.store(acc_ptr + state[:, None] * D + d[None, :], acc, mask=see, eviction_policy="evict_last")


@triton.jit
def _when_there(acc, bits, nothing):
    """The same values, which can't be had before what `bits` are made of; `nothing` is 0, as the compiler can't know.

    To save registers it would ask for a split's values when those before are merged, and each time wait for memory.
    """
    return (acc.to(tl.int32, bitcast=True) | (bits & nothing)).to(tl.float32, bitcast=True)


@triton.jit
def _load_one(ptrs, step, ok, see, D: tl.constexpr):
    """Where a split ended, so many steps behind; else empty. Read past the first-level cache, as `load_state`."""
    m = tl.load(ptrs[0] + step, mask=ok, other=float("-inf"), cache_modifier=".cg")
    total = tl.load(ptrs[1] + step, mask=ok, other=0.0, cache_modifier=".cg")
    return m, total, tl.load(ptrs[2] + step * D, mask=see, other=0.0, cache_modifier=".cg")


@triton.jit
def _merge_one(state, following):
    """Put a split behind those before it, as `merge` does."""
    m, total, acc = state
    m_next, total_next, acc_next = following
    m, a, b = both_worth(m, m_next)
    return m, total * a + total_next * b, acc * a + acc_next * b


@triton.jit
def merge_states(state, ptrs, stride, count, ok, see, nothing, D: tl.constexpr, AT_ONCE: tl.constexpr):
    """Put as many states behind those before them, in their order.

    Args:
        state: maximum and sum of weights, numbers or [M, 1, 1], and weighted values, [width] or [M, pieces, width].
        ptrs: of the first one's.
        stride: how many numbers the others' stand behind each other; their values D times as many.
        count: how many.
        ok, see: which numbers and which values there are.
        nothing: 0, as the compiler can't know.
        AT_ONCE: how many are loaded before any is merged.
    """
    for first in range(0, count, AT_ONCE):
        states = ()
        bits = tl.zeros(state[2].shape, tl.int32)
        for i in tl.static_range(AT_ONCE):
            one = _load_one(ptrs, stride * i, ok & (i < count - first), see & (i < count - first), D)
            states = states + (one,)  # type: ignore[assignment]  # Triton unrolls the loop
            bits = bits | one[2].to(tl.int32, bitcast=True)
        state = state[0], state[1], _when_there(state[2], bits, nothing)
        for i in tl.static_range(AT_ONCE):
            state = _merge_one(state, states[i])
        step = stride * AT_ONCE
        ptrs = ptrs[0] + step, ptrs[1] + step, ptrs[2] + step * D
    return state


@triton.jit
def merge_splits(
    m_ptr, total_ptr, acc_ptr, first, end, num_rows, row, head, ok, nothing,
    H: tl.constexpr, D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Merge the states of splits `first` to `end` of some rows; see `merge_states`.

    Values are taken in pieces of 64, so that a thread has those of one row, as far as can be: what a row's splits are
    worth beside each other is found once then.

    Returns:
        Maximum and sum of weights [M], weighted values [M, BLOCK_D].
    """
    WIDTH: tl.constexpr = min(BLOCK_D, 64)
    PIECES: tl.constexpr = BLOCK_D // WIDTH
    d = (tl.arange(0, PIECES) * WIDTH)[None, :, None] + tl.arange(0, WIDTH)[None, None, :]
    stride = tl.cast(num_rows, tl.int64) * H
    at, ok = (row.to(tl.int64) * H + head + first * stride)[:, None, None], ok[:, None, None]
    m, total = tl.full([BLOCK_M, 1, 1], float("-inf"), tl.float32), tl.zeros([BLOCK_M, 1, 1], tl.float32)
    state = m, total, tl.zeros([BLOCK_M, PIECES, WIDTH], tl.float32)
    ptrs = m_ptr + at, total_ptr + at, acc_ptr + at * D + d
    m, total, acc = merge_states(state, ptrs, stride, end - first, ok, ok & (d < D), nothing, D, AT_ONCE)
    return tl.reshape(m, [BLOCK_M]), tl.reshape(total, [BLOCK_M]), tl.reshape(acc, [BLOCK_M, BLOCK_D])
