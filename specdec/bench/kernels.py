"""`bench kernels`: the ops of a model's decode step against the roofline of this device, measured in the same run.

The roofline is the larger of two times: bytes by the bandwidth of a large copy, operations by the rate of a large
matrix product. On a GPU calls are timed in a graph, and inputs rotate over more memory than the cache holds.
"""

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from time import perf_counter

import torch
from torch import Tensor

from specdec.kernels.attention import AttentionMetadata
from specdec.kernels.ops import Ops
from specdec.kernels.work import AttentionWork, uniform_work
from specdec.models.weights import DecoderWeights

_CACHE = {"cuda": 50 << 20, "cpu": 32 << 20}  # bytes of the last cache: inputs rotate over several times as much
_COPY = {"cuda": 1 << 30, "cpu": 1 << 27}  # bytes
_SQUARE = {"cuda": 8192, "cpu": 1024}  # of the large product
_MOST_COPIES = 60
_BLOCK_SIZE = 16

Call = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Roofline:
    """What the device does at best: bytes and operations a second, measured."""

    bytes_per_second: float
    flops_per_second: float

    def seconds(self, num_bytes: float, flops: float) -> float:
        """Return the least time for so much work."""
        return max(num_bytes / self.bytes_per_second, flops / self.flops_per_second)


@dataclass(frozen=True, slots=True)
class Timed:
    """One op at one size.

    Args:
        op: its name.
        rows: of the batch.
        context: tokens that attention reads; 0 for products.
        microseconds: a call, the median.
        roofline_microseconds: the least that the device would need.
    """

    op: str
    rows: int
    context: int
    microseconds: float
    roofline_microseconds: float

    @property
    def share(self) -> float:
        """Of the roofline; above 1 where inputs came from the cache."""
        return self.roofline_microseconds / self.microseconds

    def as_json(self) -> dict[str, object]:
        """Return what a result file holds."""
        return asdict(self) | {"share_of_roofline": self.share}


def timed(calls: Sequence[Call], device: torch.device, repeats: int = 15) -> float:
    """Return the seconds of a call: the median of runs of all of them."""
    run, clock = (_captured(calls), _device_clock) if device.type == "cuda" else (lambda: _run(calls), _host_clock)
    run()
    return statistics.median(clock(run) for _ in range(repeats)) / len(calls)


def _run(calls: Sequence[Call]) -> None:
    for call in calls:
        call()


def _captured(calls: Sequence[Call]) -> Callable[[], None]:
    _run(calls)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        _run(calls)
    return graph.replay


def _host_clock(run: Call) -> float:
    start = perf_counter()
    run()
    return perf_counter() - start


def _device_clock(run: Call) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3


def measure_roofline(device: torch.device, dtype: torch.dtype) -> Roofline:
    """Time a large copy and a large product of torch's own."""
    source = torch.empty(_COPY[device.type], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy = timed([lambda: target.copy_(source)], device, 7)
    size = _SQUARE[device.type]
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    product = timed([lambda: torch.mm(a, b)], device, 7)
    return Roofline(2 * source.numel() / copy, 2 * size**3 / product)


def measure_kernels(
    weights: DecoderWeights, ops: Ops, roofline: Roofline, rows: Sequence[int], contexts: Sequence[int]
) -> Iterator[Timed]:
    """Time the products of one layer and the head, then attention of one sequence whose tree is a chain.

    Args:
        weights: of the model whose shapes count.
        ops: what its decoder runs by.
        roofline: of the device.
        rows: nodes of a step.
        contexts: tokens before them.
    """
    for num_rows in rows:
        yield from (
            _product(name, matrix, gated, num_rows, weights, ops, roofline) for name, matrix, gated in _of(weights)
        )
    for context in contexts:
        yield from (_attention(num_rows, context, weights, ops, roofline) for num_rows in rows if num_rows <= 64)


def _of(weights: DecoderWeights) -> list[tuple[str, Tensor, bool]]:
    layer = weights.layers[0]
    named = {"qkv": layer.qkv, "o": layer.o, "down": layer.down, "head": weights.head, "gate_up": layer.gate_up}
    matrices = {name: matrix for name, matrix in named.items() if isinstance(matrix, Tensor)}  # not quantized ones
    return [(name, matrix, name == "gate_up") for name, matrix in matrices.items()]


def _product(
    name: str, matrix: Tensor, gated: bool, rows: int, weights: DecoderWeights, ops: Ops, roofline: Roofline
) -> Timed:
    out, size = matrix.shape[0], matrix.element_size()
    width = matrix.numel() // out  # whatever the order of them
    copies = [torch.empty_like(matrix).copy_(matrix) for _ in range(_num_copies(matrix.numel() * size, matrix.device))]
    x = torch.randn(rows, width, device=matrix.device, dtype=matrix.dtype)
    if gated:
        calls: list[Call] = [partial(ops.gated_linear, x, w, None, weights.activation) for w in copies]
    else:
        calls = [partial(ops.linear, x, w) for w in copies]
    num_bytes = size * (out * width + rows * width + rows * (out // 2 if gated else out))
    best = roofline.seconds(num_bytes, 2 * rows * out * width)
    return Timed(name, rows, 0, timed(calls, matrix.device) * 1e6, best * 1e6)


def _attention(nodes: int, context: int, weights: DecoderWeights, ops: Ops, roofline: Roofline) -> Timed:
    device, dtype = weights.head.device, weights.head.dtype
    heads, kv_heads, dim = weights.num_heads, weights.num_kv_heads, weights.head_dim
    meta = _chain(nodes, context, device)
    shape = (2, meta.block_table.numel(), _BLOCK_SIZE, kv_heads, dim)
    num_bytes = 2 * (context + nodes) * kv_heads * dim * dtype.itemsize
    pages = [torch.randn(shape, device=device, dtype=dtype) for _ in range(_num_copies(num_bytes, device))]
    q = torch.randn(nodes, heads, dim, device=device, dtype=dtype)
    work = _captured_work(meta, weights) if device.type == "cuda" else meta
    calls: list[Call] = [partial(ops.tree_attention, q, p[0], p[1], work, scale=weights.scale) for p in pages]
    best = roofline.seconds(num_bytes + 2 * q.numel() * dtype.itemsize, 4 * nodes * (context + nodes) * heads * dim)
    return Timed("attention", nodes, context, timed(calls, device) * 1e6, best * 1e6)


def _chain(nodes: int, context: int, device: torch.device) -> AttentionMetadata:
    """One sequence whose tree is a chain, its blocks in any order."""
    total = context + nodes
    positions = torch.arange(context, total, device=device)
    ancestors = torch.tensor([(2 << i) - 1 - (1 << 64 if i == 63 else 0) for i in range(nodes)], device=device)
    table = torch.randperm(-(-total // _BLOCK_SIZE), device=device).unsqueeze(0)
    visible = torch.full_like(positions, context)
    return AttentionMetadata((0, nodes), (context,), (total,), table, positions, visible, ancestors, _BLOCK_SIZE)


def _captured_work(meta: AttentionMetadata, weights: DecoderWeights) -> AttentionWork:
    """The same, as a captured step has it."""
    (context,) = meta.context_lens
    return uniform_work(
        1,
        len(meta.positions),
        meta.block_table.to(torch.int32),
        torch.tensor([context], dtype=torch.int32, device=meta.positions.device),
        meta.positions,
        meta.ancestors,
        weights.num_heads // weights.num_kv_heads,
        context,
        chains=True,
    )


def _num_copies(num_bytes: int, device: torch.device) -> int:
    return max(2, min(_MOST_COPIES, math.ceil(4 * _CACHE[device.type] / num_bytes)))
