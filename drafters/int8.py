"""Draft heads by products of int8, for CPUs that are asked for fp32. Knows heads; no trees and no requests.

Drafts are guesses that the target verifies, so the rounding of their weights changes the speed and no token.
"""

import warnings
from collections.abc import Callable
from copy import deepcopy
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from specdec.drafters.draft_heads import DraftHeads
from specdec.drafters.protocol import HasMatrix

H = TypeVar("H", bound=DraftHeads)

ENGINES = ("x86", "fbgemm")
"""The engines of `torch.backends.quantized` that pack weights for the products below."""
WEIGHT_MAX = 127
"""The largest magnitude of a quantized weight."""
INPUT_MAX = 63
"""The largest magnitude of a quantized input. One bit less than there is, because CPUs without VNNI add two products of
a byte and a byte in 16 bits, which those of whole bytes would overflow."""

_PACK = "linear_prepack"
_PRODUCT = "linear_with_input_q_dq_qweight_dq_output_fp32"
_LEAST = 1e-30  # scales stay above it, so that rows of zeros have one


def has_int8(weight: Tensor) -> bool:
    """Return whether products with a weight are taken in int8: it is fp32 on a CPU, and torch has them here.

    Args:
        weight: any; of a class of its own, as torchao's are, it isn't taken, for it holds something else than it says.
    """
    plain = type(weight) in (Tensor, nn.Parameter)
    if not plain or weight.device.type != "cpu" or weight.dtype != torch.float32:
        return False
    there = hasattr(torch, "quantize_per_channel") and all(hasattr(torch.ops.quantized, op) for op in (_PACK, _PRODUCT))
    return there and torch.backends.quantized.engine in ENGINES


class Int8Linear(nn.Module):
    """x @ weight.T + bias by int8 products, for drafting alone: it has no gradient and no parameters.

    Each row of the weight has a scale of its own, and so has each row of x, found anew at every call. So a row's result
    doesn't depend on the others, to the bit: integers are summed.

    Args:
        weight: [out, in] float32 on the CPU; a rounded copy is kept, not the weight.
        bias: [out] float32, or None.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__()
        weight = weight.detach()
        scales = (weight.abs().amax(1) / WEIGHT_MAX).clamp(min=_LEAST)
        with warnings.catch_warnings():
            # torch announces that its quantized tensors will go; `has_int8` says so when they have.
            warnings.filterwarnings("ignore", r"torch\.quantize_per_tensor, torch\.quantize_per_channel", UserWarning)
            rows = torch.quantize_per_channel(
                weight, scales, torch.zeros_like(scales, dtype=torch.int64), 0, torch.qint8
            )
        self._packed = getattr(torch.ops.quantized, _PACK)(rows, None)
        self._product = getattr(torch.ops.quantized, _PRODUCT)
        self._bias = None if bias is None else bias.detach()

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., in] to [..., out] float32."""
        x = x.float()
        largest = x.abs().amax(-1, keepdim=True).clamp(min=_LEAST)
        y: Tensor = self._product(x / largest, 1 / INPUT_MAX, INPUT_MAX + 1, self._packed) * largest
        return y if self._bias is None else y + self._bias


class HostHeads(Generic[H]):
    """Heads as the host drafts with them: linear layers and projections in int8 where there is that, else as they are.

    The heads given aren't changed, and share with these what isn't in int8. Where a layer is, later changes of its
    weights aren't seen.

    Args:
        heads: the heads, of any kind.
        lm_head: the base's head, as for `DraftHeads.project`; in int8 if it is a plain product.
    """

    def __init__(self, heads: H, lm_head: Callable[[Tensor], Tensor]) -> None:
        self.heads = _layers_in_int8(heads)
        """Their states, and `next_states` where the kind has them, are those that the projections read."""
        self.lm_head = _head_in_int8(lm_head) if heads.projection is None else lm_head
        """What a shared projection calls."""
        self._own = _projections_in_int8(heads)

    def project(self, states: Tensor, first: int = 0) -> Tensor:
        """Return the logits of heads `first` to `first` + K' - 1, [T, K', H] to [T, K', V]."""
        if not self._own:
            return self.heads.project(states, self.lm_head, first)
        own = self._own[first : first + states.shape[1]]
        return torch.stack([product(x) for product, x in zip(own, states.unbind(1), strict=True)], 1)


def _layers_in_int8(heads: H) -> H:
    """A copy whose linear layers are in int8 and that shares all other tensors; the heads themselves if none can be."""
    linear = [module for module in heads.modules() if type(module) is nn.Linear and has_int8(module.weight)]
    if not linear:
        return heads
    in_place_of: dict[int, Any] = {id(module): Int8Linear(module.weight, module.bias) for module in linear}
    shared = {id(tensor): tensor for tensor in (*heads.parameters(), *heads.buffers())}
    return deepcopy(heads, in_place_of | shared)


def _head_in_int8(lm_head: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    matrix = lm_head.matrix if isinstance(lm_head, HasMatrix) else None
    return lm_head if matrix is None or not has_int8(matrix[0]) else Int8Linear(*matrix)


def _projections_in_int8(heads: DraftHeads) -> list[Int8Linear]:
    """Own projections, one a head; empty if they are shared or can't be in int8."""
    if heads.projection is None or not has_int8(heads.projection):
        return []
    biases = [None] * len(heads.projection) if heads.projection_bias is None else heads.projection_bias.unbind()
    return [Int8Linear(weight, bias) for weight, bias in zip(heads.projection.unbind(), biases, strict=True)]
