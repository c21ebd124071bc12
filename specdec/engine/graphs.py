"""Decode steps as CUDA graphs, one for each bucket, replayed one step ahead of the host.

While the device runs a step the host reads what the one before emitted, so that neither waits for the other. A request
that ends is still in the step that has been launched; its tokens of that step are dropped.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from specdec.cache.pages import KVPages
from specdec.drafters.protocol import DraftsOnDevice, KeepsHidden
from specdec.engine.budget import NODE_COUNTS, NodeBudget
from specdec.engine.capturable import why_eager
from specdec.engine.device import Bucket, Captured, DeviceStep, capture
from specdec.engine.recorder import GraphStats, Recorder
from specdec.engine.request import Request
from specdec.engine.scheduler import Scheduler
from specdec.engine.state import DeviceState
from specdec.models.decoder import Decoder
from specdec.models.padded import bound_of

MAX_ROWS = 1024
"""Most rows of a captured step: graphs hold their intermediate tensors."""
PATIENCE = 2
"""Steps that requests have waited beside empty places, all together, for each request that runs, when they are let in.
That takes a step planned by the host, for which all that run wait as long as for several captured ones."""
LONGEST_WAIT = 32
"""Captured steps after which a request is let in however many run."""
AHEAD = 64
"""Slots reserved beyond what the next steps may need, where blocks are free."""
_RING = 4  # buffers that the device copies to and from; at most two steps are in flight


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one step emitted for one request.

    Args:
        request: whose.
        tokens: the emitted tokens: the accepted drafts and the bonus token. -1: nothing could be chosen.
        leaf_reached: whether the accepted path ended at a node without children.
        num_nodes: nodes of its tree, root included.
        max_nodes: nodes that it could have had.
    """

    request: Request
    tokens: list[int]
    leaf_reached: bool
    num_nodes: int
    max_nodes: int


class Mark:
    """The end of what a device was given so far; without a GPU that is now, and no time is known of it."""

    def __init__(self, device: torch.device) -> None:
        self._event = None
        if device.type == "cuda":
            self._event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            self._event.record()

    def wait(self) -> None:
        """Wait until the device is there."""
        if self._event is not None:
            self._event.synchronize()

    def seconds_since(self, earlier: "Mark") -> float | None:
        """Return the time between two marks that the device has passed."""
        if self._event is None or earlier._event is None:
            return None
        return float(earlier._event.elapsed_time(self._event)) / 1000


@dataclass(slots=True)
class _Launched:
    """A step in flight: its requests by place, its result on the host once `done` is reached.

    `behind` is the end of the step before, if this one takes the time between both: it was launched while that ran.
    """

    requests: list[Request]
    bucket: Bucket
    result: Tensor
    done: Mark
    behind: Mark | None


def bucket_of(num_seqs: int, num_nodes: int, longest: int, max_model_len: int, cuts: bool = False) -> Bucket:
    """Return the bucket that a step of so many sequences is padded to.

    Args:
        num_seqs: padded to a power of 2.
        num_nodes: of each tree.
        longest: most tokens of a sequence after the step.
        max_model_len: no sequence is longer.
        cuts: whether a request samples from fewer than all tokens.
    """
    return Bucket(_at_least(num_seqs), num_nodes, bound_of(longest, max_model_len), cuts)


@dataclass(slots=True)
class StepGraphs:
    """Runs the running requests step by step on the device, where they allow it.

    Args:
        model: the target, with Triton kernels.
        pages: its keys and values.
        drafter: drafts on the device.
        scheduler: whose running requests are run, and whose pool blocks are reserved from.
        budget: how many nodes pay for themselves.
        max_model_len: most tokens of a request.
        num_real_tokens: ids from here on pad the vocabulary and are never emitted.
        recorder: captures the steps.
    """

    model: Decoder
    pages: KVPages
    drafter: DraftsOnDevice
    scheduler: Scheduler
    budget: NodeBudget
    max_model_len: int
    num_real_tokens: int
    recorder: Recorder
    _state: DeviceState = field(init=False)
    _loaded: list[Request] = field(default_factory=list)
    _flying: deque[_Launched] = field(default_factory=deque)
    _captured: dict[Bucket, Captured] = field(default_factory=dict)
    _launches: int = 0
    _waited: int = 0  # steps that requests waited for places which stood empty
    _waiting_since: int | None = None  # the launch when the first of them began to
    _table_sizes: list[int] = field(default_factory=list)
    _tables: list[Tensor] = field(init=False)
    _results: list[Tensor] = field(init=False)

    def __post_init__(self) -> None:
        num_seqs, device = _at_least(self.scheduler.config.max_num_seqs), self.model.device
        num_blocks = -(-(self.max_model_len + 2 * NODE_COUNTS[-1]) // self.pages.block_size)
        max_len = self.max_model_len + NODE_COUNTS[-1]
        hidden_size = self.model.hidden_size if isinstance(self.drafter, KeepsHidden) else 0
        self._state = DeviceState.make(num_seqs, max_len, num_blocks, device, hidden_size, self.model.dtype)
        pinned = device.type == "cuda"
        self._tables = [torch.zeros(num_seqs, num_blocks, dtype=torch.int32, pin_memory=pinned) for _ in range(_RING)]
        size = max(MAX_ROWS, num_seqs) * 4  # [B, n + 3] for any bucket
        self._results = [torch.empty(size, dtype=torch.int64, pin_memory=pinned) for _ in range(_RING)]

    @property
    def stats(self) -> GraphStats:
        """What the recorder captured so far."""
        return self.recorder.stats

    def step(self) -> list[Outcome] | None:
        """Launch the next step and return what the oldest one in flight emitted.

        Returns:
            None if the requests must be run eagerly now; nothing is in flight then.
        """
        bucket = self._bucket()
        if bucket is None:
            return self._stop()
        if not self._loaded:
            self._load()
        self._launch(bucket)
        if len(self._flying) == 1:
            return []
        return self._read()

    def drop(self) -> None:
        """Forget the steps in flight and what the device knows: the requests are computed anew."""
        self._flying.clear()
        self._loaded = []

    def _stop(self) -> list[Outcome] | None:
        """Read what is in flight, and forget what the device knows: eager steps will move the requests on."""
        outcomes = [outcome for _ in range(len(self._flying)) for outcome in self._read()]
        running = [(place, r.id) for place, r in enumerate(self._loaded) if r.finish_reason is None]
        if running and isinstance(self.drafter, KeepsHidden):
            places, ids = zip(*running, strict=True)
            self.drafter.keep_hidden(ids, self._state.hidden[list(places)])  # a copy
        self._loaded = []
        if outcomes:
            return outcomes
        self._waited, self._waiting_since = 0, None  # the host's step lets in whoever fits
        return None

    def _bucket(self) -> Bucket | None:
        """The shapes of the next step, its blocks reserved; None if it can't be launched."""
        running = self.scheduler.running
        if not running or (self._may_admit() and self.scheduler.can_admit()):
            return None
        if not (self._still_fits(running) if self._loaded else _can_load(running)):
            return None
        places = _at_least(len(self._loaded) or len(running))
        nodes = self._num_nodes(running, places)
        ahead = sum(launched.bucket.num_nodes for launched in self._flying) + nodes
        longest = max(len(r.tokens) for r in running) + ahead
        if longest > self.max_model_len or not self.scheduler.reserve_ahead(ahead, AHEAD):
            return None
        cuts = any(r.params.cuts for r in running)
        return bucket_of(places, nodes, longest, self.max_model_len, cuts)

    def _may_admit(self) -> bool:
        if self._waiting_since is None:
            return False
        running = len(self.scheduler.running)
        return self._waited >= PATIENCE * running or self._launches - self._waiting_since >= LONGEST_WAIT

    def _count_waiting(self) -> None:
        """Count those who wait during the step that is launched."""
        free = self.scheduler.config.max_num_seqs - len(self.scheduler.running)
        if waiting := min(free, len(self.scheduler.waiting)):
            self._waiting_since = self._launches if self._waiting_since is None else self._waiting_since
            self._waited += waiting

    def _still_fits(self, running: Sequence[Request]) -> bool:
        """Whether all that run are on the device, and in more than a quarter of its places."""
        loaded = {r.id for r in self._loaded}
        return all(r.id in loaded for r in running) and 4 * len(running) > _at_least(len(self._loaded))

    def _num_nodes(self, running: Sequence[Request], places: int) -> int:
        most = self.drafter.max_device_nodes()
        wanted = min(most, self.scheduler.config.max_nodes, MAX_ROWS // places)
        wanted = min(wanted, max(r.params.max_nodes for r in running))
        if wanted > 1:
            wanted = min(wanted, self.budget.shared_limit(running, places))
        return max(n for n in (*NODE_COUNTS, most) if n <= max(1, wanted))  # few sizes, the whole tree among them

    def _load(self) -> None:
        self._loaded = list(self.scheduler.running)
        self._table_sizes = [-1] * len(self._loaded)
        self._state.load(self._loaded)
        if isinstance(self.drafter, KeepsHidden):
            self._state.load_hidden(self.drafter.hidden_of([r.id for r in self._loaded]))

    def _launch(self, bucket: Bucket) -> None:
        for place, request in enumerate(self._loaded):
            if request.finish_reason is not None and self._table_sizes[place] != 0:
                self._state.lengths[place] = 0
                self._table_sizes[place] = 0
        self._send_tables()
        behind = self._flying[-1].done if self._flying and bucket in self._captured else None  # a capture takes long
        captured = self._captured.get(bucket) or self._capture(bucket)
        captured.replay()
        self._count_waiting()
        shape = captured.step.out.shape
        result = self._results[self._launches % _RING][: shape.numel()].view(shape)
        result.copy_(captured.step.out, non_blocking=True)
        self._launches += 1
        self._flying.append(_Launched(list(self._loaded), bucket, result, Mark(self.model.device), behind))

    def _send_tables(self) -> None:
        """Copy the block tables to the device if one has grown."""
        sizes = [0 if r.finish_reason else len(r.block_table) for r in self._loaded]
        if sizes == self._table_sizes:
            return
        table = self._tables[self._launches % _RING]
        for place, request in enumerate(self._loaded):
            blocks = request.block_table[: table.shape[1]]
            table[place, : len(blocks)] = torch.tensor(blocks, dtype=torch.int32)
        count = len(self._loaded)
        self._state.block_table[:count].copy_(table[:count], non_blocking=True)
        self._table_sizes = sizes

    def _read(self) -> list[Outcome]:
        """Wait for the oldest step in flight and return what it emitted for requests that still run."""
        launched = self._flying.popleft()
        launched.done.wait()
        bucket, outcomes = launched.bucket, []
        if launched.behind is not None and (seconds := launched.done.seconds_since(launched.behind)) is not None:
            self.budget.times.observe(bucket.num_seqs, bucket.num_nodes, seconds)
        for request, row in zip(launched.requests, launched.result.tolist(), strict=False):
            if request.finish_reason is None:
                *tokens, leaf, num_accepted, num_nodes = row
                outcomes.append(Outcome(request, tokens[:num_accepted], bool(leaf), num_nodes, bucket.num_nodes))
        return outcomes

    def _capture(self, bucket: Bucket) -> Captured:
        step = DeviceStep(bucket, self.model, self.pages, self._state, self.drafter, self.num_real_tokens)
        self._captured[bucket] = capture(step, self._state.lengths, self.recorder)
        return self._captured[bucket]


def _can_load(requests: Sequence[Request]) -> bool:
    return all(r.num_pending == 1 and why_eager(r) is None for r in requests)


def _at_least(count: int) -> int:
    """The next power of 2."""
    return 1 << (count - 1).bit_length()
