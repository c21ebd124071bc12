"""Spreads what heads hold over their channels, on a GPU; the definition is `kernels/spread.py`."""

import torch
import triton
import triton.language as tl

from specdec.kernels.spread import spread_size

_HEADS = 2  # a program, which is one warp: sums of two then need no barrier


@triton.jit
def spread_values(x, SIZE: tl.constexpr):
    """Multiply each block of SIZE columns of x, [M, BLOCK] in fp32 or fp64, by the normalized Hadamard matrix.

    Sums of two, each in the order of the reference: the same bits.
    """
    for i in tl.static_range(16):
        if (1 << i) < SIZE:
            x = _sums_and_differences(x, 1 << i)
    return x * (SIZE**-0.5)


@triton.jit
def _sums_and_differences(x, WIDTH: tl.constexpr):
    """Of columns that stand WIDTH apart.

    Splits and joins would move values between threads, so a reduction of their bits says what the other of two columns
    holds: a sum of integers less one of them is the other one.
    """
    M: tl.constexpr = x.shape[0]
    BLOCK: tl.constexpr = x.shape[1]
    BITS: tl.constexpr = tl.int64 if x.dtype == tl.float64 else tl.int32
    pairs = tl.reshape(x, [M, BLOCK // (2 * WIDTH), 2, WIDTH])
    bits = pairs.to(BITS, bitcast=True)
    other = (tl.sum(bits, 2, keep_dims=True) - bits).to(x.dtype, bitcast=True)
    sign = tl.where(tl.arange(0, 2) == 1, -1.0, 1.0).to(x.dtype)[None, None, :, None]
    return tl.reshape(tl.fma(pairs, tl.broadcast_to(sign, pairs.shape), other), [M, BLOCK])


@triton.jit
def _spread_kernel(
    x_ptr, out_ptr, rows,
    D: tl.constexpr, SIZE: tl.constexpr, WIDE: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * HEADS + tl.arange(0, HEADS)[:, None]
    col = tl.arange(0, BLOCK)[None, :]
    mask = (row < rows) & (col < D)
    x = tl.load(x_ptr + row * D + col, mask=mask, other=0)
    tl.store(out_ptr + row * D + col, spread_values(x.to(WIDE), SIZE).to(x.dtype), mask=mask)


def spread(x: torch.Tensor) -> torch.Tensor:
    """Multiply each head by a normalized Hadamard matrix, as `specdec.kernels.spread.spread` does, bit for bit.

    Args:
        x: [..., D] of any floating dtype.

    Returns:
        x's shape and dtype, contiguous.
    """
    dim = x.shape[-1]
    dense = x.contiguous()
    out = torch.empty_like(dense)
    rows = dense.numel() // dim
    _spread_kernel[(triton.cdiv(rows, _HEADS),)](
        dense, out, rows,
        D=dim, SIZE=spread_size(dim), HEADS=_HEADS, BLOCK=triton.next_power_of_2(dim),
        WIDE=tl.float64 if x.dtype == torch.float64 else tl.float32, num_warps=1,
    )  # fmt: skip
    return out
