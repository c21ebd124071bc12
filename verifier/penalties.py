"""What is added to scores: logit_bias, and the penalties on tokens that a node's own prefix holds.

Knows nodes and scores. Counts of a sequence's tokens are made once a step; a node adds its path's.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from specdec.params import SamplingParams
from specdec.verifier.nodes import NodeContext, VerifyQuery, change_where


def penalize(scores: Tensor, nodes: Sequence[NodeContext]) -> Tensor:
    """Add the bias, then apply repetition, frequency and presence penalty, in this order.

    Repetition penalty is transformers' `RepetitionPenaltyLogitsProcessor`; the other two are OpenAI's formula, over
    the output alone: score - frequency · count - presence · [count > 0].

    Args:
        scores: [R, V] float32 or float64; never changed.
        nodes: the R rows' contexts.
    """
    scores = change_where(lambda p: p.logit_bias, scores, nodes, _add_bias)
    scores = change_where(lambda p: p.repetition_penalty != 1, scores, nodes, _repetition)
    return change_where(lambda p: p.presence_penalty or p.frequency_penalty, scores, nodes, _presence_and_frequency)


def _add_bias(scores: Tensor, nodes: Sequence[NodeContext]) -> Tensor:
    def row(query: VerifyQuery) -> Tensor:
        ids = torch.tensor(list(query.params.logit_bias), device=scores.device)
        values = torch.tensor(list(query.params.logit_bias.values()), dtype=scores.dtype, device=scores.device)
        return scores.new_zeros(scores.shape[-1]).index_put((ids,), values)

    return scores + torch.stack([n.query.once("bias", partial(row, n.query)) for n in nodes])


def _repetition(scores: Tensor, nodes: Sequence[NodeContext]) -> Tensor:
    seen = _counts(scores, nodes, "all", lambda query: query.tokens) > 0
    penalty = _column(scores, nodes, lambda p: p.repetition_penalty)
    return scores.where(~seen, torch.where(scores < 0, scores * penalty, scores / penalty))


def _presence_and_frequency(scores: Tensor, nodes: Sequence[NodeContext]) -> Tensor:
    counts = _counts(scores, nodes, "output", lambda query: query.tokens[len(query.tokens) - query.num_output :])
    scores = scores - _column(scores, nodes, lambda p: p.frequency_penalty) * counts
    return scores - _column(scores, nodes, lambda p: p.presence_penalty) * (counts > 0)


def _counts(
    scores: Tensor, nodes: Sequence[NodeContext], name: str, tokens: Callable[[VerifyQuery], Sequence[int]]
) -> Tensor:
    """[r, V] in the scores' dtype: how often each token is in that part of the sequence and in the node's path."""
    vocab_size = scores.shape[-1]

    def row(query: VerifyQuery) -> Tensor:
        ids = torch.tensor(tokens(query), dtype=torch.int64, device=scores.device).clamp(max=vocab_size)
        return scores.new_zeros(vocab_size + 1).index_add(0, ids, scores.new_ones(len(ids)))[:vocab_size]

    counts = torch.stack([n.query.once(f"counts of {name}", partial(row, n.query)) for n in nodes])
    steps = [(row, token) for row, node in enumerate(nodes) for token in node.path]
    if not steps:
        return counts
    rows, ids = torch.tensor(steps, device=scores.device).T
    return counts.index_put_((rows, ids), scores.new_ones(()), accumulate=True)


def _column(scores: Tensor, nodes: Sequence[NodeContext], value: Callable[[SamplingParams], float]) -> Tensor:
    """[r, 1] in the scores' dtype."""
    return torch.tensor([[value(n.params)] for n in nodes], dtype=scores.dtype, device=scores.device)
