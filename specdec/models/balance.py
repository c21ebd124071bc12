"""Makes the channels of queries and keys alike in size, where their norm's weights can take a factor for free."""

import torch
from torch import Tensor

MAX_EXPONENT = 4
"""A channel changes by a factor of 16 at most, so that fp16 holds it still."""


def balance(norm: Tensor, projection: Tensor, num_heads: int) -> Tensor:
    """Return factors on the norm's weights, [heads + kv heads, D], that change no score and ease quantizing keys.

    A channel of a head's keys is multiplied, and that of its queries divided, by a power of two: no product of the two
    changes by a bit. Both channels that turn together have the same. It brings queries and keys as near to the same
    size as it can, so that few channels stand out among those that share a scale (as SmoothQuant does for products of
    weights, Xiao et al. 2023, equation 4 with α = 1/2). A channel's size is guessed from the weights.

    Args:
        norm: [heads + kv heads, D], weights of the queries' and the keys' norm, all D of whose channels turn.
        projection: [heads + kv heads, D, H], what makes the norm's inputs, the weights of the norm before included.
        num_heads: of the queries.
    """
    size = norm.float().abs() * projection.float().norm(dim=-1)
    power = size.square().unflatten(-1, (2, -1)).mean(1)  # [heads + kv heads, D / 2], of channels i and i + D / 2
    keys = power[num_heads:]
    queries = power[:num_heads].unflatten(0, (len(keys), -1)).mean(1)
    ratio = ((queries + 1e-12).log2() - (keys + 1e-12).log2()) / 4  # halved for powers, and once more for α
    exponent = (ratio - ratio.median(-1, keepdim=True).values).round().clamp(-MAX_EXPONENT, MAX_EXPONENT)
    factor = exponent.exp2().repeat(1, 2).to(norm.dtype)
    inverse = (1 / factor).repeat_interleave(num_heads // len(keys), 0)
    return torch.cat([inverse, factor])
