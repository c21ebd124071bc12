"""Times the GPU kernels in CUDA graphs, with inputs that come from memory, not from the cache.

    python benchmarks/kernels_gpu.py products --json benchmarks/results/products_h200.json
    python benchmarks/kernels_gpu.py attention --json benchmarks/results/attention_h200.json
    python benchmarks/kernels_gpu.py formats --json benchmarks/results/formats_h200.json
    python benchmarks/kernels_gpu.py direct --json benchmarks/results/direct_h200.json
    python benchmarks/kernels_gpu.py wide --json benchmarks/results/wide_h200.json
    python benchmarks/kernels_gpu.py pairs --json benchmarks/results/pairs_h200.json
    python benchmarks/kernels_gpu.py rope --json benchmarks/results/rope_h200.json

`products` tries tiles for each shape and number of rows, against cuBLAS; `attention` compares with torch's SDPA on
gathered keys and values, `formats` quantized pages with native ones, and `direct` and `wide` the kernels that may read
them, for few nodes and for more; `pairs` is tiles of many nodes that share keys, against those that don't; `rope` is
rotation and page write by how much a program does.
Bandwidths are against a large copy's in the same run. On an H200 the driver's copy is the slower one: `attention` also
says what a kernel's is.
"""

import json
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import astuple, dataclass
from functools import cached_property, partial
from unittest.mock import Mock, patch

import click
import torch
import torch.nn.functional as F  # noqa: N812
import triton
from torch import Tensor

from specdec.cache.pages import KVLayout, KVPages
from specdec.kernels.attention import AttentionMetadata
from specdec.kernels.formats import load
from specdec.kernels.gpu import fast
from specdec.kernels.gpu import rope as gpu_rope
from specdec.kernels.gpu.attention import tree_attention
from specdec.kernels.gpu.direct import DIRECT
from specdec.kernels.gpu.hopper import HopperKernel
from specdec.kernels.gpu.launch import on_hopper
from specdec.kernels.gpu.linear import gated_linear, linear
from specdec.kernels.gpu.pair import PAIR
from specdec.kernels.gpu.rope import rope_write
from specdec.kernels.gpu.single import SINGLE
from specdec.kernels.gpu.tiles import Tile
from specdec.kernels.gpu.wide import WIDE
from specdec.kernels.work import AttentionWork, uniform_work
from specdec.verifier.tree import TokenTree

CACHE = 50 << 20
"""Bytes of the second-level cache: inputs rotate over several times as much."""
MODELS = {
    "8B": {
        "qkv": (6144, 4096),
        "o": (4096, 4096),
        "gate_up": (28672, 4096),
        "down": (4096, 14336),
        "head": (128256, 4096),
    },
    "SmolLM2": {"qkv": (960, 576), "o": (576, 576), "gate_up": (3072, 576), "down": (576, 1536), "head": (49152, 576)},
}


def timed(calls: Sequence[Callable[[], object]], repeats: int = 20) -> float:
    """Microseconds a call: the median of replays of a graph that holds all calls behind each other."""
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000 / len(calls))
    return statistics.median(times)


def copy_bandwidth(by_kernel: bool = False) -> float:
    """TB/s of a large copy, bytes read and written: the driver's, or by a kernel that changes what it copies."""
    a = torch.empty(1 << 28, dtype=torch.int32, device="cuda")
    b = torch.empty_like(a)
    copy = partial(torch.bitwise_not, a, out=b) if by_kernel else partial(b.copy_, a)
    return 2 * a.numel() * a.itemsize / timed([copy] * 3) / 1e6


def write(path: str | None, result: dict[str, object]) -> None:
    """Print the result, and write it to a file if one is asked for."""
    facts = {
        "command": " ".join(
            ["python", "benchmarks/kernels_gpu.py", *(a for a in sys.argv[1:] if a not in ("--json", path))]
        ),
        "card": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
    }
    if path:
        with open(path, "w", encoding="utf-8") as file:
            json.dump(facts | result, file, indent=1)
            file.write("\n")


@click.group()
def main() -> None:
    """Time the kernels."""


def _tiles(rows: int, num_weights: int) -> list[Tile]:
    """Tiles to try, with operands that threads load and, on a Hopper GPU, that TMA does."""
    if rows > 64:
        sizes = [
            (128, 256, 64, 8, 3),
            (128, 256, 64, 8, 4),
            (128, 128, 64, 8, 4),
            (128, 128, 64, 8, 5),
            (128, 128, 64, 4, 4),
            (128, 64, 64, 4, 4),
            (256, 128, 64, 8, 3),
        ]
    else:
        sizes = [
            (next(n for n in (16, 32, 64) if rows <= n), out, k, *more)
            for out in (16, 32, 64, 128)
            for k in (64, 128, 256)
            for more in ((4, 4), (8, 3))
        ]
    of_each = [(m, max(16, out // num_weights), k, *more) for m, out, k, *more in sizes]
    ways = (False, True) if on_hopper(torch.device("cuda")) else (False,)
    tiles = [Tile(*size, tma) for size in of_each for tma in ways]
    return [tile for tile in tiles if tile.num_bytes(num_weights) <= 225_000]


@main.command()
@click.option("--json", "path", type=click.Path(dir_okay=False))
@click.option("--rows", default="1,16,64,4096")
@click.option("--only", default="", help="Comma-separated, e.g. 8B:qkv; all by default.")
@click.option("--search/--no-search", default=False, help="Try many tiles instead of the chosen one.")
def products(path: str | None, rows: str, only: str, search: bool) -> None:
    """Matrix products against cuBLAS."""
    bandwidth = copy_bandwidth()
    click.echo(f"copy {bandwidth:.2f} TB/s")
    out_rows: list[dict[str, object]] = []
    for model in MODELS:
        for name, (out, k) in MODELS[model].items():
            if only and f"{model}:{name}" not in only.split(","):
                continue
            copies = max(2, min(60, 4 * CACHE // (out * k * 2)))
            weights = [torch.randn(out, k, device="cuda", dtype=torch.bfloat16) / k**0.5 for _ in range(copies)]
            for n in map(int, rows.split(",")):
                x = torch.randn(n, k, device="cuda", dtype=torch.bfloat16)
                gated = name == "gate_up"
                use = weights if n <= 64 else weights[:2]

                def ours(tile: Tile | None, w: torch.Tensor, x: torch.Tensor = x, gated: bool = gated) -> torch.Tensor:
                    return gated_linear(x, w, None, "silu", tile=tile) if gated else linear(x, w, tile=tile)

                row: dict[str, object] = {"model": model, "product": name, "rows": n}
                row["cublas"] = round(timed([lambda w=w, x=x: F.linear(x, w) for w in use]), 2)
                row["ours"] = round(timed([lambda w=w, o=ours: o(None, w) for w in use]), 2)
                if n == 1:
                    call = (
                        (lambda w, x=x: fast.gated_linear(x, w, None, "silu"))
                        if gated
                        else (lambda w, x=x: fast.linear(x, w))
                    )
                    row["gemv"] = round(timed([lambda w=w, c=call: c(w) for w in use]), 2)
                if search:
                    found = {}
                    for tile in _tiles(n, 2 if gated else 1):
                        try:
                            found[tile] = timed([lambda w=w, o=ours, t=tile: o(t, w) for w in use], 8)
                        except Exception as error:  # out of registers, or no tile of this size by TMA
                            click.echo(f"{tile}: {type(error).__name__}")
                    best = sorted(found, key=found.__getitem__)[:4]
                    row["best"] = [(str(astuple(t)), round(found[t], 2)) for t in best]
                row["tb_s"] = round(out * k * 2 / float(row["ours"]) / 1e6, 2)  # type: ignore[arg-type]
                row["tflops"] = round(2 * n * out * k / float(row["ours"]) / 1e6, 1)  # type: ignore[arg-type]
                click.echo(str(row))
                out_rows.append(row)
    write(path, {"copy_tb_s": round(bandwidth, 3), "rows": out_rows})


@dataclass(frozen=True)
class Case:
    """Sequences of one context and as many nodes; their blocks are shuffled, their pages rotate beyond the cache."""

    num_sequences: int
    context: int
    nodes: int
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    kv_cache_dtype: str = "auto"

    @property
    def layout(self) -> KVLayout:
        """Shape and format of the keys and values."""
        return KVLayout(1, self.kv_heads, self.head_dim, torch.bfloat16).stored_as(self.kv_cache_dtype)

    @property
    def group(self) -> int:
        """Query heads a key head."""
        return self.heads // self.kv_heads

    @cached_property
    def meta(self) -> AttentionMetadata:
        """The batch as an eager step has it."""
        b, n, total = self.num_sequences, self.nodes, self.context + self.nodes
        width = -(-total // 16)
        positions = torch.arange(self.context, total, device="cuda").repeat(b)
        masks = [(2 << i) - 1 - (1 << 64 if i == 63 else 0) for i in range(n)]
        return AttentionMetadata(
            tuple(n * i for i in range(b + 1)),
            (self.context,) * b,
            (total,) * b,
            torch.randperm(b * width, device="cuda").view(b, width),
            positions,
            torch.full_like(positions, self.context),
            torch.tensor(masks, device="cuda").repeat(b),
            16,
        )

    @cached_property
    def work(self) -> AttentionWork:
        """The batch as a captured step has it whose drafter makes chains alone."""
        return self._captured(self.meta.positions, self.meta.ancestors, chains=True)

    @cached_property
    def tree_work(self) -> AttentionWork:
        """The same with trees instead: each node has two children, as far as there are nodes."""
        parents = [(i - 1) // 2 for i in range(self.nodes)]
        tree = TokenTree.build([parents] * self.num_sequences, [parents] * self.num_sequences)  # any tokens
        return self._captured(self.context + tree.depth.to("cuda"), tree.ancestors.to("cuda"), chains=False)

    def _captured(self, positions: Tensor, ancestors: Tensor, *, chains: bool) -> AttentionWork:
        lens = torch.tensor(self.meta.context_lens, dtype=torch.int32, device="cuda")
        table = self.meta.block_table.int()
        return uniform_work(len(lens), self.nodes, table, lens, positions, ancestors, self.group, self.context, chains)

    @cached_property
    def pages(self) -> list[KVPages]:
        """Pages of normal values, as many as go beyond the cache."""
        blocks, rng = self.meta.block_table.numel(), torch.Generator("cuda").manual_seed(0)
        copies = max(2, min(24, -(-4 * CACHE // (blocks * 16 * self.layout.bytes_per_token))))
        pages = [KVPages(self.layout, blocks, 16, torch.device("cuda")) for _ in range(copies)]
        for page in pages:
            page.randomize(rng)
        return pages

    @cached_property
    def q(self) -> Tensor:
        """[rows, heads, D]."""
        rows = self.num_sequences * self.nodes
        return torch.randn(rows, self.heads, self.head_dim, device="cuda", dtype=torch.bfloat16)

    @cached_property
    def gathered(self) -> list[list[Tensor]]:
        """Keys and values of the pages without gaps, each [sequences, key heads, context and nodes, D]."""
        keys = (self.meta.block_table[:, :, None] * 16 + torch.arange(16, device="cuda")).flatten(1)
        keys = keys[:, : self.context + self.nodes]
        return [
            [load(side[0], keys, torch.bfloat16).transpose(1, 2).contiguous() for side in (p.k, p.v)]
            for p in self.pages
        ]

    def ours(self, meta: AttentionMetadata | AttentionWork) -> float:
        """Microseconds of our attention; what is found once a step, where trees' paths stand, is found before."""
        scale = self.head_dim**-0.5
        return timed([partial(tree_attention, self.q, p.k[0], p.v[0], meta, scale=scale) for p in self.pages])

    def sdpa(self, folded: bool) -> float:
        """Microseconds of torch's, on gathered keys; folded: grouped heads as rows of one key head's attention."""
        mask = torch.ones(self.nodes, self.context + self.nodes, device="cuda", dtype=torch.bool).tril(self.context)
        q = self.q.view(self.num_sequences, self.nodes, self.heads, -1).transpose(1, 2).contiguous()
        if folded:
            q, mask = q.view(len(q), self.kv_heads, self.group * self.nodes, -1), mask.repeat(self.group, 1)
        how = {"attn_mask": None if self.nodes == 1 else mask, "scale": self.head_dim**-0.5, "enable_gqa": not folded}
        return timed([partial(F.scaled_dot_product_attention, q, kv[0], kv[1], **how) for kv in self.gathered], 8)


CASES = [(8, 32768, 1), (1, 32768, 64), (1, 32768, 16), (1, 1024, 1), (1, 1024, 16), (1, 1024, 64), (64, 512, 1)]
LONG_CASES = [(32, 8192, 1), (32, 8192, 16), (8, 32768, 1), (8, 32768, 16), (1, 32768, 16), (1, 131072, 16)]


@main.command()
@click.option("--json", "path", type=click.Path(dir_okay=False))
def attention(path: str | None) -> None:
    """Tree attention of 8 key heads, D 128, group 4, against the copy and torch's SDPA."""
    bandwidth = copy_bandwidth()
    rows: list[dict[str, object]] = []
    for case in (Case(*shape) for shape in CASES):
        others = {"sdpa": partial(case.sdpa, False), "sdpa_folded": partial(case.sdpa, True)}
        row = _attention_row(case, bandwidth, others)
        click.echo(str(row))
        rows.append(row)
    copies = {"copy_tb_s": round(bandwidth, 3), "kernel_copy_tb_s": round(copy_bandwidth(by_kernel=True), 3)}
    write(path, copies | {"rows": rows})


@main.command()
@click.option("--formats", default="auto,fp8,int8,int4", help="Values of kv_cache_dtype; the first is the baseline.")
@click.option("--nodes", default="1,16", help="Cases of so many nodes.")
@click.option("--json", "path", type=click.Path(dir_okay=False))
def formats(formats: str, nodes: str, path: str | None) -> None:
    """The same attention at long contexts over pages of each format, against the first; shares are of its own bytes."""
    bandwidth = copy_bandwidth()
    rows: list[dict[str, object]] = []
    for shape in (case for case in LONG_CASES if str(case[2]) in nodes.split(",")):
        baseline: dict[str, object] = {}
        for name in formats.split(","):
            row = {"kv_cache_dtype": name, **_attention_row(Case(*shape, kv_cache_dtype=name), bandwidth)}
            baseline = baseline or row
            row |= {f"{k}_ratio": round(row[f"{k}_us"] / baseline[f"{k}_us"], 3) for k in ("chain", "tree")}  # type: ignore[operator]
            click.echo(str(row))
            rows.append(row)
    write(path, {"copy_tb_s": round(bandwidth, 3), "rows": rows})


CODES = {"direct": DIRECT, "single": SINGLE, "wide": WIDE}
"""The kernels over codes."""
NARROW_CASES = [
    (1, 1024, 4), (1, 4096, 4), (1, 8192, 1), (1, 32768, 1), (1, 131072, 4), (2, 32768, 1), (4, 8192, 1), (8, 1024, 1),
    (8, 8192, 1), (8, 8192, 4), (8, 32768, 1), (16, 4096, 1), (32, 1024, 1), (32, 4096, 1), (32, 8192, 1),
]  # fmt: skip


@main.command("direct")
@click.option("--formats", default="int8,fp8", help="Values of kv_cache_dtype.")
@click.option("--json", "path", type=click.Path(dir_okay=False))
def direct_codes(formats: str, path: str | None) -> None:
    """A captured step's attention whose values go through shared memory, and whose codes go to the tensor cores."""
    write(path, {"rows": _of_codes(NARROW_CASES, formats.split(","), ("direct", "single"), {"us": "work"})})


WIDE_CASES = [
    (32, 8192, 16), (8, 32768, 16), (1, 8192, 16), (1, 32768, 16), (1, 131072, 16), (1, 1024, 16), (1, 2048, 16),
    (1, 4096, 16), (4, 16384, 16), (8, 2048, 16), (8, 4096, 16), (8, 8192, 16), (16, 1024, 16), (16, 2048, 16),
    (32, 2048, 16), (32, 4096, 16), (64, 512, 16), (64, 1024, 16), (1, 32768, 64), (8, 8192, 64),
]  # fmt: skip


@main.command("wide")
@click.option("--formats", default="int8,fp8", help="Values of kv_cache_dtype.")
@click.option("--json", "path", type=click.Path(dir_okay=False))
def wide_codes(formats: str, path: str | None) -> None:
    """The same of tiles of 64 rows, of chains and of trees."""
    kinds = {"us": "work", "tree_us": "meta"}
    write(path, {"rows": _of_codes(WIDE_CASES, formats.split(","), ("wide",), kinds)})


def _of_codes(
    cases: Sequence[tuple[int, int, int]], formats: Sequence[str], names: Sequence[str], kinds: dict[str, str]
) -> list[dict[str, object]]:
    """Microseconds over native pages and, of each format, without and with each kernel over codes.

    Args:
        cases: sequences, contexts, nodes.
        formats: values of kv_cache_dtype.
        names: of `CODES`.
        kinds: how a time's name ends, and the attribute of a `Case` that is measured.
    """
    rows: list[dict[str, object]] = []

    def measured(case: Case, how: str) -> dict[str, float]:
        return {f"{how}_{end}": round(case.ours(getattr(case, kind)), 1) for end, kind in kinds.items()}

    for shape in cases:
        native = measured(Case(*shape), "native")
        for kv_cache_dtype in formats:
            case = Case(*shape, kv_cache_dtype=kv_cache_dtype)
            row: dict[str, object] = {"kv_cache_dtype": kv_cache_dtype, "sequences": shape[0], "context": shape[1]}
            row |= {"nodes": shape[2], **native}
            for how in ("shared", *names):
                with only(CODES.get(how)):
                    row |= measured(case, how)
            click.echo(str(row))
            rows.append(row)
    return rows


PAIR_CASES = [
    (sequences, context, nodes)
    for sequences in (1, 2, 3, 4, 8, 16)
    for context in (512, 1024, 2048, 4096, 6144, 8192, 12288, 16384, 32768)
    for nodes in (32, 64)
    if 2048 <= sequences * context <= 65536
]


@main.command()
@click.option("--json", "path", type=click.Path(dir_okay=False))
def pairs(path: str | None) -> None:
    """Attention over native pages with two tiles of nodes a program, and with one; `takes` says what is chosen."""
    rows: list[dict[str, object]] = []
    for shape in PAIR_CASES:
        case = Case(*shape)
        row: dict[str, object] = dict(zip(("sequences", "context", "nodes"), shape, strict=True))
        with patch.object(PAIR, "attend", Mock(side_effect=PAIR.attend)) as attend:
            case.ours(case.work)
        row["takes"] = attend.called
        for how in ("one", "two"):
            with patch.object(PAIR, "takes", lambda *args, two=how == "two": two and HopperKernel.takes(PAIR, *args)):
                row |= {f"{how}_us": round(case.ours(case.work), 1)}
                row |= {f"{how}_tree_us": round(case.ours(case.tree_work), 1)}
        click.echo(str(row))
        rows.append(row)
    write(path, {"rows": rows})


@main.command()
@click.option("--formats", default="auto,fp8,int8,int4", help="Values of kv_cache_dtype.")
@click.option("--json", "path", type=click.Path(dir_okay=False))
def rope(formats: str, path: str | None) -> None:
    """Rotation and page write of 32 and 8 heads of 128, by the heads of a program: one warp, or eight for 16."""
    rows: list[dict[str, object]] = []
    for name in formats.split(","):
        layout = KVLayout(1, 8, 128, torch.bfloat16).stored_as(name)
        pages = KVPages(layout, 64, 16, torch.device("cuda"))
        for n in (1, 16, 64, 512):
            row: dict[str, object] = {"kv_cache_dtype": name, "rows": n}
            qkv = [torch.randn(n, 48, 128, device="cuda", dtype=torch.bfloat16) for _ in range(8)]
            cos, sin = (torch.randn(n, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2))
            slots = torch.randperm(64 * 16, device="cuda")[:n]
            calls = [partial(rope_write, x, cos, sin, pages.k[0], pages.v[0], slots, 32) for x in qkv * 4]
            row["us"] = round(timed(calls), 2)
            for program in ((1, 1), (2, 1), (4, 1), (8, 1), (16, 8)):
                with patch.multiple(gpu_rope, NATIVE=program, QUANTIZED=(program, program)):
                    row[f"us_of_{program[0]}"] = round(timed(calls), 2)
            click.echo(str(row))
            rows.append(row)
    write(path, {"rows": rows})


@main.command()
@click.option("--format", "kv_cache_dtype", default="int8", help="A value of kv_cache_dtype.")
@click.option("--sequences", default=32)
@click.option("--context", default=8192)
@click.option("--nodes", default=1)
def launch(kv_cache_dtype: str, sequences: int, context: int, nodes: int) -> None:
    """Launch attention once each by chains, by trees and by each kernel over codes that takes them, for a profiler."""
    case = Case(sequences, context, nodes, kv_cache_dtype=kv_cache_dtype)
    page = case.pages[0]
    for name in ("shared",) if kv_cache_dtype == "auto" else ("shared", *CODES):
        with only(CODES.get(name)):
            for meta in (case.work, case.meta):
                tree_attention(case.q, page.k[0], page.v[0], meta, scale=case.head_dim**-0.5)
    torch.cuda.synchronize()


@contextmanager
def only(way: HopperKernel | None) -> Iterator[None]:
    """Let one of the kernels over codes, or none, be taken for contexts of any length."""
    with ExitStack() as stack:
        for kernel in CODES.values():
            if kernel is way:
                stack.enter_context(patch.multiple(kernel, min_context=0, min_programs=0))
            else:
                stack.enter_context(patch.object(kernel, "takes", lambda *args: False))
        yield


def by_turns(ways: Mapping[str, Callable[[], float]], rounds: int = 3) -> dict[str, float]:
    """The median of what each way gives, one after another and again: the first times of a process are others."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            times[name].append(way())
    return {name: statistics.median(found) for name, found in times.items()}


def _attention_row(
    case: Case, bandwidth: float, others: Mapping[str, Callable[[], float]] | None = None
) -> dict[str, object]:
    """Microseconds of attention in captured steps, of chains and trees, and their shares of the copy's bandwidth.

    And in an eager step, where nothing can be read before the kernels in front have ended; and other ways, by turns.
    """
    num_bytes = case.num_sequences * (case.context + case.nodes) * case.layout.bytes_per_token
    ours = {"chain": lambda: case.ours(case.work), "tree": lambda: case.ours(case.tree_work)}
    times = by_turns({**ours, "eager": lambda: case.ours(case.meta), **(others or {})})
    row: dict[str, object] = {"sequences": case.num_sequences, "context": case.context, "nodes": case.nodes}
    row |= {f"{kind}_us": round(us, 1) for kind, us in times.items()}
    shares = {kind: num_bytes / times[kind] / 1e6 / bandwidth for kind in ("chain", "tree")}
    return row | {f"{kind}_share_of_copy": round(share, 3) for kind, share in shares.items()}


if __name__ == "__main__":
    main()
