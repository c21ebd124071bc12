"""Merge of the parts of chains' keys on Hopper GPUs. In Gluon.

Where there are many rows with few parts, to start programs takes most of a merge's time, and so does what is done for
states that aren't there; of few rows with many parts, each round of loads is a wait. So a program may have several
heads of a row, and takes as many states at once as there may be, where that is faster. Layouts say that a thread has
values of one head: Triton finds what there is one of in each head twice. `merge_kernel` in `gpu/chain.py` is for all
else. The bits are the same.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from specdec.kernels.gpu.hopper import KEY_TILE, new_maximum, wait_for_kernels
from specdec.kernels.gpu.launch import let_next_begin, on_hopper
from specdec.kernels.gpu.online import first_by_context, part_with, split_of
from specdec.kernels.work import AttentionWork


@gluon.constexpr_function
def _layout(lanes, warps, dim):
    """The layout of heads' values: so many threads have one head's, up to four behind each other at a time."""
    of_warp, of_head = min(lanes, 32), max(1, lanes // 32)
    return gl.BlockedLayout([1, min(4, dim // lanes)], [32 // of_warp, of_warp], [warps // of_head, of_head], [1, 0])


@gluon.jit
def _load_state(ptrs, step, there, D: gl.constexpr):
    """Where a part ended for some heads, so many steps behind: two numbers [M], and values [M, D]; else empty."""
    m = gl.load(ptrs[0] + step, mask=there, other=float("-inf"), cache_modifier=".cg")
    total = gl.load(ptrs[1] + step, mask=there, other=0.0, cache_modifier=".cg")
    return m, total, gl.load(ptrs[2] + step * D, mask=there[:, None], other=0.0, cache_modifier=".cg")


@gluon.jit
def _merge(state, following):
    """Put a part behind those before it."""
    m, total, acc = state
    m_next, total_next, acc_next = following
    m, finite, a = new_maximum(m, m_next)
    b = gl.exp2(m_next - finite)
    return m, total * a + total_next * b, acc * a[:, None] + acc_next * b[:, None]


@gluon.jit(do_not_specialize=["num_rows", "nodes", "programs", "next_early"])
def merge_heads_kernel(
    out_ptr, m_ptr, total_ptr, acc_ptr, context_ptr, positions_ptr, ancestors_ptr, num_rows, nodes, programs,
    next_early, H: gl.constexpr, D: gl.constexpr, SMALL: gl.constexpr, NUM: gl.constexpr, LARGE: gl.constexpr,
    FIRST: gl.constexpr, PDL: gl.constexpr, LANES: gl.constexpr, WARPS: gl.constexpr, AT_ONCE: gl.constexpr,
):  # fmt: skip
    """All parts of one node's keys for some heads, in their order, so many of them at once; as `merge_kernel`."""
    LAYOUT: gl.constexpr = _layout(LANES, WARPS, D)
    HEADS: gl.constexpr = WARPS * 32 // LANES
    if next_early:
        let_next_begin(PDL)
    row = gl.program_id(0)
    position = gl.load(positions_ptr + row).to(gl.int32)
    first = position * 0 + FIRST
    if FIRST == 0:
        context = gl.load(context_ptr + row // nodes).to(gl.int32)
        first = first_by_context(context, programs, KEY_TILE, SMALL, NUM, LARGE)
    count = part_with(split_of(position // KEY_TILE, SMALL, NUM, LARGE), first) + 1
    count = gl.where(gl.load(ancestors_ptr + row) == 0, 0, count)
    nothing = position >> 31  # a row's that sees keys
    head = gl.program_id(1) * HEADS + gl.arange(0, HEADS, gl.SliceLayout(1, LAYOUT))
    d = gl.arange(0, D, gl.SliceLayout(0, LAYOUT))
    at, stride = row.to(gl.int64) * H + head, gl.to_tensor(num_rows).to(gl.int64) * H
    values_at = (at * D)[:, None] + d[None, :]
    ptrs = m_ptr + at, total_ptr + at, acc_ptr + values_at
    wait_for_kernels(PDL)
    m = gl.full([HEADS], float("-inf"), gl.float32, gl.SliceLayout(1, LAYOUT))
    total = gl.zeros([HEADS], gl.float32, gl.SliceLayout(1, LAYOUT))
    acc = gl.zeros([HEADS, D], gl.float32, LAYOUT)
    for part in range(0, count, AT_ONCE):
        states = ()
        bits = gl.zeros([HEADS, D], gl.int32, LAYOUT)
        for i in gl.static_range(AT_ONCE):
            state = _load_state(ptrs, stride * i, (head < H) & (i < count - part), D)
            states = states + (state,)  # type: ignore[assignment]  # Gluon unrolls the loop
            bits = bits | state[2].to(gl.int32, bitcast=True)
        acc = (acc.to(gl.int32, bitcast=True) | (bits & nothing)).to(gl.float32, bitcast=True)  # as `_when_there`
        for i in gl.static_range(AT_ONCE):
            m, total, acc = _merge((m, total, acc), states[i])
        step = stride * AT_ONCE
        ptrs = ptrs[0] + step, ptrs[1] + step, ptrs[2] + step * D
    out = acc / gl.where(total == 0.0, 1.0, total)[:, None]
    gl.store(out_ptr + values_at, out.to(out_ptr.dtype.element_ty), mask=(head < H)[:, None])


@dataclass(frozen=True, slots=True)
class Merge:
    """How parts are merged: threads that have a head's 128 values, warps of a program, parts at once.

    More than 32 threads are of several warps.
    """

    lanes: int
    warps: int
    at_once: int

    def fitting(self, num_heads: int, head_dim: int) -> "Merge":
        """The same for so many heads: fewer threads for fewer values, and fewer warps where many would have no head.

        Many are a fourth of the heads. No bit depends on either.
        """
        lanes, warps = max(16, self.lanes * head_dim // 128), self.warps
        while warps * 32 > lanes and 4 * (-num_heads % (warps * 32 // lanes)) >= num_heads:
            warps //= 2
        return Merge(lanes, warps, self.at_once)


FEW_ROWS, SOME_ROWS, MANY_ROWS = 4, 8, 32
"""Few rows have programs of several heads, of up to ten parts. Up to 24 parts are loaded at once unless there are many
rows, and of some rows, more: a program then takes as long as its loads, one round of them after another."""


def merge_of(parts: int, num_rows: int) -> Merge:
    """Return how so many parts of rows' heads, of 128 values each, are merged.

    Those were the fastest in captured steps on H200s: by itself a merge leaves what comes behind it other room.
    """
    if parts <= 1:
        return Merge(16, 8, 1)
    if parts <= 5:
        return Merge(32, 8, 5)
    if parts <= 10:
        return Merge(64, 8, 10) if num_rows <= FEW_ROWS else Merge(32, 1, 10)
    if parts <= 16 or num_rows > MANY_ROWS:
        return Merge(32, 1, 16)
    if parts <= 24:
        return Merge(128, 4, 24) if num_rows == 1 else Merge(32, 1, 24)
    if num_rows > SOME_ROWS:
        return Merge(32, 1, 16)
    return Merge(128, 4, 32) if parts <= 32 else Merge(64, 2, 48)


def takes_heads(q: Tensor) -> bool:
    """Return whether the kernel is made for the heads of such queries, and for the device."""
    return q.shape[2] in (64, 128) and on_hopper(q.device)


def merge_heads(
    out: Tensor, state: Sequence[Tensor], work: AttentionWork, parts: int, first: int, programs: int,
    next_early: int, sizes: dict[str, Any],
) -> None:  # fmt: skip
    """Merge the states of chains' parts.

    Args:
        out: [N, num_heads, D], where rows go.
        state: where the states are.
        work: the batch.
        parts: most parts of a row.
        first: splits that the first part takes, or BY_CONTEXT, where so many `programs` share a context.
        next_early: 1 if the next kernel may begin when this one does, else 0.
        sizes: what attention kernels are compiled for.
    """
    num_rows, num_heads, head_dim = out.shape
    merge = merge_of(parts, num_rows).fitting(num_heads, head_dim)
    names = ("H", "D", "SMALL", "NUM", "LARGE")
    merge_heads_kernel[(num_rows, triton.cdiv(num_heads, merge.warps * 32 // merge.lanes))](
        out, *state, work.context_lens, work.positions, work.ancestors, num_rows, work.nodes_per_sequence, programs,
        next_early, *(sizes[name] for name in names), first, sizes["PDL"], merge.lanes, merge.warps, merge.at_once,
        num_warps=merge.warps, enable_fp_fusion=False, launch_pdl=sizes["PDL"],
    )  # fmt: skip
