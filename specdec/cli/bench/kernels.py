"""`specdec bench kernels`: the ops of a decode step against this device's roofline."""

from pathlib import Path

import click

from specdec.cli.bench.options import json_option, numbers
from specdec.cli.options import DEFAULT_MODEL, deterministic_option


@click.command()
@click.option("--model", default=DEFAULT_MODEL, help="Whose shapes count: a folder, a hub id, or a known name.")
@click.option("--rows", default="1,16,64", help="Rows of the products, and nodes of the tree that attends.")
@click.option("--contexts", default="1024", help="Tokens that attention reads.")
@click.option("--device", default="auto", help="auto takes a GPU where there is one.")
@click.option("--dtype", default="auto", help="auto is float32 on a CPU, bfloat16 on a GPU.")
@deterministic_option
@json_option
def kernels(
    model: str, rows: str, contexts: str, device: str, dtype: str, deterministic: bool, out: Path | None
) -> None:
    """Time matrix products and attention; the roofline is a large copy and a large product of the same run."""
    from rich.console import Console

    from specdec.bench.environment import environment
    from specdec.bench.kernels import measure_kernels, measure_roofline
    from specdec.bench.results import write_json
    from specdec.bench.tables import number, simple_table
    from specdec.errors import UnsupportedModel
    from specdec.hub.load import load
    from specdec.llm import resolve_device, resolve_dtype
    from specdec.models.decoder import Decoder
    from specdec.models.load import make_target

    sizes, lengths = numbers("--rows", rows), numbers("--contexts", contexts)
    place = resolve_device(device)
    loaded = load(model, dtype=resolve_dtype(dtype, place), device=place)
    target = make_target(loaded.model, deterministic)
    if not isinstance(target, Decoder):
        raise UnsupportedModel(f"{loaded.name} runs by its own forward, whose ops are transformers'; give another")
    console = Console()
    with console.status("measuring"):
        best = measure_roofline(place, target.dtype)
        found = list(measure_kernels(target.weights, target.ops, best, sizes, lengths))
    console.print(f"{target.ops.name}: copy {best.bytes_per_second / 1e9:.0f} GB/s, product "
                  f"{best.flops_per_second / 1e12:.2f} TFLOP/s")  # fmt: skip
    cells = [
        [t.op, str(t.rows), str(t.context or "–"), number(t.microseconds, 1), number(t.roofline_microseconds, 1)]
        + [f"{100 * t.share:.0f}%"]
        for t in found
    ]
    console.print(simple_table(loaded.name, ("op", "rows", "context", "µs", "roofline", "of it"), cells))
    if out is not None:
        kind = {"format": "specdec-kernels", "version": 1, "model": loaded.name, "ops": target.ops.name}
        made = {"environment": environment(place, target.dtype), "roofline": {
            "bytes_per_second": best.bytes_per_second, "flops_per_second": best.flops_per_second,
        }}  # fmt: skip
        write_json(out, kind | made | {"rows": [t.as_json() for t in found]})
