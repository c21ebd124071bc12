"""`specdec bench seeds`: what each mechanism gains, on against off, in one table."""

from dataclasses import asdict
from pathlib import Path

import click

from specdec.cli.bench.options import json_option, prompt_options
from specdec.cli.options import DEFAULT_MODEL, deterministic_option


@click.command()
@click.option("--model", default=DEFAULT_MODEL, help="A folder, a hub id, or a name that `specdec pull` knows.")
@click.option("--heads", default="shipped", help="A drafter with heads, such as medusa:PATH; shipped takes our own.")
@click.option("--only", multiple=True, help="Only this row; may be repeated.  [default: all]")
@click.option("--num-seqs", type=click.IntRange(min=1), default=8, help="Requests that run at once.")
@click.option("--max-new-tokens", type=click.IntRange(min=2), default=64, help="Most tokens an answer.")
@prompt_options
@click.option("--device", default="auto", help="auto takes a GPU where there is one.")
@click.option("--dtype", default="auto", help="auto is float32 on a CPU, bfloat16 on a GPU.")
@deterministic_option
@json_option
def seeds(
    model: str,
    heads: str,
    only: tuple[str, ...],
    num_seqs: int,
    max_new_tokens: int,
    prompts: str,
    categories: tuple[str, ...],
    num_prompts: int | None,
    device: str,
    dtype: str,
    deterministic: bool,
    out: Path | None,
) -> None:
    """Measure each mechanism on and off, everything else equal. A ratio below 1 is a loss, and is shown as one."""
    from rich.console import Console

    from specdec.bench.dataset import load_prompts
    from specdec.bench.environment import environment
    from specdec.bench.mechanisms import Bench, Row
    from specdec.bench.results import write_json
    from specdec.bench.seeds import ROWS, measure_rows
    from specdec.bench.speed import make_work
    from specdec.bench.systems import check_system, load_target
    from specdec.bench.tables import number, simple_table
    from specdec.errors import ConfigError

    if unknown := [name for name in only if name not in ROWS]:
        raise ConfigError(f"there is no row {unknown[0]!r}; there are: {', '.join(ROWS)}")
    check_system(heads, peers=False)
    asked = load_prompts(prompts, categories, num_prompts)
    loaded = load_target(model, device, dtype)
    bench = Bench(make_work(loaded, asked, max_new_tokens, deterministic=deterministic), num_seqs, heads)
    kind = {"format": "specdec-seeds", "version": 1, "num_seqs": num_seqs, "max_new_tokens": max_new_tokens}
    made = {"environment": environment(loaded.model.device, loaded.model.dtype), "model": loaded.name}
    rows: list[Row] = []
    console = Console()
    with console.status("measuring") as status:
        for row in measure_rows(bench, only, status.update):
            rows.append(row)
            console.print(f"{row.name}: {row.how}", style="dim", highlight=False, soft_wrap=True)
            if out is not None:  # after each row, since a run may be cut short
                write_json(out, kind | made | {"rows": [asdict(row) | {"ratio": row.ratio} for row in rows]})
    measured = [row for row in rows if row.ratio is not None]
    cells = [[r.name, number(r.on, 1), number(r.off, 1), r.unit, number(r.ratio)] for r in measured]
    console.print(simple_table(f"{loaded.name}, {loaded.model.device}", ("mechanism", "on", "off", "", "×"), cells))
