"""What attention kernels in Gluon share: which part of which tile of nodes a program takes, when they are taken.

They are made for Hopper GPUs, tiles of 64 keys and blocks of 16, 32 or 64 slots. The state of each part is left as
`gpu/chain.py` and `gpu/tree.py` leave it, for the kernels that merge them. Which keys are in which split is told by the
functions of `gpu/online.py`, which are Triton's and Gluon's alike.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from specdec.kernels.gpu.launch import multiprocessors, on_hopper
from specdec.kernels.gpu.online import NUM_SMALL, num_splits, split_of, start_of
from specdec.kernels.gpu.pages import PagePointers
from specdec.kernels.work import AttentionWork

KEY_TILE = gl.constexpr(64)
"""Keys of a tile."""


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
def wait_unless_idle(asked, part, PDL: gl.constexpr):
    """Wait for the kernels before where there is something to do; else a program leaves its room to others at once.

    A tile's first program waits in any case: this kernel never ends before those that it follows.
    """
    if asked | (part == 0):
        wait_for_kernels(PDL)


@gluon.jit
def tile_at(tiles_ptr, tile):
    """A tile's sequence, first row, number of rows and first node."""
    at = tiles_ptr + tile * 4
    return gl.load(at), gl.load(at + 1), gl.load(at + 2), gl.load(at + 3)


@gluon.jit
def program_of(tiles_ptr, early, FIRST: gl.constexpr, PDL: gl.constexpr):
    """What a program is for: a tile's sequence, first row, number of rows and first node; the key head; the part.

    Programs run about in their order, and what takes long is not to be the last one: as `part_of_program` of
    `gpu/online.py`. The heads of a block stand next to each other, and are read at about the same time. Unless `early`,
    all of this may come from the kernel before.
    """
    if early == 0:
        wait_for_kernels(PDL)
    tile, part = tile_at(tiles_ptr, gl.program_id(1)), gl.program_id(2)
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
def ends_of(splits, to_tile, CHAINS: gl.constexpr, SMALL: gl.constexpr, NUM: gl.constexpr, LARGE: gl.constexpr):
    """Where those of a part's splits end that are merged, and where all do: a tree's last split goes on."""
    MERGED: gl.constexpr = 1 if CHAINS else 0
    last = split_of(to_tile - MERGED, SMALL, NUM, LARGE)
    return gl.minimum(splits[1], last + MERGED), gl.minimum(splits[1], last + 1)


@gluon.jit
def tiles_of(split, whole, to_tile, SMALL: gl.constexpr, NUM: gl.constexpr, LARGE: gl.constexpr):
    """A split's first tile, where those end that all rows see, and where all end."""
    end = gl.minimum(start_of(split + 1, SMALL, NUM, LARGE), to_tile)
    return start_of(split, SMALL, NUM, LARGE), gl.minimum(whole, end), end


@gluon.jit
def query_rows(q_ptr, tile, head, lane, H: gl.constexpr, D: gl.constexpr, GROUP: gl.constexpr):
    """Where the queries of a tile's rows × grouped heads start, and which there are."""
    row = (tile[1] + lane // GROUP).to(gl.int64) * H + head * GROUP + lane % GROUP
    return q_ptr + row * D, lane // GROUP < tile[2]


@gluon.jit
def store_state(states, tile, head, part, num_states, m, total, acc, H: gl.constexpr, GROUP: gl.constexpr):
    """Put down where a part ended: maximum [M], sums of weights [M, n], all the same, and values [M, D].

    Values stay in the cache until they are merged, whatever keys and values of long contexts pass through it.
    """
    D: gl.constexpr = acc.shape[1]
    m_ptr, total_ptr, acc_ptr = states
    lane = gl.arange(0, m.shape[0], m.type.layout)
    state = (part * num_states + tile[3] + lane // GROUP).to(gl.int64) * H + head * GROUP + lane % GROUP
    gl.store(m_ptr + state, m, mask=lane // GROUP < tile[2])
    gl.store(total_ptr + state, gl.max(total, 1), mask=lane // GROUP < tile[2])
    lane = gl.arange(0, m.shape[0], gl.SliceLayout(1, acc.type.layout))
    state = (part * num_states + tile[3] + lane // GROUP).to(gl.int64) * H + head * GROUP + lane % GROUP
    acc_at = acc_ptr + state[:, None] * D + gl.arange(0, D, gl.SliceLayout(0, acc.type.layout))[None, :]
    gl.store(acc_at, acc, mask=(lane // GROUP < tile[2])[:, None], eviction_policy="evict_last")


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
def new_maximum(m, tops):
    """The maximum of each row with a tile's; the same but finite; and what earlier keys are worth beside it."""
    top = gl.maximum(m, tops)
    finite = gl.where(top == float("-inf"), 0.0, top)
    return top, finite, gl.exp2(m - finite)


@dataclass(eq=False)
class HopperKernel:
    """A kernel in Gluon that reads the context of tiles of nodes, and when it is taken.

    Args:
        kernel: of a program for each tile of nodes, key head and split.
        rows: most rows × grouped heads of a tile.
        warps: of a program.
        max_registers: of a thread of a program that takes one split, by the sizes of heads that it is made for. With
            fewer, one more program may share a multiprocessor, and what finds no register goes to memory.
        kinds: formats of pages that it reads.
        min_rows: fewest rows × grouped heads of a tile; None: as many as `rows`.
        min_context: it is the faster one for contexts from this length on,
        min_programs: and where it has as many programs,
        min_keys: or the longest context × tiles of nodes × key heads is at least as much,
        max_heads: and where there are fewer tiles × key heads than that.
        merged: whatever these say, it is the faster one, and a program takes the small splits of a tile together,
            where the longest context × tiles × key heads to this power is at least as much. Other programs put every
            multiprocessor to work then.
        max_merged: and where no context is longer: of more keys those splits are the smaller part, and the program
            takes more room.
        few_programs: up to so many programs a multiprocessor threads have all the registers that they would take, and
            programs are spread more evenly: multiprocessors that are free first would take more of them.
    """

    kernel: Any
    rows: int
    warps: int
    max_registers: dict[int, int]
    kinds: Sequence[str]
    min_rows: int | None = None
    min_context: int = 0
    min_programs: int = 0
    min_keys: int = 0
    max_heads: int | None = None
    merged: tuple[int, int] | None = None
    max_merged: int | None = None
    few_programs: int = 0

    def first(self, work: AttentionWork, num_kv_heads: int) -> int:
        """Return how many splits the first part of a context takes, or BY_CONTEXT, where `programs` share one."""
        if self.merged is None or (self.max_merged is not None and work.max_context > self.max_merged):
            return 1
        power, least = self.merged
        return NUM_SMALL if (len(work.tree_tiles) * num_kv_heads) ** power * work.max_context >= least else 1

    def programs(self, work: AttentionWork, num_kv_heads: int) -> int:
        """Return how many programs share the context of a key head."""
        return 1

    def takes(self, q: Tensor, pages: PagePointers, work: AttentionWork, sizes: dict[str, Any]) -> bool:
        """Return whether this kernel is the faster one for a batch, of those that it is made for.

        Args:
            q: [N, num_heads, D].
            pages: the keys'.
            work: the batch.
            sizes: what attention kernels are compiled for.
        """
        made_for = (
            pages.kind.value in self.kinds
            and q.dtype in (torch.bfloat16, torch.float16)
            and q.shape[2] in self.max_registers
            and (self.min_rows or self.rows) <= work.tree_block <= self.rows
            and on_hopper(q.device)
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
            first: splits that the first part takes, or BY_CONTEXT.
            sizes: what attention kernels are compiled for.
        """
        given = sizes | {"FIRST": first, "ROWS": self.rows}
        names = ("H", "G", "D", "BLOCK_SIZE", "SMALL", "NUM", "LARGE", "FIRST", "PDL", "ROWS")
        constants = work.chains, *(given[name] for name in names)
        grid = sizes["G"], len(work.tree_tiles), num_parts
        many = prod(grid) > self.few_programs * multiprocessors(q.device)
        self.kernel[grid](
            q, *pages, *state, work.tree_tiles, work.block_table, work.context_lens, work.positions, work.ancestors,
            work.block_table.stride(0), len(work.tree_rows), int(work.early), scale, *constants, num_warps=self.warps,
            maxnreg=self.max_registers[q.shape[2]] if first == 1 and many else 255, enable_fp_fusion=False,
            launch_pdl=sizes["PDL"],
        )  # fmt: skip
