"""Matrix products where bits may depend on the number of rows: the fastest kernel for each size.

One row takes a matrix-vector kernel without matrix instructions, many rows take the library's product, and the others
the deterministic one, which is as fast there. Weights in slabs are for that one alone.
"""

import torch
import torch.nn.functional as F  # noqa: N812
import triton
import triton.language as tl

from specdec.kernels.activation import ACTIVATIONS
from specdec.kernels.gpu import linear as exact
from specdec.kernels.gpu.activation import act_mul, activate
from specdec.kernels.gpu.launch import overlap, wait_for_inputs
from specdec.kernels.gpu.linear import SMALL_BITS
from specdec.kernels.slabs import in_slabs

FEW_ROWS = 64
"""Up to here the deterministic product is as fast as the library's."""
SHORT_K, MANY_OUT = 2048, 32768
"""A matrix of shorter rows than this and more of them, a small model's head, takes the deterministic product."""


@triton.jit
def _gemv_kernel(
    x_ptr, w_ptr, bias_ptr, y_ptr, OUT: tl.constexpr, K: tl.constexpr, BIAS: tl.constexpr, GATED: tl.constexpr,
    ACTIVATION: tl.constexpr, BLOCK_OUT: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    col = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    at = tl.arange(0, BLOCK_K)
    w_at = w_ptr + (col % OUT).to(tl.int64)[:, None] * K + at[None, :]
    wait_for_inputs(PDL, (2 if GATED else 1) * OUT * K * w_ptr.dtype.element_ty.primitive_bitwidth <= SMALL_BITS)
    total = tl.zeros([BLOCK_OUT, BLOCK_K], tl.float32)
    up = tl.zeros([BLOCK_OUT, BLOCK_K], tl.float32)
    for k in range(0, K, BLOCK_K):
        there = at < K - k
        x = tl.load(x_ptr + k + at, mask=there, other=0.0).to(tl.float32)
        total += tl.load(w_at + k, mask=there[None, :], other=0.0).to(tl.float32) * x[None, :]
        if GATED:
            up += tl.load(w_at + OUT * K + k, mask=there[None, :], other=0.0).to(tl.float32) * x[None, :]
    dtype = y_ptr.dtype.element_ty
    y = tl.sum(total, 1)
    if BIAS:
        y += tl.load(bias_ptr + col % OUT).to(tl.float32)
    if GATED:
        u = tl.sum(up, 1)
        if BIAS:
            u += tl.load(bias_ptr + OUT + col % OUT).to(tl.float32)
        y = activate(y.to(dtype).to(tl.float32), ACTIVATION).to(dtype).to(tl.float32) * u.to(dtype).to(tl.float32)
    tl.store(y_ptr + col, y.to(dtype), mask=col < OUT)


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return x @ weight.T + bias: [N, in], [out, in], [out] or None → [N, out]; weights may be in slabs."""
    if _is_for_exact(x, weight):
        return exact.linear(x, weight, bias)
    return F.linear(x, weight, bias) if len(x) > FEW_ROWS else _gemv(x, weight, bias, None)


def gated_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str) -> torch.Tensor:
    """Return activation(gate) · up of a merged projection: [N, in], [2 I, in], [2 I] or None → [N, I]."""
    assert activation in ACTIVATIONS
    if _is_for_exact(x, weight):
        return exact.gated_linear(x, weight, bias, activation)
    if len(x) > FEW_ROWS:
        return act_mul(F.linear(x, weight, bias), activation)
    return _gemv(x, weight, bias, activation)


def _is_for_exact(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether the deterministic product is taken."""
    if in_slabs(weight):
        return True
    out, k = weight.shape
    return k < SHORT_K and out >= MANY_OUT if len(x) == 1 else len(x) <= FEW_ROWS


def _gemv(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str | None) -> torch.Tensor:
    gated = activation is not None
    out, k = len(weight) // (2 if gated else 1), weight.shape[1]
    y = torch.empty(1, out, dtype=x.dtype, device=x.device)
    block_out, block_k, warps = (4, 2048, 8) if k >= SHORT_K else (4, min(512, triton.next_power_of_2(k)), 4)
    _gemv_kernel[(triton.cdiv(out, block_out),)](
        x, weight, weight if bias is None else bias, y, out, k, bias is not None, gated, activation or "",
        block_out, block_k, num_warps=warps,
        **overlap(x.device),
    )  # fmt: skip
    return y
