"""From the target's raw logits to the scores it really chooses by.

Knows nodes and scores. Every step reads the node's own prefix, so a node is treated as if its path were real. The
order is that of transformers' `_get_logits_processor`:

1. `logit_bias` (its sequence_bias)
2. `repetition_penalty`, then `frequency_penalty` and `presence_penalty`, which transformers doesn't have
3. `no_repeat_ngram_size`, `bad_words_ids`, `min_new_tokens`, `allowed_token_ids`, `suppress_tokens`
4. the request's own `logits_processors`, in their order
5. where the request samples: temperature, top-k, top-p, min-p
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from specdec.errors import InvalidRequest
from specdec.params import LogitsProcessor
from specdec.verifier.masks import mask_banned
from specdec.verifier.nodes import NodeContext, VerifyQuery, change_where
from specdec.verifier.penalties import penalize
from specdec.verifier.warpers import warp

__all__ = ["NodeContext", "VerifyQuery", "process_logits"]


def process_logits(
    logits: Tensor, nodes: Sequence[NodeContext], num_real_tokens: int, failures: dict[int, Exception] | None = None
) -> Tensor:
    """Return the scores that each node's choice is made by; dropped tokens hold -inf.

    Ids from `num_real_tokens` on pad the vocabulary and are dropped in every row. A row whose request asks for
    nothing and is greedy stays as it is. Masks and a request's own processors may leave a row with -inf alone; the
    warpers never do.

    Args:
        logits: [R, V] floating point; never changed.
        nodes: the R rows' contexts.
        num_real_tokens: how many ids the tokenizer knows, 1 to V.
        failures: takes by `NodeContext.sequence` what a request's own processors raised; its row holds NaN then. None
            raises it.

    Returns:
        [R, V] float32, or float64 if the logits are. May share memory with `logits`.

    Raises:
        ValueError: the number of rows or `num_real_tokens` doesn't fit the logits.
        InvalidRequest: a request's own processor returned something other than scores [1, V].
    """
    num_rows, vocab_size = logits.shape
    if len(nodes) != num_rows or not 1 <= num_real_tokens <= vocab_size:
        raise ValueError(f"logits {num_rows} × {vocab_size} don't fit {len(nodes)} rows of {num_real_tokens} tokens")
    scores = _drop_padding(logits.to(torch.promote_types(logits.dtype, torch.float32)), num_real_tokens)
    scores = mask_banned(penalize(scores, nodes), nodes)

    def call_own(chosen: Tensor, asking: Sequence[NodeContext]) -> Tensor:
        called = [_call_own(row, node, failures) for row, node in zip(torch.split(chosen, 1), asking, strict=True)]
        return _drop_padding(torch.cat(called), num_real_tokens)

    return warp(change_where(lambda p: p.logits_processors, scores, nodes, call_own), nodes)


def _drop_padding(scores: Tensor, num_real_tokens: int) -> Tensor:
    if num_real_tokens == scores.shape[-1]:
        return scores
    return scores.masked_fill(torch.arange(scores.shape[-1], device=scores.device) >= num_real_tokens, -torch.inf)


def _call_own(scores: Tensor, node: NodeContext, failures: dict[int, Exception] | None) -> Tensor:
    """Pass a row [1, V] through its request's own processors, which may write into what they get."""
    result = scores.clone()
    try:
        for processor in node.params.logits_processors:
            result = processor(node.prefix(scores.device).clone().unsqueeze(0), result)
            _check_result(processor, result, scores)
    except Exception as error:  # the user's code may raise anything; it concerns its own request alone
        if failures is None:
            raise
        failures[node.sequence] = error
        return torch.full_like(scores, torch.nan)
    return result.to(scores)


def _check_result(processor: LogitsProcessor, result: object, scores: Tensor) -> None:
    if not isinstance(result, Tensor) or result.shape != scores.shape or not result.is_floating_point():
        kind = f"{result.dtype} of shape {list(result.shape)}" if isinstance(result, Tensor) else repr(result)
        raise InvalidRequest(
            f"logits processor {processor!r} returned {kind}; it must return scores of shape {list(scores.shape)}"
        )
