"""`specdec tune`: measure how long steps take on this device, so that the engine knows how many nodes pay."""

import json
import shlex
from typing import TYPE_CHECKING, Any

import click

from specdec.cli.options import (
    DEFAULT_MODEL,
    cache_format_options,
    deterministic_option,
    prepack_option,
    quantization_option,
)

if TYPE_CHECKING:
    from rich.console import Console

    from specdec.engine.config import EngineConfig
    from specdec.engine.cost import CostTable
    from specdec.engine.measure import Grid, Seconds
    from specdec.models.protocol import PackedModel

_CONFIG = ("deterministic", "prepack", "kv_cache_dtype", "kv_group_size")
"""Options that are the engine's too, and that step times depend on."""


@click.command()
@click.option("--model", default=DEFAULT_MODEL, help="A folder, a hub id, or a name that `specdec pull` knows.")
@click.option("--device", default="auto", help="auto takes a GPU where there is one.")
@click.option("--dtype", default="auto", help="auto is float32 on a CPU, bfloat16 on a GPU.")
@quantization_option
@prepack_option
@cache_format_options
@deterministic_option
@click.option("--max-seqs", type=click.IntRange(min=1), help="Most sequences a step.  [default: 4 on a CPU, else 16]")
@click.option("--contexts", help="Context lengths, such as 128,1024.  [default: 128, 1024 and, on a GPU, 4096]")
@click.option("--repeats", type=click.IntRange(min=1), default=5, help="Timed steps a point; the median counts.")
@click.option("--json", "as_json", is_flag=True, help="Print the table as one JSON object.")
def tune(as_json: bool, **options: Any) -> None:
    """Measure the step time over sequences × nodes × context and keep it for the engine.

    Captured steps are measured where the engine captures them, else eager ones. The table is for engines of the same
    options: --dtype, --quantization, --prepack, --kv-cache-dtype, --kv-group-size and --deterministic.
    """
    from rich.console import Console

    from specdec.engine.cost import save_table

    console = Console(stderr=as_json)
    table = _measure(console, options)
    path = save_table(table)
    if as_json:
        click.echo(json.dumps({"file": str(path)} | table.to_dict()))
        return
    _print_table(console, table)
    click.echo(f"written to {path}")


def _measure(console: "Console", options: dict[str, Any]) -> "CostTable":
    from datetime import UTC, datetime

    from specdec.build import cost_key
    from specdec.engine.config import EngineConfig
    from specdec.engine.cost import CostTable
    from specdec.engine.measure import make_grid
    from specdec.llm import load_model
    from specdec.models.load import make_target

    contexts = _parse_contexts(options["contexts"])
    config = EngineConfig(**{name: options[name] for name in _CONFIG})
    loaded = load_model(options["model"], None, *(options[name] for name in ("dtype", "device", "quantization")))
    target = make_target(loaded.model, config.deterministic, config.prepack)
    grid = make_grid(target.device, target.max_len, max_seqs=options["max_seqs"], contexts=contexts)
    return CostTable(
        key=cost_key(loaded.model, config.deterministic, config.kv_cache_name, target.prepacked),
        model=loaded.name,
        command=_command(options),
        measured=datetime.now(UTC).isoformat(timespec="seconds"),
        num_seqs=grid.num_seqs,
        num_nodes=grid.num_nodes,
        contexts=grid.contexts,
        step_seconds=_run(console, target, grid, options["repeats"], config),
    )


def _run(console: "Console", target: "PackedModel", grid: "Grid", repeats: int, config: "EngineConfig") -> "Seconds":
    import torch

    from specdec.engine.measure import make_step, measure
    from specdec.errors import ConfigError

    num_done = 0
    with console.status("warming up") as status:

        def show(point: str) -> None:
            nonlocal num_done
            num_done += 1
            status.update(f"measuring {point} ({num_done} of {len(grid)})")

        try:
            step, how = make_step(target, grid, config)
            console.print(f"measuring {how}")
            return measure(step, grid, repeats=repeats, warmup=1, progress=show)
        except torch.OutOfMemoryError as error:
            raise ConfigError(
                f"{grid.num_seqs[-1]} sequences of {grid.contexts[-1]} tokens don't fit into the device's memory; "
                "give smaller --max-seqs or --contexts"
            ) from error


def _parse_contexts(text: str | None) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(",")) if text else ()
    except ValueError as error:
        raise click.UsageError(f"--contexts takes whole numbers with commas, such as 128,1024, not {text!r}") from error


def _command(options: dict[str, Any]) -> str:
    given = {name.replace("_", "-"): value for name, value in options.items() if value is not None}
    return shlex.join(["specdec", "tune", *(_as_option(name, value) for name, value in given.items())])


def _as_option(name: str, value: object) -> str:
    return f"--{'' if value else 'no-'}{name}" if isinstance(value, bool) else f"--{name}={value}"


def _print_table(console: "Console", table: "CostTable") -> None:
    from rich import box
    from rich.table import Table

    console.print(f"{table.model}, {table.key.dtype}, {table.key.device}")
    console.print("ms a step by nodes a sequence; × is against one node")
    shown = Table(box=box.SIMPLE_HEAD, show_edge=False)
    for heading in ("seqs", "context", *map(str, table.num_nodes)):
        shown.add_column(heading, justify="right", no_wrap=True)
    for s in table.num_seqs:
        for c in table.contexts:
            times = [table.seconds(s, n, c) for n in table.num_nodes]
            shown.add_row(str(s), str(c), *(f"{_short(t * 1e3)}\n×{_short(t / times[0])}" for t in times))
    console.print(shown)


def _short(value: float) -> str:
    """A positive number in five or so characters."""
    return f"{value:.2f}" if value < 100 else f"{value:.1f}" if value < 1000 else f"{value:.0f}"
