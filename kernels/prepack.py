"""Weights in oneDNN's own order, for products on x86 CPUs. Knows matrices, no models.

A product of few rows is bound by reading the weight, and oneDNN reads one that lies as it wants it from front to back:
16 rows then cost little more than one, where BLAS, which reorders a part of the weight at every call, takes several
times as long (`benchmarks/linear_cpu.py` measures both). It is a second copy of the weight.
"""

import torch
from torch import Tensor

_ROWS = 16  # that the order is chosen for; all that were tried, from 4 to 256, chose the same


def can_prepack(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether weights of that kind can be prepacked: on an x86 CPU with AVX2 at least, by torch's oneDNN."""
    known = device.type == "cpu" and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    if not known or not torch.backends.cpu.get_cpu_capability().startswith("AVX"):
        return False
    return dtype == torch.float32 or (dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported())


def prepack(weight: Tensor) -> Tensor:
    """Return a weight [out, in] in oneDNN's order: opaque, but for `shape`, `dtype`, `copy_` and `to_dense`."""
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), _ROWS)
    return packed


def prepacked_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return x @ weight.T + bias, [N, out] contiguous, of a prepacked weight."""
    y: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return y
