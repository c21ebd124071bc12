"""Measures steps for the cost table, over random tokens and contexts that were never computed.

A step is measured as the engine runs it: captured where it captures steps, else as a whole step of a real engine.
"""

import random
import statistics
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

import torch

from specdec.cache.pages import KVLayout, KVPages
from specdec.drafters.protocol import DeviceQuery, DraftQuery, Observation
from specdec.engine.capturable import why_no_graph
from specdec.engine.config import EngineConfig
from specdec.engine.device import Bucket, Captured, DeviceStep, capture
from specdec.engine.engine import Engine
from specdec.engine.graphs import bucket_of
from specdec.engine.recorder import Recorder
from specdec.engine.state import DeviceState
from specdec.errors import ConfigError
from specdec.models.decoder import Decoder
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
_BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class Grid:
    """The points to measure, as in `CostTable`."""

    num_seqs: tuple[int, ...]
    num_nodes: tuple[int, ...]
    contexts: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.num_seqs) * len(self.num_nodes) * len(self.contexts)

    @property
    def max_model_len(self) -> int:
        """Most tokens of a sequence in any step of the grid: context, root, nodes, and the token after them."""
        return self.contexts[-1] + MAX_NODES + 2


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


def make_step(model: PackedModel, grid: Grid, config: EngineConfig | None = None) -> tuple[Step, str]:
    """Return what runs and times a model's steps as an engine would run them, and how that is, for people.

    Args:
        model: the target.
        grid: the largest points that will be asked for.
        config: says how keys and values are stored; None: as they are.
    """
    config = config or EngineConfig()
    why = why_no_graph(model, _RandomChains(model.vocab_size), CoupledRule())
    if why is not None:
        return EngineStep(model, grid, config), f"eager steps, because {why}"
    assert isinstance(model, Decoder)
    layout = model.kv_layout.stored_as(config.kv_cache_dtype, config.kv_group_size)
    return CapturedStep(model, grid, layout), "captured steps"


class CapturedStep:
    """A `Step` of the device alone, captured on a GPU: draft of a full chain, forward, acceptance, commit.

    Its seconds are the device's own, taken by events behind a step like it, as the engine launches a step while the one
    before it runs; elsewhere the same step is run and timed as it is. One point is captured at a time.

    Args:
        model: the target, with Triton kernels.
        grid: the largest points that will be asked for; the cache is made to hold them.
        layout: the cache's, in the format to measure; None takes native pages.
    """

    def __init__(self, model: Decoder, grid: Grid, layout: KVLayout | None = None) -> None:
        self._model, self._max_model_len = model, grid.max_model_len
        self._chains = _RandomChains(model.vocab_size)
        width = -(-grid.max_model_len // _BLOCK_SIZE)  # blocks a sequence
        num_seqs = self._bucket(grid.num_seqs[-1], 1, grid.contexts[-1]).num_seqs
        rng = torch.Generator(model.device).manual_seed(0)
        self._pages = KVPages(layout or model.kv_layout, num_seqs * width, _BLOCK_SIZE, model.device)
        self._pages.randomize(rng)
        self._state = DeviceState.make(num_seqs, grid.max_model_len, width, model.device)
        self._state.history.random_(model.vocab_size, generator=rng)
        blocks = torch.randperm(num_seqs * width, generator=rng, device=model.device)
        self._state.block_table.copy_(blocks.view(num_seqs, width))
        self._captured: dict[tuple[int, int, int], Captured] = {}

    def __call__(self, num_seqs: int, num_nodes: int, context: int) -> float:
        """Run one step, padded as the engine would pad it, and return its seconds."""
        point = (num_seqs, num_nodes, context)
        if point not in self._captured:
            self._captured.clear()  # its memory is free before more is taken
            self._captured[point] = self._capture(*point)
        replay, device = self._captured[point].replay, self._model.device
        if device.type == "cuda":  # what the host takes to launch a step passes while this one runs
            self._begin(num_seqs, context)
            replay()
        self._begin(num_seqs, context)
        return _timed(replay, device)

    def _begin(self, num_seqs: int, context: int) -> None:
        self._state.lengths.zero_()
        self._state.lengths[:num_seqs] = context + 1

    def _capture(self, num_seqs: int, num_nodes: int, context: int) -> Captured:
        bucket, vocab_size = self._bucket(num_seqs, num_nodes, context), self._model.vocab_size
        step = DeviceStep(bucket, self._model, self._pages, self._state, self._chains, vocab_size)
        return capture(step, self._state.lengths, Recorder(self._model.device))

    def _bucket(self, num_seqs: int, num_nodes: int, context: int) -> Bucket:
        return bucket_of(num_seqs, num_nodes, context + 1 + num_nodes, self._max_model_len)


class EngineStep:
    """A `Step` of the engine itself, eager: schedule, forward over the trees, logits, acceptance, commit, delivery.

    Args:
        model: the target.
        grid: the largest points that will be asked for; the cache is made to hold them.
        config: says how keys and values are stored; None: as they are.
    """

    def __init__(self, model: PackedModel, grid: Grid, config: EngineConfig | None = None) -> None:
        num_seqs = grid.num_seqs[-1]
        config = replace(
            config or EngineConfig(),
            block_size=_BLOCK_SIZE,
            num_blocks=num_seqs * -(-grid.max_model_len // _BLOCK_SIZE),
            max_model_len=grid.max_model_len,
            max_num_seqs=num_seqs,
            max_num_batched_tokens=2 * MAX_NODES * num_seqs,
            cuda_graphs=False,
            enable_prefix_caching=False,
        )
        self._chains = _RandomChains(model.vocab_size)
        self._engine = Engine(model, self._chains, CoupledRule(), config, seed=0)
        self._engine.pages.randomize(torch.Generator(model.device).manual_seed(0))

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
    """A drafter that costs next to nothing and proposes as many nodes as it is told to, on the host or the device."""

    name = "random chains"
    reads_hidden = False
    chains_only = True

    def __init__(self, vocab_size: int) -> None:
        self.num_nodes = 1
        self._vocab_size, self._rng = vocab_size, random.Random(0)

    def draw(self, count: int) -> list[int]:
        return self._rng.choices(range(self._vocab_size), k=count)

    def propose(self, queries: Sequence[DraftQuery]) -> TokenTree:
        tokens = [[query.tokens[-1], *self.draw(self.num_nodes - 1)] for query in queries]
        return TokenTree.build(tokens, [chain_parents(self.num_nodes)] * len(queries))

    def max_device_nodes(self) -> int:
        return MAX_NODES

    def draft_on_device(self, query: DeviceQuery, num_nodes: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        tokens = query.history[:, :num_nodes].long().contiguous()  # any tokens will do, the root's too
        parents = torch.arange(-1, num_nodes - 1, device=tokens.device).expand_as(tokens).contiguous()
        return tokens, parents, torch.where(query.lengths > 0, num_nodes, 0).to(torch.int32)

    def observe(self, observation: Observation) -> None:
        """Nothing to learn."""

    def forget(self, request_ids: Collection[int]) -> None:
        """Nothing to drop."""


def _timed(run: Callable[[], object], device: torch.device) -> float:
    """Run once; seconds by the device's own clock if it is a GPU."""
    if device.type != "cuda":
        began = time.perf_counter()
        run()
        return time.perf_counter() - began
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1000


def _finish(device: torch.device) -> None:
    """Wait until the device has done all that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
