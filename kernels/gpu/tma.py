"""Matrix products whose operands the tensor memory accelerator (TMA) loads, of a large model on Hopper GPUs.

One thread asks for a whole box of a matrix, which comes to shared memory as matrix instructions take it: no thread
computes addresses, and larger steps over k are under way. TMA takes longer to fill rows outside x with zeros than to
load rows, so some come twice instead, unless x fills no more than half of a tile. The bits are those of
`gpu/linear.py`, whose kernels are for all else: float32, few inputs, few products, other GPUs.
"""

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from specdec.kernels.gpu.activation import gated
from specdec.kernels.gpu.launch import on_hopper, overlap, prefetch_piece, wait_for_inputs
from specdec.kernels.gpu.tiles import Tile, grid_of, row_stride, tile_at
from specdec.kernels.slabs import SLAB, in_slabs

_OF_TWO = tl.constexpr(8192)
"""Bytes of each of two weights that a program asks for before it waits: of more, all programs ask for too many."""


@triton.jit
def _dot(x, w, acc, W_LEFT: tl.constexpr):
    """Put the product of rows [M, k] and weights [N, k] behind what is there: [M, N], or [N, M]."""
    if W_LEFT:
        acc = tl.dot(w, tl.trans(x), acc)
    else:
        acc = tl.dot(x, tl.trans(w), acc)
    return acc


@triton.jit
def _add_bias(acc, bias_at, W_LEFT: tl.constexpr):
    """Add each output's bias [N]."""
    bias = tl.load(bias_at).to(tl.float32)
    if W_LEFT:
        acc += bias[:, None]
    else:
        acc += bias[None, :]
    return acc


@triton.jit
def _ask_ahead(
    w_ptr, first_out, OUT: tl.constexpr, GATED: tl.constexpr, BLOCK_OUT: tl.constexpr, SLAB: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Ask for the tile's part of the first slab, which is one piece of memory; of two weights for less."""
    at = w_ptr + tl.cast(first_out, tl.int64) * SLAB
    SIZE: tl.constexpr = min(BLOCK_OUT, OUT) * SLAB * 2
    if GATED:
        prefetch_piece(at, min(SIZE, _OF_TWO), PDL)
        prefetch_piece(at + OUT * SLAB, min(SIZE, _OF_TWO), PDL)
    else:
        prefetch_piece(at, SIZE, PDL)


@triton.jit
def _rows_of(first, num_rows, BLOCK_ROWS: tl.constexpr, HALVES: tl.constexpr):
    """Which row each one of a tile is; with `HALVES` as `_in_halves` has them."""
    row = tl.arange(0, BLOCK_ROWS)
    if HALVES:
        HALF: tl.constexpr = BLOCK_ROWS // 2
        twice = tl.where(num_rows > HALF, tl.maximum(BLOCK_ROWS - num_rows, 0), 0)
        row -= tl.where(row < HALF, 0, twice)
    return first + row


@triton.jit(do_not_specialize=["num_rows"])
def _tma_kernel(
    x_desc, w_desc, w_ptr, bias_ptr, y_ptr, num_rows, OUT: tl.constexpr, K: tl.constexpr, BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_OUT: tl.constexpr, BLOCK_K: tl.constexpr,
    W_LEFT: tl.constexpr, SLAB: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A tile of a product; with an activation of a gated one, as `_linear_kernel`.

    The last tile of rows ends where x does. A warp group's matrix instructions have 64 rows of the left operand: where
    x has fewer than those, or than a tile, the weights are at the left (`W_LEFT`). Where a tile has fewer outputs, too,
    the compiler takes those of single warps. If `SLAB` isn't 0 the weights are slabs, one behind another.
    """
    GATED: tl.constexpr = ACTIVATION is not None
    row_tile, out_tile = tile_at(num_rows, OUT, BLOCK_ROWS, BLOCK_OUT)
    first_out = out_tile * BLOCK_OUT
    if OUT % BLOCK_OUT and OUT > BLOCK_OUT:  # the last tile of outputs ends where these do, too
        first_out = tl.minimum(first_out, OUT - BLOCK_OUT)
    first_row = tl.minimum(row_tile * BLOCK_ROWS, tl.maximum(num_rows - BLOCK_ROWS, 0))
    if SLAB > 0 and BLOCK_ROWS <= 64:  # more rows' programs come one behind the other
        _ask_ahead(w_ptr, first_out, OUT, GATED, BLOCK_OUT, SLAB, PDL)
    wait_for_inputs(PDL, not GATED)  # behind a large gated product the next one would take its room
    shape: tl.constexpr = [BLOCK_OUT, BLOCK_ROWS] if W_LEFT else [BLOCK_ROWS, BLOCK_OUT]
    acc = tl.zeros(shape, tl.float32)
    up = acc
    for k in range(0, K, BLOCK_K):
        at, col = first_out, k
        if SLAB > 0:
            at, col = k // SLAB * ((2 if GATED else 1) * OUT) + first_out, k % SLAB
        w = w_desc.load([at, col])
        if GATED:
            w_up = w_desc.load([OUT + at, col])
        if W_LEFT:
            x = tl.reshape(x_desc.load([0, first_row, k]), [BLOCK_ROWS, BLOCK_K])
        else:  # from a box of halves it would go through registers
            x = x_desc.load([first_row, k])
        acc = _dot(x, w, acc, W_LEFT)
        if GATED:
            up = _dot(x, w_up, up, W_LEFT)
    row, col = _rows_of(first_row, num_rows, BLOCK_ROWS, W_LEFT), first_out + tl.arange(0, BLOCK_OUT)
    if BIAS:
        acc = _add_bias(acc, bias_ptr + col % OUT, W_LEFT)
    if GATED and BIAS:
        up = _add_bias(up, bias_ptr + OUT + col % OUT, W_LEFT)
    y = gated(acc, up, ACTIVATION, y_ptr.dtype.element_ty) if GATED else acc.to(y_ptr.dtype.element_ty)
    y_at = y_ptr + row.to(tl.int64)[:, None] * OUT + col[None, :]
    there = (row < num_rows)[:, None] & (col < OUT)[None, :]
    if W_LEFT:
        y_at, there = tl.trans(y_at), tl.trans(there)
    tl.store(y_at, y, mask=there)


def takes_tma(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Return whether these are operands of 16 bits, on a Hopper GPU, with rows at addresses that TMA can load from."""
    stride, k = row_stride(x), x.shape[1]
    if x.element_size() != 2 or stride < k or not on_hopper(x.device):
        return False
    return all(at % 16 == 0 for at in (x.data_ptr(), weight.data_ptr(), 2 * stride, 2 * k))


def _in_halves(x: torch.Tensor, rows: int, k: int) -> TensorDescriptor:
    """Describe tiles of so many rows as two halves: where x has fewer, but more than a half, the second ends as x does.

    Rows that are in both come twice, and are computed and stored twice, the same. Behind up to half of a tile's rows
    there are zeros after all: few rows have time for them.
    """
    (n, num_inputs), half, stride = x.shape, rows // 2, row_stride(x)
    apart = min(half, n - half) if n > half else half
    shape = [2, n - apart, num_inputs] if n > half else [1, n, num_inputs]
    return TensorDescriptor(x, shape, [apart * stride, stride, 1], [2, half, k])


def tma_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    y: torch.Tensor,
    tile: Tile,
    activation: str | None,
) -> None:
    """Write x @ weight.T + bias to y, or activation(gate) · up of a merged projection, as `gpu/linear.py` does.

    Args:
        x: [N, in] fp16 or bf16, N ≥ 1, at addresses that `takes_tma`.
        weight: [out, in], or with an activation [2 out, in], the gate's rows first; or in slabs.
        bias: [out] or [2 out], or None.
        y: [N, out] contiguous.
        tile: how to cut the product.
        activation: one of `specdec.kernels.activation.ACTIVATIONS`, or None.
    """
    (n, k), out, t = x.shape, y.shape[1], tile
    w_left = n < t.rows or t.rows < 64
    rows = _in_halves(x, t.rows, t.k) if w_left else TensorDescriptor(x, [n, k], [row_stride(x), 1], [t.rows, t.k])
    slab = SLAB if in_slabs(weight) else 0
    rows_of = weight.transpose(0, 1).flatten(0, 1) if slab else weight
    weights = TensorDescriptor(rows_of, list(rows_of.shape), [slab or k, 1], [t.out, t.k])
    _tma_kernel[grid_of(n, out, t)](
        rows, weights, weight, weight if bias is None else bias, y, n, out, k, bias is not None, activation,
        t.rows, t.out, t.k, w_left, slab, num_warps=t.warps, num_stages=t.stages, enable_fp_fusion=False,
        **overlap(x.device),
    )  # fmt: skip
