"""A drafter's candidates in each row of logits, best first, coupled to the target's choice. The torch reference."""

import torch
from torch import Tensor

from specdec.kernels.sample import check_sizes, scores_of


def rank(
    logits: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    positions: Tensor,
    num_ranks: int,
    rows_per_sequence: int = 1,
    token_ids: Tensor | None = None,
) -> Tensor:
    """Return the k tokens of each row with the best logits / temperature + gumbel(seed, position, token), best first.

    Where the row samples they are k draws without replacement, by the noise that `kernels.sample.choose` uses at that
    position; where it is greedy they are its k likeliest tokens. Of tied tokens the lowest id comes first.

    Args:
        logits: [R, V] float32, float16 or bfloat16, rows contiguous.
        temperature: [R / rows_per_sequence] float32, at least 0; 0 is greedy.
        seeds: [R / rows_per_sequence] int64.
        positions: [R] int64, output position that the row predicts, in [0, 2^32).
        num_ranks: k, from 1 to V.
        rows_per_sequence: rows that share a temperature and a seed; they stand behind each other.
        token_ids: [V] int64, the token of each column, ascending; None if column i is token i.

    Returns:
        [R, k] int64 token ids. NaN counts as -inf; ranks behind the last finite score hold any ids.

    Raises:
        ValueError: the sizes don't fit each other.
    """
    check_ranks(logits, temperature, seeds, positions, num_ranks, rows_per_sequence, token_ids)
    scores = scores_of(logits, temperature, seeds, positions, rows_per_sequence, token_ids)
    scores = scores.masked_fill(scores.isnan(), -torch.inf)
    columns = scores.sort(descending=True, stable=True).indices[:, :num_ranks]
    return columns if token_ids is None else token_ids[columns]


def check_ranks(
    logits: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    positions: Tensor,
    num_ranks: int,
    rows_per_sequence: int,
    token_ids: Tensor | None,
) -> None:
    """Refuse arguments of `rank` that don't fit each other.

    Raises:
        ValueError: with the sizes.
    """
    check_sizes(logits, temperature, seeds, positions, logits.shape[1], rows_per_sequence)
    if not 1 <= num_ranks <= logits.shape[1]:
        raise ValueError(f"num_ranks must be from 1 to {logits.shape[1]}, not {num_ranks}")
    if token_ids is not None and token_ids.shape != logits.shape[1:]:
        raise ValueError(f"{logits.shape[1]} columns of logits don't fit {len(token_ids)} token ids")
