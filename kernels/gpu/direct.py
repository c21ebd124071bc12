"""Attention over quantized pages whose codes become values on their way to the tensor cores. In Gluon.

`chain_kernel` and `context_kernel` bring codes to shared memory, from there to registers, as bf16 to shared memory
again, and to the tensor cores. Here tiles of codes are copied to shared memory ahead, and each thread takes from there
the very codes that it hands to the tensor cores. Which values of a row a thread holds is ours to choose, as long as the
sixteen that a product sums at once stay the same: of a key it takes the four of a word, and so of a value; queries and
sums are put in that order. The state of each split is left as those kernels leave it, for `merge_kernel` and
`tail_kernel`.

The bits are those of the other kernels (`tests/test_direct.py`). It is for tiles of 16 rows, and `gpu/wide.py`
for those of 64.
"""

from collections.abc import Sequence

import torch
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from specdec.kernels.gpu.pages import PagePointers
from specdec.kernels.gpu.unpack import pairs_assembly, row_assembly
from specdec.kernels.work import AttentionWork

ROWS, HEAD_DIM, KEY_TILE, WARPS = gl.constexpr(16), gl.constexpr(128), gl.constexpr(64), gl.constexpr(4)
"""Rows × grouped heads and keys of a tile, the size of a head and warps of a program that the layouts are made for."""
STAGES, MAX_REGISTERS = gl.constexpr(2), 128
"""Tiles that have room in shared memory, one that is read and those on their way, and registers of a thread: of 2 and
3 stages, 96 to 168 registers the fastest on an H200 (`benchmarks/results/direct_h200.json`)."""

KINDS = ("int8", "fp8", "fp8_e4m3")
"""Formats whose codes it reads."""
MIN_CONTEXT = 4096
"""It is taken for contexts from this length on. Measured on an H200 with 1 to 32 sequences of 1,024 to 131,072 tokens:
in short ones, whose splits are two tiles each, `chain_kernel` is ahead, which merges them itself."""

_SUM = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [1, WARPS.value], [16, 8]))
_LEFT = gl.constexpr(gl.DotOperandLayout(0, _SUM.value, 2))
_RIGHT = gl.constexpr(gl.DotOperandLayout(1, _SUM.value, 2))
_SHAPE = gl.constexpr([KEY_TILE.value, HEAD_DIM.value // 4])
"""A tile's words of four codes."""

_COPY = gl.constexpr(gl.BlockedLayout([1, 4], [4, 8], [WARPS.value, 1], [1, 0]))
_KEPT = gl.constexpr(gl.SwizzledSharedLayout(4, 1, 8, [1, 0]))
"""Sixteen bytes of eight rows in a place of their own each: what lanes read at once never shares a bank."""
_KEPT_LEFT = gl.constexpr(gl.SwizzledSharedLayout(8, 1, 8, [1, 0]))
_KEPT_SCALES = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))


def _words(registers: list[list[int]], lanes: list[list[int]], warps: list[list[int]]) -> gl.DistributedLinearLayout:
    """Where a tile's words are: (key, word) by 1, 2, 4, … of a thread's registers, of the lanes, of the warps."""
    return gl.DistributedLinearLayout(registers, lanes, warps, block_bases=[], shape=_SHAPE.value)


_KEYS = gl.constexpr(
    _words([[0, 4], [0, 8], [0, 16], [32, 0]], [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]], [[8, 0], [16, 0]])
)
"""A thread hands over every fourth word of two keys: of each sixteen values that a product sums at once four."""
_VALUES = gl.constexpr(
    _words([[1, 0], [8, 0], [16, 0], [32, 0]], [[2, 0], [4, 0], [0, 1], [0, 2], [0, 4]], [[0, 8], [0, 16]])
)
"""A thread hands over one word of sixteen rows: four columns, and of each sixteen rows four."""


@gluon.constexpr_function
def _copy_scales(words):
    """The layout in which a tile's words of two scales are copied: as many bytes a thread as a row has, up to 16."""
    size = min(words, 4)
    return gl.BlockedLayout([1, size], [32 * size // words, words // size], [WARPS.value, 1], [1, 0])


@gluon.constexpr_function
def _scale_words(groups):
    """Words of two scales that a row has, or that it stands in."""
    return max(1, groups // 2)


@gluon.constexpr_function
def _only(dim, layout):
    """The layout of one of a tensor's three dimensions."""
    for other in reversed([i for i in range(3) if i != dim]):
        layout = gl.SliceLayout(other, layout)
    return layout


@gluon.jit
def _along(x, dim: gl.constexpr):
    """A vector as one dimension of a tensor of three."""
    for other in gl.static_range(3):
        if other != dim:
            x = gl.expand_dims(x, other)
    return x


@gluon.jit
def _room(GROUPS: gl.constexpr):
    """Shared memory for the words of a few tiles, and for those with their scales."""
    codes = gl.allocate_shared_memory(gl.uint32, [STAGES, KEY_TILE, HEAD_DIM // 4], _KEPT)
    return codes, gl.allocate_shared_memory(gl.uint32, [STAGES, KEY_TILE, _scale_words(GROUPS)], _KEPT_SCALES)


@gluon.jit
def _after(stage):
    """The stage behind one."""
    return gl.where(stage + 1 == STAGES, 0, stage + 1)


@gluon.jit
def _blocks(table_at, tile, num_blocks, layout: gl.constexpr, BLOCK_SIZE: gl.constexpr):
    """The blocks that a tile's keys are in, of the first `num_blocks` under a table: [KEY_TILE] int32, others 0."""
    at = tile * (KEY_TILE // BLOCK_SIZE) + gl.arange(0, KEY_TILE, gl.SliceLayout(1, layout)) // BLOCK_SIZE
    return gl.load(table_at + at, mask=at < num_blocks, other=0)


@gluon.jit
def _copy(to, ptr, blocks, within, some, layout: gl.constexpr, BLOCK: gl.constexpr, WORDS: gl.constexpr):
    """Start to copy WORDS words of each key of a tile, a block's BLOCK from the next one's; nothing unless `some`."""
    words = gl.arange(0, WORDS, gl.SliceLayout(0, layout))
    at = blocks.to(gl.int64) * BLOCK + within
    async_copy.async_copy_global_to_shared(to, ptr + at[:, None] + words[None, :], mask=some)


@gluon.jit
def _upper(words, head, G: gl.constexpr, GROUPS: gl.constexpr):
    """Whether a code's scale is the upper half of its word: of [KEY_TILE, W, words that share one], 0 or 1."""
    layout: gl.constexpr = words.type.layout
    if GROUPS == 1:
        key = gl.arange(0, KEY_TILE, _only(0, layout))
        upper = _along((key * G + head) % 2, 0)
    else:
        PER_GROUP: gl.constexpr = HEAD_DIM // 4 // GROUPS
        word = gl.arange(0, 2 * PER_GROUP, _only(2, layout))
        upper = _along(word // PER_GROUP, 2)
    upper, _ = gl.broadcast(upper, words)
    return upper


@gluon.jit
def _keys(words, scales, upper, kind: gl.constexpr):
    """[HEAD_DIM, KEY_TILE] bf16, the values of a key in the order 0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, … of sixteen."""
    a, b, c, d = gl.inline_asm_elementwise(
        row_assembly(kind), "=h,=h,=h,=h,r,r,r", [words, scales, upper * 0x2222 + 0x1010], pack=1, is_pure=True,
        dtype=(gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16),
    )  # fmt: skip
    x = gl.join(gl.join(a, b), gl.join(c, d))  # [..., 2 within a pair, 2 pairs]
    x = gl.permute(gl.reshape(x, [KEY_TILE, HEAD_DIM // 16, 4, 2, 2]), (1, 4, 2, 3, 0))
    return gl.convert_layout(gl.reshape(x, [HEAD_DIM, KEY_TILE]), _RIGHT, assert_trivial=True)


@gluon.jit
def _values(words, scales, upper, kind: gl.constexpr):
    """[KEY_TILE, HEAD_DIM] bf16, the columns in the order 0, 4, …, 124, 1, 5, …."""
    even, odd = _of_pairs(words)
    of_even, of_odd = _of_pairs(scales)
    even_upper, odd_upper = _of_pairs(upper)
    select = even_upper * 0x22 + odd_upper * 0x2200 + 0x5410
    a, b, c, d, e, f, g, h = gl.inline_asm_elementwise(
        pairs_assembly(kind), "=h,=h,=h,=h,=h,=h,=h,=h,r,r,r,r,r", [even, odd, of_even, of_odd, select], pack=1,
        is_pure=True,
        dtype=(gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16),
    )  # fmt: skip
    first, second = gl.join(gl.join(a, b), gl.join(e, f)), gl.join(gl.join(c, d), gl.join(g, h))
    x = gl.permute(gl.join(first, second), (0, 2, 3, 4, 1))  # [pairs of keys, 2, 2 halves of a word, 2 in it, words]
    return gl.convert_layout(gl.reshape(x, [KEY_TILE, HEAD_DIM]), _RIGHT, assert_trivial=True)


@gluon.jit
def _of_pairs(x):
    """Those of a tile's even keys, and of its odd ones: [KEY_TILE / 2, words] each."""
    return gl.split(gl.permute(gl.reshape(x, [KEY_TILE // 2, 2, HEAD_DIM // 4]), (0, 2, 1)))


@gluon.jit
def _weights(kept, s, m):
    """Weights of a tile's keys as a product takes them, what earlier ones are worth beside them, the new maximum."""
    top = gl.maximum(m, gl.max(s, 1))
    finite = gl.where(top == float("-inf"), 0.0, top)
    kept.store(gl.exp2(s - finite[:, None]).to(gl.bfloat16))
    return kept.load(_LEFT), gl.exp2(m - finite), top


@gluon.jit
def _fetch(kept, pages, head, blocks, scale_blocks, stage, some, BLOCK_SIZE: gl.constexpr, G: gl.constexpr):
    """Start to copy a tile's codes and scales to a stage, from blocks as the two kinds of copies want them."""
    GROUPS: gl.constexpr = HEAD_DIM // pages.group
    WORDS: gl.constexpr = HEAD_DIM // 4
    codes = pages.codes.to(gl.pointer_type(gl.uint32), bitcast=True)
    scales = pages.scales.to(gl.pointer_type(gl.uint32), bitcast=True)
    row = gl.arange(0, KEY_TILE, gl.SliceLayout(1, _COPY)) % BLOCK_SIZE * G + head
    _copy(kept[0].index(stage), codes, blocks, row * WORDS, some, _COPY, BLOCK_SIZE * G * WORDS, WORDS)
    SCALES: gl.constexpr = _copy_scales(_scale_words(GROUPS))
    row = gl.arange(0, KEY_TILE, gl.SliceLayout(1, SCALES)) % BLOCK_SIZE * G + head
    if GROUPS == 1:  # a word is of two rows, and blocks hold an even number
        _copy(kept[1].index(stage), scales, scale_blocks, row // 2, some, SCALES, BLOCK_SIZE * G // 2, 1)
    else:
        HALF: gl.constexpr = GROUPS // 2
        _copy(kept[1].index(stage), scales, scale_blocks, row * HALF, some, SCALES, BLOCK_SIZE * G * HALF, HALF)


@gluon.jit
def _blocks_of(table_at, tile, num_blocks, BLOCK_SIZE: gl.constexpr, GROUPS: gl.constexpr):
    """The blocks of a tile, as the copies of codes want them and as those of scales do."""
    SCALES: gl.constexpr = _copy_scales(_scale_words(GROUPS))
    codes = _blocks(table_at, tile, num_blocks, _COPY, BLOCK_SIZE)
    return codes, _blocks(table_at, tile, num_blocks, SCALES, BLOCK_SIZE)


@gluon.jit
def _fetch_both(kept, k_pages, v_pages, head, blocks, stage, some, BLOCK_SIZE: gl.constexpr, G: gl.constexpr):
    """Start to copy a tile's keys and values to a stage, as a group of its own."""
    _fetch(kept[0], k_pages, head, blocks[0], blocks[1], stage, some, BLOCK_SIZE, G)
    _fetch(kept[1], v_pages, head, blocks[0], blocks[1], stage, some, BLOCK_SIZE, G)
    async_copy.commit_group()


@gluon.jit
def _take(kept, stage, layout: gl.constexpr, GROUPS: gl.constexpr):
    """A tile's words and, beside each, that with its scale: [KEY_TILE, W, words of two groups] each."""
    WORDS: gl.constexpr = HEAD_DIM // 4
    W: gl.constexpr = _scale_words(GROUPS)
    words = gl.reshape(kept[0].index(stage).load(layout), [KEY_TILE, W, WORDS // W])
    scales = kept[1].index(stage).load(gl.SliceLayout(2, words.type.layout))
    return words, gl.expand_dims(scales, 2)


@gluon.jit
def _beside(scales, words):
    """Scales that stand once, at each of the words that they are of."""
    scales, _ = gl.broadcast(scales, words)
    return scales


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
        right: the stages, where the table starts, its number of blocks, where the copies end, the last key that any row
            sees, and that of each row.
        MASKED: whether rows may see a part of a tile only.
    """
    m, total, acc, blocks, stage, free = state
    q_kept, p_kept = left
    kept, table_at, num_blocks, to_tile, last, position = right
    GROUPS: gl.constexpr = HEAD_DIM // k_pages.group
    ones = gl.full([KEY_TILE, 8 * WARPS], 1.0, gl.bfloat16, _RIGHT)
    none = gl.zeros([ROWS, KEY_TILE], gl.float32, _SUM)
    factor = scale * 1.4426950408889634
    for tile in range(first, end):
        async_copy.wait_group(STAGES - 2)
        k_words, k_scales = _take(kept[0], stage, _KEYS, GROUPS)
        v_words, v_scales = _take(kept[1], stage, _VALUES, GROUPS)
        _fetch_both(kept, k_pages, v_pages, head, blocks, free, tile + (STAGES - 1) < to_tile, BLOCK_SIZE, G)
        blocks = _blocks_of(table_at, tile + STAGES, num_blocks, BLOCK_SIZE, GROUPS)
        keys = _keys(k_words, _beside(k_scales, k_words), _upper(k_words, head, G, GROUPS), k_pages.kind)
        s = mma_v2(q_kept.load(_LEFT), keys, none) * factor
        if MASKED:
            key = gl.arange(0, KEY_TILE, gl.SliceLayout(0, _SUM))
            s = gl.where(key[None, :] <= (position - tile * KEY_TILE)[:, None], s, float("-inf"))
        p, keep, m = _weights(p_kept, s, m)
        v_scales = _beside(v_scales, v_words)
        if MASKED:  # a weight of 0 makes nothing of what stands in a slot not in use, unless its scale is infinite
            place, _ = gl.broadcast(_along(gl.arange(0, KEY_TILE, _only(0, v_words.type.layout)), 0), v_words)
            v_scales = gl.where(place <= last - tile * KEY_TILE, v_scales, 0)
        values = _values(v_words, v_scales, _upper(v_words, head, G, GROUPS), v_pages.kind)
        total = mma_v2(p, ones, total * keep[:, None])
        acc = mma_v2(p, values, acc * keep[:, None])
        free = stage
        stage = _after(stage)
    return m, total, acc, blocks, stage, free


@gluon.jit(do_not_specialize=["table_stride", "num_states"])
def direct_kernel(
    q_ptr, k_pages, v_pages, m_ptr, total_ptr, acc_ptr, tiles_ptr, table_ptr, context_ptr, positions_ptr, ancestors_ptr,
    table_stride, num_states, scale,
    CHAINS: gl.constexpr, H: gl.constexpr, G: gl.constexpr, BLOCK_SIZE: gl.constexpr,
    SMALL: gl.constexpr, NUM: gl.constexpr, LARGE: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """One split of one tile of nodes: of chains with their own keys, of trees without."""
    D: gl.constexpr = HEAD_DIM
    TILE: gl.constexpr = KEY_TILE
    GROUP: gl.constexpr = H // G
    GROUPS: gl.constexpr = D // k_pages.group
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    tile_of, kv_head, split = gl.program_id(0), gl.program_id(1), gl.program_id(2)
    sequence, first_row = gl.load(tiles_ptr + tile_of * 4), gl.load(tiles_ptr + tile_of * 4 + 1)
    count, first_node = gl.load(tiles_ptr + tile_of * 4 + 2), gl.load(tiles_ptr + tile_of * 4 + 3)
    lane = gl.arange(0, ROWS, gl.SliceLayout(1, _SUM))
    ok = lane // GROUP < count
    if CHAINS:
        row = first_row + lane // GROUP
        position = gl.load(positions_ptr + row, mask=ok, other=0).to(gl.int32)
        position = gl.where(gl.load(ancestors_ptr + row, mask=ok, other=0) != 0, position, -1)  # padding sees nothing
        last = gl.max(position, 0)
        end = (last + TILE) // TILE
        # Tiles that every row sees need no masks.
        whole = (gl.min(gl.where(position < 0, last, position), 0) + 1) // TILE
    else:
        position = lane  # unused
        last = gl.load(context_ptr + sequence).to(gl.int32) - 1
        whole = (last + 1) // TILE  # tiles that every node sees
        end = whole
    from_tile = gl.where(split < NUM, split * SMALL, SMALL * NUM + (split - NUM) * LARGE)
    to_tile = gl.where(split + 1 < NUM, (split + 1) * SMALL, SMALL * NUM + (split + 1 - NUM) * LARGE)
    if from_tile < end if CHAINS else from_tile <= end:
        to_tile = gl.minimum(to_tile, end)
        whole = gl.minimum(to_tile, whole)
        num_blocks = (last + BLOCK_SIZE) // BLOCK_SIZE
        table_at = table_ptr + sequence.to(gl.int64) * table_stride
        kept = _room(GROUPS), _room(GROUPS)
        for ahead in gl.static_range(STAGES - 1):
            tile = from_tile + ahead
            blocks = _blocks_of(table_at, tile, num_blocks, BLOCK_SIZE, GROUPS)
            _fetch_both(kept, k_pages, v_pages, kv_head, blocks, ahead, tile < to_tile, BLOCK_SIZE, G)
        blocks = _blocks_of(table_at, from_tile + (STAGES - 1), num_blocks, BLOCK_SIZE, GROUPS)
        at = gl.arange(0, ROWS, gl.SliceLayout(1, _LEFT))
        k = gl.arange(0, D, gl.SliceLayout(0, _LEFT))
        of_key = k // 16 * 16 + k % 8 // 2 * 4 + k // 8 % 2 * 2 + k % 2  # the order of `_keys`
        q_at = ((first_row + at // GROUP).to(gl.int64) * H + kv_head * GROUP + at % GROUP) * D
        q = gl.load(q_ptr + q_at[:, None] + of_key[None, :], mask=(at // GROUP < count)[:, None], other=0.0)
        left = (
            gl.allocate_shared_memory(gl.bfloat16, [ROWS, D], _KEPT_LEFT, q),
            gl.allocate_shared_memory(gl.bfloat16, [ROWS, TILE], _KEPT_LEFT),
        )
        m = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, _SUM))
        total = gl.zeros([ROWS, 8 * WARPS], gl.float32, _SUM)
        acc = gl.zeros([ROWS, D], gl.float32, _SUM)
        state = m, total, acc, blocks, from_tile * 0, from_tile * 0 + (STAGES - 1)
        right = kept, table_at, num_blocks, to_tile, last, position
        state = _attend(from_tile, whole, state, left, right, k_pages, v_pages, kv_head, scale, False, G, BLOCK_SIZE)
        rest = gl.maximum(from_tile, whole)
        state = _attend(rest, to_tile, state, left, right, k_pages, v_pages, kv_head, scale, True, G, BLOCK_SIZE)
        m, total, acc, _, _, _ = state
        async_copy.wait_group(0)
        to = (split * num_states + first_node + lane // GROUP).to(gl.int64) * H + kv_head * GROUP + lane % GROUP
        gl.store(m_ptr + to, m, mask=ok)
        gl.store(total_ptr + to, gl.max(total, 1), mask=ok)  # all columns are the same
        acc = gl.reshape(gl.permute(gl.reshape(acc, [ROWS, 4, D // 4]), (0, 2, 1)), [ROWS, D])  # the order of `_values`
        OUT: gl.constexpr = acc.type.layout
        of_out = gl.arange(0, ROWS, gl.SliceLayout(1, OUT))
        acc_state = (split * num_states + first_node + of_out // GROUP).to(gl.int64) * H
        acc_state += kv_head * GROUP + of_out % GROUP
        acc_at = acc_ptr + acc_state[:, None] * D + gl.arange(0, D, gl.SliceLayout(0, OUT))[None, :]
        gl.store(acc_at, acc, mask=(of_out // GROUP < count)[:, None])


def takes(q: Tensor, pages: PagePointers, work: AttentionWork, sizes: dict[str, object]) -> bool:
    """Return whether this kernel is the faster one for a batch, of those that it is made for.

    Args:
        q: [N, num_heads, D].
        pages: the keys'.
        work: the batch.
        sizes: what attention kernels are compiled for; `PDL` is what tells Hopper GPUs from others.
    """
    made_for = (
        pages.kind.value in KINDS
        and q.dtype == torch.bfloat16
        and q.shape[2] == HEAD_DIM.value
        and work.tree_block == ROWS.value
        and sizes["PDL"]
        and not sizes["SOFTCAP"]
        and not sizes["WINDOW"]
    )
    return bool(made_for) and work.max_context >= MIN_CONTEXT


def attend(
    q: Tensor, pages: Sequence[PagePointers], state: Sequence[Tensor], work: AttentionWork, scale: float,
    num_splits: int, sizes: dict[str, object],
) -> None:  # fmt: skip
    """Put down the states of splits as `chain_kernel` does for chains, and `context_kernel` for trees.

    Args:
        q: [N, num_heads, D].
        pages: keys and values.
        state: where they go.
        work: the batch: chains if it counts those that arrived.
        scale: factor on the scores.
        num_splits: how many there are.
        sizes: what attention kernels are compiled for.
    """
    names = ("H", "G", "BLOCK_SIZE", "SMALL", "NUM", "LARGE", "PDL")
    direct_kernel[(len(work.tree_tiles), sizes["G"], num_splits)](
        q, *pages, *state, work.tree_tiles, work.block_table, work.context_lens, work.positions, work.ancestors,
        work.block_table.stride(0), len(work.tree_rows), scale, work.arrived is not None,
        *(sizes[name] for name in names), num_warps=WARPS.value, maxnreg=MAX_REGISTERS,
        enable_fp_fusion=False, launch_pdl=sizes["PDL"],
    )  # fmt: skip
