"""Gated activations of a merged gate-up projection."""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F  # noqa: N812

_ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "swish": F.silu,
    "gelu": F.gelu,
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
}
ACTIVATIONS = frozenset(_ACTIVATIONS)
"""Names that `act_mul` takes, as Hugging Face configs spell them."""


def act_mul(gate_up: torch.Tensor, activation: str) -> torch.Tensor:
    """Return activation(gate) · up.

    Args:
        gate_up: [N, 2 I], the gate in the first half.
        activation: one of `ACTIVATIONS`.

    Returns:
        [N, I].
    """
    gate, up = gate_up.chunk(2, dim=-1)
    return _ACTIVATIONS[activation](gate) * up
