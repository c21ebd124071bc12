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
    """Of columns that stand WIDTH apart. Reductions, since splits and joins would move values between threads."""
    M: tl.constexpr = x.shape[0]
    BLOCK: tl.constexpr = x.shape[1]
    pairs = tl.reshape(x, [M, BLOCK // (2 * WIDTH), 2, WIDTH])
    second = tl.arange(0, 2)[None, None, :, None] == 1
    total = tl.sum(pairs, 2, keep_dims=True)
    difference = tl.sum(tl.where(second, -pairs, pairs), 2, keep_dims=True)
    return tl.reshape(tl.where(second, difference, total), [M, BLOCK])


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
