"""Launches the kernels whose threads share memory, at few sizes each, for compute-sanitizer.

    compute-sanitizer --tool racecheck --kernel-name kns=_kernel --kernel-name-exclude kns=_ZN \\
        python -m tests.sanitize native products

The tool takes long to read each kernel that it meets, and the tests launch very many. It also checks torch's unless
they are left out, as here by how C++ names functions.
"""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from specdec.kernels.gpu import attention
from specdec.kernels.gpu.attention import tree_attention
from specdec.kernels.gpu.gluon_names import copy_values
from specdec.kernels.gpu.hopper import HopperKernel
from specdec.kernels.gpu.linear import gated_linear, linear
from specdec.kernels.gpu.online import BY_CONTEXT, NUM_SMALL
from specdec.kernels.gpu.tiles import tile_of
from specdec.kernels.gpu.tma import takes_tma
from specdec.kernels.slabs import fits_slabs, to_slabs
from specdec.verifier.tree import chain_parents
from tests.kernels import DEVICE
from tests.test_attention import build
from tests.test_direct import SCALE, WAYS, make_batch

CONTEXTS = [2300, 200, 63, 0]
"""Of small splits and a large one, of tiles that are whole and of others, and of none."""


def native() -> None:
    """Attention over native pages in Gluon."""
    for name, nodes in (("narrow", 3), ("native", 13), ("native", 37)):
        for first in (1, NUM_SMALL):
            _attend(("native", 128, 16, 2, nodes), WAYS[name], first)


def pair() -> None:
    """Attention over native pages by two warp groups that share what a third one has brought."""
    for nodes in (32, 55):
        _attend(("native", 128, 16, 2, nodes), WAYS["pair"], BY_CONTEXT)


def codes() -> None:
    """Attention over codes in Gluon."""
    for kind, group in (("int8", 64), ("fp8", None), ("int4", 64)):
        for name, nodes in (("single", 3), ("direct", 3), ("wide", 13)):
            for first in (1, NUM_SMALL) if name == "wide" else (1,):
                _attend((kind, group, 16, 2, nodes), WAYS[name], first)


def shared() -> None:
    """Attention in Triton, over pages of each kind: trees, chains, and prompts beside trees."""
    for kind, group in (("native", 128), ("int8", 64), ("fp8", None), ("int4", 64)):
        for nodes in (3, 13):
            for first in (1, NUM_SMALL):
                _attend((kind, group, 16, 2, nodes), None, first)
    meta, _ = build([(3, 140, [-1, 0, 0]), (70, 0, chain_parents(5))], device=DEVICE)
    pages = torch.randn(2, int(meta.block_table.max()) + 1, meta.block_size, 2, 128, device=DEVICE).half()
    q = torch.randn(meta.cu_seqlens_q[-1], 8, 128, device=DEVICE).half()
    tree_attention(q, pages[0], pages[1], meta, scale=SCALE)


def products() -> None:
    """Products, by the tiles of a large model and of a small one; of many numbers of rows the last tile isn't full."""
    for rows in (1, 24, 40, 64, 100, 512):
        for out, k in ((4096, 4096), (6144, 4096), (65536, 4096), (576, 576)):
            x, w = (torch.randn(n, k, device=DEVICE).half() for n in (rows, 512))
            for tma in {False, takes_tma(x, w)}:
                for weight in (w, to_slabs(w)) if tma and fits_slabs(w) else (w,):
                    linear(x, weight, tile=tile_of(rows, out, k, tma=tma))
                    gated_linear(x, weight, None, "silu", tile=tile_of(rows, out, k, 2, tma=tma))


def hand_over() -> None:
    """A kernel whose warps part, each group waiting for its own: the tool reports what the compiler hands to them."""
    x = torch.zeros(512, dtype=torch.int32, device=DEVICE)
    _hand_over_kernel[(400,)](x, 3, num_warps=4)
    assert x.tolist() == [i % 128 + 3 for i in range(256)] + [i + 3 for i in range(32)] + [0] * 224


def faulty_race() -> None:
    """A kernel whose warps read what others have stored without waiting for them, which racecheck must report."""
    _race_kernel[(1,)](torch.empty(512, dtype=torch.int32, device=DEVICE), num_warps=4)


def faulty_copy() -> None:
    """A kernel that reads what is still being copied to shared memory."""
    x = torch.zeros(128, device=DEVICE)
    _early_kernel[(1,)](x, torch.empty_like(x), num_warps=4)


def faulty_write() -> None:
    """A kernel that writes to nobody's memory, which memcheck must report."""
    _outside_kernel[(1,)](torch.zeros(128, device=DEVICE), num_warps=4)


@gluon.jit
def _put_sums(x_ptr, zeros_ptr, n):
    at = gl.arange(0, 128, gl.BlockedLayout([1], [32], [4], [0]))
    gl.store(x_ptr + at, at + n + gl.sum(gl.load(zeros_ptr + at), 0))


@gluon.jit
def _put(x_ptr, n):
    at = gl.arange(0, 32, gl.BlockedLayout([1], [32], [1], [0]))
    gl.store(x_ptr + at, at + n)


@gluon.jit
def _hand_over_kernel(x_ptr, n):
    zeros_ptr = x_ptr + 384
    m = n + gl.load(zeros_ptr)
    gl.warp_specialize(
        [
            (_put_sums, (x_ptr, zeros_ptr, m)),
            (_put_sums, (x_ptr + 128, zeros_ptr, m)),
            (_put, (x_ptr + 256, m)),
        ],
        [4, 1],
        [24, 24],
    )


@gluon.jit
def _race_kernel(y_ptr):
    at = gl.arange(0, 512, gl.BlockedLayout([4], [32], [4], [0]))
    kept = gl.allocate_shared_memory(gl.int32, [512], gl.SwizzledSharedLayout(1, 1, 1, [0]), at)
    # Gluon knows what its own loads read, and lets them wait.
    read: gl.constexpr = "{ .reg .u32 a; mov.u32 a, global_smem; add.u32 a, a, $1; ld.shared.u32 $0, [a]; }"
    x = gl.inline_asm_elementwise(read, "=r,r", [(511 - at) * 4], dtype=gl.int32, is_pure=False, pack=1)
    gl.store(y_ptr + at, x + kept.load(at.type.layout))


@gluon.jit
def _early_kernel(x_ptr, y_ptr):
    copied: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    read: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
    kept = gl.allocate_shared_memory(gl.float32, [128], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    copy_values(kept, x_ptr + gl.arange(0, 128, copied))
    async_copy.commit_group()
    gl.store(y_ptr + gl.arange(0, 128, read), kept.load(read))
    async_copy.wait_group(0)


@gluon.jit
def _outside_kernel(x_ptr):
    at = gl.arange(0, 128, gl.BlockedLayout([1], [32], [4], [0]))
    gl.store(x_ptr + (1 << 40) + at, at.to(gl.float32))


GROUPS: dict[str, Callable[[], None]] = {
    f.__name__: f for f in (native, pair, codes, shared, products, hand_over, faulty_race, faulty_copy, faulty_write)
}


def _attend(shape: tuple[str, int | None, int, int, int], way: HopperKernel | None, first: int) -> None:
    """Attend chains and trees of a shape of `tests/test_direct.py`; `first` small splits are one program's."""
    for chains in (True, False):
        batch = make_batch(shape, CONTEXTS, chains=chains)
        with _by(way, first):
            tree_attention(batch.q, *batch.pages, batch.work, scale=SCALE)


@contextmanager
def _by(way: HopperKernel | None, first: int) -> Iterator[None]:
    """Let a kernel read the contexts, or, if it is None, those in Triton."""
    with ExitStack() as stack:
        for kernel in WAYS.values():
            stack.enter_context(patch.object(kernel, "takes", lambda *args, taken=kernel is way: taken))
            stack.enter_context(patch.object(kernel, "first", lambda *args: first))
        stack.enter_context(patch.object(attention, "_first_part", lambda *args: first))
        yield


def main(names: list[str]) -> None:
    """Launch groups of kernels; all of which nothing should be reported if none is named."""
    torch.manual_seed(0)
    for name in names or [name for name in GROUPS if not name.startswith(("faulty", "hand_over"))]:
        start = time.perf_counter()
        GROUPS[name]()
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        print(f"{name}: launched in {time.perf_counter() - start:.1f} s", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
