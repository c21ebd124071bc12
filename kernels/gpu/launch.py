"""How the kernels of a step follow each other: each may be launched before the one before it has ended.

With programmatic dependent launch a kernel's programs start while those of the kernel before still run. What doesn't
depend on them is done at once; then `wait_for_inputs` holds until all earlier kernels have ended and their results are
seen. A kernel that is launched so must wait before it reads or writes anything but weights.
"""

from functools import cache

import torch
import triton
import triton.language as tl


@triton.jit
def wait_for_inputs(PDL: tl.constexpr):
    """Let the next kernel start, and wait until the kernels before have ended."""
    if PDL > 1:
        tl.extra.cuda.gdc_launch_dependents()
    if PDL > 0:
        tl.extra.cuda.gdc_wait()


@triton.jit
def prefetch(pointers, PDL: tl.constexpr):
    """Bring the cache lines at these addresses into the second-level cache."""
    if PDL > 0:
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [pointers], dtype=tl.int32, is_pure=False, pack=1
        )


MODE = 2


@cache
def overlap(device: torch.device) -> dict[str, int]:
    """Return the launch options of a kernel that calls `wait_for_inputs`: on Hopper GPUs and later it starts early."""
    early = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
    return {"PDL": MODE if early else 0, "launch_pdl": early and MODE > 0}
