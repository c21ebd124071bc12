"""How the kernels of a step follow each other: each is launched while the one before it ends.

With programmatic dependent launch a kernel is made ready before the kernels before it have ended; `wait_for_inputs`
holds until they have, and their results are seen. A kernel that is launched so must wait before it reads or writes
anything but weights.
"""

from functools import cache

import torch
import triton
import triton.language as tl


@triton.jit
def wait_for_inputs(PDL: tl.constexpr):
    """Wait until the kernels before have ended."""
    if PDL:
        tl.extra.cuda.gdc_wait()


@cache
def overlap(device: torch.device) -> dict[str, bool]:
    """Return the launch options of a kernel that calls `wait_for_inputs`: on Hopper GPUs and later it starts early."""
    early = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
    return {"PDL": early, "launch_pdl": early}
