"""A drafter's candidates from its states, best first, coupled to the target's choice. The torch reference."""

import torch
from torch import Tensor

from specdec.kernels.linear import linear
from specdec.kernels.rank import rank


def candidates(
    states: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    temperature: Tensor,
    seeds: Tensor,
    positions: Tensor,
    out: Tensor,
    *,
    ahead: int = 0,
    step: int = 0,
    token_ids: Tensor | None = None,
) -> None:
    """Write the k tokens with the best scores of each row of states: those that `rank` finds in its logits.

    Args:
        states: [S, P, H] of P rows in each of S sequences.
        weight: [V, H], the projection.
        bias: [V], or None.
        temperature: [S] float32, at least 0; 0 is greedy.
        seeds: [S] int64.
        positions: [S] int64, output positions to count from.
        out: [S, P, k] int64, k from 1 to V; written in place: token ids, best first.
        ahead: how many positions behind that a sequence's first row predicts.
        step: how many positions each row is behind the one before it.
        token_ids: [V] int64, the token of each column, ascending; None if column i is token i.

    Raises:
        ValueError: the sizes don't fit each other.
    """
    check_sizes(states, weight, bias, temperature, seeds, positions, out, token_ids)
    num_rows = states.shape[1]
    at = positions.unsqueeze(1) + ahead + step * torch.arange(num_rows, device=positions.device)  # [S, P]
    logits = linear(states.flatten(0, 1), weight, bias)
    best = rank(logits, temperature, seeds, at.flatten(), out.shape[2], num_rows, token_ids)
    out.copy_(best.view_as(out))


def check_sizes(
    states: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    temperature: Tensor,
    seeds: Tensor,
    positions: Tensor,
    out: Tensor,
    token_ids: Tensor | None,
) -> None:
    """Refuse arguments of `candidates` that don't fit each other.

    Raises:
        ValueError: with the sizes.
    """
    num_columns, size = weight.shape
    if states.shape[2] != size or out.shape[:2] != states.shape[:2]:
        shapes = [list(t.shape) for t in (states, weight, out)]
        raise ValueError(f"states [S, P, H], weight [V, H] and out [S, P, k] don't fit each other: {shapes}")
    if any(t.shape != states.shape[:1] for t in (temperature, seeds, positions)):
        shapes = [list(t.shape) for t in (temperature, seeds, positions)]
        raise ValueError(f"temperature, seeds and positions of {len(states)} sequences can't be {shapes}")
    if not 1 <= out.shape[2] <= num_columns:
        raise ValueError(f"out must have room for 1 to {num_columns} candidates, not {out.shape[2]}")
    if any(t is not None and t.shape != weight.shape[:1] for t in (bias, token_ids)):
        raise ValueError(f"bias and token_ids must have {num_columns} values, one for each row of weight")
