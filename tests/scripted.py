"""Drafters that are right, wrong or random on purpose, for the whole test-suite.

They hold the engine to the protocol: each call checks what a drafter may rely on. `known` lists the requests that the
drafter still holds state of; it must be empty once all requests have ended.
"""

import random
from collections.abc import Callable, Collection, Mapping, Sequence

from specdec.drafters.protocol import DraftQuery, Observation
from specdec.verifier.tree import MAX_NODES, TokenTree

Answers = Mapping[int | tuple[int, ...], Sequence[int]] | Callable[[DraftQuery], Sequence[int]]
"""The tokens that the target will emit: by request id, by prompt, or a function of the query that returns those after
the root. A mapping holds the whole output from its first token on."""


def future(answers: Answers, query: DraftQuery) -> list[int]:
    """The tokens that follow the query's root, as far as they are known."""
    if callable(answers):
        return list(answers(query))
    prompt = tuple(query.tokens[: len(query.tokens) - query.num_output])
    output = answers[query.request_id] if query.request_id in answers else answers.get(prompt, ())
    return list(output[query.num_output :])


class Growing:
    """One sequence's tree in the making; siblings always differ."""

    def __init__(self, query: DraftQuery, vocab_size: int, rng: random.Random) -> None:
        self.tokens, self.parents = [query.tokens[-1]], [-1]
        self._taken: set[tuple[int, int]] = set()
        self._budget, self._vocab_size, self._rng = query.max_nodes, vocab_size, rng

    @property
    def room(self) -> int:
        return self._budget - len(self.tokens)

    def add(self, parent: int, token: int) -> int | None:
        """Add a child; None if there is no room or a sibling holds the token."""
        if not self.room or (parent, token) in self._taken:
            return None
        self._taken.add((parent, token))
        self.tokens.append(token)
        self.parents.append(parent)
        return len(self.tokens) - 1

    def add_other(self, parent: int, right: int | None) -> int | None:
        """Add a child that isn't `right`; None if there is no room or no such token left."""
        start = self._rng.randrange(self._vocab_size)
        others = ((start + i) % self._vocab_size for i in range(self._vocab_size))
        token = next((t for t in others if t != right and (parent, t) not in self._taken), None)
        return None if token is None else self.add(parent, token)


class ScriptedDrafter:
    """Draws each tree by `draw(growing, query, rng)`; the random numbers depend on seed, request and length alone."""

    reads_hidden = False

    def __init__(
        self, name: str, draw: Callable[[Growing, DraftQuery, random.Random], None], vocab_size: int, seed: int
    ):
        self.name = name
        self.num_proposed = 0
        self._draw, self._vocab_size, self._seed = draw, vocab_size, seed
        self._tokens: dict[int, list[int]] = {}
        self._num_committed: dict[int, int] = {}

    @property
    def known(self) -> set[int]:
        return self._tokens.keys() | self._num_committed.keys()

    def propose(self, queries: Sequence[DraftQuery]) -> TokenTree:
        ids = [query.request_id for query in queries]
        assert len(set(ids)) == len(ids), f"a request is asked for twice in one step: {ids}"
        trees: list[Growing] = []
        for query in queries:
            self._check_query(query)
            rng = random.Random(f"{self._seed}/{query.request_id}/{len(query.tokens)}")
            growing = Growing(query, self._vocab_size, rng)
            if growing.room:
                self._draw(growing, query, rng)
            self.num_proposed += len(growing.tokens) - 1
            trees.append(growing)
        return TokenTree.build([tree.tokens for tree in trees], [tree.parents for tree in trees])

    def observe(self, observation: Observation) -> None:
        ids, counts = observation.request_ids, observation.num_committed
        assert len(ids) == len(counts) and len(set(ids)) == len(ids), f"requests {ids} committed {counts}"
        assert all(count >= 0 for count in counts), f"negative number of committed tokens: {counts}"
        assert self.reads_hidden or observation.hidden is None, "hidden states weren't asked for"
        if self.reads_hidden:
            assert observation.hidden is not None and observation.hidden.shape[0] == sum(counts)
        for request_id, count in zip(ids, counts, strict=True):
            self._num_committed[request_id] = self._num_committed.get(request_id, 0) + count

    def forget(self, request_ids: Collection[int]) -> None:
        assert all(isinstance(request_id, int) for request_id in request_ids)
        for request_id in request_ids:  # one that was never scheduled may be dropped too
            self._tokens.pop(request_id, None)
            self._num_committed.pop(request_id, None)

    def _check_query(self, query: DraftQuery) -> None:
        assert 1 <= query.max_nodes <= MAX_NODES, f"node budget {query.max_nodes}"
        assert 0 <= query.num_output < len(query.tokens), f"{query.num_output} output of {len(query.tokens)} tokens"
        assert query.params.seed is not None, "the seed must be resolved"
        before = self._tokens.get(query.request_id, [])
        assert list(query.tokens[: len(before)]) == before, f"request {query.request_id} was rewritten"
        committed = self._num_committed.get(query.request_id, 0)
        assert committed < len(query.tokens), (
            f"{committed} tokens committed of {len(query.tokens)}: the root is among them"
        )
        self._tokens[query.request_id] = list(query.tokens)


class OracleDrafter(ScriptedDrafter):
    """Always has the right path. Shapes: "chain"; "wide", wrong siblings before each right node; "ragged", the right
    path cut at a random length among wrong branches at random places."""

    def __init__(self, answers: Answers, shape: str = "chain", vocab_size: int = 97, seed: int = 0) -> None:
        draws = {"chain": self._chain, "wide": self._wide, "ragged": self._ragged}
        super().__init__(f"oracle-{shape}", draws[shape], vocab_size, seed)
        self._answers = answers

    def _chain(self, tree: Growing, query: DraftQuery, rng: random.Random) -> None:
        node: int | None = 0
        for token in future(self._answers, query):
            node = None if node is None else tree.add(node, token)

    def _wide(self, tree: Growing, query: DraftQuery, rng: random.Random) -> None:
        node: int | None = 0
        for token in future(self._answers, query):
            if node is None or not tree.room:
                return
            for _ in range(min(2, tree.room - 1)):
                tree.add_other(node, token)
            node = tree.add(node, token)

    def _ragged(self, tree: Growing, query: DraftQuery, rng: random.Random) -> None:
        path = future(self._answers, query)
        length = rng.randint(0, len(path))
        right_nodes = [0]
        while tree.room and rng.random() > 0.05:
            depth = len(right_nodes) - 1
            if depth < length and rng.random() < 0.5:
                node = tree.add(right_nodes[-1], path[depth])
                assert node is not None
                right_nodes.append(node)
            else:
                node = rng.randrange(len(tree.tokens))
                tree.add_other(node, dict(zip(right_nodes, path, strict=False)).get(node))


class AdversarialDrafter(ScriptedDrafter):
    """Never right: none of the root's children is the target's next token. Shapes: "chain", "wide" (all siblings)."""

    def __init__(self, answers: Answers, shape: str = "chain", vocab_size: int = 97, seed: int = 0) -> None:
        super().__init__(f"adversarial-{shape}", {"chain": self._chain, "wide": self._wide}[shape], vocab_size, seed)
        self._answers = answers

    def _chain(self, tree: Growing, query: DraftQuery, rng: random.Random) -> None:
        right = next(iter(future(self._answers, query)), None)
        node = None if right is None else tree.add_other(0, right)
        while node is not None and tree.room:
            node = tree.add_other(node, None)

    def _wide(self, tree: Growing, query: DraftQuery, rng: random.Random) -> None:
        right = next(iter(future(self._answers, query)), None)
        while right is not None and tree.add_other(0, right) is not None:
            pass


class RandomDrafter(ScriptedDrafter):
    """Random trees of random sizes up to the budget, of random tokens."""

    def __init__(self, seed: int = 0, vocab_size: int = 97) -> None:
        super().__init__("random", self._grow, vocab_size, seed)

    def _grow(self, tree: Growing, query: DraftQuery, rng: random.Random) -> None:
        for _ in range(rng.randint(0, tree.room)):
            tree.add_other(rng.randrange(len(tree.tokens)), None)


class SometimesDrafter(ScriptedDrafter):
    """A chain whose tokens are each right with probability `rate`; after a wrong one the rest is random."""

    def __init__(self, answers: Answers, rate: float = 0.5, vocab_size: int = 97, seed: int = 0) -> None:
        super().__init__(f"sometimes-{rate}", self._chain, vocab_size, seed)
        self._answers, self._rate = answers, rate

    def _chain(self, tree: Growing, query: DraftQuery, rng: random.Random) -> None:
        node: int | None = 0
        right = True
        for token in future(self._answers, query):
            if node is None or not tree.room:
                return
            right = right and rng.random() < self._rate
            node = tree.add(node, token) if right else tree.add_other(node, token)
