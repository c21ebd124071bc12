"""Weights in the order in which products read them: oneDNN's own on x86 CPUs, slabs on Hopper GPUs. No models here.

On a CPU a product of few rows is bound by reading the weight, and oneDNN reads one that lies as it wants it from front
to back: 16 rows then cost little more than one, where BLAS, which reorders a part of the weight at every call, takes
several times as long (`benchmarks/linear_cpu.py` measures both). Slabs are for the same (`specdec.kernels.slabs`).
Either is a second copy of the weight.
"""

import torch
from torch import Tensor

from specdec.kernels.slabs import fits_slabs, to_slabs

_ROWS = 16  # that the order is chosen for; all that were tried, from 4 to 256, chose the same
WHERE = "float32 and bfloat16 on x86 CPUs, and for 16 bits on Hopper GPUs"
"""What `can_prepack` says yes to."""


def can_prepack(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether weights of that kind can be prepacked.

    They can on an x86 CPU with AVX2 at least, by torch's oneDNN, and on a Hopper GPU those of 16 bits.
    """
    if device.type == "cuda":
        from specdec.kernels.gpu.launch import on_hopper

        return dtype in (torch.float16, torch.bfloat16) and on_hopper(device)
    known = device.type == "cpu" and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    if not known or not torch.backends.cpu.get_cpu_capability().startswith("AVX"):
        return False
    return dtype == torch.float32 or (dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported())


def gains_by_prepacking(weight: Tensor) -> bool:
    """Return whether a weight [out, in] that can be prepacked is to be: on a GPU large ones alone."""
    return weight.device.type == "cpu" or fits_slabs(weight)


def prepack(weight: Tensor) -> Tensor:
    """Return a weight [out, in] in the order in which products read it.

    On a CPU it is opaque, but for `shape`, `dtype` and `copy_`; on a GPU it is in slabs.
    """
    if weight.device.type != "cpu":
        return to_slabs(weight)
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), _ROWS)
    return packed


def prepacked_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return x @ weight.T + bias, [N, out] contiguous, of a weight that was prepacked on a CPU."""
    y: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return y
