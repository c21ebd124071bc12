"""One call of `generate`: as the user made it, and as the engine is to run it."""

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any

import torch

from specdec.params import SamplingParams

Criterion = Callable[[torch.Tensor, tuple[torch.Tensor, ...] | None], Any]
"""Maps ids [1, L] and each step's scores, [1, V] or None, to whether the row ends: HF's `StoppingCriteria`."""


class NotOurs(Exception):  # noqa: N818 - nothing is wrong: transformers' own generate takes the call
    """The engine can't take a call; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """The arguments of one call, named as in transformers' `generate`; `kwargs` are those without a name there."""

    inputs: Any = None
    generation_config: Any = None
    logits_processor: Any = None
    stopping_criteria: Any = None
    prefix_allowed_tokens_fn: Any = None
    synced_gpus: Any = None
    assistant_model: Any = None
    streamer: Any = None
    negative_prompt_ids: Any = None
    negative_prompt_attention_mask: Any = None
    custom_generate: Any = None
    kwargs: dict[str, Any] = field(default_factory=dict)

    def as_arguments(self) -> dict[str, Any]:
        """Return the call as keyword arguments."""
        named = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "kwargs"}
        return named | self.kwargs


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """What the engine is to do. Its R rows are the batch, each row `num_return_sequences` times.

    Args:
        input_ids: [R, S] integers as given, padding included.
        prompts: the R rows' tokens without padding.
        params: of the R rows.
        criteria: asked after each token of a row, for that row alone.
        pad_token_id: stands behind a row that has ended; None where all rows must be equally long.
        streamer: HF's `BaseStreamer` for a single row, or None.
        as_dict: whether to return a `GenerateDecoderOnlyOutput`.
        output_scores, output_logits: whether that holds them.
        warning: what the user must know about the call, or None.
    """

    input_ids: torch.Tensor
    prompts: list[list[int]]
    params: list[SamplingParams]
    criteria: list[Criterion]
    pad_token_id: int | None
    streamer: Any
    as_dict: bool
    output_scores: bool
    output_logits: bool
    warning: str | None
