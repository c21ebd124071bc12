"""A model's output head, whole or for some tokens. Knows Hugging Face models and decoders; no batches."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the field's name for it
from torch import Tensor
from transformers import PreTrainedModel

from specdec.errors import UnsupportedModel
from specdec.models.decoder import Decoder

Matrix = tuple[Tensor, Tensor | None]
"""Weight [V, H] and bias [V] or None of a product."""


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
        rows = None if token_ids is None else _rows(head, token_ids)
        self._product = head if rows is None else partial(linear, weight=rows[0], bias=rows[1])
        self._rows = rows
        config = model.config.get_text_config()
        self._softcap: float | None = getattr(config, "final_logit_softcapping", None)
        self._scale: float = getattr(config, "logit_scale", None) or 1 / (getattr(config, "logits_scaling", None) or 1)

    @property
    def matrix(self) -> Matrix | None:
        """Weight and bias that give the scores of some tokens by their product alone; None if more is done, or all."""
        return self._rows if self._scale == 1 and self._softcap is None else None

    def __call__(self, states: Tensor) -> Tensor:
        """Score the vocabulary, or its tokens: [R, H] to [R, V] or [R, D]."""
        logits: Tensor = self._product(states.to(self._dtype))
        logits = logits if self._scale == 1 else logits * self._scale
        return logits if self._softcap is None else torch.tanh(logits / self._softcap) * self._softcap


class DecoderHead:
    """A decoder's whole output head."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder

    @property
    def matrix(self) -> Matrix | None:
        """Weight and bias that give the scores by their product alone; None if more is done."""
        w = self._decoder.weights
        return (self._decoder.head, w.head_bias) if w.logit_softcap is None else None

    def __call__(self, states: Tensor) -> Tensor:
        """Score the vocabulary: [R, H] to [R, V]."""
        return self._decoder.logits(states)


def _rows(head: Any, token_ids: Tensor) -> Matrix:
    """Some rows of the head's weight, which are copied."""
    weight, bias = head.weight.detach(), getattr(head, "bias", None)
    if not weight.is_floating_point():
        raise UnsupportedModel(
            f"{type(head).__name__} is a quantized head, of which heads with a draft vocabulary can't take some rows; "
            "load the model in bf16, or train heads without a draft vocabulary"
        )
    ids = token_ids.to(weight.device)
    return weight[ids], None if bias is None else bias.detach()[ids]
