"""From an accepted path to delivered tokens: the stop inside the block, log-probabilities, counts, failures.

A request that comes to a dead end, whose own code raises, or whose text can't be made, ends there with the error;
nobody else notices.
"""

from collections.abc import Callable, Sequence

import torch

from specdec.engine.request import ERROR, STOP, Request
from specdec.errors import SpecdecError
from specdec.outputs import TARGET, TokenLogprob
from specdec.verifier.rules import Accepted
from specdec.verifier.tree import TokenTree


def deliver(request: Request, accepted: Accepted, tree: TokenTree, b: int, logits: torch.Tensor, drafter: str) -> None:
    """Append the accepted tokens to a request up to its first stop, and count them.

    Args:
        request: whose step it was.
        accepted: path and tokens.
        tree: the step's trees.
        b: which of them is the request's.
        logits: [nodes, V] of all trees.
        drafter: name to stand beside drafted tokens, where the tree names no other.
    """
    start = tree.cu_nodes[b]
    proposers = [tree.proposers[start + node] if tree.proposers else drafter for node in accepted.path[1:]]

    def keep(index: int) -> None:
        if accepted.scores is not None:
            request.scores.append(accepted.scores[index : index + 1])
        if request.keep_logits:
            node = start + accepted.path[index]
            request.logits.append(logits[node : node + 1].clone())  # of the step's logits only this row is kept

    kept = append(request, accepted.tokens, proposers, keep)
    if request.params.logprobs is not None and kept:
        rows = torch.tensor(accepted.path[:kept], device=logits.device) + start
        request.logprobs += _logprobs(logits[rows], accepted.tokens[:kept], request.params.logprobs)
    leaf_reached = accepted.path[-1] not in tree.parents_of(b)
    request.stats.count(kept, len(accepted.path) - 1, leaf_reached, tree.num_nodes(b) - 1)
    if accepted.error is not None and request.finish_reason is None:  # behind a stop it is none of the answer's
        request.end(ERROR, accepted.error)


def deliver_captured(request: Request, tokens: Sequence[int], leaf_reached: bool, num_nodes: int, drafter: str) -> None:
    """Append what a captured step emitted to a request, and count it.

    Args:
        request: whose.
        tokens: the accepted drafts and the bonus token, which is -1 where the target could choose none.
        leaf_reached: whether the accepted path ended at a node without children.
        num_nodes: nodes of its tree, root included.
        drafter: name to stand beside drafted tokens.
    """
    chosen = [token for token in tokens if token >= 0]
    kept = append(request, chosen, [drafter] * (len(tokens) - 1))
    request.stats.count(kept, len(tokens) - 1, leaf_reached, num_nodes - 1)
    if len(chosen) < len(tokens) and request.finish_reason is None:
        request.end(ERROR, SpecdecError(f"the target's logits for request {request.id} hold NaN, or -inf alone"))


def append(
    request: Request, tokens: Sequence[int], proposers: Sequence[str], keep: Callable[[int], None] | None = None
) -> int:
    """Append tokens to a request up to its first stop.

    Args:
        request: whose.
        tokens: the accepted drafts and the bonus token.
        proposers: who proposed each of the drafts.
        keep: called with the index of each token that is kept, before anyone looks at the request.

    Returns:
        How many tokens were kept.
    """
    kept = 0
    for token in tokens:
        try:
            step = request.stop.push(token)
        except Exception as error:  # whatever a tokenizer raises
            request.end(ERROR, error)
            break
        request.tokens.append(token)
        request.text += step.text
        request.proposers.append(proposers[kept] if kept < len(proposers) else TARGET)
        if keep is not None:
            keep(kept)
        kept += 1
        request.finish_reason, request.stop_reason = step.finish_reason, step.stop_reason
        _ask_stopping(request)
        if request.finish_reason is not None:
            break
    return kept


def _ask_stopping(request: Request) -> None:
    """Let the request's own callback end it: by its answer, or by what it raises."""
    try:
        ends = request.stopping is not None and request.stopping(request)
    except Exception as error:  # the user's code may raise anything
        request.end(ERROR, error)
    else:
        if ends and request.finish_reason is None:
            request.end(STOP)


def _logprobs(logits: torch.Tensor, tokens: Sequence[int], num_top: int) -> list[TokenLogprob]:
    """Log-probabilities [K, V] of the delivered tokens, before any processing."""
    logp = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
    own = logp.gather(1, torch.tensor(tokens, device=logits.device)[:, None])[:, 0].tolist()
    values, ids = (t.tolist() for t in logp.topk(min(num_top, logp.shape[-1]), dim=-1))
    return [
        TokenLogprob(token, lp, dict(zip(i, v, strict=True)))
        for token, lp, i, v in zip(tokens, own, ids, values, strict=True)
    ]
