"""Captures what a device runs as CUDA graphs. Knows nothing of what that is."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class GraphStats:
    """What graphs cost: how many there are, seconds of capture, bytes of the device's memory that they hold."""

    num_graphs: int = 0
    seconds: float = 0.0
    num_bytes: int = 0


class Recorder:
    """Captures runs. Their intermediate tensors share memory, so no two of them may run at the same time.

    Args:
        device: where they run; nothing is captured on a CPU.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.stats = device, GraphStats()
        self._pool: Any = None

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        """Return what runs `run` again, over the same tensors: on a GPU its graph, elsewhere itself.

        Args:
            run: has run before, so that all its kernels are compiled. It isn't run now.
        """
        if self.device.type != "cuda":
            self.stats = GraphStats(self.stats.num_graphs + 1)
            return run
        start = perf_counter()
        torch.cuda.empty_cache()  # a capture begins with it: what it frees is not the graph's
        before = torch.cuda.memory_reserved(self.device)
        graph = torch.cuda.CUDAGraph()
        # Other threads may go on: without this, memory that one of them asks the device for would end the capture.
        with _no_collection(), torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            run()
        self._pool = graph.pool()
        taken = torch.cuda.memory_reserved(self.device) - before
        s = self.stats
        self.stats = GraphStats(s.num_graphs + 1, s.seconds + perf_counter() - start, s.num_bytes + taken)
        return graph.replay


@contextmanager
def _no_collection() -> Iterator[None]:
    """Collect no garbage meanwhile: a graph of an engine that is gone, freed during a capture, would end it."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
