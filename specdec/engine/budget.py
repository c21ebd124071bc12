"""How many nodes the trees of a step may have: as many as buy more tokens than their time costs, given where they buy
most.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from specdec.engine.cost import CostTable
from specdec.engine.gains import ChainGains, Gains, TreeGains
from specdec.engine.request import Request
from specdec.engine.times import StepTimes
from specdec.verifier.tree import MAX_NODES

FIRST_WAIT = 4
"""Steps at one node before a request is probed for the first time."""
LAST_WAIT = 64
"""Most steps between two probes."""
ROWS_OF_A_STEP = 256
"""Where nothing was measured: so many rows are taken to double the time of a step on a GPU."""
NODE_COUNTS = (1, 2, 4, 8, 16, 32, 64)
"""Node counts to choose from where nothing was measured."""
PROBE_NODES = 4
"""Most nodes of a probe, root included."""


@dataclass(slots=True)
class _RequestState:
    quality: float  # how good its drafts are, as `Gains` counts it
    num_tried: int = 0  # verified depths counted so far
    num_accepted: int = 0
    num_drafted: int = 0
    idle: int = 0  # steps at one node since the last probe
    wait: int = FIRST_WAIT  # steps at one node before the next


class NodeBudget:
    """Gives the trees of a step the nodes with the most expected tokens a second.

    A sequence whose drafts are accepted at rate a is expected to emit 1 + a + … + a^(n-1) tokens from n nodes: its n-th
    node buys a^(n-1) tokens. Where the drafter's tree was measured, a node buys its measured chance instead, times how
    good the sequence's drafts have been. The nodes of all sequences stand in one line, the best first, and as many are
    taken as give the most expected tokens ÷ seconds; so one tree may have a single node where another has 64. The
    seconds are those of a step with as many nodes in all, evenly spread.

    Captured steps are padded: all trees have the nodes of their bucket. There the sequences share one number of nodes,
    the one with the most expected tokens of all ÷ seconds (`shared_limit`). The seconds are those that such steps took
    lately (`times`), as far as they are known: drafts cost time of their own, which grows with the sequences.

    A request that is left with one node is probed with a few after 4 such steps, then after 8, 16, … up to 64, so that
    it comes back once its drafts are right again; unless nodes would not pay if all were accepted.

    Args:
        table: measured step times; None limits nothing but captured steps, by a guess until their times are known.
        max_nodes: most nodes a sequence.
        chances: measured ones of the drafter's tree, as `KnowsChances` has them; None if there are none.
    """

    def __init__(self, table: CostTable | None, max_nodes: int, chances: Sequence[float] | None = None) -> None:
        self.table = table
        self.times = StepTimes()
        """Of captured steps, as they ran; whoever runs them puts them in."""
        largest_known = MAX_NODES if table is None else table.num_nodes[-1]  # larger trees weren't measured
        self._most = min(max_nodes, largest_known)
        self._gains: Gains = ChainGains(self._most) if chances is None else TreeGains(chances, self._most)
        self._largest = PROBE_NODES  # tree that the drafter has proposed
        self._room = PROBE_NODES + 1  # nodes that it may have use for
        self._states: dict[int, _RequestState] = {}
        self._best = lru_cache(maxsize=4096)(self._alone)

    def allot(self, requests: Sequence[Request], num_rows: int, *, busy: bool = False) -> list[int]:
        """Share nodes among the trees of one step.

        Args:
            requests: whose trees.
            num_rows: most nodes in all, roots not counted.
            busy: whether others would use what is left. Then, or where there are too few for all, no tree is given
                many more nodes than the largest one that the drafter has proposed yet, unless it filled that whole.

        Returns:
            Most nodes of each request's tree, root included.
        """
        states = [self._state(r) for r in requests]
        scarce = busy or num_rows < len(requests) * (self._most - 1)
        most = min(self._most, self._room) if scarce else self._most
        # The last token needs no draft: it is the choice at the root.
        limits = [min(most, r.params.max_nodes) if r.stop.max_tokens - r.num_output > 1 else 1 for r in requests]
        context = sum(len(r.tokens) for r in requests) / max(1, len(requests))
        nodes = self._share([state.quality for state in states], limits, num_rows, context)
        left = num_rows - sum(nodes) + len(nodes)
        for i, (request, state) in enumerate(zip(requests, states, strict=True)):
            if nodes[i] > 1:
                state.idle, state.wait = 0, FIRST_WAIT
            elif state.idle >= state.wait:
                best = self._best(len(requests), -(-len(request.tokens) // 64) * 64, self._gains.best)
                nodes[i] = min(PROBE_NODES, best, limits[i], 1 + left)
                left -= nodes[i] - 1
        return nodes

    def _share(self, qualities: Sequence[float], limits: Sequence[int], num_rows: int, context: float) -> list[int]:
        """Nodes of each tree, root included, at those qualities."""
        num_seqs, node = len(qualities), np.arange(1, self._most)[:, None]
        curves = self._gains.of(qualities).T  # [nodes, sequences]
        gains = np.where(node < np.array(limits), curves, -1).ravel()  # falling along the nodes
        order = np.argsort(-gains, kind="stable")[: min(num_rows, sum(limits) - num_seqs)]
        if self.table is not None and len(order):
            tokens = num_seqs + np.cumsum([0, *gains[order]])  # expected of 0, 1, … nodes besides the roots
            counts = 1 + np.arange(len(tokens)) / num_seqs  # nodes a sequence
            measured = [self.table.seconds(num_seqs, n, context) for n in self.table.num_nodes]
            order = order[: int(np.argmax(tokens / np.interp(counts, self.table.num_nodes, measured)))]
        return [int(n) for n in 1 + np.bincount(order % max(1, num_seqs), minlength=num_seqs)]

    def shared_limit(self, requests: Sequence[Request], num_seqs: int | None = None) -> int:
        """Return the nodes of each tree of a step whose trees all have as many, padding included.

        A probe concerns all, so it waits until at least half of them are due.

        Args:
            requests: those of the step.
            num_seqs: sequences that the step is padded to; by default none is added.
        """
        states = [self._state(r) for r in requests]
        places, context = num_seqs or len(requests), max(len(r.tokens) for r in requests)

        def expected(num_nodes: int) -> float:
            return self._seconds(places, num_nodes, context)

        def seconds(num_nodes: int) -> float:
            return self.times.seconds(places, num_nodes, expected)

        best = self._search([s.quality for s in states], seconds)
        if best > 1 and self.times.lack_plain(places):
            return 1  # there is nothing yet to compare drafts with
        if best == 1 and 2 * sum(s.idle >= s.wait for s in states) >= len(states):
            return min(PROBE_NODES, self._search([self._gains.best] * len(states), seconds))
        if best > 1:
            for state in states:
                state.idle, state.wait = 0, FIRST_WAIT
        return best

    def observe(self, request: Request, max_nodes: int, *, padded: bool = False) -> None:
        """Learn from a request's last step.

        Args:
            request: after its tokens were delivered and counted.
            max_nodes: the nodes that its tree could have in that step.
            padded: whether the step took the time of `max_nodes` nodes whatever the tree had: then a tree that
                wasn't drafted counts as one that was refused.
        """
        state, stats = self._state(request), request.stats
        num_tried = sum(stats.tried_by_depth)
        num_accepted = stats.num_accepted_tokens - state.num_accepted
        num_refused = num_tried - state.num_tried - num_accepted
        answered = stats.num_draft_tokens > state.num_drafted
        if answered:
            size = 1 + stats.num_draft_tokens - state.num_drafted
            self._largest = max(self._largest, size)
            self._room = 2 * size if size >= max_nodes > 1 and size >= self._largest else self._largest + 1
        if padded and max_nodes > 1 and not answered:
            num_refused += 1
        state.quality = self._gains.learn(state.quality, num_accepted, num_refused, max_nodes)
        if max_nodes == 1:
            state.idle += 1
        elif state.idle >= (1 if padded else state.wait) and (answered or padded):  # a probe that was answered
            state.idle, state.wait = 0, min(2 * state.wait, LAST_WAIT)
        state.num_tried, state.num_accepted = num_tried, stats.num_accepted_tokens
        state.num_drafted = stats.num_draft_tokens

    def forget(self, request_id: int) -> None:
        """Drop what is known of a request that ended."""
        self._states.pop(request_id, None)

    def _state(self, request: Request) -> _RequestState:
        state = self._states.get(request.id)
        if state is None:
            state = self._states[request.id] = _RequestState(self._gains.first)
        return state

    def _alone(self, num_seqs: int, context: int, quality: float) -> int:
        return self._search([quality], lambda num_nodes: self._seconds(num_seqs, num_nodes, context))

    def _search(self, qualities: Sequence[float], seconds: Callable[[int], float]) -> int:
        """The node count with the most expected tokens a second at those qualities; the smallest of equals."""
        known = NODE_COUNTS if self.table is None else self.table.num_nodes
        counts = [n for n in known if n < self._most] + [self._most]
        bought = np.cumsum([0.0, *self._gains.of(qualities).sum(0)])  # by all, with 1, 2, … nodes each
        gain = {n: (len(qualities) + bought[n - 1]) / seconds(n) for n in counts}
        return max(counts, key=lambda n: gain[n])

    def _seconds(self, num_seqs: int, num_nodes: int, context: int) -> float:
        if self.table is not None:
            return self.table.seconds(num_seqs, num_nodes, context)
        return 1 + num_seqs * num_nodes / ROWS_OF_A_STEP
