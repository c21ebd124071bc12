"""From the target's raw logits to the scores it really chooses by: temperature, top-k, top-p, min-p.

Knows logits and request parameters. A row is described by its `NodeContext`, which carries the node's whole
prefix, so a processor that reads it (penalties, bad words, min_tokens) is one more step in `process_logits`.

The kept sets are those of transformers' `TopKLogitsWarper`, `TopPLogitsWarper` and `MinPLogitsWarper`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.params import SamplingParams

_TOP_P_HEAD = 1024  # most nuclei are smaller; sorting this many of 49,152 tokens takes a tenth of the time
_MIN_TEMPERATURE = 1e-6  # below it, divided float32 logits could overflow; the choice is the greedy one anyway


@dataclass(frozen=True, slots=True)
class VerifyQuery:
    """One sequence whose tree is to be verified.

    Args:
        params: the request's parameters; `params.seed` is set unless it is greedy.
        tokens: prompt and output so far; the last one is the tree's root. Read only.
        num_output: how many of `tokens` are output: the token chosen at the root stands at this output position.
    """

    params: SamplingParams
    tokens: Sequence[int]
    num_output: int


@dataclass(frozen=True, slots=True)
class NodeContext:
    """One node at which the target chooses: its prefix is `query.tokens` followed by `path`.

    Args:
        sequence: index of the sequence in the batch, named in errors.
        query: the node's sequence.
        path: tokens from below the root down to the node itself; empty at the root.
    """

    sequence: int
    query: VerifyQuery
    path: tuple[int, ...] = ()

    @property
    def params(self) -> SamplingParams:
        """The request's parameters."""
        return self.query.params

    @property
    def position(self) -> int:
        """Output position of the token chosen at this node."""
        return self.query.num_output + len(self.path)


def process_logits(logits: Tensor, nodes: Sequence[NodeContext], num_real_tokens: int) -> Tensor:
    """Return the scores that each node's choice is made by; dropped tokens hold -inf.

    Ids from `num_real_tokens` on pad the vocabulary and are dropped in every row. Sampling rows are divided
    by their temperature, then cut by top-k, top-p and min-p in this order; greedy rows stay as they are.
    A row that held a finite logit still holds one; NaN stays NaN.

    Args:
        logits: [R, V] floating point; never changed.
        nodes: the R rows' contexts.
        num_real_tokens: how many ids the tokenizer knows, 1 to V.

    Returns:
        [R, V] float32, or float64 if the logits are. May share memory with `logits`.

    Raises:
        ValueError: the number of rows or `num_real_tokens` doesn't fit the logits.
    """
    num_rows, vocab_size = logits.shape
    if len(nodes) != num_rows or not 1 <= num_real_tokens <= vocab_size:
        raise ValueError(f"logits {num_rows} × {vocab_size} don't fit {len(nodes)} rows of {num_real_tokens} tokens")
    scores = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if num_real_tokens < vocab_size:
        padding = torch.arange(vocab_size, device=logits.device) >= num_real_tokens
        scores = scores.masked_fill(padding, -torch.inf)
    sampled = {row: node.params for row, node in enumerate(nodes) if not node.params.greedy}
    scores = _warp(scores, {row: p.temperature for row, p in sampled.items() if p.temperature != 1}, _temperature)
    scores = _warp(scores, {row: p.top_k for row, p in sampled.items() if 0 < p.top_k < vocab_size}, _top_k)
    scores = _warp(scores, {row: p.top_p for row, p in sampled.items() if p.top_p < 1}, _top_p)
    return _warp(scores, {row: p.min_p for row, p in sampled.items() if p.min_p > 0}, _min_p)


def change_rows(scores: Tensor, rows: Sequence[int], change: Callable[[Tensor], Tensor]) -> Tensor:
    """Return scores [R, V] with the given rows [r, V] changed; the others cost nothing if all or none are given."""
    if not rows:
        return scores
    if len(rows) == scores.shape[0]:
        return change(scores)
    index = torch.tensor(rows, device=scores.device)
    return scores.index_copy(0, index, change(scores[index]))


def _warp(scores: Tensor, values: dict[int, float], warper: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Apply the warper to the rows that `values` has a parameter for, passed as a float64 column [r, 1]."""
    column = torch.tensor(list(values.values()), dtype=torch.float64, device=scores.device).unsqueeze(1)
    return change_rows(scores, list(values), lambda chosen: warper(chosen, column))


def _temperature(scores: Tensor, temperature: Tensor) -> Tensor:
    return scores / temperature.clamp(min=_MIN_TEMPERATURE).to(scores.dtype)


def _top_k(scores: Tensor, k: Tensor) -> Tensor:
    """Drop what scores below the k-th best; tokens tied with it stay."""
    k = k.to(torch.int64)
    best = scores.topk(int(k.max())).values
    return scores.masked_fill(scores < best.gather(-1, k - 1), -torch.inf)


def _top_p(scores: Tensor, p: Tensor) -> Tensor:
    """Keep the fewest best tokens whose probability reaches p.

    Of tokens tied at the cut, the lowest ids stay (transformers' unstable sort keeps as many, but any of them).
    Probabilities add up in float64, so that the cut doesn't depend on how a device orders its sums.
    """
    probs = scores.softmax(-1, dtype=torch.float64)
    best, ids = scores.topk(min(_TOP_P_HEAD, scores.shape[-1]))
    reached = probs.gather(-1, ids).cumsum(-1)  # [r, head]
    if best.shape[-1] < scores.shape[-1] and bool((reached[:, -1:] < p).any()):
        best, ids = scores.sort(descending=True)
        reached = probs.gather(-1, ids).cumsum(-1)
    num_kept = (reached[:, :-1] < p).sum(-1, keepdim=True) + 1  # the token that reaches p is kept
    last = best.gather(-1, num_kept - 1)
    tied = scores == last
    num_tied_kept = num_kept - (scores > last).sum(-1, keepdim=True)
    surplus = tied & (tied.cumsum(-1) > num_tied_kept)
    return scores.masked_fill((scores < last) | surplus, -torch.inf)


def _min_p(scores: Tensor, min_p: Tensor) -> Tensor:
    """Drop tokens less likely than min_p × the likeliest one."""
    probs = scores.softmax(-1)
    return scores.masked_fill(probs < min_p.to(probs.dtype) * probs.amax(-1, keepdim=True), -torch.inf)
