"""Spreads heads over their channels, so that large ones cost the others no bits when keys are quantized."""

import torch
from torch import Tensor


def spread(x: Tensor) -> Tensor:
    """Multiply each head by a normalized Hadamard matrix H, which is symmetric and its own inverse.

    Scores stay what they are, since (q H) · (k H) = q · k. A channel that is larger than the others goes into all
    channels in equal parts, so no scale has to be as large as it was (QuaRot, Ashkboos et al. 2024, section 4;
    FlashAttention-3, Shah et al. 2024, section 3.3; without their random signs, which bought nothing in the models
    that we measured). Where D isn't a power of two, it is done in blocks of the largest one that divides it.

    Args:
        x: [..., D] of any floating dtype.

    Returns:
        x's shape and dtype: sums are taken in fp32 (fp64 for fp64), always in the same order, and rounded once.
    """
    size = spread_size(x.shape[-1])
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    width = 1
    while width < size:
        first, second = wide.reshape(*x.shape[:-1], x.shape[-1] // (2 * width), 2, width).unbind(-2)
        wide = torch.stack([first + second, first - second], -2)
        width *= 2
    out: Tensor = wide * size**-0.5
    return out.view(x.shape).to(x.dtype)


def spread_size(head_dim: int) -> int:
    """The largest power of two that divides it: channels that are spread over each other."""
    return head_dim & -head_dim
