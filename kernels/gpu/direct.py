"""Attention over quantized pages whose codes go from memory to where the tensor cores take them. In Gluon.

`chain_kernel` and `context_kernel` bring codes to shared memory, from there to registers, as bf16 to shared memory
again, and to the tensor cores. Here each thread loads, a tile ahead, the very codes that it hands to them, and shared
memory holds nothing but weights. Which values of a row a thread holds is ours to choose, as long as the sixteen that a
product sums at once stay the same: of a key it takes the four of a word, and so of a value; queries and sums are put in
that order. The state of each split is left as those kernels leave it, for `merge_kernel` and `tail_kernel`.

The bits are those of the other kernels (`tests/test_direct.py`). With a lone long context it is the faster one; where
many programs share a multiprocessor it isn't: it takes many registers, so that few of them do.
"""

from collections.abc import Sequence

import torch
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from specdec.kernels.gpu.launch import num_multiprocessors
from specdec.kernels.gpu.pages import PagePointers
from specdec.kernels.gpu.unpack import pairs_assembly, row_assembly
from specdec.kernels.work import AttentionWork

ROWS, HEAD_DIM, KEY_TILE, WARPS = gl.constexpr(16), gl.constexpr(128), gl.constexpr(64), gl.constexpr(4)
"""Rows × grouped heads and keys of a tile, the size of a head and warps of a program that the layouts are made for."""

KINDS = ("int8", "fp8", "fp8_e4m3")
"""Formats whose codes it reads."""
MIN_CONTEXT, AT_ONCE = 8192, 2
"""It is taken for contexts from this length on, where their large splits are so few that all run at once: so many on
each multiprocessor. Measured on an H200 with 1 to 8 sequences of 1,024 to 131,072 tokens."""

_SUM = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [1, WARPS.value], [16, 8]))
_LEFT = gl.constexpr(gl.DotOperandLayout(0, _SUM.value, 2))
_RIGHT = gl.constexpr(gl.DotOperandLayout(1, _SUM.value, 2))


@gluon.constexpr_function
def _shape(block_size, groups):
    """A tile's words of four codes: blocks, eights of a block, pairs of an eight, two, groups of a row, words of it."""
    words = HEAD_DIM.value // 4
    return [KEY_TILE.value // block_size, block_size // 8, 4, 2, groups, words // groups]


@gluon.constexpr_function
def _layout(registers, lanes, warps, block_size, groups):
    """Where the words of a tile are; each argument lists (key, word) of 1, 2, 4, …."""
    shape = _shape(block_size, groups)

    def bases(steps):
        return [
            [k // block_size, k % block_size // 8, k % 8 // 2, k % 2, w // shape[5], w % shape[5]] for k, w in steps
        ]

    return gl.DistributedLinearLayout(
        reg_bases=bases(registers), lane_bases=bases(lanes), warp_bases=bases(warps), block_bases=[], shape=shape
    )


@gluon.constexpr_function
def _key_layout(block_size, groups):
    """A lane holds every fourth word of two keys: four values of each sixteen that a product takes."""
    lanes = [(0, 1), (0, 2), (1, 0), (2, 0), (4, 0)]
    return _layout([(0, 4), (0, 8), (0, 16), (32, 0)], lanes, [(8, 0), (16, 0)], block_size, groups)


@gluon.constexpr_function
def _value_layout(block_size, groups):
    """A lane holds one word of sixteen values' rows: four columns, and of each sixteen rows four."""
    lanes = [(2, 0), (4, 0), (0, 1), (0, 2), (0, 4)]
    return _layout([(1, 0), (8, 0), (16, 0), (32, 0)], lanes, [(0, 8), (0, 16)], block_size, groups)


@gluon.constexpr_function
def _only(dim, rank, layout):
    """The layout of one dimension of a tensor."""
    for i in reversed(range(rank)):
        if i != dim:
            layout = gl.SliceLayout(i, layout)
    return layout


@gluon.jit
def _along(x, dim: gl.constexpr, rank: gl.constexpr):
    """A vector as one dimension of a tensor of a rank."""
    for i in gl.static_range(rank):
        if i != dim:
            x = gl.expand_dims(x, i)
    return x


@gluon.jit
def _range(dim: gl.constexpr, rank: gl.constexpr, layout: gl.constexpr, shape: gl.constexpr, step: gl.constexpr):
    """0, step, 2 step, … along a dimension."""
    return _along(gl.arange(0, shape[dim], _only(dim, rank, layout)) * step, dim, rank)


@gluon.jit
def _load(ptr, blocks, some, rank: gl.constexpr, layout: gl.constexpr, shape: gl.constexpr, ROW_SIZE: gl.constexpr):
    """Words (rank 6) or scales (rank 5) of a tile, `ROW_SIZE` between places; nothing unless `some`."""
    start = ptr + gl.convert_layout(blocks, _only(0, rank, layout)).to(gl.int64) * (shape[1] * 8 * ROW_SIZE)
    inside = _range(2, rank, layout, shape, 2 * ROW_SIZE)
    if rank == 6:
        inside = inside + (_range(4, rank, layout, shape, shape[5]) + _range(5, rank, layout, shape, 1))
    else:
        inside = inside + _range(4, rank, layout, shape, 1)
    # Last and by itself what a thread's own values differ by: constants, which loads take as they are.
    apart = _range(1, rank, layout, shape, 8 * ROW_SIZE) + _range(3, rank, layout, shape, ROW_SIZE)
    return gl.load(_along(start, 0, rank) + inside + apart, mask=some)


@gluon.jit
def _blocks(table_at, tile, end, layout: gl.constexpr, NUM: gl.constexpr):
    """Blocks of a tile; whole tiles before `end` have them all."""
    return gl.load(table_at + tile * NUM + gl.arange(0, NUM, layout), mask=tile < end, other=0)


@gluon.jit
def _keys(words, scales, kind: gl.constexpr):
    """[HEAD_DIM, KEY_TILE] bf16, the values of a key in the order 0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, … of sixteen."""
    scales, _ = gl.broadcast(gl.expand_dims(scales, 5), words)
    a, b, c, d = gl.inline_asm_elementwise(
        row_assembly(kind), "=h,=h,=h,=h,r,h", [words, scales], pack=1, is_pure=True,
        dtype=(gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16),
    )  # fmt: skip
    x = gl.join(gl.join(a, b), gl.join(c, d))  # [..., 2 within a pair, 2 pairs]
    x = gl.permute(gl.reshape(x, [KEY_TILE, HEAD_DIM // 16, 4, 2, 2]), (1, 4, 2, 3, 0))
    return gl.convert_layout(gl.reshape(x, [HEAD_DIM, KEY_TILE]), _RIGHT, assert_trivial=True)


@gluon.jit
def _values(words, scales, kind: gl.constexpr):
    """[KEY_TILE, HEAD_DIM] bf16, the columns in the order 0, 4, …, 124, 1, 5, …."""
    scales, _ = gl.broadcast(gl.expand_dims(scales, 5), words)
    shape: gl.constexpr = [KEY_TILE // 2, 2, HEAD_DIM // 4]
    even, odd = gl.split(gl.permute(gl.reshape(words, shape), (0, 2, 1)))
    of_even, of_odd = gl.split(gl.permute(gl.reshape(scales, shape), (0, 2, 1)))
    a, b, c, d, e, f, g, h = gl.inline_asm_elementwise(
        pairs_assembly(kind), "=h,=h,=h,=h,=h,=h,=h,=h,r,r,h,h", [even, odd, of_even, of_odd], pack=1, is_pure=True,
        dtype=(gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16),
    )  # fmt: skip
    first, second = gl.join(gl.join(a, b), gl.join(e, f)), gl.join(gl.join(c, d), gl.join(g, h))
    x = gl.permute(gl.join(first, second), (0, 2, 3, 4, 1))  # [pairs of keys, 2, 2 halves of a word, 2 in it, words]
    return gl.convert_layout(gl.reshape(x, [KEY_TILE, HEAD_DIM]), _RIGHT, assert_trivial=True)


@gluon.jit
def _weights(s, m):
    """Weights of a tile's keys as a product takes them, what earlier ones are worth beside them, the new maximum."""
    top = gl.maximum(m, gl.max(s, 1))
    finite = gl.where(top == float("-inf"), 0.0, top)
    p = gl.convert_layout(gl.exp2(s - finite[:, None]).to(gl.bfloat16), _LEFT)
    return p, gl.exp2(m - finite), top


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
    SHAPE: gl.constexpr = _shape(BLOCK_SIZE, GROUPS)
    KEYS: gl.constexpr = _key_layout(BLOCK_SIZE, GROUPS)
    VALUES: gl.constexpr = _value_layout(BLOCK_SIZE, GROUPS)
    KEY_SCALES: gl.constexpr = gl.SliceLayout(5, KEYS)
    VALUE_SCALES: gl.constexpr = gl.SliceLayout(5, VALUES)
    KEY_BLOCKS: gl.constexpr = _only(0, 6, KEYS)
    VALUE_BLOCKS: gl.constexpr = _only(0, 6, VALUES)
    WORDS: gl.constexpr = G * D // 4
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
        at = gl.arange(0, ROWS, gl.SliceLayout(1, _LEFT))
        k = gl.arange(0, D, gl.SliceLayout(0, _LEFT))
        of_key = k // 16 * 16 + k % 8 // 2 * 4 + k // 8 % 2 * 2 + k % 2  # the order of `_keys`
        q_at = ((first_row + at // GROUP).to(gl.int64) * H + kv_head * GROUP + at % GROUP) * D
        q = gl.load(q_ptr + q_at[:, None] + of_key[None, :], mask=(at // GROUP < count)[:, None], other=0.0)
        table_at = table_ptr + sequence.to(gl.int64) * table_stride
        k_codes = k_pages.codes.to(gl.pointer_type(gl.uint32), bitcast=True) + kv_head * (D // 4)
        v_codes = v_pages.codes.to(gl.pointer_type(gl.uint32), bitcast=True) + kv_head * (D // 4)
        k_scales, v_scales = k_pages.scales + kv_head * GROUPS, v_pages.scales + kv_head * GROUPS
        m = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, _SUM))
        total = gl.zeros([ROWS, 8 * WARPS], gl.float32, _SUM)
        acc = gl.zeros([ROWS, D], gl.float32, _SUM)
        ones = gl.full([TILE, 8 * WARPS], 1.0, gl.bfloat16, _RIGHT)
        factor = scale * 1.4426950408889634
        none = gl.zeros([ROWS, TILE], gl.float32, _SUM)
        # Codes are a tile ahead, and the blocks that they are in two.
        more = from_tile < whole
        key_blocks = _blocks(table_at, from_tile, whole, KEY_BLOCKS, SHAPE[0])
        value_blocks = _blocks(table_at, from_tile, whole, VALUE_BLOCKS, SHAPE[0])
        key_words = _load(k_codes, key_blocks, more, 6, KEYS, SHAPE, WORDS)
        key_scales = _load(k_scales, key_blocks, more, 5, KEY_SCALES, SHAPE, G * GROUPS)
        value_words = _load(v_codes, value_blocks, more, 6, VALUES, SHAPE, WORDS)
        value_scales = _load(v_scales, value_blocks, more, 5, VALUE_SCALES, SHAPE, G * GROUPS)
        key_blocks = _blocks(table_at, from_tile + 1, whole, KEY_BLOCKS, SHAPE[0])
        value_blocks = _blocks(table_at, from_tile + 1, whole, VALUE_BLOCKS, SHAPE[0])
        for tile in range(from_tile, whole):
            more = tile + 1 < whole
            keys = _keys(key_words, key_scales, k_pages.kind)
            key_words = _load(k_codes, key_blocks, more, 6, KEYS, SHAPE, WORDS)
            key_scales = _load(k_scales, key_blocks, more, 5, KEY_SCALES, SHAPE, G * GROUPS)
            p, keep, m = _weights(mma_v2(q, keys, none) * factor, m)
            values = _values(value_words, value_scales, v_pages.kind)
            value_words = _load(v_codes, value_blocks, more, 6, VALUES, SHAPE, WORDS)
            value_scales = _load(v_scales, value_blocks, more, 5, VALUE_SCALES, SHAPE, G * GROUPS)
            key_blocks = _blocks(table_at, tile + 2, whole, KEY_BLOCKS, SHAPE[0])
            value_blocks = _blocks(table_at, tile + 2, whole, VALUE_BLOCKS, SHAPE[0])
            total = mma_v2(p, ones, total * keep[:, None])
            acc = mma_v2(p, values, acc * keep[:, None])
        for tile in range(gl.maximum(from_tile, whole), to_tile):
            first_key = tile * TILE
            of_keys, of_values = gl.arange(0, SHAPE[0], KEY_BLOCKS), gl.arange(0, SHAPE[0], VALUE_BLOCKS)
            there = (last - first_key) // BLOCK_SIZE  # the last of the tile's blocks that is in use
            key_blocks = gl.load(table_at + tile * SHAPE[0] + of_keys, mask=of_keys <= there, other=0)
            value_blocks = gl.load(table_at + tile * SHAPE[0] + of_values, mask=of_values <= there, other=0)
            key_words = _load(k_codes, key_blocks, True, 6, KEYS, SHAPE, WORDS)
            key_scales = _load(k_scales, key_blocks, True, 5, KEY_SCALES, SHAPE, G * GROUPS)
            key = first_key + gl.arange(0, TILE, gl.SliceLayout(0, _SUM))
            s = mma_v2(q, _keys(key_words, key_scales, k_pages.kind), none) * factor
            p, keep, m = _weights(gl.where(key[None, :] <= position[:, None], s, float("-inf")), m)
            value_words = _load(v_codes, value_blocks, True, 6, VALUES, SHAPE, WORDS)
            value_scales = _load(v_scales, value_blocks, True, 5, VALUE_SCALES, SHAPE, G * GROUPS)
            # A weight of 0 makes nothing of what stands in a slot that isn't in use, unless its scale is infinite.
            place = _range(0, 5, VALUE_SCALES, SHAPE, BLOCK_SIZE) + _range(1, 5, VALUE_SCALES, SHAPE, 8)
            place = place + _range(2, 5, VALUE_SCALES, SHAPE, 2) + _range(3, 5, VALUE_SCALES, SHAPE, 1)
            place, _ = gl.broadcast(place, value_scales)
            value_scales = gl.where(place <= last - first_key, value_scales, 0.0)
            total = mma_v2(p, ones, total * keep[:, None])
            acc = mma_v2(p, _values(value_words, value_scales, v_pages.kind), acc * keep[:, None])
        state = (split * num_states + first_node + lane // GROUP).to(gl.int64) * H + kv_head * GROUP + lane % GROUP
        gl.store(m_ptr + state, m, mask=ok)
        gl.store(total_ptr + state, gl.max(total, 1), mask=ok)  # all columns are the same
        acc = gl.reshape(gl.permute(gl.reshape(acc, [ROWS, 4, D // 4]), (0, 2, 1)), [ROWS, D])  # the order of `_values`
        OUT: gl.constexpr = acc.type.layout
        of_out = gl.arange(0, ROWS, gl.SliceLayout(1, OUT))
        acc_state = (split * num_states + first_node + of_out // GROUP).to(gl.int64) * H
        acc_state += kv_head * GROUP + of_out % GROUP
        acc_at = acc_ptr + acc_state[:, None] * D + gl.arange(0, D, gl.SliceLayout(0, OUT))[None, :]
        gl.store(acc_at, acc, mask=(of_out // GROUP < count)[:, None])


def takes(q: Tensor, pages: PagePointers, work: AttentionWork, num_large: int, sizes: dict[str, object]) -> bool:
    """Return whether this kernel is the faster one for a batch, of those that it is made for.

    Args:
        q: [N, num_heads, D].
        pages: the keys'.
        work: the batch.
        num_large: how many large splits of tiles and key heads there are, empty ones included.
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
    return bool(made_for) and work.max_context >= MIN_CONTEXT and num_large <= AT_ONCE * num_multiprocessors(q.device)


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
        *(sizes[name] for name in names), num_warps=WARPS.value, maxnreg=200, enable_fp_fusion=False,
        launch_pdl=sizes["PDL"],
    )  # fmt: skip
