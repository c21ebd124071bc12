"""Two drafters as one: the first where it has something to say, the second where it hasn't, or both in one tree."""

from collections.abc import Collection, Sequence
from dataclasses import replace

from specdec.cache.blocks import BlockPool
from specdec.cache.pages import KVPages
from specdec.drafters.protocol import Drafter, DraftQuery, Observation, UsesCache
from specdec.verifier.tree import TokenTree


class HybridDrafter:
    """Asks a cheap drafter first and gives the nodes that it leaves to another.

    Args:
        first: asked with the whole budget; usually "ngram".
        second: asked with what the first left; its tree is merged into the first's.
        both: whether the second is asked too where the first drafted; else only where it did not.
    """

    def __init__(self, first: Drafter, second: Drafter, both: bool = False) -> None:
        self.name = f"{first.name}+{second.name}"
        self.reads_hidden = first.reads_hidden or second.reads_hidden
        self._first, self._second, self._both = first, second, both
        users = [drafter for drafter in (first, second) if isinstance(drafter, UsesCache)]
        self.kv_layouts = [layout for drafter in users for layout in drafter.kv_layouts]

    def attach(self, pages: KVPages, pool: BlockPool) -> None:
        """Pass the target's pages to the drafter that wants them."""
        for drafter in (self._first, self._second):
            if isinstance(drafter, UsesCache):
                drafter.attach(pages, pool)

    def propose(self, queries: Sequence[DraftQuery]) -> TokenTree:
        """Return one tree a query: the union of both drafters' paths."""
        one = self._first.propose(queries)
        left = [self._left(query, one.num_nodes(b)) for b, query in enumerate(queries)]
        other = self._second.propose([replace(q, max_nodes=n) for q, n in zip(queries, left, strict=True)])
        merged = [_merge(one, other, b) for b in range(len(queries))]
        return TokenTree.build(
            [tokens for tokens, _, _ in merged],
            [parents for _, parents, _ in merged],
            [(self._first.name, self._second.name)[who] for _, _, sources in merged for who in sources],
        )

    def observe(self, observation: Observation) -> None:
        """Tell both; each gets the hidden states only if it reads them."""
        blind = replace(observation, hidden=None)
        for drafter in (self._first, self._second):
            drafter.observe(observation if drafter.reads_hidden else blind)

    def forget(self, request_ids: Collection[int]) -> None:
        """Tell both."""
        self._first.forget(request_ids)
        self._second.forget(request_ids)

    def _left(self, query: DraftQuery, num_nodes: int) -> int:
        """Node budget of the second drafter, root included."""
        return query.max_nodes - num_nodes + 1 if num_nodes == 1 or self._both else 1


def _merge(one: TokenTree, other: TokenTree, b: int) -> tuple[list[int], list[int], list[int]]:
    """Tokens, parents and sources (0 or 1) of the union of two trees of one root; shared nodes are the first's."""
    tokens, parents = one.tokens_of(b), one.parents_of(b)
    sources = [0] * len(tokens)
    children = {(parent, token): node for node, (parent, token) in enumerate(zip(parents, tokens, strict=True))}
    place: list[int] = []
    for node, (token, parent) in enumerate(zip(other.tokens_of(b), other.parents_of(b), strict=True)):
        key = (place[parent], token) if node else (-1, token)
        if key not in children:
            children[key] = len(tokens)
            tokens.append(token)
            parents.append(key[0])
            sources.append(1)
        place.append(children[key])
    return tokens, parents, sources
