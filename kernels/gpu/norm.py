"""RMS norm on a GPU, alone and fused with the residual addition before it: one program a row."""

import torch
import triton
import triton.language as tl

from specdec.kernels.gpu.launch import let_next_begin, lets_begin, overlap, wait_for_inputs

_MAX_WIDTH = 16384


@triton.jit
def _scaled(wide, w, eps: tl.constexpr, H: tl.constexpr):
    """`wide` is zero past H."""
    unit = wide * tl.rsqrt(tl.sum(wide * wide, 0) / H + eps)
    # Rounded to the weight's dtype before and after the product: the bits that torch gives.
    return (unit.to(w.dtype).to(wide.dtype) * w.to(wide.dtype)).to(w.dtype)


@triton.jit(do_not_specialize=["next_early"])
def _rmsnorm_kernel(
    x_ptr, weight_ptr, out_ptr, x_row, x_head, weight_head, next_early,
    eps: tl.constexpr, H: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if next_early:
        let_next_begin(PDL)
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    col = tl.arange(0, BLOCK)
    mask = col < H
    w = tl.load(weight_ptr + head * weight_head + col, mask=mask, other=0)
    wait_for_inputs(PDL)
    x = tl.load(x_ptr + row * x_row + head * x_head + col, mask=mask, other=0)
    out = _scaled(x.to(WIDE), w, eps, H)
    tl.store(out_ptr + (row * tl.num_programs(1) + head) * H + col, out.to(x.dtype), mask=mask)


@triton.jit(do_not_specialize=["next_early"])
def _add_rmsnorm_kernel(
    delta_ptr, residual_ptr, weight_ptr, out_ptr, total_ptr, delta_row, residual_row, next_early,
    eps: tl.constexpr, H: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if next_early:
        let_next_begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, BLOCK)
    mask = col < H
    w = tl.load(weight_ptr + col, mask=mask, other=0)
    wait_for_inputs(PDL)
    delta = tl.load(delta_ptr + row * delta_row + col, mask=mask, other=0)
    residual = tl.load(residual_ptr + row * residual_row + col, mask=mask, other=0)
    total = (residual.to(WIDE) + delta.to(WIDE)).to(residual.dtype)
    tl.store(total_ptr + row * H + col, total, mask=mask)
    out = _scaled(total.to(WIDE), w, eps, H)
    tl.store(out_ptr + row * H + col, out.to(residual.dtype), mask=mask)


def rmsnorm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Normalise the last dimension by its root mean square, in fp32 (fp64 for fp64), and scale it.

    The launch of a row is the same whatever the number of rows, so its bits are too.

    Args:
        x: [N, H] or [N, heads, H], H ≤ 16384; may be a slice of a larger tensor, but the last dimension is dense.
        weight: [H] or, one for each head, [heads, H]; its last dimension is dense. A weight of x's own dtype
            multiplies after rounding, as Llama does; a wider one multiplies before (Gemma's 1 + w, in fp32).
        eps: added to the mean square.

    Returns:
        x's shape and dtype, contiguous.

    Raises:
        ValueError: a shape is not one of these, or the last dimension is not dense.
    """
    if x.dim() not in (2, 3):
        raise ValueError(f"x must be [N, H] or [N, heads, H], not {list(x.shape)}")
    rows = x if x.dim() == 3 else x.unsqueeze(1)  # [N, heads, H]
    n, heads, _ = rows.shape
    _check(rows, weight)
    w = weight.expand(heads, -1)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    strides = _row_stride(rows), rows.stride(1), w.stride(0)
    _rmsnorm_kernel[(n, heads)](rows, w, out, *strides, _next_early(rows), **_constants(x, eps))
    return out


def add_rmsnorm(
    delta: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the norm of residual + delta, and that sum, rounded to their dtype.

    Args:
        delta, residual: [N, H], same dtype, H ≤ 16384; rows may be strided, the last dimension is dense.
        weight: [H]; its dtype as in `rmsnorm`.
        eps: added to the mean square.

    Returns:
        The normalised rows and the new residual, each [N, H] and contiguous.

    Raises:
        ValueError: shapes or dtypes differ, or the last dimension is not dense.
    """
    if delta.dim() != 2 or delta.shape != residual.shape or delta.dtype != residual.dtype or weight.dim() != 1:
        raise ValueError(f"delta {_describe(delta)} and residual {_describe(residual)} must be equal [N, H]")
    _check(delta, weight)
    _check(residual, weight)
    out, total = (torch.empty(delta.shape, dtype=delta.dtype, device=delta.device) for _ in range(2))
    strides = _row_stride(delta), _row_stride(residual)
    _add_rmsnorm_kernel[(len(delta),)](
        delta, residual, weight, out, total, *strides, _next_early(delta), **_constants(delta, eps)
    )
    return out, total


def _check(x: torch.Tensor, weight: torch.Tensor) -> None:
    width = x.shape[-1]
    if not 0 < width <= _MAX_WIDTH or weight.shape[-1] != width:
        raise ValueError(f"x {_describe(x)} and weight {_describe(weight)} must share an H of 1 to {_MAX_WIDTH}")
    if width > 1 and (x.stride(-1) != 1 or weight.stride(-1) != 1):
        raise ValueError(f"the last dimension must be dense; strides are {x.stride()} and {weight.stride()}")


def _constants(x: torch.Tensor, eps: float) -> dict[str, object]:
    """What is compiled in: it may depend on H and the dtype, never on the number of rows."""
    width = x.shape[-1]
    block = triton.next_power_of_2(width)
    wide = tl.float64 if x.dtype == torch.float64 else tl.float32
    warps = min(16, max(1, block // 512))
    return {"eps": eps, "H": width, "WIDE": wide, "BLOCK": block, "num_warps": warps, **overlap(x.device)}


def _next_early(x: torch.Tensor) -> int:
    """1 if the next kernel, a product of these rows, may begin when this one does, else 0."""
    return int(lets_begin("norm", len(x), x.shape[1:].numel()))


def _row_stride(x: torch.Tensor) -> int:
    # torch leaves the stride of a lone row arbitrary. Triton compiles by its divisibility, and the order of the sum
    # with it: a lone row must look like the rows of a batch.
    return x.stride(0) if len(x) > 1 else x[0].numel()


def _describe(x: torch.Tensor) -> str:
    return f"{list(x.shape)} {x.dtype}"
