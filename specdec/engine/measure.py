"""Measures steps for the cost table: whole steps of a real engine, over random tokens and an empty cache."""

import random
import statistics
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch

from specdec.drafters.protocol import DraftQuery, Observation
from specdec.engine.config import EngineConfig
from specdec.engine.engine import Engine
from specdec.errors import ConfigError
from specdec.models.protocol import PackedModel
from specdec.params import SamplingParams
from specdec.verifier.rules import CoupledRule
from specdec.verifier.tree import MAX_NODES, TokenTree, chain_parents

Step = Callable[[int, int, int], float]
"""Runs one step of so many sequences × nodes × context tokens and returns its seconds."""
Seconds = tuple[tuple[tuple[float, ...], ...], ...]

NUM_NODES = (1, 2, 4, 8, 16, 32, 64)
CONTEXTS = {"cpu": (128, 1024), "cuda": (128, 1024, 4096)}
MAX_SEQS = {"cpu": 4, "cuda": 16}
_SEQS_RATIO = {"cpu": 4, "cuda": 2}


@dataclass(frozen=True, slots=True)
class Grid:
    """The points to measure, as in `CostTable`."""

    num_seqs: tuple[int, ...]
    num_nodes: tuple[int, ...]
    contexts: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.num_seqs) * len(self.num_nodes) * len(self.contexts)


def make_grid(
    device: torch.device, max_model_len: int, *, max_seqs: int | None = None, contexts: Sequence[int] = ()
) -> Grid:
    """Choose the points to measure on a device; a CPU gets fewer.

    Args:
        device: where the model is.
        max_model_len: positions that the model has.
        max_seqs: most sequences; by default 4 on a CPU and 16 on a GPU.
        contexts: context lengths; by default 128, 1024 and, on a GPU, 4096, cut to what the model has room for.

    Raises:
        ConfigError: a number is out of bounds, or a context and 64 nodes are more than the model's positions.
    """
    kind = "cpu" if device.type == "cpu" else "cuda"
    room = max_model_len - MAX_NODES - 2  # the root, and the token after it
    if room < 1:
        raise ConfigError(f"the model has {max_model_len} positions, too few to measure trees of {MAX_NODES} nodes")
    bad = next((c for c in contexts if not 1 <= c <= room), None)
    if bad is not None:
        raise ConfigError(f"context {bad} is out of bounds: give 1 to {room}, which leaves room for {MAX_NODES} nodes")
    most = MAX_SEQS[kind] if max_seqs is None else max_seqs
    if most < 1:
        raise ConfigError(f"max_seqs must be at least 1, not {most}")
    seqs = {most}
    power = 1
    while power < most:
        seqs.add(power)
        power *= _SEQS_RATIO[kind]
    chosen = contexts or [min(c, room) for c in CONTEXTS[kind]]
    return Grid(tuple(sorted(seqs)), NUM_NODES, tuple(sorted(set(chosen))))


def measure(
    step: Step, grid: Grid, *, repeats: int = 5, warmup: int = 2, progress: Callable[[str], None] = lambda point: None
) -> Seconds:
    """Return the median seconds of a step at each point, [S][N][C].

    Args:
        step: runs and times one.
        grid: the points.
        repeats: timed steps a point.
        warmup: untimed steps before them.
        progress: told which point comes next.
    """

    def median(num_seqs: int, num_nodes: int, context: int) -> float:
        progress(f"{num_seqs} × {num_nodes} nodes at context {context}")
        for _ in range(warmup):
            step(num_seqs, num_nodes, context)
        return statistics.median(step(num_seqs, num_nodes, context) for _ in range(repeats))

    return tuple(tuple(tuple(median(s, n, c) for c in grid.contexts) for n in grid.num_nodes) for s in grid.num_seqs)


class EngineStep:
    """A `Step` of the engine itself: schedule, forward over the trees, logits, acceptance, commit, delivery.

    Args:
        model: the target.
        grid: the largest points that will be asked for; the cache is made to hold them.
    """

    def __init__(self, model: PackedModel, grid: Grid) -> None:
        num_seqs, max_model_len = grid.num_seqs[-1], grid.contexts[-1] + MAX_NODES + 2
        config = EngineConfig(
            num_blocks=num_seqs * -(-max_model_len // 16),
            max_model_len=max_model_len,
            max_num_seqs=num_seqs,
            max_num_batched_tokens=2 * MAX_NODES * num_seqs,
        )
        self._chains = _RandomChains(model.vocab_size)
        self._engine = Engine(model, self._chains, CoupledRule(), config, seed=0)
        for pages in (*self._engine.pages.k, *self._engine.pages.v):
            pages.zero_()  # contexts are never computed; what is there must not be NaN

    def __call__(self, num_seqs: int, num_nodes: int, context: int) -> float:
        """Run one step and return its seconds, the device's work included."""
        engine, device = self._engine, self._engine.model.device
        self._chains.num_nodes = num_nodes
        params = SamplingParams(max_new_tokens=2 * MAX_NODES)
        requests = [engine.add(self._chains.draw(context + 1), params) for _ in range(num_seqs)]
        for request in requests:  # as if their contexts had been computed
            request.num_computed = context
        engine.scheduler.running += requests
        engine.scheduler.waiting.clear()
        _finish(device)
        start = time.perf_counter()
        engine.step()
        _finish(device)
        seconds = time.perf_counter() - start
        assert all(r.stats.num_draft_tokens == num_nodes - 1 for r in requests), "a tree was cut"
        for request in requests:
            engine.abort(request)
        return seconds


class _RandomChains:
    """A drafter that costs nothing and proposes as many nodes as it is told to."""

    name = "random chains"
    reads_hidden = False

    def __init__(self, vocab_size: int) -> None:
        self.num_nodes = 1
        self._vocab_size, self._rng = vocab_size, random.Random(0)

    def draw(self, count: int) -> list[int]:
        return self._rng.choices(range(self._vocab_size), k=count)

    def propose(self, queries: Sequence[DraftQuery]) -> TokenTree:
        tokens = [[query.tokens[-1], *self.draw(self.num_nodes - 1)] for query in queries]
        return TokenTree.build(tokens, [chain_parents(self.num_nodes)] * len(queries))

    def observe(self, observation: Observation) -> None:
        """Nothing to learn."""

    def forget(self, request_ids: Collection[int]) -> None:
        """Nothing to drop."""


def _finish(device: torch.device) -> None:
    """Wait until the device has done all that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
