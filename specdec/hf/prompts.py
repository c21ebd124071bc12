"""The rows of a batch without their padding, and how many tokens each may get."""

from collections.abc import Sequence
from typing import Any

import torch

from specdec.hf.call import Given, NotOurs

Rows = list[list[int]]


def read_input_ids(inputs: Any, input_ids: Any) -> torch.Tensor:
    """Return the prompt ids [B, S], wherever they were given.

    Raises:
        NotOurs: there are none, or they are something else.
    """
    if inputs is not None and input_ids is not None:
        raise NotOurs("both inputs and input_ids were given")
    ids = inputs if inputs is not None else input_ids
    if not isinstance(ids, torch.Tensor) or ids.ndim != 2 or ids.is_floating_point() or not ids.numel():
        raise NotOurs("input_ids are no tensor of token ids [batch, length]")
    return ids


def without_padding(
    ids: torch.Tensor, mask: torch.Tensor | None, pad_token_id: int | None, eos_token_ids: Sequence[int]
) -> Rows:
    """Return each row's tokens where its mask is 1, wherever the others stand: left, right or between.

    Without a mask padding is told as transformers does: by `pad_token_id`, if that is no EOS token.

    Args:
        ids: [B, S] integers.
        mask: [B, S] of 0 and 1, or None.
        pad_token_id: None if unknown.
        eos_token_ids: tokens that end an answer.

    Raises:
        NotOurs: the mask is of another shape, holds other values, or hides a whole row.
    """
    if mask is None:
        kept = torch.ones_like(ids, dtype=torch.bool)
        if pad_token_id is not None and pad_token_id not in eos_token_ids:
            kept = ids.ne(pad_token_id)
    else:
        if mask.shape != ids.shape or not bool(((mask == 0) | (mask == 1)).all()):
            raise NotOurs("attention_mask isn't 0 and 1 for each of input_ids")
        kept = mask.to(device=ids.device, dtype=torch.bool)
    rows = [row[keep].tolist() for row, keep in zip(ids, kept, strict=True)]
    if not all(rows):
        raise NotOurs("a row of the batch is padding alone")
    return rows


def token_limits(
    model: Any, given: Given, config: Any, ids: torch.Tensor, longest: int, max_model_len: int
) -> tuple[int, int]:
    """Return the most tokens that each row may get, and the fewest; transformers counts padding into its lengths.

    Args:
        model: whose own code resolves and checks the lengths, with its errors and warnings.
        given: the call, to know which lengths are defaults.
        config: the prepared `GenerationConfig`; its lengths are resolved in place.
        ids: [B, S] prompts.
        longest: tokens of the longest row, without padding.
        max_model_len: most tokens that the engine holds of one row.

    Raises:
        NotOurs: a row may outgrow the engine.
        ValueError: no room is left for a token.
    """
    default_max, default_min = (_is_default(model, given, name) for name in ("max_length", "min_length"))
    config = model._prepare_generated_length(
        generation_config=config,
        has_default_max_length=default_max,
        has_default_min_length=default_min,
        model_input_name="input_ids",
        input_ids_length=ids.shape[1],
        inputs_tensor=ids,
    )
    num_new = config.max_length - ids.shape[1]
    if longest + num_new > max_model_len:
        raise NotOurs(f"{longest} prompt tokens and up to {num_new} new ones, beyond max_model_len={max_model_len}")
    model._validate_generated_length(config, ids.shape[1], default_max)
    return num_new, min(num_new, max(0, (config.min_length or 0) - ids.shape[1]))


def _is_default(model: Any, given: Given, name: str) -> bool:
    """Whether neither the call nor a config sets a length."""
    configs = (given.generation_config, model.generation_config)
    return given.kwargs.get(name) is None and all(getattr(config, name, None) is None for config in configs)
