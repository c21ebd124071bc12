"""From an accepted path to delivered tokens: the stop inside the block, log-probabilities, counts."""

from collections.abc import Callable, Sequence

import torch

from specdec.engine.request import STOP, Request
from specdec.engine.scheduler import Scheduled
from specdec.errors import SpecdecError
from specdec.outputs import TARGET, TokenLogprob
from specdec.verifier.rules import Accepted
from specdec.verifier.tree import TokenTree


def check_tree(tree: TokenTree, items: Sequence[Scheduled], vocab_size: int, drafter: str) -> None:
    """Refuse a tree that doesn't answer what the drafter was asked.

    Raises:
        SpecdecError: wrong number of trees, a wrong root, too many nodes, or ids outside the vocabulary.
    """
    problem = None
    if tree.num_sequences != len(items):
        problem = f"{tree.num_sequences} trees for {len(items)} sequences"
    elif len(tree.tokens) and not 0 <= int(tree.tokens.min()) <= int(tree.tokens.max()) < vocab_size:
        problem = f"a token id outside the vocabulary of {vocab_size} tokens"
    else:
        for b, item in enumerate(items):
            if int(tree.tokens[tree.cu_nodes[b]]) != item.request.tokens[-1]:
                problem = f"a root of request {item.request.id} that is not its last token"
            elif tree.num_nodes(b) > item.max_nodes:
                problem = f"{tree.num_nodes(b)} nodes for request {item.request.id}, whose budget is {item.max_nodes}"
    if problem:
        raise SpecdecError(f"drafter {drafter!r} proposed {problem}; this is a fault of the drafter")


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
    if request.params.logprobs is not None:
        rows = torch.tensor(accepted.path[:kept], device=logits.device) + start
        request.logprobs += _logprobs(logits[rows], accepted.tokens[:kept], request.params.logprobs)
    leaf_reached = accepted.path[-1] not in tree.parents_of(b)
    request.stats.count(kept, len(accepted.path) - 1, leaf_reached, tree.num_nodes(b) - 1)


def deliver_captured(request: Request, tokens: Sequence[int], leaf_reached: bool, num_nodes: int, drafter: str) -> None:
    """Append what a captured step emitted to a request, and count it.

    Args:
        request: whose.
        tokens: the accepted drafts and the bonus token, which is -1 where the target could choose none.
        leaf_reached: whether the accepted path ended at a node without children.
        num_nodes: nodes of its tree, root included.
        drafter: name to stand beside drafted tokens.

    Raises:
        SpecdecError: the target's logits hold NaN, or -inf alone.
    """
    if tokens[-1] < 0:
        raise SpecdecError(f"the target's logits for request {request.id} hold NaN, or -inf alone")
    kept = append(request, tokens, [drafter] * (len(tokens) - 1))
    request.stats.count(kept, len(tokens) - 1, leaf_reached, num_nodes - 1)


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
    for kept, token in enumerate(tokens, 1):
        step = request.stop.push(token)
        request.tokens.append(token)
        request.text += step.text
        request.proposers.append(proposers[kept - 1] if kept <= len(proposers) else TARGET)
        if keep is not None:
            keep(kept - 1)
        request.finish_reason, request.stop_reason = step.finish_reason, step.stop_reason
        if request.stopping is not None and request.stopping(request) and request.finish_reason is None:
            request.text += request.stop.flush()
            request.finish_reason = STOP
        if request.finish_reason is not None:
            break
    return kept


def _logprobs(logits: torch.Tensor, tokens: Sequence[int], num_top: int) -> list[TokenLogprob]:
    """Log-probabilities [K, V] of the delivered tokens, before any processing."""
    logp = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
    own = logp.gather(1, torch.tensor(tokens, device=logits.device)[:, None])[:, 0].tolist()
    values, ids = (t.tolist() for t in logp.topk(num_top, dim=-1))
    return [
        TokenLogprob(token, lp, dict(zip(i, v, strict=True)))
        for token, lp, i, v in zip(tokens, own, ids, values, strict=True)
    ]
