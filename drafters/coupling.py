"""Drafts that are coupled to the target's draw: candidates ranked with the noise that its choice will use."""

from collections.abc import Sequence

import torch
from torch import Tensor

from specdec.kernels.gumbel import gumbel_noise, gumbel_noise_at
from specdec.kernels.sample import MIN_TEMPERATURE
from specdec.params import SamplingParams


def coupled_scores(
    logits: Tensor, params: Sequence[SamplingParams], positions: Sequence[int], token_ids: Tensor | None = None
) -> Tensor:
    """Return scores whose order is each row's order of candidates.

    Args:
        logits: [R, …, V] float32 or float64, a drafter's.
        params: the R rows' requests.
        positions: the output position that each row predicts.
        token_ids: [V] int64, the target's tokens in the columns; None if column i is token i.

    Returns:
        [R, …, V]: the logits themselves where the request is greedy, log-probability / temperature + noise where it
        samples: its top k are k draws without replacement.
    """
    rows = [row for row, p in enumerate(params) if not p.greedy]
    if not rows:
        return logits
    device = logits.device
    seeds = torch.tensor([params[row].seed for row in rows], device=device)
    at = torch.tensor([positions[row] for row in rows], device=device)
    if token_ids is None:
        noise = gumbel_noise(seeds, at, logits.shape[-1])
    else:
        noise = gumbel_noise_at(seeds, at, token_ids.expand(len(rows), -1))
    between = [1] * (logits.ndim - 2)  # what a row scores several times at one position has one noise
    temperature = logits.new_tensor([max(params[row].temperature, MIN_TEMPERATURE) for row in rows])
    scores = logits[rows].log_softmax(-1) / temperature.view(-1, *between, 1) + noise.view(len(rows), *between, -1)
    return logits.index_copy(0, torch.tensor(rows, device=device), scores)


def likeliest(
    logits: Tensor, params: Sequence[SamplingParams], positions: Sequence[int], token_ids: Tensor | None, width: int
) -> tuple[Tensor, Tensor]:
    """Return each row's first candidates, by column, and how likely each one is the target's choice.

    A greedy choice is believed to follow the drafter's probabilities, which is to say that the target's logits are the
    drafter's and Gumbel noise. So the noise that a sampling request's choice is known to add, times the temperature, is
    added to the logits before: the lower the temperature, the less it tells.

    Args:
        logits: [R, V] float32 or float64, a drafter's.
        params, positions, token_ids: as for `coupled_scores`.
        width: most candidates of a row.

    Returns:
        [R, k] int64 and [R, k], likeliest first; k is `width`, or V if there are no more.
    """
    scores = coupled_scores(logits, params, positions, token_ids)
    if not all(p.greedy for p in params):
        factors = [1.0 if p.greedy else max(p.temperature, MIN_TEMPERATURE) for p in params]
        scores = scores * scores.new_tensor(factors).unsqueeze(-1)
    top = scores.softmax(-1).topk(min(width, scores.shape[-1]))
    return top.indices, top.values
