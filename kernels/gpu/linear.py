"""Matrix products of packed rows with [out, in] weights, in Triton: a row's bits don't depend on how many there are.

Each element is one chain of matrix instructions over k = 0, 16, 32, … in fp32: no split over k, whatever the tile, and
the tile alone depends on the number of rows. Few rows are bound by the weight's bytes: narrow tiles put every
multiprocessor to work and several of their loads in flight.
"""

import torch
import triton
import triton.language as tl

from specdec.kernels.activation import ACTIVATIONS
from specdec.kernels.gpu.activation import gated
from specdec.kernels.gpu.launch import let_next_begin, lets_begin, overlap, prefetch, shared_memory, wait_for_inputs
from specdec.kernels.gpu.tiles import Tile, grid_of, row_stride, tile_at, tile_of
from specdec.kernels.gpu.tma import takes_tma, tma_linear
from specdec.kernels.slabs import SLAB, in_slabs

SMALL_BITS = tl.constexpr(8 * (16 << 20))
"""Bits of a matrix that takes little longer than its launch does, up to 16 MiB: its first lines are asked for while the
kernel before runs. A larger one is slower so, even behind a norm, which leaves the memory idle. The kernel behind is
made ready early, but for the product behind a large gated one, whose programs would take its room. Measured with
matrices of 0.7 to 3.5 MB and of 33 MB and more; nothing is known of those between."""


@triton.jit
def _first_lines(w_ptr, row, K: tl.constexpr):
    """Addresses of the first 2 KiB of rows [N] of a matrix, line by line: [lines, N]."""
    PER_LINE: tl.constexpr = 1024 // w_ptr.dtype.element_ty.primitive_bitwidth
    LINES: tl.constexpr = min(16, triton.next_power_of_2((K + PER_LINE - 1) // PER_LINE))
    at = tl.minimum(tl.arange(0, LINES) * PER_LINE, K - 1)
    return w_ptr + row.to(tl.int64)[None, :] * K + at[:, None]


@triton.jit
def _same_rows(at, ROWS: tl.constexpr):
    """A lone row, read once for all rows of a tile: if each read it, all would wait for the same few bytes."""
    return tl.broadcast_to(tl.load(at)[None, :], [ROWS, at.shape[0]])


@triton.jit
def _load_rows(x_at, k, at, row, num_rows, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """Step k of rows [ROWS], columns `at` [BLOCK_K] of it. What stands in rows past the last one is nobody's.

    As with a lone row, all programs would wait for the same few bytes if such rows were some row again: they are of
    another step each, or nothing where the columns are masked anyway. For tiles of 64 rows that cost more than it gave.
    """
    FEW: tl.constexpr = row.shape[0] <= 16
    if K % BLOCK_K == 0:
        if FEW:
            k += tl.where(row < num_rows, 0, row * BLOCK_K % K)
            k = tl.where(k < K, k, k - K)[:, None]
        x = tl.load(x_at + k)
    else:
        inside = (at < K - k)[None, :]
        if FEW:
            inside = inside & (row < num_rows)[:, None]
        x = tl.load(x_at + k, mask=inside, other=0.0)
    return x


@triton.jit
def _load_x(x_ptr, x_at, k, at, row, num_rows, K: tl.constexpr, BLOCK_K: tl.constexpr, LONE: tl.constexpr):
    """Step k of a tile's rows."""
    return _same_rows(x_ptr + k + at, row.shape[0]) if LONE else _load_rows(x_at, k, at, row, num_rows, K, BLOCK_K)


@triton.jit
def _load_weights(w_at, k, at, K: tl.constexpr, BLOCK_K: tl.constexpr, SLAB_SIZE: tl.constexpr, SLAB: tl.constexpr):
    """Step k of a tile's weights, [BLOCK_K, BLOCK_OUT]; `SLAB_SIZE` is 0 of those by rows."""
    if SLAB_SIZE > 0:
        w = tl.load(w_at + tl.multiple_of(tl.cast(k // SLAB, tl.int64) * SLAB_SIZE + k % SLAB, BLOCK_K))
    elif K % BLOCK_K == 0:
        w = tl.load(w_at + k)
    else:
        w = tl.load(w_at + k, mask=at[:, None] < K - k, other=0.0)
    return w


# Compiled for one row alone, the loads of x would not be pipelined.
@triton.jit(do_not_specialize=["num_rows", "next_early"])
def _linear_kernel(
    x_ptr, w_ptr, bias_ptr, y_ptr, num_rows, x_stride, next_early,
    OUT: tl.constexpr, K: tl.constexpr, BIAS: tl.constexpr, ACTIVATION: tl.constexpr, BLOCK_ROWS: tl.constexpr,
    BLOCK_OUT: tl.constexpr, BLOCK_K: tl.constexpr, LONE: tl.constexpr, SLAB: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A tile of a product, or with an activation of a gated one: then the weights of `up` stand behind the gate's.

    Rows of a weight have K columns behind each other, or `SLAB`, if that isn't 0: then it is in slabs.
    """
    GATED: tl.constexpr = ACTIVATION is not None
    WIDTH: tl.constexpr = SLAB if SLAB > 0 else K
    SLAB_SIZE: tl.constexpr = (2 if GATED else 1) * OUT * SLAB
    row_tile, out_tile = tile_at(num_rows, OUT, BLOCK_ROWS, BLOCK_OUT)
    row = row_tile * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    col = out_tile * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    at = tl.arange(0, BLOCK_K)
    x_at = x_ptr + (row % num_rows).to(tl.int64)[:, None] * x_stride + at[None, :]
    w_at = w_ptr + (col % OUT).to(tl.int64)[None, :] * WIDTH + at[:, None]
    up_at = w_at + OUT * WIDTH
    BITS: tl.constexpr = (2 if GATED else 1) * OUT * K * w_ptr.dtype.element_ty.primitive_bitwidth
    if BITS <= SMALL_BITS:
        prefetch(_first_lines(w_ptr, col % OUT, WIDTH), PDL)
        if GATED:
            prefetch(_first_lines(w_ptr, OUT + col % OUT, WIDTH), PDL)
    if next_early:
        let_next_begin(PDL)
    wait_for_inputs(PDL, not GATED or BITS <= SMALL_BITS)
    acc = tl.zeros([BLOCK_ROWS, BLOCK_OUT], tl.float32)
    up = acc
    for k in range(0, K, BLOCK_K):
        if GATED:  # each kind loads in the order in which it was timed
            x = _load_x(x_ptr, x_at, k, at, row, num_rows, K, BLOCK_K, LONE)
            w = _load_weights(w_at, k, at, K, BLOCK_K, SLAB_SIZE, SLAB)
            w_up = _load_weights(up_at, k, at, K, BLOCK_K, SLAB_SIZE, SLAB)
        else:
            w = _load_weights(w_at, k, at, K, BLOCK_K, SLAB_SIZE, SLAB)
            x = _load_x(x_ptr, x_at, k, at, row, num_rows, K, BLOCK_K, LONE)
        acc = tl.dot(x, w, acc, input_precision="ieee")
        if GATED:
            up = tl.dot(x, w_up, up, input_precision="ieee")
    if BIAS:
        acc += tl.load(bias_ptr + col % OUT)[None, :].to(tl.float32)
    if GATED and BIAS:
        up += tl.load(bias_ptr + OUT + col % OUT)[None, :].to(tl.float32)
    y = gated(acc, up, ACTIVATION, y_ptr.dtype.element_ty) if GATED else acc.to(y_ptr.dtype.element_ty)
    y_at = y_ptr + row.to(tl.int64)[:, None] * OUT + col[None, :]
    tl.store(y_at, y, mask=(row < num_rows)[:, None] & (col < OUT)[None, :])


def linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *, tile: Tile | None = None
) -> torch.Tensor:
    """Return x @ weight.T + bias.

    Args:
        x: [N, in]; rows may be strided, the last dimension is dense.
        weight: [out, in] contiguous, x's dtype: fp32, fp16 or bf16; or in slabs (`specdec.kernels.slabs`).
        bias: [out] or None.
        tile: how to cut the product; None takes `tile_of`, as it fits the device.

    Returns:
        [N, out], contiguous.
    """
    return _multiply(x, weight, bias, None, tile or _tile(x, weight, 1))


def gated_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str,
    *,
    tile: Tile | None = None,
) -> torch.Tensor:
    """Return activation(gate) · up of a merged gate-up projection, without writing gate and up.

    Both are rounded to the dtype before they are used, and activation(gate) too, as `linear` and `act_mul` do.

    Args:
        x: [N, in]; rows may be strided, the last dimension is dense.
        weight: [2 I, in] contiguous, the gate's rows first; or in slabs.
        bias: [2 I] or None.
        activation: one of `specdec.kernels.activation.ACTIVATIONS`.
        tile: how to cut the product; None takes `tile_of`, as it fits the device.

    Returns:
        [N, I], contiguous.
    """
    assert activation in ACTIVATIONS
    return _multiply(x, weight, bias, activation, tile or _tile(x, weight, 2))


def _multiply(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str | None, tile: Tile
) -> torch.Tensor:
    """A product, or with an activation a gated one."""
    (n, k), t, slab = x.shape, tile, SLAB if in_slabs(weight) else 0
    assert not slab or slab % t.k == 0
    out = len(weight) // (1 if activation is None else 2)
    y = torch.empty(n, out, dtype=x.dtype, device=x.device)
    if t.tma and n:
        tma_linear(x, weight, bias, y, t, activation)
    elif n:
        next_early = int(lets_begin("product", n, k))
        _linear_kernel[grid_of(n, out, t)](
            x, weight, weight if bias is None else bias, y, n, row_stride(x), next_early, out, k, bias is not None,
            activation, t.rows, t.out, t.k, n == 1 and k % t.k == 0, slab, num_warps=t.warps, num_stages=t.stages,
            enable_fp_fusion=False, **overlap(x.device),
        )  # fmt: skip
    return y


def _tile(x: torch.Tensor, weight: torch.Tensor, num_weights: int) -> Tile:
    """The tile of a product by so many matrices that stand behind each other, as it fits the device."""
    size, out = x.element_size(), len(weight) // num_weights
    n, k = x.shape
    chosen = tile_of(n, out, k, num_weights, size, takes_tma(x, weight))
    return chosen.fitting(shared_memory(x.device), num_weights, size)
