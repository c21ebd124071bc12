"""Tiles of codes in shared memory: how quantized pages are read by kernels that keep no values there. In Gluon.

Codes are copied as words of four, and scales as words of two, a tile's to one of several stages; a thread takes from
there what it hands to the tensor cores.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from specdec.kernels.gpu.gluon_names import copy_values
from specdec.kernels.gpu.hopper import KEY_TILE, along_dim, blocks_in, only_dim, query_rows
from specdec.kernels.gpu.unpack import pairs_assembly, scales_assembly, word_assembly

HEAD_DIM = gl.constexpr(128)
"""The size of a head that the layouts are made for."""
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
def room(STAGES: gl.constexpr, pages):
    """Shared memory for the words of a few tiles, and for those with their scales."""
    WORDS: gl.constexpr = code_words(pages.kind)
    SCALES: gl.constexpr = row_scale_words(pages.kind, HEAD_DIM // pages.group)
    codes = gl.allocate_shared_memory(gl.uint32, [STAGES, KEY_TILE, WORDS], kept_layout(WORDS))
    return codes, gl.allocate_shared_memory(gl.uint32, [STAGES, KEY_TILE, SCALES], _KEPT_SCALES)


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
    copy_values(to, start + within, mask=some)


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
