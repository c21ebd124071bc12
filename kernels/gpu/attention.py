"""Attention of a packed batch over paged keys and values, in Triton: prompt chunks, chains and token trees.

A row's result doesn't depend on what shares the launch, bit for bit, nor on the kernel that it goes through: all share
the arithmetic of `specdec.kernels.gpu.online`. Which kernel runs which rows is said by `AttentionWork`.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from specdec.kernels.attention import AttentionMetadata
from specdec.kernels.formats import Pages
from specdec.kernels.gpu.chain import chain_kernel, merge_kernel
from specdec.kernels.gpu.chunk import chunk_kernel
from specdec.kernels.gpu.direct import DIRECT
from specdec.kernels.gpu.hopper import HopperKernel
from specdec.kernels.gpu.launch import lets_begin, overlap
from specdec.kernels.gpu.merge import merge_heads, takes_heads
from specdec.kernels.gpu.native import NATIVE, NATIVE_NARROW
from specdec.kernels.gpu.online import (
    BY_CONTEXT,
    LARGE_SPLIT,
    MANY_HEADS,
    NUM_SMALL,
    SMALL_SPLIT,
    first_part,
    key_tile,
    num_parts,
)
from specdec.kernels.gpu.pages import PagePointers, pointers
from specdec.kernels.gpu.pair import PAIR
from specdec.kernels.gpu.paths import path_slots
from specdec.kernels.gpu.single import SINGLE
from specdec.kernels.gpu.tree import context_kernel, tail_kernel
from specdec.kernels.gpu.wide import WIDE
from specdec.kernels.work import MAX_TREE_BLOCK, MIN_BLOCK, AttentionWork, max_block, tile_block

FEW_KEYS = 4096
"""In contexts of up to so many keys programs take small splits together with tiles of 64 rows and with quantized pages,
too: of more keys those are the smaller part. Narrow tiles of quantized pages are faster without."""

EARLY_ROWS, EARLY_PROGRAMS = 4, 64
"""Up to so many rows, of so many programs that read contexts, the product behind a merge may begin when that does, in a
large model, too: it finds room on multiprocessors that have no such program. Of more it came to stand where it was
slower."""

SIXTEEN_STATES = 512
"""Grouped heads × values of a head up to which the registers of four warps have room for sixteen states."""

MAX_REGISTERS = {16: 128, 64: 168}
"""By rows × grouped heads of a tile, where heads have up to 128 values of 16 bits: with fewer registers than they would
take, one more of the programs that read a context runs on each multiprocessor. Narrow tiles of quantized pages are
faster with all that they take."""


@dataclass(frozen=True, slots=True)
class _Call:
    """One call's tensors, and what is compiled in: `sizes` for all kernels, `shape` for those that read keys.

    `way` takes the place of the kernels that read the context of a tile of nodes, if it isn't None; `first` is how many
    splits the first part of a context takes, or BY_CONTEXT, where so many `programs` share it.
    """

    q: Tensor
    pages: tuple[PagePointers, PagePointers]
    num_kv_heads: int
    out: Tensor
    work: AttentionWork
    factors: tuple[float, float]
    sizes: dict[str, Any]
    shape: dict[str, Any]
    way: HopperKernel | None
    first: int
    programs: int

    @property
    def options(self) -> dict[str, int]:
        """How the kernels that read the context of a tile of nodes are launched."""
        options, block = {"num_warps": 4, "num_stages": 2}, self.work.tree_block
        quantized = self.pages[0].kind.value != "native"
        fits = self.q.shape[2] <= 128 and self.q.itemsize == 2
        if fits and block in MAX_REGISTERS and not (quantized and block <= MIN_BLOCK):
            options["maxnreg"] = MAX_REGISTERS[block]
        return options

    @property
    def group_block(self) -> int:
        """Rows of a tile that holds one row's grouped heads."""
        return tile_block(1, self.q.shape[1] // self.num_kv_heads, MIN_BLOCK)


def tree_attention(
    q: Tensor,
    k_pages: Pages,
    v_pages: Pages,
    meta: AttentionMetadata | AttentionWork,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Attend each row to the keys that `meta` lets it see; see the reference, `specdec.kernels.attention`.

    Args:
        q: [N, num_heads, D] contiguous; num_heads is a multiple of num_kv_heads.
        k_pages, v_pages: [num_blocks, block_size, num_kv_heads, D] contiguous, of q's dtype or quantized. Slots
            outside a sequence are never read.
        meta: the batch.
        scale: factor on the scores, above 0.
        window: a row at position p sees keys at positions above p - window.
        softcap: scores become softcap · tanh(score / softcap) before masking.

    Returns:
        [N, num_heads, D], q's dtype. Rows of padding, whose ancestors are 0, hold 0.

    Raises:
        ValueError: the scale is not above 0.
    """
    if not scale > 0:
        raise ValueError(f"scale must be above 0, not {scale}: the largest score is looked for before it is applied")
    num_heads, head_dim = q.shape[1:]
    block_size, num_kv_heads = k_pages.shape[1:3]
    assert q.is_contiguous() and k_pages.is_contiguous() and v_pages.is_contiguous()
    tile = key_tile(head_dim)
    sizes = {
        "H": num_heads,
        "G": num_kv_heads,
        "D": head_dim,
        "BLOCK_D": max(MIN_BLOCK, triton.next_power_of_2(head_dim)),
        "TILE": tile,
        "SMALL": SMALL_SPLIT // tile,
        "NUM": NUM_SMALL,
        "LARGE": LARGE_SPLIT // tile,
        "enable_fp_fusion": False,
        **overlap(q.device),
    }
    shape = sizes | {"SOFTCAP": softcap is not None, "WINDOW": window or 0, "BLOCK_SIZE": block_size}
    work = meta.work(num_heads // num_kv_heads, max_block(head_dim))
    factors = (scale, 0.0 if softcap is None else softcap)
    pages = pointers(k_pages), pointers(v_pages)
    ways = SINGLE, DIRECT, WIDE, PAIR, NATIVE, NATIVE_NARROW
    way = next((way for way in ways if way.takes(q, pages[0], work, shape)), None)
    native = pages[0].kind.value == "native"
    first = _first_part(work, num_kv_heads, native, window) if way is None else way.first(work, num_kv_heads)
    programs = 1 if way is None else way.programs(work, num_kv_heads)
    call = _Call(q, pages, num_kv_heads, torch.empty_like(q), work, factors, sizes, shape, way, first, programs)
    if len(work.chunk_tiles):
        _run_chunks(call)
    if work.chains:
        _run_chains(call)
    elif len(work.tree_rows):
        _run_trees(call)
    return call.out


def _first_part(work: AttentionWork, num_kv_heads: int, native: bool, window: int | None) -> int:
    """How many splits the first part of a context takes in the kernels for pages of any kind."""
    block = work.tree_block
    many = len(work.tree_tiles) * num_kv_heads >= MANY_HEADS.get(block, 1 << 31)
    if native and block < MAX_TREE_BLOCK:
        faster = True
    else:
        faster = work.max_context <= FEW_KEYS and (native or block > MIN_BLOCK)
    return NUM_SMALL if many and faster and not window else 1


def _run_chunks(call: _Call) -> None:
    work = call.work
    chunk_kernel[(len(work.chunk_tiles), call.num_kv_heads)](
        call.q, *call.pages, call.out, work.chunk_tiles, work.block_table, work.positions, work.block_table.stride(0),
        *call.factors, BLOCK_M=work.chunk_block, num_warps=8 if work.chunk_block >= 128 else 4, num_stages=2,
        **call.shape,
    )  # fmt: skip


def _run_trees(call: _Call) -> None:
    work, table, num_nodes = call.work, call.work.block_table, len(call.work.tree_rows)
    state, parts = _states(call)
    slots = path_slots(work, call.shape["TILE"], call.shape["BLOCK_SIZE"])
    if call.way is not None:
        call.way.attend(call.q, call.pages, state, work, call.factors[0], parts, call.first, call.shape)
    else:
        context_kernel[(call.num_kv_heads, len(work.tree_tiles), parts)](
            call.q, *call.pages, *state, work.tree_tiles, table, work.context_lens, work.positions, table.stride(0),
            num_nodes, *call.factors, FIRST=call.first, BLOCK_M=work.tree_block, **call.options, **call.shape,
        )  # fmt: skip
    tail_kernel[(num_nodes, call.num_kv_heads)](
        call.q, *call.pages, call.out, *state, slots, work.tree_rows, work.tree_sequences, work.context_lens,
        work.positions, work.ancestors, num_nodes, work.nodes_per_sequence, call.programs,
        _next_early(call, parts), *call.factors, SOFTCAP=call.shape["SOFTCAP"], WINDOW=call.shape["WINDOW"],
        FIRST=call.first, LENGTH=slots.shape[1], BLOCK_M=call.group_block, num_stages=1, **_tail_of(call, parts),
        **call.sizes,
    )  # fmt: skip


def _tail_of(call: _Call, parts: int) -> dict[str, int]:
    """How `tail_kernel` is launched, and how many states a program loads at once; the last part's is another one.

    Many programs are two warps each, so that all run at once, and more states at once were slower there.
    """
    if len(call.work.tree_rows) * call.num_kv_heads > 256:
        return {"num_warps": 2, "AT_ONCE": 2 if parts <= 3 else 4 if parts <= 24 else 6}
    room = call.q.shape[1] // call.num_kv_heads * call.q.shape[2] <= SIXTEEN_STATES
    return {"num_warps": 4, "AT_ONCE": next((n for n in (2, 4, 8) if parts - 1 <= n), 16 if room else 8)}


def _run_chains(call: _Call) -> None:
    work, num_rows = call.work, len(call.q)
    state, parts = _states(call)
    whole = call.way is None and call.first > 1 and parts == 1
    if call.way is not None:
        call.way.attend(call.q, call.pages, state, work, call.factors[0], parts, call.first, call.shape)
    else:
        chain_kernel[(call.num_kv_heads, len(work.tree_tiles), parts)](
            call.q, *call.pages, call.out, *state, work.block_table, work.positions, work.ancestors,
            work.block_table.stride(0), num_rows, work.nodes_per_sequence, int(work.early), *call.factors,
            FIRST=call.first, WHOLE=whole, BLOCK_M=work.tree_block, **call.options, **call.shape,
        )  # fmt: skip
    if not whole:
        _merge_chains(call, state, parts)


def _next_early(call: _Call, parts: int) -> int:
    """1 if the product behind may begin when the merge of parts does, else 0."""
    num_rows, num_heads, head_dim = call.q.shape
    few = call.num_kv_heads * len(call.work.tree_tiles) * parts <= EARLY_PROGRAMS
    return int(num_rows <= EARLY_ROWS and few or lets_begin("merge", num_rows, num_heads * head_dim))


def _merge_chains(call: _Call, state: tuple[Tensor, Tensor, Tensor], parts: int) -> None:
    """Merge as many parts of each row at most, by the kernel that is made for its heads."""
    work, (num_rows, num_heads, head_dim) = call.work, call.q.shape
    next_early = _next_early(call, parts)
    if call.first == BY_CONTEXT:  # as many as the longest one has
        parts = num_parts(_keys(call), first_part(work.max_context, call.programs, head_dim), 1)
    if takes_heads(call.q):
        merge_heads(call.out, state, work, parts, call.first, call.programs, next_early, call.sizes)
    else:
        heads = 1 if call.first == 1 or parts > 8 else 2  # of many rows, with few states each
        sizes = {name: size for name, size in call.sizes.items() if name != "G"}
        merge_kernel[(num_rows, triton.cdiv(num_heads, heads))](
            call.out, *state, work.context_lens, work.positions, work.ancestors, num_rows, work.nodes_per_sequence,
            call.programs, next_early,
            FIRST=call.first, HEADS=heads, AT_ONCE=16 if parts > 8 else 8, num_warps=1, **sizes,
        )  # fmt: skip


def _states(call: _Call) -> tuple[tuple[Tensor, Tensor, Tensor], int]:
    """Room for each part's, node's and head's state: maximum, sum of weights, weighted values; how many parts."""
    num_heads, head_dim = call.q.shape[1:]
    parts = num_parts(_keys(call), call.first, 1 if call.work.chains else 2)
    size = parts * len(call.work.tree_rows) * num_heads
    room = torch.empty(size * (head_dim + 2), dtype=torch.float32, device=call.q.device)
    return (room[:size], room[size : 2 * size], room[2 * size :]), parts


def _keys(call: _Call) -> int:
    """The most keys that a row sees."""
    return call.work.max_context + max(1, call.work.nodes_per_sequence)
