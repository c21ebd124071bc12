"""Gated activations of a merged gate-up projection, on a GPU."""

import torch
import triton
import triton.language as tl

from specdec.kernels.activation import ACTIVATIONS

_BLOCK = 1024


@triton.jit
def _times_sigmoid(x, y):
    """x · sigmoid(y), by as few instructions as it takes: nothing else runs beside those behind a gated product."""
    return x / (1.0 + tl.exp(-y))  # 0 where exp overflows, as in torch


@triton.jit
def activate(x, ACTIVATION: tl.constexpr):
    """Apply an activation to x, fp32 or fp64."""
    if ACTIVATION == "relu":
        return tl.where(x <= 0, 0.0, x)  # NaN stays NaN, as in torch
    elif ACTIVATION == "gelu":
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif ACTIVATION == "gelu_pytorch_tanh":
        # (1 + tanh(y)) / 2 is sigmoid(2 y); the factor is 2 √(2 / π).
        return _times_sigmoid(x, 1.5957691216057308 * (x + 0.044715 * x * x * x))
    else:
        return _times_sigmoid(x, x)


@triton.jit
def gated(gate, up, ACTIVATION: tl.constexpr, dtype: tl.constexpr):
    """Return activation(gate) · up of sums in fp32, each rounded to the dtype before it is used."""
    active = activate(gate.to(dtype).to(tl.float32), ACTIVATION).to(dtype)
    return (active.to(tl.float32) * up.to(dtype).to(tl.float32)).to(dtype)


@triton.jit
def _act_mul_kernel(
    gate_up_ptr, out_ptr, gate_up_row, WIDTH,
    ACTIVATION: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = col < WIDTH
    gate = tl.load(gate_up_ptr + row * gate_up_row + col, mask=mask, other=0)
    up = tl.load(gate_up_ptr + row * gate_up_row + WIDTH + col, mask=mask, other=0)
    activated = activate(gate.to(WIDE), ACTIVATION).to(gate.dtype)
    out = (activated.to(WIDE) * up.to(WIDE)).to(gate.dtype)
    tl.store(out_ptr + row * WIDTH + col, out, mask=mask)


def act_mul(gate_up: torch.Tensor, activation: str) -> torch.Tensor:
    """Return activation(gate) · up, activation(gate) rounded to the dtype before the product, as torch does.

    Args:
        gate_up: [N, 2 I], the gate in the first half; rows may be strided, the last dimension is dense.
        activation: one of `specdec.kernels.activation.ACTIVATIONS`.

    Returns:
        [N, I], gate_up's dtype, contiguous.

    Raises:
        ValueError: the activation is unknown, or gate_up has another shape.
    """
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation {activation!r} is unknown; known: {', '.join(sorted(ACTIVATIONS))}")
    if gate_up.dim() != 2 or gate_up.shape[1] % 2 or gate_up.stride(1) != 1:
        raise ValueError(f"gate_up must be [N, 2 I] with dense rows, not {list(gate_up.shape)}, {gate_up.stride()}")
    n, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(n, width, dtype=gate_up.dtype, device=gate_up.device)
    wide = tl.float64 if gate_up.dtype == torch.float64 else tl.float32
    grid = (n, triton.cdiv(width, _BLOCK))
    _act_mul_kernel[grid](gate_up, out, gate_up.stride(0), width, activation, wide, _BLOCK)
    return out
