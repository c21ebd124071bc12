"""One step of a recurrent draft head, in Triton; reference and contract in `kernels/cell.py`.

Two launches: norms, product with U, bias and SiLU; product with D, bias and sum. The norms scale what the products of
the plain states and embeddings come to, so that no program waits for them. Each warp sums a part of the inputs: a chain
of matrix instructions over all of them is what a level would wait for.
"""

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.kernels.cell import EPS, check_shapes
from specdec.kernels.gpu.activation import activate
from specdec.kernels.gpu.launch import overlap, wait_for_inputs
from specdec.kernels.gpu.tiles import Tile, tile_at


@triton.jit
def _scale(squares, H: tl.constexpr, EPS: tl.constexpr):
    """[ROWS, 1]: one over the root mean square of rows whose squares these are, [SLICES, ROWS, K]."""
    return tl.rsqrt(tl.sum(tl.sum(squares, 2), 0) / H + EPS)[:, None]


@triton.jit(do_not_specialize=["num_rows", "num_paths", "num_above", "found_row"])
def _up_kernel(
    states_ptr, above_ptr, found_ptr, last_ptr, embedding_ptr, w_ptr, bias_ptr, y_ptr,
    num_rows, num_paths, num_above, found_row,
    OUT: tl.constexpr, H: tl.constexpr, EPS: tl.constexpr,
    SLICES: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_OUT: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row_tile, out_tile = tile_at(num_rows, OUT, BLOCK_ROWS, BLOCK_OUT)
    row = row_tile * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    col = out_tile * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    at = tl.arange(0, SLICES)[:, None, None] * BLOCK_K + tl.arange(0, BLOCK_K)[None, None, :]  # [SLICES, 1, BLOCK_K]
    across = tl.trans(at, 0, 2, 1)
    there = row < num_rows
    tree, path = row % num_rows // num_paths, row % num_rows % num_paths
    above, last = tl.load(above_ptr + path), tl.load(last_ptr + path)
    w_at = w_ptr + (col % OUT).to(tl.int64)[None, None, :] * (2 * H) + across
    wait_for_inputs(PDL)
    token = tl.load(found_ptr + tree.to(tl.int64) * found_row + last)
    s_at = states_ptr + (tree.to(tl.int64) * num_above + above)[None, :, None] * H + at
    e_at = embedding_ptr + token[None, :, None] * H + at
    from_state = tl.zeros([SLICES, BLOCK_ROWS, BLOCK_OUT], tl.float32)
    from_token = tl.zeros([SLICES, BLOCK_ROWS, BLOCK_OUT], tl.float32)
    s_squares = tl.zeros([SLICES, BLOCK_ROWS, BLOCK_K], tl.float32)
    e_squares = tl.zeros([SLICES, BLOCK_ROWS, BLOCK_K], tl.float32)
    for k in range(0, H, SLICES * BLOCK_K):
        inside = there[None, :, None] & (at < H - k)
        s = tl.load(s_at + k, mask=inside, other=0.0)
        e = tl.load(e_at + k, mask=inside, other=0.0)
        ws = tl.load(w_at + k, mask=across < H - k, other=0.0)
        we = tl.load(w_at + H + k, mask=across < H - k, other=0.0)
        from_state = tl.dot(s, ws, from_state, input_precision="ieee")
        from_token = tl.dot(e, we, from_token, input_precision="ieee")
        s_squares += s.to(tl.float32) * s.to(tl.float32)
        e_squares += e.to(tl.float32) * e.to(tl.float32)
    x = tl.sum(from_state, 0) * _scale(s_squares, H, EPS) + tl.sum(from_token, 0) * _scale(e_squares, H, EPS)
    x += tl.load(bias_ptr + col % OUT)[None, :].to(tl.float32)
    y = activate(x, "silu").to(y_ptr.dtype.element_ty)
    y_at = y_ptr + row.to(tl.int64)[:, None] * OUT + col[None, :]
    tl.store(y_at, y, mask=there[:, None] & (col < OUT)[None, :])


@triton.jit(do_not_specialize=["num_rows", "num_paths", "num_above"])
def _down_kernel(
    x_ptr, w_ptr, bias_ptr, states_ptr, above_ptr, y_ptr,
    num_rows, num_paths, num_above,
    H: tl.constexpr, K: tl.constexpr,
    SLICES: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_OUT: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row_tile, out_tile = tile_at(num_rows, H, BLOCK_ROWS, BLOCK_OUT)
    row = row_tile * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    col = out_tile * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    at = tl.arange(0, SLICES)[:, None, None] * BLOCK_K + tl.arange(0, BLOCK_K)[None, None, :]  # [SLICES, 1, BLOCK_K]
    across = tl.trans(at, 0, 2, 1)
    there = row < num_rows
    tree, path = row % num_rows // num_paths, row % num_rows % num_paths
    before = tree.to(tl.int64) * num_above + tl.load(above_ptr + path)
    x_at = x_ptr + row.to(tl.int64)[None, :, None] * K + at
    w_at = w_ptr + (col % H).to(tl.int64)[None, None, :] * K + across
    wait_for_inputs(PDL)
    parts = tl.zeros([SLICES, BLOCK_ROWS, BLOCK_OUT], tl.float32)
    for k in range(0, K, SLICES * BLOCK_K):
        x = tl.load(x_at + k, mask=there[None, :, None] & (at < K - k), other=0.0)
        w = tl.load(w_at + k, mask=across < K - k, other=0.0)
        parts = tl.dot(x, w, parts, input_precision="ieee")
    acc = tl.sum(parts, 0) + tl.load(bias_ptr + col % H)[None, :].to(tl.float32)
    state_at = states_ptr + before[:, None] * H + (col % H)[None, :]
    acc += tl.load(state_at, mask=there[:, None], other=0.0).to(tl.float32)
    y_at = y_ptr + row.to(tl.int64)[:, None] * H + col[None, :]
    tl.store(y_at, acc.to(y_ptr.dtype.element_ty), mask=there[:, None] & (col < H)[None, :])


def cell(
    states: Tensor,
    above: Tensor,
    found: Tensor,
    last: Tensor,
    embedding: Tensor,
    up: Tensor,
    up_bias: Tensor,
    down: Tensor,
    down_bias: Tensor,
    *,
    tiles: tuple[Tile | None, Tile | None] = (None, None),
) -> Tensor:
    """Return the next state of each of P paths in each of S trees of one shape; see `kernels.cell.next_state`.

    What lies between is rounded less often than by the reference.

    Args:
        states: [S, A, H] contiguous, those of the level before; fp32, fp16 or bf16.
        above: [P] int64, for each path the state that it goes on from.
        found: [S, M] int64, token ids; rows may be strided.
        last: [P] int64, for each path where its last token stands in a row of `found`.
        embedding: [V, H], the input embeddings, like all weights contiguous and of the states' dtype.
        up, up_bias, down, down_bias: [I, 2 H], [I], [H, I] and [H].
        tiles: how to cut the two products, `k` being what each of the warps takes at once; None chooses.

    Returns:
        [S, P, H].

    Raises:
        ValueError: the shapes don't fit each other, or a tensor isn't contiguous or of another dtype.
    """
    check_shapes(states, above, found, last, embedding, up, up_bias, down, down_bias)
    dense = (states, embedding, up, up_bias, down, down_bias)
    if any(t.dtype != states.dtype or not t.is_contiguous() for t in dense) or found.stride(1) != 1:
        raise ValueError(f"states and weights must be contiguous and {states.dtype}, and the rows of found dense")
    (num_trees, num_above, size), num_paths, inner = states.shape, len(above), len(up)
    num_rows = num_trees * num_paths
    between = torch.empty(num_rows, inner, dtype=states.dtype, device=states.device)
    out = torch.empty(num_trees, num_paths, size, dtype=states.dtype, device=states.device)
    t = tiles[0] or _tile(2, states.element_size())
    _up_kernel[_grid(num_rows, inner, t)](
        states, above, found, last, embedding, up, up_bias, between, num_rows, num_paths, num_above, found.stride(0),
        inner, size, EPS, t.warps, t.rows, t.out, t.k, num_warps=t.warps, num_stages=t.stages, **overlap(states.device),
    )  # fmt: skip
    t = tiles[1] or _tile(1, states.element_size())
    _down_kernel[_grid(num_rows, size, t)](
        between, down, down_bias, states, above, out, num_rows, num_paths, num_above,
        size, inner, t.warps, t.rows, t.out, t.k, num_warps=t.warps, num_stages=t.stages, **overlap(states.device),
    )  # fmt: skip
    return out


def _tile(num_products: int, itemsize: int) -> Tile:
    """The fastest of many on an H200 with 1 and 6 rows; `k` is what a warp takes at once."""
    t = Tile(16, 32, 32, 4, 3) if num_products == 2 else Tile(16, 16, 128, 4, 3)
    return t if itemsize <= 2 else replace(t, k=t.k // 2)


def _grid(num_rows: int, out: int, t: Tile) -> tuple[int]:
    return (triton.cdiv(num_rows, t.rows) * triton.cdiv(out, t.out),)
