"""A model's output head, whole or for some tokens. Knows Hugging Face models; no batches."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the field's name for it
from torch import Tensor
from transformers import PreTrainedModel

from specdec.errors import UnsupportedModel


class OutputHead:
    """Scores final hidden states as the model's own head does, with its scale and softcap.

    Args:
        model: a causal LM with an output head.
        token_ids: [D] int64, the only tokens to score, in that order; None scores all.
        linear: x, weight and bias to x @ weight.T + bias, where only some tokens are scored.

    Raises:
        UnsupportedModel: only some tokens are wanted, and the head's weight is quantized.
    """

    def __init__(
        self, model: PreTrainedModel, token_ids: Tensor | None = None, linear: Callable[..., Tensor] = F.linear
    ) -> None:
        head: Any = model.get_output_embeddings()
        self._dtype: torch.dtype = head.weight.dtype
        self._product = head if token_ids is None else _rows(head, token_ids, linear)
        config = model.config.get_text_config()
        self._softcap: float | None = getattr(config, "final_logit_softcapping", None)
        self._scale: float = getattr(config, "logit_scale", None) or 1 / (getattr(config, "logits_scaling", None) or 1)

    def __call__(self, states: Tensor) -> Tensor:
        """Score the vocabulary, or its tokens: [R, H] to [R, V] or [R, D]."""
        logits: Tensor = self._product(states.to(self._dtype))
        logits = logits if self._scale == 1 else logits * self._scale
        return logits if self._softcap is None else torch.tanh(logits / self._softcap) * self._softcap


def _rows(head: Any, token_ids: Tensor, linear: Callable[..., Tensor]) -> Callable[[Tensor], Tensor]:
    """The product with some rows of the head's weight, which are copied."""
    weight, bias = head.weight.detach(), getattr(head, "bias", None)
    if not weight.is_floating_point():
        raise UnsupportedModel(
            f"{type(head).__name__} is a quantized head, of which heads with a draft vocabulary can't take some rows; "
            "load the model in bf16, or train heads without a draft vocabulary"
        )
    ids = token_ids.to(weight.device)
    return partial(linear, weight=weight[ids], bias=None if bias is None else bias.detach()[ids])
