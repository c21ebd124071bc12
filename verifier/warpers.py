"""The cuts and the temperature of rows that sample: temperature, top-k, top-p, min-p.

Knows nodes and scores. The kept sets are those of transformers' `TopKLogitsWarper`, `TopPLogitsWarper` and
`MinPLogitsWarper`.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from specdec.kernels.cuts import keep_min_p, keep_top_k, keep_top_p
from specdec.kernels.sample import MIN_TEMPERATURE
from specdec.verifier.nodes import NodeContext, change_rows

_TOP_P_HEAD = 1024  # most nuclei are smaller; sorting this many of 49,152 tokens takes a tenth of the time


def warp(scores: Tensor, nodes: Sequence[NodeContext]) -> Tensor:
    """Divide sampling rows by their temperature, then cut them by top-k, top-p and min-p, in this order.

    Greedy rows stay as they are. A row that held a finite score still holds one.

    Args:
        scores: [R, V] float32 or float64; never changed.
        nodes: the R rows' contexts.
    """
    vocab_size = scores.shape[-1]
    sampled = {row: node.params for row, node in enumerate(nodes) if not node.params.greedy}
    scores = _warp(scores, {row: p.temperature for row, p in sampled.items() if p.temperature != 1}, _temperature)
    scores = _warp(scores, {row: p.top_k for row, p in sampled.items() if 0 < p.top_k < vocab_size}, _top_k)
    scores = _warp(scores, {row: p.top_p for row, p in sampled.items() if p.top_p < 1}, _top_p)
    return _warp(scores, {row: p.min_p for row, p in sampled.items() if p.min_p > 0}, keep_min_p)


def _warp(scores: Tensor, values: dict[int, float], warper: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Apply the warper to the rows that `values` has a parameter for, passed as a float64 column [r, 1]."""
    column = torch.tensor(list(values.values()), dtype=torch.float64, device=scores.device).unsqueeze(1)
    return change_rows(scores, list(values), lambda chosen: warper(chosen, column))


def _temperature(scores: Tensor, temperature: Tensor) -> Tensor:
    return scores / temperature.clamp(min=MIN_TEMPERATURE).to(scores.dtype)


def _top_k(scores: Tensor, k: Tensor) -> Tensor:
    k = k.to(torch.int64)
    return keep_top_k(scores, scores.topk(int(k.max())).values, k)


def _top_p(scores: Tensor, p: Tensor) -> Tensor:
    """Probabilities add up in float64, so that the cut doesn't depend on how a device orders its sums."""
    probs = scores.softmax(-1, dtype=torch.float64)
    best, ids = scores.topk(min(_TOP_P_HEAD, scores.shape[-1]))
    reached = probs.gather(-1, ids).cumsum(-1)  # [r, head]
    if best.shape[-1] < scores.shape[-1] and bool((reached[:, -1:] < p).any()):
        best, ids = scores.sort(descending=True)
        reached = probs.gather(-1, ids).cumsum(-1)
    return keep_top_p(scores, best, reached, p)
