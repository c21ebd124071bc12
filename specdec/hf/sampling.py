"""From a prepared `GenerationConfig` to the `SamplingParams` of each row."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from transformers import (
    LogitsProcessor,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SuppressTokensLogitsProcessor,
)

from specdec.errors import InvalidRequest
from specdec.hf.call import NotOurs
from specdec.params import MAX_SEED, SamplingParams

AllowedTokens = Callable[[int, torch.Tensor], list[int]]


def read_params(config: Any, limits: tuple[int, int], eos_token_ids: Sequence[int]) -> SamplingParams:
    """Return what all rows share, without seed and custom processors.

    Args:
        config: the prepared `GenerationConfig`.
        limits: the most and the fewest new tokens.
        eos_token_ids: tokens that end an answer.

    Raises:
        NotOurs: a value is one that transformers refuses, or beyond the engine's bounds.
    """
    for name in ("temperature",) * bool(config.do_sample) + ("repetition_penalty",):
        value = getattr(config, name)
        if value is not None and value != 1 and not (isinstance(value, float) and value > 0):
            raise NotOurs(f"{name}={value!r}")
    bad_words = [word for word in config.bad_words_ids or () if word not in [[eos] for eos in eos_token_ids]]
    try:
        return SamplingParams(
            max_new_tokens=limits[0],
            min_new_tokens=limits[1],
            ignore_eos=True,
            stop_token_ids=tuple(eos_token_ids),
            repetition_penalty=_or(config.repetition_penalty, 1.0),
            no_repeat_ngram_size=_or(config.no_repeat_ngram_size, 0),
            bad_words_ids=bad_words,
            suppress_tokens=_or(config.suppress_tokens, ()),
            **_cuts(config),
        )
    except InvalidRequest as error:
        raise NotOurs(str(error)) from error


def row_params(
    shared: SamplingParams, processors: Sequence[Any], allowed: AllowedTokens | None, num_rows: int, copies: int
) -> list[SamplingParams]:
    """Return each row's parameters: its seed, drawn from torch's global generator, and its processors.

    Args:
        shared: what the rows have in common.
        processors: the user's, as `read_processors` returns them.
        allowed: HF's `prefix_allowed_tokens_fn`, which wants the index in the batch, or None.
        num_rows: rows of the batch.
        copies: `num_return_sequences`.

    Raises:
        NotOurs: there are more processors than the engine takes.
    """
    seeds = [0] * (num_rows * copies) if shared.greedy else torch.randint(MAX_SEED, (num_rows * copies,)).tolist()
    rows = []
    for row, seed in enumerate(seeds):
        first = [] if allowed is None else [_constrained(allowed, row // copies)]
        try:
            rows.append(replace(shared, seed=seed, logits_processors=[*first, *processors]))
        except InvalidRequest as error:
            raise NotOurs(str(error)) from error
    return rows


def read_processors(config: Any, given: Any, allowed: AllowedTokens | None) -> list[Any]:
    """Return the user's logits processors, each once.

    Raises:
        NotOurs: one would replace a processor that transformers makes from the config, or change its order.
    """
    if allowed is not None and config.suppress_tokens is not None:
        raise NotOurs("prefix_allowed_tokens_fn together with suppress_tokens")
    made = _made_from(config, allowed)
    processors: list[Any] = []
    for processor in given or ():
        if type(processor) in made:
            raise NotOurs(f"{type(processor).__name__} in logits_processor takes the place of transformers' own")
        if processor not in processors:
            processors.append(processor)
    return processors


def _made_from(config: Any, allowed: AllowedTokens | None) -> set[type[LogitsProcessor]]:
    """The processors that transformers makes from a config that the engine follows."""
    asked = {
        RepetitionPenaltyLogitsProcessor: _or(config.repetition_penalty, 1) != 1,
        NoRepeatNGramLogitsProcessor: config.no_repeat_ngram_size,
        NoBadWordsLogitsProcessor: config.bad_words_ids is not None,
        MinLengthLogitsProcessor: config.min_length,
        MinNewTokensLengthLogitsProcessor: config.min_new_tokens,
        PrefixConstrainedLogitsProcessor: allowed is not None,
        SuppressTokensLogitsProcessor: config.suppress_tokens is not None,
    }
    return {kind for kind, made in asked.items() if made}


def _constrained(allowed: AllowedTokens, row: int) -> Any:
    return PrefixConstrainedLogitsProcessor(lambda _, ids: allowed(row, ids), 1)


def _cuts(config: Any) -> dict[str, Any]:
    """What applies only where the call samples."""
    if not config.do_sample:
        return {}
    cuts = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    return {name: _or(getattr(config, name), off) for name, off in cuts.items()}


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value
