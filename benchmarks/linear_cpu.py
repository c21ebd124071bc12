"""Why weights are prepacked on a CPU (`kernels/prepack.py`), and why `kernels/linear.py` multiplies (weight @ x.T).T.

Times all matrix products of one SmolLM2-135M forward (30 layers and the head) in fp32 for several row counts.
Prints milliseconds and ratios; `--json FILE` writes them too.
"""

import json
import platform
import time
from collections.abc import Callable
from functools import partial

import click
import torch
import torch.nn.functional as F  # noqa: N812

from specdec.kernels.linear import linear
from specdec.kernels.prepack import can_prepack, prepack

LAYER = [(960, 576), (576, 576), (3072, 576), (576, 1536)]  # (out, in) of qkv, o, gate-up, down
NUM_LAYERS, HEAD = 30, (49152, 576)
ROWS = (1, 2, 4, 8, 16, 32, 64, 256)
Inputs = dict[int, torch.Tensor]


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
    """Time both orders of the product, and prepacked weights where there are such."""
    weights = [torch.randn(shape) for _ in range(NUM_LAYERS) for shape in LAYER] + [torch.randn(HEAD)]
    prepacked = [prepack(w) for w in weights] if can_prepack(weights[0].device, weights[0].dtype) else None
    rows = []
    for n in ROWS:
        inputs = {size: torch.randn(n, size) for size in (576, 1536)}

        def forward(product: Callable[..., torch.Tensor], some: list[torch.Tensor], x: Inputs = inputs) -> None:
            for weight in some:
                product(x[weight.shape[1]], weight)

        ways = {"f_linear": partial(forward, F.linear, weights), "linear": partial(forward, linear, weights)}
        if prepacked is not None:
            ways["prepacked"] = partial(forward, linear, prepacked)
        times = {f"{name}_ms": round(best_of(work, repeats), 1) for name, work in ways.items()}
        rows.append({"rows": n, **times})
        click.echo(str(rows[-1]))
    if path:
        facts = {"threads": torch.get_num_threads(), "torch": torch.__version__, "machine": platform.machine()}
        with open(path, "w", encoding="utf-8") as file:
            json.dump({"command": "python benchmarks/linear_cpu.py", **facts, "rows": rows}, file, indent=1)
            file.write("\n")


if __name__ == "__main__":
    main()
