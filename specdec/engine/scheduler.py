"""Decides which requests take part in a step, with how many rows, and reserves their slots."""

from bisect import insort
from collections.abc import Mapping
from dataclasses import dataclass, field

from specdec.cache.blocks import BlockPool
from specdec.engine.budget import NodeBudget
from specdec.engine.config import EngineConfig
from specdec.engine.lengths import LengthPredictor, peak_blocks
from specdec.engine.request import LENGTH, STOP, Request


@dataclass(slots=True)
class Scheduled:
    """One request's part in a step.

    Args:
        request: whose.
        num_causal: pending tokens to run as causal rows: all but the root, or a chunk of them.
        max_nodes: node budget of its tree, root included; 0 where this step doesn't reach the root yet.
    """

    request: Request
    num_causal: int
    max_nodes: int


@dataclass(slots=True)
class Plan:
    """What a step will run, and the requests that had to make room for it."""

    items: list[Scheduled] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)

    @property
    def decoding(self) -> list[Scheduled]:
        """The items that reach their root and so emit tokens."""
        return [item for item in self.items if item.max_nodes]


class Scheduler:
    """By priority, then first come, first served; decoding before prompts; the last one makes room when blocks run out.

    The next request is admitted once those that run, and itself, are expected to find blocks until their ends, by the
    lengths of the answers that ended before. So requests rarely have to make room, and one alone is always admitted.

    Args:
        config: budgets.
        pool: the blocks to reserve from.
        node_budget: how many nodes pay for themselves.
    """

    def __init__(self, config: EngineConfig, pool: BlockPool, node_budget: NodeBudget) -> None:
        self.config = config
        self.pool = pool
        self.node_budget = node_budget
        self.lengths = LengthPredictor()
        self.waiting: list[Request] = []  # by rank
        self.running: list[Request] = []
        self.num_preemptions = 0

    def add(self, request: Request) -> None:
        """Put a request into the queue, at its place."""
        insort(self.waiting, request, key=lambda r: r.rank)

    def schedule(self, *, drafts: bool = True) -> Plan:
        """Choose the step's requests and reserve a slot for each of their rows. Without drafts trees are roots."""
        plan = Plan()
        budget = self.config.max_num_batched_tokens
        decoding = [r for r in self.running if r.num_pending == 1]
        rows = max(0, budget - len(decoding)) // 2  # half of the rest is left for prompts
        busy = bool(self.waiting) or len(decoding) < len(self.running)
        nodes: dict[int, int] | None = None
        if drafts:
            shares = self.node_budget.allot(decoding, rows, busy=busy)
            nodes = {r.id: share for r, share in zip(decoding, shares, strict=True)}
        for request in sorted(self.running, key=lambda r: (r.num_pending > 1, r.rank)):  # decoding first
            if budget and request not in plan.preempted:
                budget -= self._add(plan, request, budget, nodes)
        while budget and not plan.preempted and (found := self._admissible()) is not None:
            request = self.waiting.pop(0)
            self.running.append(request)
            self._reuse(request, found)
            budget -= self._add(plan, request, budget, nodes)
        for item in plan.items:
            self._reserve_nodes(item)
        return plan

    def can_admit(self) -> bool:
        """Whether the first of the waiting requests can start now."""
        return self._admissible() is not None

    def reserve_ahead(self, num_slots: int, spare: int) -> bool:
        """Reserve slots behind the known tokens of all running requests, for steps that aren't planned one by one.

        Args:
            num_slots: what each needs.
            spare: what each is given beyond, where it can be had, so that this is done less often.

        Returns:
            False if there are too few blocks; nothing was reserved.
        """
        short = [r for r in self.running if self._blocks_missing(r, len(r.tokens) + num_slots)]
        for more in (spare, 0):
            missing = [self._blocks_missing(r, len(r.tokens) + num_slots + more) for r in short]
            if sum(missing) <= self.pool.num_free:
                for request, count in zip(short, missing, strict=True):
                    request.block_table += self.pool.allocate(count)
                return True
        return False

    def release(self, request: Request) -> None:
        """Take an ended or aborted request out and free its blocks."""
        if request.finish_reason in (STOP, LENGTH):
            self.lengths.observe(request.num_output)
        if request in self.running:
            self.running.remove(request)
        else:
            self.waiting.remove(request)
        self._free_blocks(request)

    def restart(self) -> list[Request]:
        """Send all running requests that haven't ended back to the queue, and return them."""
        unended = [r for r in self.running if r.finish_reason is None]
        for request in unended:
            self._send_back(request)
        return unended

    def remember(self, request: Request) -> None:
        """Let a request's full blocks of committed tokens be found by others."""
        num_tokens = min(request.num_computed, len(request.tokens))  # what was accepted behind a stop isn't delivered
        self.pool.remember(request.block_table, request.tokens, num_tokens, request.params.cache_salt)

    def trim(self, request: Request) -> None:
        """Free the blocks behind the committed tokens: slots of rejected nodes."""
        self.remember(request)
        keep = -(-request.num_computed // self.config.block_size)
        self.pool.release(request.block_table[keep:])
        del request.block_table[keep:]

    def _add(self, plan: Plan, request: Request, budget: int, nodes: Mapping[int, int] | None) -> int:
        """Put a request into the plan if slots for its tokens can be had; return the rows that it takes of the budget.

        Its nodes get theirs later: no request makes room for another one's drafts.
        """
        rows = min(request.num_pending, budget)
        reaches_root = rows == request.num_pending
        max_nodes = 0
        if reaches_root and nodes is not None:
            max_nodes = nodes.get(request.id) or self.node_budget.allot([request], (budget - rows) // 2)[0]
        elif reaches_root:
            max_nodes = 1
        if not self._reserve(plan, request, request.num_computed + rows):
            return 0
        request.block_table += self.pool.allocate(self._blocks_missing(request, request.num_computed + rows))
        plan.items.append(Scheduled(request, rows - 1 if reaches_root else rows, max_nodes))
        return rows + max(max_nodes - 1, 0)

    def _reserve_nodes(self, item: Scheduled) -> None:
        """Reserve slots for the nodes below the root, of which there are no more than free blocks have room for."""
        request, end = item.request, item.request.num_computed + item.num_causal
        room = (len(request.block_table) + self.pool.num_free) * self.config.block_size - end
        item.max_nodes = min(item.max_nodes, room)
        request.block_table += self.pool.allocate(self._blocks_missing(request, end + item.max_nodes))

    def _reserve(self, plan: Plan, request: Request, num_slots: int) -> bool:
        """Make room for `num_slots` slots of a request by preempting the last ones; False if it had to go itself."""
        while self._blocks_missing(request, num_slots) > self.pool.num_free:
            victim = max(self.running, key=lambda r: r.rank)
            self._preempt(plan, victim)
            if victim is request:
                return False
        return True

    def _preempt(self, plan: Plan, request: Request) -> None:
        """Let a request make room."""
        self._send_back(request)
        plan.items = [item for item in plan.items if item.request is not request]
        plan.preempted.append(request)
        self.num_preemptions += 1

    def _send_back(self, request: Request) -> None:
        """Send a request back to the queue; its tokens are recomputed later."""
        self.running.remove(request)
        self._free_blocks(request)
        request.num_computed = 0
        self.add(request)

    def _admissible(self) -> list[int] | None:
        """The blocks that the first of the waiting requests would begin with; None if it can't start now."""
        if not self.waiting or len(self.running) >= self.config.max_num_seqs:
            return None
        request = self.waiting[0]
        found = self.pool.find(request.tokens, request.params.cache_salt)
        left = self.pool.num_left(found) - self._blocks_missing(request, len(request.tokens)) + len(found)
        if left < 0 or self._comes_soon(request, len(found)):
            return None
        fits = not self.running or self._expected_peak(request, self.pool.num_blocks - left) <= self.pool.num_blocks
        return found if fits else None

    def _expected_peak(self, request: Request, num_used: int) -> float:
        """Most blocks in use until all that run have ended, and a request with them after which so many are."""
        sequences = []
        for r in (*self.running, request):
            num_held = -(-len(r.tokens) // self.config.block_size)
            if r is not request:
                num_used += num_held - len(r.block_table)  # what a prompt lacks yet; less what is reserved ahead
            sequences.append((num_held, self.lengths.remaining(r.num_output, r.stop.max_tokens)))
        return peak_blocks(num_used, sequences, self.config.block_size)

    def _comes_soon(self, request: Request, num_found: int) -> bool:
        """Whether a running request is about to compute the block that would be the next to find."""
        size = self.config.block_size
        end = (num_found + 1) * size
        if not self.config.enable_prefix_caching or end >= len(request.tokens):
            return False
        return any(
            other.num_computed < end <= len(other.tokens)
            and other.params.cache_salt == request.params.cache_salt
            and other.tokens[:end] == request.tokens[:end]
            for other in self.running
            if other.num_pending > 1
        )

    def _reuse(self, request: Request, found: list[int]) -> None:
        """Begin a request with blocks that hold its first tokens already."""
        self.pool.take(found, len(request.tokens))
        request.block_table += found
        request.num_computed = len(found) * self.config.block_size
        if not request.admitted:  # what it finds when it comes back it has computed itself
            request.admitted = True
            request.stats.num_cached_tokens = request.num_computed

    def _blocks_missing(self, request: Request, num_slots: int) -> int:
        return max(0, -(-num_slots // self.config.block_size) - len(request.block_table))

    def _free_blocks(self, request: Request) -> None:
        self.remember(request)
        self.pool.release(request.block_table)
        request.block_table.clear()
