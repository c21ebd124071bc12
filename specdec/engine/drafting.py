"""Asks the drafter for a step's trees and holds it to what it was asked. A tree that fails ends its own request."""

from collections.abc import Sequence

from specdec.drafters.protocol import Drafter, DraftQuery
from specdec.engine.request import ERROR, Request
from specdec.engine.scheduler import Plan, Scheduled
from specdec.errors import SpecdecError
from specdec.verifier.tree import TokenTree


def draft(drafter: Drafter, plan: Plan, vocab_size: int) -> TokenTree:
    """Return a tree for each decoding item of a plan, in order.

    Where that fails, the drafter is asked again for one request at a time, so that the failure finds its request: it
    is ended by the error and leaves the plan.

    Args:
        drafter: is asked.
        plan: the step.
        vocab_size: V of the target.
    """
    queries = [_query(item) for item in plan.decoding]
    trees, failed = [TokenTree.build([], [])], list[Request]()
    if not queries:
        return trees[0]
    try:
        return _propose(drafter, queries, vocab_size)
    except Exception:  # whatever a drafter raises: it comes again below, from the requests that it belongs to
        pass
    for item, query in zip(plan.decoding, queries, strict=True):
        try:
            trees.append(_propose(drafter, [query], vocab_size))
        except Exception as error:
            item.request.end(ERROR, _named(error, drafter.name, query.request_id))
            failed.append(item.request)
    plan.items = [item for item in plan.items if item.request not in failed]
    return TokenTree.join(trees)


def _query(item: Scheduled) -> DraftQuery:
    r = item.request
    return DraftQuery(r.id, r.tokens, r.num_output, item.max_nodes, r.params, r.block_table, r.num_computed)


def _propose(drafter: Drafter, queries: Sequence[DraftQuery], vocab_size: int) -> TokenTree:
    """Ask for trees and refuse those that don't answer the queries."""
    tree = drafter.propose(queries)
    tree.check()
    problem = None
    if tree.num_sequences != len(queries):
        problem = f"{tree.num_sequences} trees for {len(queries)} sequences"
    elif len(tree.tokens) and not 0 <= int(tree.tokens.min()) <= int(tree.tokens.max()) < vocab_size:
        problem = f"a token id outside the vocabulary of {vocab_size} tokens"
    else:
        for b, query in enumerate(queries):
            if int(tree.tokens[tree.cu_nodes[b]]) != query.tokens[-1]:
                problem = "a root that is not the request's last token"
            elif tree.num_nodes(b) > query.max_nodes:
                problem = f"{tree.num_nodes(b)} nodes where the budget is {query.max_nodes}"
    if problem:
        raise SpecdecError(f"it proposed {problem}; this is a fault of the drafter")
    return tree


def _named(error: Exception, drafter: str, request_id: int) -> SpecdecError:
    what = str(error) if isinstance(error, SpecdecError) else f"{type(error).__name__}: {error}"
    named = SpecdecError(f"drafter {drafter!r} failed for request {request_id}: {what}")
    named.__cause__ = error
    return named
