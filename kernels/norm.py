"""RMS norm, alone and fused with the residual addition before it."""

import torch


def rmsnorm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Normalise the last dimension by its root mean square, in fp32 (fp64 for fp64), and scale it.

    Args:
        x: [..., H].
        weight: broadcastable to x; Gemma's 1 + w is folded in when the weights are loaded, in fp32, so the weight
            may be wider than x. A weight of x's own dtype multiplies after rounding, as Llama does.
        eps: added to the mean square.

    Returns:
        x's shape and dtype.
    """
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    unit = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (unit.to(weight.dtype) * weight).to(x.dtype)


def add_rmsnorm(
    delta: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the norm of residual + delta, and that sum.

    Args:
        delta, residual: [N, H], same dtype.
        weight, eps: as in `rmsnorm`.

    Returns:
        The normalised rows and the new residual, each [N, H].
    """
    total = residual + delta
    return rmsnorm(total, weight, eps), total
