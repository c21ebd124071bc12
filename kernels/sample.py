"""The target's choice in each row of logits: argmax of logits / temperature + noise. The torch reference."""

import torch
from torch import Tensor

from specdec.kernels.gumbel import gumbel_noise, gumbel_noise_at

MIN_TEMPERATURE = 1e-6
"""Temperatures between 0 and this count as this: below it, divided logits could overflow."""


def choose(
    logits: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    positions: Tensor,
    num_real_tokens: int,
    rows_per_sequence: int = 1,
) -> Tensor:
    """Return argmax(logits / temperature + gumbel(seed, position, token)) of each row, ties to the lowest id.

    The decisions are those of `verifier.rules.choose` for requests that set nothing but temperature and seed, and of
    those that set top_k, top_p or min_p too if the logits come from `kernels.cuts.cut`: float32 scores, IEEE division,
    the noise of `kernels.gumbel`. A temperature of 0 takes neither division nor noise.

    Args:
        logits: [R, V] float32, float16 or bfloat16, rows contiguous.
        temperature: [R / rows_per_sequence] float32, at least 0.
        seeds: [R / rows_per_sequence] int64.
        positions: [R] int64, output position of the token to choose, in [0, 2^32).
        num_real_tokens: ids from here on pad the vocabulary and are never read; 1 to V.
        rows_per_sequence: rows that share a temperature and a seed; they stand behind each other.

    Returns:
        [R] int64 token ids; -1 for a row that holds NaN, or -inf alone.

    Raises:
        ValueError: the sizes don't fit each other.
    """
    check_sizes(logits, temperature, seeds, positions, num_real_tokens, rows_per_sequence)
    scores = scores_of(logits[:, :num_real_tokens], temperature, seeds, positions, rows_per_sequence)
    best, tokens = scores.max(-1)
    return tokens.masked_fill(~(best > -torch.inf), -1)


def scores_of(
    logits: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    positions: Tensor,
    rows_per_sequence: int = 1,
    token_ids: Tensor | None = None,
) -> Tensor:
    """Return what `choose` takes the maximum of, [R, V] float32; its arguments are those of `choose`.

    Args:
        token_ids: [V] int64, the token of each column, by which its noise is drawn; None if column i is token i.
    """
    scores = logits.float()
    temperature = temperature.repeat_interleave(rows_per_sequence, output_size=len(logits)).unsqueeze(1)  # [R, 1]
    seeds = seeds.repeat_interleave(rows_per_sequence, output_size=len(logits))
    if token_ids is None:
        noise = gumbel_noise(seeds, positions, logits.shape[1])
    else:
        noise = gumbel_noise_at(seeds, positions, token_ids.expand(len(logits), -1))
    sampled = scores / temperature.clamp(min=MIN_TEMPERATURE) + noise
    return sampled.where(temperature > 0, scores)


def check_sizes(
    logits: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    positions: Tensor,
    num_real_tokens: int,
    rows_per_sequence: int,
) -> None:
    """Refuse arguments of `choose` whose sizes don't fit each other.

    Raises:
        ValueError: with the sizes.
    """
    num_rows, vocab_size = logits.shape
    sequences = (len(temperature) * rows_per_sequence, len(seeds) * rows_per_sequence, len(positions))
    if sequences != (num_rows,) * 3:
        raise ValueError(
            f"{num_rows} rows of logits don't fit {len(temperature)} temperatures and {len(seeds)} seeds of "
            f"{rows_per_sequence} rows each, and {len(positions)} positions"
        )
    if not 1 <= num_real_tokens <= vocab_size:
        raise ValueError(f"num_real_tokens must be from 1 to {vocab_size}, not {num_real_tokens}")
