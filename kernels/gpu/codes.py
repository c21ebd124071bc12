"""Tiles of codes in shared memory: how quantized pages are read by kernels that keep no values there. In Gluon.

Codes are copied as words of four, and scales as words of two, a tile's to one of several stages; a thread takes from
there what it hands to the tensor cores.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from specdec.kernels.gpu.online import NUM_SMALL, num_splits
from specdec.kernels.gpu.pages import PagePointers
from specdec.kernels.gpu.unpack import pairs_assembly, scales_assembly, word_assembly
from specdec.kernels.work import AttentionWork

HEAD_DIM, KEY_TILE = gl.constexpr(128), gl.constexpr(64)
"""The size of a head and keys of a tile that the layouts are made for."""
KINDS = ("int8", "fp8", "fp8_e4m3", "int4")
"""Formats whose codes they read."""

Bases = list[list[int]]
"""Where the first, the second, the fourth, … element of a layout's registers, lanes or warps is."""

_SHAPE = gl.constexpr([KEY_TILE.value, HEAD_DIM.value // 4])
"""Fours of a tile's values: words of codes of eight bits, halves of words of four bits."""

_KEPT_SCALES = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))


def words_layout(registers: Bases, lanes: Bases, warps: Bases) -> gl.DistributedLinearLayout:
    """Where a tile's words are: (key, word) by 1, 2, 4, … of a thread's registers, of the lanes, of the warps."""
    return gl.DistributedLinearLayout(registers, lanes, warps, block_bases=[], shape=_SHAPE.value)


@gluon.constexpr_function
def code_words(kind):
    """Words of codes that a row has."""
    return HEAD_DIM.value // (8 if kind == "int4" else 4)


@gluon.constexpr_function
def row_scale_words(kind, groups):
    """Words of two scales, or zero points, that a row has; one that two rows share counts for both."""
    return groups if kind == "int4" else max(1, groups // 2)


@gluon.constexpr_function
def scale_words(groups):
    """Words of scales alone that a row has, or that its scale stands in."""
    return max(1, groups // 2)


@gluon.constexpr_function
def scales_of_word(groups):
    """How many of a word's two scales are a row's own."""
    return min(2, groups)


@gluon.constexpr_function
def sharers(kind, groups):
    """Rows that share a word of scales: two where each has one scale and nothing else."""
    return 2 if groups == 1 and kind != "int4" else 1


@gluon.constexpr_function
def kept_layout(words):
    """How rows of so many words are kept: sixteen bytes of eight rows never share a bank."""
    rows = 32 // words  # in all banks
    return gl.SwizzledSharedLayout(4, rows, 8 // rows, [1, 0])


@gluon.constexpr_function
def codes_layout(words, warps):
    """The layout in which a tile's words are copied, [blocks, rows, words]: sixteen bytes a thread."""
    return gl.BlockedLayout([1, 1, 4], [1, 128 // words, words // 4], [1, warps, 1], [2, 1, 0])


@gluon.constexpr_function
def scales_layout(words, block_size, warps):
    """The same of words of two scales: as many bytes a thread as a row has, up to 16."""
    size = min(words, 4)
    lanes = words // size
    rows = min(block_size, 32 // lanes)
    return gl.BlockedLayout([1, 1, size], [32 // lanes // rows, rows, lanes], [warps, 1, 1], [2, 1, 0])


@gluon.constexpr_function
def only_dim(dim, layout):
    """The layout of one of a tensor's three dimensions."""
    for other in reversed([i for i in range(3) if i != dim]):
        layout = gl.SliceLayout(other, layout)
    return layout


@gluon.jit
def along_dim(x, dim: gl.constexpr):
    """A vector as one dimension of a tensor of three."""
    for other in gl.static_range(3):
        if other != dim:
            x = gl.expand_dims(x, other)
    return x


@gluon.jit
def wait_for_kernels(PDL: gl.constexpr):
    """Wait until the kernels before have ended, as `wait_for_inputs` of `gpu/launch.py`; again, it is no wait."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@gluon.jit
def program_of(tiles_ptr, early, FIRST: gl.constexpr, PDL: gl.constexpr):
    """What a program is for: a tile's sequence, first row, number of rows and first node; the key head; the part.

    Programs run about in their order, and what takes long is not to be the last one: as `part_of_program` of
    `gpu/online.py`. The heads of a block stand next to each other, and are read at about the same time. Unless `early`,
    all of this may come from the kernel before.
    """
    if early == 0:
        wait_for_kernels(PDL)
    at = tiles_ptr + gl.program_id(1) * 4
    tile = gl.load(at), gl.load(at + 1), gl.load(at + 2), gl.load(at + 3)
    part = gl.program_id(2)
    if FIRST == 1:
        part = gl.num_programs(2) - 1 - part
    return tile, gl.program_id(0), part


@gluon.jit
def seen(tile, lane, reads, GROUP: gl.constexpr, CHAINS: gl.constexpr):
    """The last key that each row of a tile of nodes sees, and any; the end of tiles, and of those that all rows see.

    Of trees, whose own keys aren't read here, all rows see the same tiles.
    """
    sequence, first_row, count, _ = tile
    context_ptr, positions_ptr, ancestors_ptr = reads
    if CHAINS:
        row, ok = first_row + lane // GROUP, lane // GROUP < count
        position = gl.load(positions_ptr + row, mask=ok, other=0).to(gl.int32)
        position = gl.where(gl.load(ancestors_ptr + row, mask=ok, other=0) != 0, position, -1)  # padding sees nothing
        last = gl.max(position, 0)
        end = (last + KEY_TILE) // KEY_TILE
        whole = (gl.min(gl.where(position < 0, last, position), 0) + 1) // KEY_TILE
    else:
        position = lane  # unused
        last = gl.load(context_ptr + sequence).to(gl.int32) - 1
        whole = (last + 1) // KEY_TILE
        end = whole
    return position, last, end, whole


@gluon.jit
def start_of(split, SMALL: gl.constexpr, NUM: gl.constexpr, LARGE: gl.constexpr):
    """The first tile of a split."""
    return gl.where(split < NUM, split * SMALL, SMALL * NUM + (split - NUM) * LARGE)


@gluon.jit
def split_of(tile, SMALL: gl.constexpr, NUM: gl.constexpr, LARGE: gl.constexpr):
    """The split that a tile is in."""
    return gl.where(tile < SMALL * NUM, tile // SMALL, NUM + (tile - SMALL * NUM) // LARGE)


@gluon.jit
def part_of(
    tile, splits, lane, reads, table_ptr, table_stride, GROUP: gl.constexpr, CHAINS: gl.constexpr,
    BLOCK_SIZE: gl.constexpr, SMALL: gl.constexpr, NUM: gl.constexpr, LARGE: gl.constexpr,
):  # fmt: skip
    """What splits, the first and where they end, hold for a tile of nodes.

    Returns:
        Whether their state is asked for; their first tile, where those end that all rows see, and where all end; where
        the block table starts, and its number of blocks; the last key that any row sees, and that of each.
    """
    position, last, end, whole = seen(tile, lane, reads, GROUP, CHAINS)
    first, to_tile = start_of(splits[0], SMALL, NUM, LARGE), start_of(splits[1], SMALL, NUM, LARGE)
    if CHAINS:
        asked = first < end
    else:  # whose own keys come behind the last of them
        asked = first <= end
    to_tile = gl.minimum(to_tile, end)
    table_at = table_ptr + tile[0].to(gl.int64) * table_stride
    tiles = first, gl.minimum(to_tile, whole), to_tile
    return asked, tiles, (table_at, (last + BLOCK_SIZE) // BLOCK_SIZE), (last, position)


@gluon.jit
def query_rows(q_ptr, tile, head, lane, H: gl.constexpr, D: gl.constexpr, GROUP: gl.constexpr):
    """Where the queries of a tile's rows × grouped heads start, and which there are."""
    row = (tile[1] + lane // GROUP).to(gl.int64) * H + head * GROUP + lane % GROUP
    return q_ptr + row * D, lane // GROUP < tile[2]


@gluon.jit
def load_queries(
    q_ptr, tile, head, kind: gl.constexpr, layout: gl.constexpr, ROWS: gl.constexpr, H: gl.constexpr,
    GROUP: gl.constexpr,
):  # fmt: skip
    """Queries as left operand for keys in the order of `keys_of`: [ROWS, HEAD_DIM] fp16."""
    rows, ok = query_rows(q_ptr, tile, head, gl.arange(0, ROWS, gl.SliceLayout(1, layout)), H, HEAD_DIM, GROUP)
    k = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, layout))
    half, four, inside = k // 8 % 2, k // 2 % 4, k % 2
    if kind == "int4":
        of_key = k // 16 * 16 + four // 2 * 8 + inside * 4 + four % 2 * 2 + half
    elif kind == "int8":
        of_key = k // 16 * 16 + four * 4 + half * 2 + inside
    else:
        of_key = k // 16 * 16 + four * 4 + inside * 2 + half
    return as_half(gl.load(rows[:, None] + of_key[None, :], mask=ok[:, None], other=0.0))


@gluon.jit
def store_state(states, tile, head, part, num_states, m, total, acc, H: gl.constexpr, GROUP: gl.constexpr):
    """Put down where a part ended: maximum [M], sums of weights [M, n], all the same, and values [M, D]."""
    D: gl.constexpr = acc.shape[1]
    m_ptr, total_ptr, acc_ptr = states
    lane = gl.arange(0, m.shape[0], m.type.layout)
    state = (part * num_states + tile[3] + lane // GROUP).to(gl.int64) * H + head * GROUP + lane % GROUP
    gl.store(m_ptr + state, m, mask=lane // GROUP < tile[2])
    gl.store(total_ptr + state, gl.max(total, 1), mask=lane // GROUP < tile[2])
    lane = gl.arange(0, m.shape[0], gl.SliceLayout(1, acc.type.layout))
    state = (part * num_states + tile[3] + lane // GROUP).to(gl.int64) * H + head * GROUP + lane % GROUP
    acc_at = acc_ptr + state[:, None] * D + gl.arange(0, D, gl.SliceLayout(0, acc.type.layout))[None, :]
    gl.store(acc_at, acc, mask=(lane // GROUP < tile[2])[:, None])


@gluon.jit
def room(STAGES: gl.constexpr, pages):
    """Shared memory for the words of a few tiles, and for those with their scales."""
    WORDS: gl.constexpr = code_words(pages.kind)
    SCALES: gl.constexpr = row_scale_words(pages.kind, HEAD_DIM // pages.group)
    codes = gl.allocate_shared_memory(gl.uint32, [STAGES, KEY_TILE, WORDS], kept_layout(WORDS))
    return codes, gl.allocate_shared_memory(gl.uint32, [STAGES, KEY_TILE, SCALES], _KEPT_SCALES)


@gluon.jit
def stage_after(stage, STAGES: gl.constexpr):
    """The stage behind one."""
    return gl.where(stage + 1 == STAGES, 0, stage + 1)


@gluon.jit
def blocks_in(table, tile, layout: gl.constexpr, BLOCK_SIZE: gl.constexpr):
    """The blocks of a tile, of those that a table has: [blocks, 1, 1] int32, others 0."""
    table_at, num_blocks = table
    BLOCKS: gl.constexpr = KEY_TILE // BLOCK_SIZE
    at = tile * BLOCKS + along_dim(gl.arange(0, BLOCKS, only_dim(0, layout)), 0)
    return gl.load(table_at + at, mask=at < num_blocks, other=0)


@gluon.jit
def blocks_of(table, tile, pages, BLOCK_SIZE: gl.constexpr, WARPS: gl.constexpr):
    """The blocks of a tile, as the copies of codes want them and as those of scales do."""
    W: gl.constexpr = row_scale_words(pages.kind, HEAD_DIM // pages.group)
    codes = blocks_in(table, tile, codes_layout(code_words(pages.kind), WARPS), BLOCK_SIZE)
    return codes, blocks_in(table, tile, scales_layout(W, BLOCK_SIZE, WARPS), BLOCK_SIZE)


@gluon.jit
def copy_words(to, ptr, blocks, head, some, layout: gl.constexpr, BLOCK_SIZE: gl.constexpr, G: gl.constexpr,
               WORDS: gl.constexpr, SHARED: gl.constexpr):  # fmt: skip
    """Start to copy WORDS words of each key of a tile, which as many as `SHARED` rows share; nothing unless `some`."""
    row = along_dim(gl.arange(0, BLOCK_SIZE, only_dim(1, layout)), 1) * G + head
    within = row // SHARED * WORDS + along_dim(gl.arange(0, WORDS, only_dim(2, layout)), 2)
    start = ptr + blocks.to(gl.int64) * (BLOCK_SIZE * G * WORDS // SHARED)
    to = to.reshape([KEY_TILE // BLOCK_SIZE, BLOCK_SIZE, WORDS])
    async_copy.async_copy_global_to_shared(to, start + within, mask=some)


@gluon.jit
def fetch_tile(kept, pages, head, blocks, stage, some, BLOCK_SIZE: gl.constexpr, G: gl.constexpr, WARPS: gl.constexpr):
    """Start to copy a tile's codes and scales to a stage."""
    GROUPS: gl.constexpr = HEAD_DIM // pages.group
    WORDS: gl.constexpr = code_words(pages.kind)
    W: gl.constexpr = row_scale_words(pages.kind, GROUPS)
    SHARED: gl.constexpr = sharers(pages.kind, GROUPS)
    codes = pages.codes.to(gl.pointer_type(gl.uint32), bitcast=True)
    scales = pages.scales.to(gl.pointer_type(gl.uint32), bitcast=True)
    OF_CODES: gl.constexpr = codes_layout(WORDS, WARPS)
    OF_SCALES: gl.constexpr = scales_layout(W, BLOCK_SIZE, WARPS)
    copy_words(kept[0].index(stage), codes, blocks[0], head, some, OF_CODES, BLOCK_SIZE, G, WORDS, 1)
    copy_words(kept[1].index(stage), scales, blocks[1], head, some, OF_SCALES, BLOCK_SIZE, G, W, SHARED)


@gluon.jit
def fetch_both(
    kept, k_pages, v_pages, head, blocks, stage, some, BLOCK_SIZE: gl.constexpr, G: gl.constexpr, WARPS: gl.constexpr
):
    """Start to copy a tile's keys and values to a stage, as a group of its own."""
    fetch_tile(kept[0], k_pages, head, blocks, stage, some, BLOCK_SIZE, G, WARPS)
    fetch_tile(kept[1], v_pages, head, blocks, stage, some, BLOCK_SIZE, G, WARPS)
    async_copy.commit_group()


@gluon.jit
def by_scale(fours, pages):
    """Fours [M, HEAD_DIM / 4] by the word of scales and the half of it that they go with: [M, W, halves, PER]."""
    W: gl.constexpr = scale_words(HEAD_DIM // pages.group)
    HALVES: gl.constexpr = scales_of_word(HEAD_DIM // pages.group)
    return gl.reshape(fours, [fours.shape[0], W, HALVES, HEAD_DIM // 4 // W // HALVES])


@gluon.jit
def take_words(kept, stage, layout: gl.constexpr, pages):
    """What a thread has of a tile: the words that its fours stand in, and those of their scales and zero points.

    Returns:
        [KEY_TILE, HEAD_DIM / 4] words, and two times [KEY_TILE, W], the same where there are no zero points.
    """
    if pages.kind == "int4":
        fours = gl.full([KEY_TILE, HEAD_DIM // 4], 0, gl.uint32, layout)
        pairs = gl.reshape(fours, [KEY_TILE, HEAD_DIM // 8, 2])
        words = kept[0].index(stage).load(gl.SliceLayout(2, pairs.type.layout))
        words, _ = gl.broadcast(gl.expand_dims(words, 2), pairs)
        words = gl.convert_layout(gl.reshape(words, [KEY_TILE, HEAD_DIM // 4]), layout, assert_trivial=True)
    else:
        words = kept[0].index(stage).load(layout)
    GROUPS: gl.constexpr = HEAD_DIM // pages.group
    grouped = by_scale(words, pages)
    OF: gl.constexpr = gl.SliceLayout(2, gl.SliceLayout(3, grouped.type.layout))
    if pages.kind == "int4" and GROUPS > 1:
        BOTH: gl.constexpr = gl.SliceLayout(2, gl.SliceLayout(3, gl.join(grouped, grouped).type.layout))
        both = kept[1].index(stage).reshape([KEY_TILE, 2, GROUPS // 2]).permute((0, 2, 1)).load(BOTH)
        scales, zeros = gl.split(both)
        scales = gl.convert_layout(scales, OF, assert_trivial=True)
        zeros = gl.convert_layout(zeros, OF, assert_trivial=True)
    else:
        scales = kept[1].index(stage).load(OF)
        zeros = scales
    return words, (scales, zeros)


@gluon.jit
def _upper(grouped, every: gl.constexpr, offset: gl.constexpr, head, pages, G: gl.constexpr):
    """Whether a scale is the upper half of its word, 0 or 1: of `every` key from `offset` on."""
    LAYOUT: gl.constexpr = gl.SliceLayout(3, grouped.type.layout)
    GROUPS: gl.constexpr = HEAD_DIM // pages.group
    if GROUPS == 1:
        key = along_dim(gl.arange(0, grouped.shape[0], only_dim(0, LAYOUT)), 0) * every + offset
        upper = (key * G + head) % sharers(pages.kind, GROUPS)
    else:
        upper = along_dim(gl.arange(0, 2, only_dim(2, LAYOUT)), 2)
    return upper


@gluon.jit
def _beside(first, second, select, grouped, assembly: gl.constexpr):
    """Halves of two words as `select` says, and what else `assembly` makes of them, beside each four they are of."""
    LAYOUT: gl.constexpr = gl.SliceLayout(3, grouped.type.layout)
    first = gl.convert_layout(gl.expand_dims(first, 2), LAYOUT, assert_trivial=True)
    second = gl.convert_layout(gl.expand_dims(second, 2), LAYOUT, assert_trivial=True)
    first, select = gl.broadcast(first, select)
    second, select = gl.broadcast(second, select)
    one, other = gl.inline_asm_elementwise(
        assembly, "=r,=r,r,r,r", [first, second, select], dtype=(gl.int32, gl.int32), is_pure=True, pack=1
    )
    one, _ = gl.broadcast(gl.expand_dims(one, 3), grouped)
    other, _ = gl.broadcast(gl.expand_dims(other, 3), grouped)
    return one, other


@gluon.jit
def _factors(first, second, select, grouped, pages):
    """What codes are multiplied by and what is added then, of words of scales and zero points, beside each four."""
    scales, less = _beside(first[0], second[0], select, grouped, scales_assembly(pages.kind))
    if pages.kind == "int4":
        if pages.group == HEAD_DIM:  # a zero point stands beside its scale
            select = select + 0x2222
        less, _ = _beside(first[1], second[1], select, grouped, scales_assembly(pages.kind))
    return scales, less


@gluon.jit
def _odd(grouped):
    """Whether a four is the second one of two, 0 or 1: of the shape of `by_scale`."""
    LAYOUT: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, grouped.type.layout)))
    odd = gl.arange(0, grouped.shape[3], LAYOUT) % 2
    odd, _ = gl.broadcast(gl.expand_dims(gl.expand_dims(gl.expand_dims(odd, 0), 1), 2), grouped)
    return odd


@gluon.jit
def keys_of(words, scales, head, pages, G: gl.constexpr):
    """Values of a tile's fours: [KEY_TILE, HEAD_DIM / 4, 2, 2] fp16.

    They are 0, 1; 2, 3 in the order of the last dimension, floats 0, 2; 1, 3. Those of int4 are of eight: 0, 4; 1, 5,
    and of the second four of two 2, 6; 3, 7.
    """
    grouped = by_scale(words, pages)
    select = _upper(grouped, 1, 0, head, pages, G) * 0x2222 + 0x1010
    scales, less = _factors(scales, scales, select, grouped, pages)
    if pages.kind == "int4":
        grouped = gl.inline_asm_elementwise(
            "shr.b32 $0, $1, $2;", "=r,r,r", [grouped, _odd(grouped) * 8], dtype=gl.int32, is_pure=True, pack=1
        )
    a, b, c, d = gl.inline_asm_elementwise(
        word_assembly(pages.kind), "=h,=h,=h,=h,r,r,r", [grouped, scales, less], pack=1, is_pure=True,
        dtype=(gl.float16, gl.float16, gl.float16, gl.float16),
    )  # fmt: skip
    return gl.reshape(gl.join(gl.join(a, b), gl.join(c, d)), [KEY_TILE, HEAD_DIM // 4, 2, 2])


@gluon.jit
def right_keys(words, scales, head, pages, layout: gl.constexpr, G: gl.constexpr):
    """The same as right operand, in the order of `load_queries`: [HEAD_DIM, KEY_TILE]."""
    x = gl.reshape(keys_of(words, scales, head, pages, G), [KEY_TILE, HEAD_DIM // 16, 4, 2, 2])
    x = gl.reshape(gl.permute(x, (1, 4, 2, 3, 0)), [HEAD_DIM, KEY_TILE])
    return gl.convert_layout(x, layout, assert_trivial=True)


@gluon.jit
def _of_pairs(x):
    """What is of a tile's even keys, and of its odd ones."""
    return gl.split(gl.permute(gl.reshape(x, [KEY_TILE // 2, 2, x.shape[1]]), (0, 2, 1)))


@gluon.jit
def values_of(words, scales, head, pages, G: gl.constexpr):
    """The same, but in their own order: [KEY_TILE / 2, HEAD_DIM / 4, 2 keys, 2, 2] fp16."""
    even, odd = _of_pairs(words)
    even, odd = by_scale(even, pages), by_scale(odd, pages)
    even_scales, odd_scales = _of_pairs(scales[0])
    even_zeros, odd_zeros = _of_pairs(scales[1])
    upper = _upper(even, 2, 0, head, pages, G) * 0x22 + _upper(even, 2, 1, head, pages, G) * 0x2200
    scales, less = _factors((even_scales, even_zeros), (odd_scales, odd_zeros), upper + 0x5410, even, pages)
    if pages.kind == "int4":  # the halves of two keys' words
        even = gl.inline_asm_elementwise(
            "prmt.b32 $0, $1, $2, $3;", "=r,r,r,r", [even, odd, _odd(even) * 0x2222 + 0x5410], dtype=gl.int32,
            is_pure=True, pack=1,
        )  # fmt: skip
    a, b, c, d, e, f, g, h = gl.inline_asm_elementwise(
        pairs_assembly(pages.kind), "=h,=h,=h,=h,=h,=h,=h,=h,r,r,r,r", [even, odd, scales, less], pack=1, is_pure=True,
        dtype=(gl.float16, gl.float16, gl.float16, gl.float16, gl.float16, gl.float16, gl.float16, gl.float16),
    )  # fmt: skip
    x = gl.join(gl.join(gl.join(a, b), gl.join(e, f)), gl.join(gl.join(c, d), gl.join(g, h)))
    return gl.reshape(x, [KEY_TILE // 2, HEAD_DIM // 4, 2, 2, 2])


@gluon.jit
def new_maximum(m, tops):
    """The maximum of each row with a tile's; the same but finite; and what earlier keys are worth beside it."""
    top = gl.maximum(m, tops)
    finite = gl.where(top == float("-inf"), 0.0, top)
    return top, finite, gl.exp2(m - finite)


@gluon.jit
def as_half(q):
    """Queries in fp16, as `load_q` of `gpu/online.py` makes it of bf16."""
    if q.dtype == gl.float16:
        half = q
    else:
        x = q.to(gl.float32)
        half = gl.where(x > 65504.0, 65504.0, gl.where(x < -65504.0, -65504.0, x)).to(gl.float16)
    return half


@gluon.jit
def only_seen(scales, tile, last):
    """The words of scales and zero points of keys up to `last`, 0 of those behind it.

    A weight of 0 makes nothing of what stands in a slot that isn't in use, unless its scale is infinite.
    """
    key = gl.arange(0, KEY_TILE, gl.SliceLayout(1, scales[0].type.layout))
    there = (key <= last - tile * KEY_TILE)[:, None]
    return gl.where(there, scales[0], 0), gl.where(there, scales[1], 0)


@dataclass(eq=False)
class HopperKernel:
    """A kernel in Gluon that reads the context of tiles of nodes, and when it is taken.

    Args:
        kernel: of a program for each tile of nodes, key head and split.
        rows: most rows × grouped heads of a tile.
        warps: of a program.
        max_registers: of a thread of a program that takes one split.
        min_rows: fewest rows × grouped heads of a tile; None: as many as `rows`.
        min_context: it is the faster one for contexts from this length on,
        min_programs: and where it has as many programs,
        min_keys: or the longest context × tiles of nodes × key heads is at least as much,
        max_heads: and where there are fewer tiles × key heads than that.
        merged: whatever these say, it is the faster one, and a program takes the small splits of a tile together,
            where the longest context × tiles × key heads to this power is at least as much. Other programs put every
            multiprocessor to work then.
        kinds: formats of pages that it reads.
        head_dims: sizes of heads that it is made for.
        constants: what else it is compiled for.
    """

    kernel: Any
    rows: int
    warps: int
    max_registers: int
    min_rows: int | None = None
    min_context: int = 0
    min_programs: int = 0
    min_keys: int = 0
    max_heads: int | None = None
    merged: tuple[int, int] | None = None
    kinds: Sequence[str] = KINDS
    head_dims: Sequence[int] = (HEAD_DIM.value,)
    constants: dict[str, int] = field(default_factory=dict)

    def first(self, work: AttentionWork, num_kv_heads: int) -> int:
        """Return how many splits the first part of a context takes."""
        if self.merged is None:
            return 1
        power, least = self.merged
        return NUM_SMALL if (len(work.tree_tiles) * num_kv_heads) ** power * work.max_context >= least else 1

    def takes(self, q: Tensor, pages: PagePointers, work: AttentionWork, sizes: dict[str, Any]) -> bool:
        """Return whether this kernel is the faster one for a batch, of those that it is made for.

        Args:
            q: [N, num_heads, D].
            pages: the keys'.
            work: the batch.
            sizes: what attention kernels are compiled for; `PDL` is what tells Hopper GPUs from others.
        """
        made_for = (
            pages.kind.value in self.kinds
            and q.dtype in (torch.bfloat16, torch.float16)
            and q.shape[2] in self.head_dims
            and (self.min_rows or self.rows) <= work.tree_block <= self.rows
            and sizes["PDL"]
            and not sizes["SOFTCAP"]
            and not sizes["WINDOW"]
        )
        heads = len(work.tree_tiles) * int(sizes["G"])
        many = heads * num_splits(work.max_context) >= self.min_programs or heads * work.max_context >= self.min_keys
        few = self.max_heads is None or heads < self.max_heads
        faster = work.max_context >= self.min_context and many and few or self.first(work, int(sizes["G"])) > 1
        return bool(made_for) and faster

    def attend(
        self, q: Tensor, pages: Sequence[PagePointers], state: Sequence[Tensor], work: AttentionWork, scale: float,
        num_parts: int, first: int, sizes: dict[str, Any],
    ) -> None:  # fmt: skip
        """Put down the states of parts as `chain_kernel` does for chains, and `context_kernel` for trees.

        Args:
            q: [N, num_heads, D].
            pages: keys and values.
            state: where they go.
            work: the batch, of chains or of trees.
            scale: factor on the scores.
            num_parts: how many there are.
            first: splits that the first part takes.
            sizes: what attention kernels are compiled for.
        """
        given = sizes | {"FIRST": first}
        names = ("H", "G", "D", "BLOCK_SIZE", "SMALL", "NUM", "LARGE", "FIRST", "PDL")
        constants = [work.chains, *(given[name] for name in names), *self.constants.values()]
        early = int(work.nodes_per_sequence > 0)  # else the batch was divided just now, or has new keys in contexts
        self.kernel[(sizes["G"], len(work.tree_tiles), num_parts)](
            q, *pages, *state, work.tree_tiles, work.block_table, work.context_lens, work.positions, work.ancestors,
            work.block_table.stride(0), len(work.tree_rows), early, scale, *constants, num_warps=self.warps,
            maxnreg=self.max_registers if first == 1 else 255, enable_fp_fusion=False, launch_pdl=sizes["PDL"],
        )  # fmt: skip
