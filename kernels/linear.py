"""Matrix product of packed rows with a weight in the usual [out, in] layout."""

import torch
import torch.nn.functional as F  # noqa: N812 - the field's name for it

from specdec.kernels.activation import act_mul
from specdec.kernels.prepack import prepacked_linear
from specdec.kernels.slabs import from_slabs, in_slabs

MANY_ROWS = 192
"""With so many rows packing the weight costs less than turning the result around."""


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return x @ weight.T + bias.

    On a CPU in fp32 or fp64 the product of fewer than MANY_ROWS is taken as (weight @ x.T).T: BLAS then streams the
    large operand once and packs the small one, where the other order repacks the weight at every call. One row is
    padded to two, since GEMM reads the weight faster than GEMV does (benchmarks/linear_cpu.py measures both).

    Args:
        x: [N, in].
        weight: [out, in], same dtype; or what `specdec.kernels.prepack` makes of it.
        bias: [out] or None.

    Returns:
        [N, out], contiguous.
    """
    if weight.is_mkldnn:
        return prepacked_linear(x, weight, bias)
    if in_slabs(weight):
        weight = from_slabs(weight)
    n = x.shape[0]
    if x.device.type != "cpu" or x.dtype not in (torch.float32, torch.float64) or n >= MANY_ROWS:
        return F.linear(x, weight, bias)
    rows = x if n != 1 else x.expand(2, -1).contiguous()
    y = (weight @ rows.t()).t()[:n].contiguous()  # [N, out]
    return y if bias is None else y.add_(bias)


def gated_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str) -> torch.Tensor:
    """Return activation(gate) · up of a merged gate-up projection.

    Args:
        x: [N, in].
        weight: [2 I, in], the gate's rows first; same dtype; or what `specdec.kernels.prepack` makes of it.
        bias: [2 I] or None.
        activation: one of `specdec.kernels.activation.ACTIVATIONS`.

    Returns:
        [N, I].
    """
    return act_mul(linear(x, weight, bias), activation)
