"""Where the time of steps goes that the host plans, and which nodes are accepted: seen from outside the engine.

The engine's drafter, model and rule are wrapped by their own protocols for one run and then put back.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter
from typing import TypeVar

import torch

from specdec.cache.pages import KVPages
from specdec.drafters.protocol import Drafter, DraftQuery, Observation
from specdec.engine.engine import Engine
from specdec.models.batch import Batch
from specdec.models.protocol import PackedModel
from specdec.verifier.rules import AcceptanceRule, Accepted, VerifyQuery
from specdec.verifier.tree import TokenTree

T = TypeVar("T")
Ranks = tuple[int, ...]
"""A node as Medusa's choices name it: for each depth, which of its siblings is on the path."""


@dataclass(slots=True)
class Parts:
    """What was seen of a run.

    Args:
        device: waited for before and after each part.
        draft, forward, accept: seconds in the drafter, the target and the rule.
        proposed, accepted: how often each node of the trees was proposed, and accepted.
    """

    device: torch.device
    draft: float = 0.0
    forward: float = 0.0
    accept: float = 0.0
    proposed: Counter[Ranks] = field(default_factory=Counter)
    accepted: Counter[Ranks] = field(default_factory=Counter)

    def time(self, part: str, work: Callable[[], T]) -> T:
        """Do a piece of work and add its time to a part."""
        self._wait()
        start = perf_counter()
        result = work()
        self._wait()
        setattr(self, part, getattr(self, part) + perf_counter() - start)
        return result

    def count(self, tree: TokenTree, results: Sequence[Accepted]) -> None:
        """Add the nodes of one step's trees, roots left out."""
        for b, result in enumerate(results):
            ranks = node_ranks(tree.parents_of(b))
            self.proposed.update(ranks[1:])
            self.accepted.update(ranks[node] for node in result.path[1:])

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def node_ranks(parents: Sequence[int]) -> list[Ranks]:
    """Return how Medusa's choices would name each node of one tree; the root is ()."""
    ranks: list[Ranks] = []
    num_children = [0] * len(parents)
    for parent in parents:
        ranks.append((*ranks[parent], num_children[parent]) if parent >= 0 else ())
        if parent >= 0:
            num_children[parent] += 1
    return ranks


@contextmanager
def watched(engine: Engine) -> Iterator[Parts]:
    """Watch an engine that captures no whole steps; it is as before when the block ends."""
    assert engine.graphs is None, "captured steps can't be looked into"
    parts = Parts(engine.model.device)
    drafter, model, rule, forwards = engine.drafter, engine.model, engine.rule, engine.forwards
    engine.drafter, engine.model, engine.rule = _Drafter(drafter, parts), _Model(model, parts), _Rule(rule, parts)
    if forwards is not None:
        engine.forwards = lambda batch: parts.time("forward", lambda: forwards(batch))
    try:
        yield parts
    finally:
        engine.drafter, engine.model, engine.rule, engine.forwards = drafter, model, rule, forwards


class _Drafter:
    def __init__(self, drafter: Drafter, parts: Parts) -> None:
        self.name, self.reads_hidden = drafter.name, drafter.reads_hidden
        self._drafter, self._parts = drafter, parts

    def propose(self, queries: Sequence[DraftQuery]) -> TokenTree:
        return self._parts.time("draft", lambda: self._drafter.propose(queries))

    def observe(self, observation: Observation) -> None:
        self._parts.time("draft", lambda: self._drafter.observe(observation))

    def forget(self, request_ids: Collection[int]) -> None:
        self._drafter.forget(request_ids)


class _Model:
    def __init__(self, model: PackedModel, parts: Parts) -> None:
        self.vocab_size, self.max_len, self.device = model.vocab_size, model.max_len, model.device
        self.kv_layout = model.kv_layout
        self._model, self._parts = model, parts

    def forward(self, batch: Batch, pages: KVPages) -> torch.Tensor:
        return self._parts.time("forward", lambda: self._model.forward(batch, pages))

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._parts.time("forward", lambda: self._model.logits(hidden))


class _Rule:
    def __init__(self, rule: AcceptanceRule, parts: Parts) -> None:
        self.name, self.lossless = rule.name, rule.lossless
        self._rule, self._parts = rule, parts

    def __call__(
        self, tree: TokenTree, logits: torch.Tensor, queries: Sequence[VerifyQuery], num_real_tokens: int
    ) -> list[Accepted]:
        results = self._parts.time("accept", lambda: self._rule(tree, logits, queries, num_real_tokens))
        self._parts.count(tree, results)
        return results
