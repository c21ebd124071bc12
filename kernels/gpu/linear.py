"""Matrix products of packed rows with [out, in] weights, in Triton: a row's bits don't depend on how many there are.

Each element is one chain of matrix instructions over k = 0, 16, 32, … in fp32: no split over k, whatever the tile, and
the tile alone depends on the number of rows. Few rows are bound by the weight's bytes: narrow tiles put every
multiprocessor to work and several of their loads in flight.
"""

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl

from specdec.kernels.activation import ACTIVATIONS
from specdec.kernels.gpu.activation import activate
from specdec.kernels.gpu.launch import overlap, prefetch, shared_memory, wait_for_inputs

SMALL_BITS = tl.constexpr(8 * (16 << 20))
"""Bits of a matrix that takes little longer than its launch does, up to 16 MiB: its first lines are asked for while the
kernel before runs. A larger one is slower so, even behind a norm, which leaves the memory idle. The kernel behind is
made ready early, but for the product behind a large gated one, whose programs would take its room. Measured with
matrices of 0.7 to 3.5 MB and of 33 MB and more; nothing is known of those between."""


@dataclass(frozen=True, slots=True)
class Tile:
    """How a product is cut: a program's rows, outputs and step over k; its warps and the loads in flight."""

    rows: int
    out: int
    k: int
    warps: int
    stages: int

    def num_bytes(self, num_weights: int = 1, itemsize: int = 2) -> int:
        """Bytes of shared memory that its loads in flight take at most."""
        return (self.rows + self.out * num_weights) * self.k * self.stages * itemsize

    def fitting(self, room: int, num_weights: int = 1, itemsize: int = 2) -> "Tile":
        """The same with fewer loads in flight, and then smaller steps over k, as `room` bytes of shared memory need it.

        A sum's bits depend on neither.
        """
        tile = self
        while tile.num_bytes(num_weights, itemsize) > room and (tile.stages > 1 or tile.k > 16):
            fewer = tile.stages > 3 or tile.k <= 16
            tile = replace(tile, stages=tile.stages - 1) if fewer else replace(tile, k=tile.k // 2)
        return tile


_MANY_ROWS = {
    1: (Tile(128, 256, 64, 8, 3), Tile(128, 128, 64, 8, 4), Tile(128, 64, 64, 4, 4), Tile(64, 64, 128, 4, 5)),
    2: (Tile(128, 128, 64, 8, 4), Tile(128, 64, 64, 8, 4), Tile(64, 64, 64, 4, 4)),
}
"""Tiles of more than 64 rows by the number of weights, the one with the fewest bytes an operation first."""
HALF_BUSY = 66
"""Tiles from which on half of a GPU's multiprocessors have one; where they are fewer, smaller tiles are faster."""


def tile_of(num_rows: int, out: int, k: int, num_weights: int = 1, itemsize: int = 2) -> Tile:
    """Choose the tile for [num_rows, k] by `num_weights` matrices [out, k] of `itemsize` bytes an element.

    Up to 64 rows of a large model they were the fastest in captured steps on an H200 (`engine_gpu.py tiles` tries those
    beside them), others by themselves on an H100 (`kernels_gpu.py products --search`).
    """
    tile = _tile_of_two_bytes(num_rows, out, k, num_weights)
    return tile if itemsize <= 2 else replace(tile, k=tile.k // 2)  # the loads in flight fill the shared memory


def _tile_of_two_bytes(num_rows: int, out: int, k: int, num_weights: int) -> Tile:
    if num_rows > 64:
        tiles = _MANY_ROWS[num_weights]
        wide = [t for t in tiles if -(-num_rows // t.rows) * -(-out // t.out) >= HALF_BUSY]
        return (wide or tiles[-1:])[0]
    rows = 16 if num_rows <= 16 else 64  # a tile of 32 rows was slower than one of 64 that is half empty
    if out * num_weights >= 32768 and k < 1024:  # a small model's head
        return Tile(rows, 128 if rows == 16 else 64, 64, 8 if rows == 16 else 4, 3 if rows == 16 else 4)
    if k < 2048:
        return Tile(rows, 16 if rows == 64 or k > 1024 else 32, 256 if k > 1024 else 128, 4, 4)
    if rows == 64:
        if num_weights == 2 or out >= 32768:
            return Tile(64, 64 if num_weights == 2 else 128, 128, 4, 4)
        return Tile(64, 64, 128, 4, 5) if out > 4096 else Tile(64, 32, 128, 4, 8)
    if num_weights == 2 or out >= 32768:
        return Tile(16, 64, 256, 4, 3)
    if out > 4096:
        return Tile(16, 32, 256, 2, 4) if num_rows == 1 else Tile(16, 64, 256, 4, 4)
    return Tile(16, 32, 256, 2, 6)


@triton.jit
def _first_lines(w_ptr, row, K: tl.constexpr):
    """Addresses of the first 2 KiB of rows [N] of a matrix, line by line: [lines, N]."""
    PER_LINE: tl.constexpr = 1024 // w_ptr.dtype.element_ty.primitive_bitwidth
    LINES: tl.constexpr = min(16, triton.next_power_of_2((K + PER_LINE - 1) // PER_LINE))
    at = tl.minimum(tl.arange(0, LINES) * PER_LINE, K - 1)
    return w_ptr + row.to(tl.int64)[None, :] * K + at[:, None]


@triton.jit
def tile_at(num_rows, num_out, ROWS: tl.constexpr, OUT: tl.constexpr):
    """Which tile a program takes: eight row tiles share a column of weights while it is in the cache."""
    wide, high = tl.cdiv(num_out, OUT), tl.cdiv(num_rows, ROWS)
    program = tl.program_id(0)
    first = program // (8 * wide) * 8
    height = tl.minimum(high - first, 8)
    inside = program % (8 * wide)
    return first + inside % height, inside // height


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


@triton.jit(do_not_specialize=["num_rows"])  # compiled for one row alone, the loads of x would not be pipelined
def _linear_kernel(
    x_ptr, w_ptr, bias_ptr, y_ptr, num_rows, x_stride, OUT: tl.constexpr, K: tl.constexpr, BIAS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_OUT: tl.constexpr, BLOCK_K: tl.constexpr, LONE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row_tile, out_tile = tile_at(num_rows, OUT, BLOCK_ROWS, BLOCK_OUT)
    row = row_tile * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    col = out_tile * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    at = tl.arange(0, BLOCK_K)
    x_at = x_ptr + (row % num_rows).to(tl.int64)[:, None] * x_stride + at[None, :]
    w_at = w_ptr + (col % OUT).to(tl.int64)[None, :] * K + at[:, None]
    if OUT * K * w_ptr.dtype.element_ty.primitive_bitwidth <= SMALL_BITS:
        prefetch(_first_lines(w_ptr, col % OUT, K), PDL)
    wait_for_inputs(PDL)
    acc = tl.zeros([BLOCK_ROWS, BLOCK_OUT], tl.float32)
    for k in range(0, K, BLOCK_K):
        if K % BLOCK_K == 0:
            w = tl.load(w_at + k)
        else:
            w = tl.load(w_at + k, mask=at[:, None] < K - k, other=0.0)
        x = _same_rows(x_ptr + k + at, BLOCK_ROWS) if LONE else _load_rows(x_at, k, at, row, num_rows, K, BLOCK_K)
        acc = tl.dot(x, w, acc, input_precision="ieee")
    if BIAS:
        acc += tl.load(bias_ptr + col % OUT)[None, :].to(tl.float32)
    y_at = y_ptr + row.to(tl.int64)[:, None] * OUT + col[None, :]
    tl.store(y_at, acc.to(y_ptr.dtype.element_ty), mask=(row < num_rows)[:, None] & (col < OUT)[None, :])


@triton.jit(do_not_specialize=["num_rows"])
def _gated_linear_kernel(
    x_ptr, w_ptr, bias_ptr, y_ptr, num_rows, x_stride, OUT: tl.constexpr, K: tl.constexpr, BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_OUT: tl.constexpr, BLOCK_K: tl.constexpr,
    LONE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row_tile, out_tile = tile_at(num_rows, OUT, BLOCK_ROWS, BLOCK_OUT)
    row = row_tile * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    col = out_tile * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    at = tl.arange(0, BLOCK_K)
    x_at = x_ptr + (row % num_rows).to(tl.int64)[:, None] * x_stride + at[None, :]
    gate_at = w_ptr + (col % OUT).to(tl.int64)[None, :] * K + at[:, None]
    up_at = gate_at + OUT * K
    EARLY: tl.constexpr = 2 * OUT * K * w_ptr.dtype.element_ty.primitive_bitwidth <= SMALL_BITS
    if EARLY:
        prefetch(_first_lines(w_ptr, col % OUT, K), PDL)
        prefetch(_first_lines(w_ptr, OUT + col % OUT, K), PDL)
    wait_for_inputs(PDL, EARLY)
    gate = tl.zeros([BLOCK_ROWS, BLOCK_OUT], tl.float32)
    up = tl.zeros([BLOCK_ROWS, BLOCK_OUT], tl.float32)
    for k in range(0, K, BLOCK_K):
        x = _same_rows(x_ptr + k + at, BLOCK_ROWS) if LONE else _load_rows(x_at, k, at, row, num_rows, K, BLOCK_K)
        if K % BLOCK_K == 0:
            g, u = tl.load(gate_at + k), tl.load(up_at + k)
        else:
            g = tl.load(gate_at + k, mask=at[:, None] < K - k, other=0.0)
            u = tl.load(up_at + k, mask=at[:, None] < K - k, other=0.0)
        gate = tl.dot(x, g, gate, input_precision="ieee")
        up = tl.dot(x, u, up, input_precision="ieee")
    if BIAS:
        gate += tl.load(bias_ptr + col % OUT)[None, :].to(tl.float32)
        up += tl.load(bias_ptr + OUT + col % OUT)[None, :].to(tl.float32)
    dtype = y_ptr.dtype.element_ty
    active = activate(gate.to(dtype).to(tl.float32), ACTIVATION).to(dtype)
    y = active.to(tl.float32) * up.to(dtype).to(tl.float32)
    y_at = y_ptr + row.to(tl.int64)[:, None] * OUT + col[None, :]
    tl.store(y_at, y.to(dtype), mask=(row < num_rows)[:, None] & (col < OUT)[None, :])


def linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *, tile: Tile | None = None
) -> torch.Tensor:
    """Return x @ weight.T + bias.

    Args:
        x: [N, in]; rows may be strided, the last dimension is dense.
        weight: [out, in] contiguous, x's dtype: fp32, fp16 or bf16.
        bias: [out] or None.
        tile: how to cut the product; None takes `tile_of`, as it fits the device.

    Returns:
        [N, out], contiguous.
    """
    (out, k), n = weight.shape, len(x)
    y = torch.empty(n, out, dtype=x.dtype, device=x.device)
    if n:
        itemsize = x.element_size()
        t = tile or tile_of(n, out, k, itemsize=itemsize).fitting(shared_memory(x.device), 1, itemsize)
        _linear_kernel[_grid(n, out, t)](
            x, weight, weight if bias is None else bias, y, n, _row_stride(x), out, k, bias is not None,
            t.rows, t.out, t.k, n == 1 and k % t.k == 0, num_warps=t.warps, num_stages=t.stages, enable_fp_fusion=False,
            **overlap(x.device),
        )  # fmt: skip
    return y


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
        weight: [2 I, in] contiguous, the gate's rows first.
        bias: [2 I] or None.
        activation: one of `specdec.kernels.activation.ACTIVATIONS`.
        tile: how to cut the product; None takes `tile_of`, as it fits the device.

    Returns:
        [N, I], contiguous.
    """
    assert activation in ACTIVATIONS
    out, k, n = len(weight) // 2, weight.shape[1], len(x)
    y = torch.empty(n, out, dtype=x.dtype, device=x.device)
    if n:
        itemsize = x.element_size()
        t = tile or tile_of(n, out, k, 2, itemsize).fitting(shared_memory(x.device), 2, itemsize)
        _gated_linear_kernel[_grid(n, out, t)](
            x, weight, weight if bias is None else bias, y, n, _row_stride(x), out, k, bias is not None, activation,
            t.rows, t.out, t.k, n == 1 and k % t.k == 0, num_warps=t.warps, num_stages=t.stages, enable_fp_fusion=False,
            **overlap(x.device),
        )  # fmt: skip
    return y


def _grid(num_rows: int, out: int, t: Tile) -> tuple[int]:
    return (triton.cdiv(num_rows, t.rows) * triton.cdiv(out, t.out),)


def _row_stride(x: torch.Tensor) -> int:
    """The stride of a row; torch leaves that of a lone row arbitrary, and Triton compiles by its divisibility."""
    return x.stride(0) if len(x) > 1 else x.shape[1]
