"""Tiles of codes in shared memory, as `gpu/direct.py` and `gpu/wide.py` read quantized pages. In Gluon.

Codes are copied as words of four, and scales as words of two, a tile's to one of several stages; a thread takes from
there what it hands to the tensor cores.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from specdec.kernels.gpu.pages import PagePointers
from specdec.kernels.work import AttentionWork

HEAD_DIM, KEY_TILE, WARPS = gl.constexpr(128), gl.constexpr(64), gl.constexpr(4)
"""The size of a head, keys of a tile and warps of a program that the layouts are made for."""
STAGES = gl.constexpr(2)
"""Tiles that have room in shared memory, one that is read and those on their way: with 3 both kernels are slower on an
H200 (`benchmarks/results/direct_h200.json`, `wide_h200.json`)."""
KINDS = ("int8", "fp8", "fp8_e4m3")
"""Formats whose codes they read."""

Bases = list[list[int]]
"""Where the first, the second, the fourth, … element of a layout's registers, lanes or warps is."""

_SHAPE = gl.constexpr([KEY_TILE.value, HEAD_DIM.value // 4])
"""A tile's words of four codes."""

_COPY = gl.constexpr(gl.BlockedLayout([1, 4], [4, 8], [WARPS.value, 1], [1, 0]))
_KEPT = gl.constexpr(gl.SwizzledSharedLayout(4, 1, 8, [1, 0]))
"""Sixteen bytes of eight rows in a place of their own each: what lanes read at once never shares a bank."""
_KEPT_SCALES = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))


def words_layout(registers: Bases, lanes: Bases, warps: Bases) -> gl.DistributedLinearLayout:
    """Where a tile's words are: (key, word) by 1, 2, 4, … of a thread's registers, of the lanes, of the warps."""
    return gl.DistributedLinearLayout(registers, lanes, warps, block_bases=[], shape=_SHAPE.value)


@gluon.constexpr_function
def scales_layout(words):
    """The layout in which a tile's words of two scales are copied: as many bytes a thread as a row has, up to 16."""
    size = min(words, 4)
    return gl.BlockedLayout([1, size], [32 * size // words, words // size], [WARPS.value, 1], [1, 0])


@gluon.constexpr_function
def scale_words(groups):
    """Words of two scales that a row has, or that it stands in."""
    return max(1, groups // 2)


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
def seen(sequence, first_row, lane, ok, reads, GROUP: gl.constexpr, CHAINS: gl.constexpr):
    """The last key that each row of a tile of nodes sees, and any; the end of tiles, and of those that all rows see.

    Of trees, whose own keys aren't read here, all rows see the same tiles.
    """
    context_ptr, positions_ptr, ancestors_ptr = reads
    if CHAINS:
        row = first_row + lane // GROUP
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
def long_splits_first():
    """A program's split: programs run about in their order, and what takes long is not to be the last one."""
    return gl.num_programs(2) - 1 - gl.program_id(2)


@gluon.jit
def start_of(split, SMALL: gl.constexpr, NUM: gl.constexpr, LARGE: gl.constexpr):
    """The first tile of a split."""
    return gl.where(split < NUM, split * SMALL, SMALL * NUM + (split - NUM) * LARGE)


@gluon.jit
def room(GROUPS: gl.constexpr):
    """Shared memory for the words of a few tiles, and for those with their scales."""
    codes = gl.allocate_shared_memory(gl.uint32, [STAGES, KEY_TILE, HEAD_DIM // 4], _KEPT)
    return codes, gl.allocate_shared_memory(gl.uint32, [STAGES, KEY_TILE, scale_words(GROUPS)], _KEPT_SCALES)


@gluon.jit
def stage_after(stage):
    """The stage behind one."""
    return gl.where(stage + 1 == STAGES, 0, stage + 1)


@gluon.jit
def blocks_in(table_at, tile, num_blocks, layout: gl.constexpr, BLOCK_SIZE: gl.constexpr):
    """The blocks that a tile's keys are in, of the first `num_blocks` under a table: [KEY_TILE] int32, others 0."""
    at = tile * (KEY_TILE // BLOCK_SIZE) + gl.arange(0, KEY_TILE, gl.SliceLayout(1, layout)) // BLOCK_SIZE
    return gl.load(table_at + at, mask=at < num_blocks, other=0)


@gluon.jit
def copy_words(to, ptr, blocks, within, some, layout: gl.constexpr, BLOCK: gl.constexpr, WORDS: gl.constexpr):
    """Start to copy WORDS words of each key of a tile, a block's BLOCK from the next one's; nothing unless `some`."""
    words = gl.arange(0, WORDS, gl.SliceLayout(0, layout))
    at = blocks.to(gl.int64) * BLOCK + within
    async_copy.async_copy_global_to_shared(to, ptr + at[:, None] + words[None, :], mask=some)


@gluon.jit
def is_upper(words, head, G: gl.constexpr, GROUPS: gl.constexpr):
    """Whether a code's scale is the upper half of its word: of [KEY_TILE, W, words that share one], 0 or 1."""
    layout: gl.constexpr = words.type.layout
    if GROUPS == 1:
        key = gl.arange(0, KEY_TILE, only_dim(0, layout))
        upper = along_dim((key * G + head) % 2, 0)
    else:
        PER_GROUP: gl.constexpr = HEAD_DIM // 4 // GROUPS
        word = gl.arange(0, 2 * PER_GROUP, only_dim(2, layout))
        upper = along_dim(word // PER_GROUP, 2)
    upper, _ = gl.broadcast(upper, words)
    return upper


@gluon.jit
def of_pairs(x):
    """Those of a tile's even keys, and of its odd ones: [KEY_TILE / 2, words] each."""
    return gl.split(gl.permute(gl.reshape(x, [KEY_TILE // 2, 2, HEAD_DIM // 4]), (0, 2, 1)))


@gluon.jit
def fetch_tile(kept, pages, head, blocks, scale_blocks, stage, some, BLOCK_SIZE: gl.constexpr, G: gl.constexpr):
    """Start to copy a tile's codes and scales to a stage, from blocks as the two kinds of copies want them."""
    GROUPS: gl.constexpr = HEAD_DIM // pages.group
    WORDS: gl.constexpr = HEAD_DIM // 4
    codes = pages.codes.to(gl.pointer_type(gl.uint32), bitcast=True)
    scales = pages.scales.to(gl.pointer_type(gl.uint32), bitcast=True)
    row = gl.arange(0, KEY_TILE, gl.SliceLayout(1, _COPY)) % BLOCK_SIZE * G + head
    copy_words(kept[0].index(stage), codes, blocks, row * WORDS, some, _COPY, BLOCK_SIZE * G * WORDS, WORDS)
    SCALES: gl.constexpr = scales_layout(scale_words(GROUPS))
    row = gl.arange(0, KEY_TILE, gl.SliceLayout(1, SCALES)) % BLOCK_SIZE * G + head
    if GROUPS == 1:  # a word is of two rows, and blocks hold an even number
        copy_words(kept[1].index(stage), scales, scale_blocks, row // 2, some, SCALES, BLOCK_SIZE * G // 2, 1)
    else:
        HALF: gl.constexpr = GROUPS // 2
        copy_words(kept[1].index(stage), scales, scale_blocks, row * HALF, some, SCALES, BLOCK_SIZE * G * HALF, HALF)


@gluon.jit
def blocks_of(table_at, tile, num_blocks, BLOCK_SIZE: gl.constexpr, GROUPS: gl.constexpr):
    """The blocks of a tile, as the copies of codes want them and as those of scales do."""
    SCALES: gl.constexpr = scales_layout(scale_words(GROUPS))
    codes = blocks_in(table_at, tile, num_blocks, _COPY, BLOCK_SIZE)
    return codes, blocks_in(table_at, tile, num_blocks, SCALES, BLOCK_SIZE)


@gluon.jit
def fetch_both(kept, k_pages, v_pages, head, blocks, stage, some, BLOCK_SIZE: gl.constexpr, G: gl.constexpr):
    """Start to copy a tile's keys and values to a stage, as a group of its own."""
    fetch_tile(kept[0], k_pages, head, blocks[0], blocks[1], stage, some, BLOCK_SIZE, G)
    fetch_tile(kept[1], v_pages, head, blocks[0], blocks[1], stage, some, BLOCK_SIZE, G)
    async_copy.commit_group()


@gluon.jit
def take_words(kept, stage, layout: gl.constexpr, GROUPS: gl.constexpr):
    """A tile's words and, beside each, that with its scale: [KEY_TILE, W, words of two groups] each."""
    WORDS: gl.constexpr = HEAD_DIM // 4
    W: gl.constexpr = scale_words(GROUPS)
    words = gl.reshape(kept[0].index(stage).load(layout), [KEY_TILE, W, WORDS // W])
    scales = kept[1].index(stage).load(gl.SliceLayout(2, words.type.layout))
    return words, gl.expand_dims(scales, 2)


@gluon.jit
def beside_words(scales, words):
    """Scales that stand once, at each of the words that they are of."""
    scales, _ = gl.broadcast(scales, words)
    return scales


@dataclass(eq=False)
class CodesKernel:
    """A kernel over such tiles, and when it is taken.

    Args:
        kernel: of a program for each tile of nodes, key head and split.
        rows: rows × grouped heads of a tile.
        max_registers: of a thread.
        min_context: it is the faster one for contexts from this length on.
    """

    kernel: Any
    rows: int
    max_registers: int
    min_context: int

    def takes(self, q: Tensor, pages: PagePointers, work: AttentionWork, sizes: dict[str, object]) -> bool:
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
            and work.tree_block == self.rows
            and sizes["PDL"]
            and not sizes["SOFTCAP"]
            and not sizes["WINDOW"]
        )
        return bool(made_for) and work.max_context >= self.min_context

    def attend(
        self, q: Tensor, pages: Sequence[PagePointers], state: Sequence[Tensor], work: AttentionWork, scale: float,
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
        self.kernel[(len(work.tree_tiles), sizes["G"], num_splits)](
            q, *pages, *state, work.tree_tiles, work.block_table, work.context_lens, work.positions, work.ancestors,
            work.block_table.stride(0), len(work.tree_rows), scale, work.arrived is not None,
            *(sizes[name] for name in names), num_warps=WARPS.value, maxnreg=self.max_registers,
            enable_fp_fusion=False, launch_pdl=sizes["PDL"],
        )  # fmt: skip
