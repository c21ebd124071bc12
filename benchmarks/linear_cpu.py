"""Why `kernels/linear.py` multiplies (weight @ x.T).T on a CPU: both orders, measured in one run.

Times all matrix products of one SmolLM2-135M forward (30 layers and the head) in fp32 for several row counts.
Prints milliseconds and the ratio; `--json FILE` writes them too.
"""

import json
import platform
import time
from collections.abc import Callable

import click
import torch
import torch.nn.functional as F  # noqa: N812

from specdec.kernels.linear import linear

LAYER = [(960, 576), (576, 576), (3072, 576), (576, 1536)]  # (out, in) of qkv, o, gate-up, down
NUM_LAYERS, HEAD = 30, (49152, 576)
ROWS = (1, 2, 4, 8, 16, 32, 64)


def best_of(work: Callable[[], object], repeats: int) -> float:
    """Fastest of several runs, in milliseconds."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times) * 1e3


@click.command()
@click.option("--repeats", default=10, show_default=True, help="Runs a measurement; the fastest counts.")
@click.option("--json", "path", type=click.Path(dir_okay=False), help="Also write the figures to this file.")
@torch.inference_mode()
def main(repeats: int, path: str | None) -> None:
    """Time both orders of the product."""
    weights = [torch.randn(shape) for _ in range(NUM_LAYERS) for shape in LAYER] + [torch.randn(HEAD)]
    rows = []
    for n in ROWS:
        inputs = {size: torch.randn(n, size) for size in (576, 1536)}

        def forward(product: Callable[..., torch.Tensor], x: dict[int, torch.Tensor] = inputs) -> None:
            for weight in weights:
                product(x[weight.shape[1]], weight)

        usual, ours = best_of(lambda: forward(F.linear), repeats), best_of(lambda: forward(linear), repeats)  # noqa: B023
        rows.append({"rows": n, "f_linear_ms": round(usual, 1), "linear_ms": round(ours, 1)})
        click.echo(f"{n:3d} rows: F.linear {usual:6.1f} ms, ours {ours:6.1f} ms, {usual / ours:.2f}×")
    if path:
        facts = {"threads": torch.get_num_threads(), "torch": torch.__version__, "machine": platform.machine()}
        with open(path, "w", encoding="utf-8") as file:
            json.dump({"command": "python benchmarks/linear_cpu.py", **facts, "rows": rows}, file, indent=1)
            file.write("\n")


if __name__ == "__main__":
    main()
