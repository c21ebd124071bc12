"""How the kernels of a step follow each other: each is launched while the one before it runs.

With programmatic dependent launch a kernel is made ready before the kernels before it have ended; `wait_for_inputs`
holds until they have, and their results are seen. A kernel that is launched so must wait before it reads or writes
anything but weights. Once it has waited it lets the next one be made ready, in what room it leaves. A rotation does so
before it waits (`let_next_begin`), for attention has much to read that was there long before. Kernels in front of a
small product do so as well, by how many rows there are (`lets_begin`); done by all kernels that was slower, since those
further behind took room, too. So what a kernel reads before it waits may be written by no kernel of its forward, but
where the kernel in front of it has waited; a forward begins with kernels of torch, which wait for all that was before.
"""

from functools import cache

import torch
import triton
import triton.language as tl
from triton.runtime import driver

SMALL_INPUTS = 2048
"""A small product has fewer inputs than this, and its programs may wait beside others; those of a large one take most
of a multiprocessor."""
_LET_BEGIN = {
    "merge": (range(1, 17), range(128, 257)),
    "norm": (range(1, 33), range(128, 257)),
    "product": (range(128, 257),),
}
"""By kind of kernel, numbers of rows with which steps of a small model were faster on an H200 if these kernels let the
next one begin when they begin themselves. Of more rows than these nothing is known."""


def lets_begin(kind: str, num_rows: int, inputs: int) -> bool:
    """Return whether a kernel lets the next one begin when it begins itself (its `next_early`): no bit depends on it.

    Args:
        kind: "merge" of attention's parts, with a product behind; "norm" with one behind; "product".
        num_rows: of the batch.
        inputs: of the product.
    """
    return inputs < SMALL_INPUTS and any(num_rows in rows for rows in _LET_BEGIN[kind])


@triton.jit
def wait_for_inputs(PDL: tl.constexpr, EARLY: tl.constexpr = True):
    """Wait until the kernels before have ended; `EARLY` lets the next one be made ready from now on."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        if EARLY:
            tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def let_next_begin(PDL: tl.constexpr):
    """Let the next kernel be made ready from now on, while the kernels before this one still run."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def prefetch(at, PDL: tl.constexpr):
    """Ask for the lines at these addresses, of weights, while the kernels before still run; nothing waits for them."""
    if PDL:
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [at], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def prefetch_piece(at, SIZE: tl.constexpr, PDL: tl.constexpr):
    """Ask for SIZE bytes of weights behind each other, as `prefetch`, by one thread: each such order takes a while."""
    if PDL:
        tl.inline_asm_elementwise(
            "{ .reg .pred first; .reg .u32 thread; mov.u32 thread, %tid.x; setp.eq.u32 first, thread, 0; "
            "@first cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0; }",
            "=r,l,r", [at, tl.cast(SIZE, tl.int32)], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@cache
def on_hopper(device: torch.device) -> bool:
    """Return whether kernels that use what Hopper GPUs alone have can run there."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


@cache
def shared_memory(device: torch.device) -> int:
    """Return how many bytes of shared memory a program may take; where kernels are interpreted, more than any takes."""
    if device.type != "cuda":
        return 1 << 30
    index = torch.cuda.current_device() if device.index is None else device.index
    most: int = driver.active.utils.get_device_properties(index)["max_shared_mem"]
    return most


@cache
def multiprocessors(device: torch.device) -> int:
    """Return how many multiprocessors a GPU has; where kernels are compiled without one, as many as an H100."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132


@cache
def overlap(device: torch.device) -> dict[str, bool]:
    """Return the launch options of a kernel that calls `wait_for_inputs`: on Hopper GPUs and later it starts early."""
    early = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
    return {"PDL": early, "launch_pdl": early}
