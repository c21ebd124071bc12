"""Times the GPU kernels in CUDA graphs, with inputs that come from memory, not from the cache.

    python benchmarks/kernels_gpu.py products --json benchmarks/results/products_h100.json
    python benchmarks/kernels_gpu.py attention --json benchmarks/results/attention_h100.json

`products` tries tiles for each shape and number of rows, against cuBLAS; `attention` compares with torch's SDPA on
gathered keys and values. Bandwidths are against a large copy's in the same run.
"""

import json
import statistics
import sys
from collections.abc import Callable, Sequence

import click
import torch
import torch.nn.functional as F  # noqa: N812
import triton

from specdec.kernels.attention import AttentionMetadata
from specdec.kernels.gpu import fast
from specdec.kernels.gpu.attention import tree_attention
from specdec.kernels.gpu.linear import Tile, gated_linear, linear, tile_of

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


def copy_bandwidth() -> float:
    """TB/s of a large copy, bytes read and written."""
    a = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    b = torch.empty_like(a)
    return 2 * a.numel() / timed([lambda: b.copy_(a)] * 3) / 1e6


def write(path: str | None, result: dict[str, object]) -> None:
    """Print the result, and write it to a file if one is asked for."""
    facts = {
        "command": " ".join(["python", "benchmarks/kernels_gpu.py", *sys.argv[1:2]]),
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


def _tiles(rows: int) -> list[Tile]:
    if rows > 64:
        large = [
            (128, 256, 64, 8, 3),
            (128, 256, 64, 8, 4),
            (128, 128, 64, 8, 4),
            (128, 128, 64, 4, 4),
            (256, 128, 64, 8, 3),
        ]
        return [Tile(*t) for t in large]
    m = 16 if rows <= 16 else 64
    return [
        Tile(m, out, k, w, s)
        for out in (16, 32, 64, 128)
        for k in (64, 128, 256)
        for w, s in ((4, 4), (8, 3))
        if (m + out) * k * 2 * s < 200_000
    ]


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
                chosen = tile_of(n, out // (2 if gated else 1), k, 2 if gated else 1)
                row["ours"] = round(timed([lambda w=w, o=ours, c=chosen: o(c, w) for w in use]), 2)
                if n == 1:
                    call = (
                        (lambda w, x=x: fast.gated_linear(x, w, None, "silu"))
                        if gated
                        else (lambda w, x=x: fast.linear(x, w))
                    )
                    row["gemv"] = round(timed([lambda w=w, c=call: c(w) for w in use]), 2)
                if search:
                    found = {}
                    for tile in _tiles(n):
                        if gated:
                            tile = Tile(tile.rows, max(16, tile.out // 2), tile.k, tile.warps, tile.stages)
                        try:
                            found[tile] = timed([lambda w=w, o=ours, t=tile: o(t, w) for w in use], 8)
                        except Exception as error:  # out of shared memory or registers: no tile for this size
                            click.echo(f"{tile}: {type(error).__name__}")
                    best = sorted(found, key=found.__getitem__)[:4]
                    row["best"] = [(f"{t.rows},{t.out},{t.k},{t.warps},{t.stages}", round(found[t], 2)) for t in best]
                row["tb_s"] = round(out * k * 2 / float(row["ours"]) / 1e6, 2)  # type: ignore[arg-type]
                row["tflops"] = round(2 * n * out * k / float(row["ours"]) / 1e6, 1)  # type: ignore[arg-type]
                click.echo(str(row))
                out_rows.append(row)
    write(path, {"copy_tb_s": round(bandwidth, 3), "rows": out_rows})


def metadata(num_sequences: int, context: int, nodes: int) -> AttentionMetadata:
    """Sequences of the same context, each with a chain of nodes, their blocks shuffled."""
    total = context + nodes
    width = -(-total // 16)
    table = torch.randperm(num_sequences * width, device="cuda").view(num_sequences, width)
    positions = torch.arange(context, total, device="cuda").repeat(num_sequences)
    ancestors = torch.tensor([[(2 << i) - 1 - (1 << 64 if i == 63 else 0) for i in range(nodes)]], device="cuda")
    return AttentionMetadata(
        tuple(nodes * i for i in range(num_sequences + 1)),
        (context,) * num_sequences,
        (total,) * num_sequences,
        table,
        positions,
        torch.full_like(positions, context),
        ancestors.expand(num_sequences, -1).reshape(-1),
        16,
    )


@main.command()
@click.option("--json", "path", type=click.Path(dir_okay=False))
def attention(path: str | None) -> None:
    """Tree attention of 8 key heads, D 128, group 4, against the copy and torch's SDPA."""
    bandwidth = copy_bandwidth()
    rows: list[dict[str, object]] = []
    for num_sequences, context, nodes in (
        (8, 32768, 1),
        (1, 32768, 64),
        (1, 32768, 16),
        (1, 1024, 1),
        (1, 1024, 16),
        (1, 1024, 64),
        (64, 512, 1),
    ):
        meta = metadata(num_sequences, context, nodes)
        num_blocks = meta.block_table.numel()
        copies = max(2, min(24, -(-4 * CACHE // (num_blocks * 16 * 8 * 128 * 4))))
        pages = [torch.randn(2, num_blocks, 16, 8, 128, device="cuda", dtype=torch.bfloat16) for _ in range(copies)]
        q = torch.randn(num_sequences * nodes, 32, 128, device="cuda", dtype=torch.bfloat16)
        scale = 128**-0.5
        ours = timed([lambda p=p, m=meta, q=q: tree_attention(q, p[0], p[1], m, scale=scale) for p in pages])
        keys = (meta.block_table[:, :, None] * 16 + torch.arange(16, device="cuda")).flatten(1)[:, : context + nodes]
        mask = torch.ones(nodes, context + nodes, device="cuda", dtype=torch.bool).tril(context)
        gathered = [p.flatten(1, 2)[:, keys].transpose(2, 3).contiguous() for p in pages]  # [2, B, 8, keys, D]
        qs = q.view(num_sequences, nodes, 32, 128).transpose(1, 2).contiguous()

        def sdpa(
            kv: torch.Tensor, qs: torch.Tensor = qs, mask: torch.Tensor = mask, nodes: int = nodes
        ) -> torch.Tensor:
            return F.scaled_dot_product_attention(
                qs, kv[0], kv[1], None if nodes == 1 else mask, scale=scale, enable_gqa=True
            )

        def folded(
            kv: torch.Tensor, qs: torch.Tensor = qs, mask: torch.Tensor = mask, nodes: int = nodes
        ) -> torch.Tensor:
            """Grouped heads as rows of one key head's attention: what a hand would write for SDPA."""
            rows = qs.view(len(qs), 8, 4 * nodes, 128)
            return F.scaled_dot_product_attention(
                rows, kv[0], kv[1], None if nodes == 1 else mask.repeat(4, 1), scale=scale
            )

        byte_count = num_sequences * (context + nodes) * 8 * 128 * 4
        row = {
            "sequences": num_sequences,
            "context": context,
            "nodes": nodes,
            "us": round(ours, 1),
            "sdpa_us": round(timed([lambda kv=kv, f=sdpa: f(kv) for kv in gathered], 8), 1),
            "sdpa_folded_us": round(timed([lambda kv=kv, f=folded: f(kv) for kv in gathered], 8), 1),
            "share_of_copy": round(byte_count / ours / 1e6 / bandwidth, 3),
        }
        click.echo(str(row))
        rows.append(row)
        del pages, gathered
    write(path, {"copy_tb_s": round(bandwidth, 3), "rows": rows})


if __name__ == "__main__":
    main()
