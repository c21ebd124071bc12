"""`specdec bench latency` and `specdec bench throughput`."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from specdec.cli.bench.options import json_option, numbers, prompt_options
from specdec.cli.options import DEFAULT_MODEL, deterministic_option

if TYPE_CHECKING:
    from specdec.bench.speed import Work

F = TypeVar("F", bound=Callable[..., Any])


def _work_options(command: F) -> F:
    """Add the options that make a `Work`, and --json."""
    for option in (
        json_option,
        deterministic_option,
        click.option("--dtype", default="auto", help="auto is float32 on a CPU, bfloat16 on a GPU."),
        click.option("--device", default="auto", help="auto takes a GPU where there is one."),
        click.option("--ignore-eos", is_flag=True, help="Answers of full length; peers don't know it."),
        click.option("--max-new-tokens", type=click.IntRange(min=1), default=128, help="Most tokens an answer."),
        prompt_options,
        click.option("--model", default=DEFAULT_MODEL, help="A folder, a hub id, or a name that `pull` knows."),
    ):
        command = option(command)
    return command


@click.command()
@click.option("--drafter", "drafters", multiple=True, help="May be repeated.  [default: plain and ngram]")
@_work_options
def latency(drafters: tuple[str, ...], out: Path | None, **options: Any) -> None:
    """Stream prompts one at a time and show TTFT, TPOT and the times between tokens and chunks."""
    from rich.console import Console

    from specdec.bench.speed import measure_latency
    from specdec.bench.systems import check_system
    from specdec.bench.tables import number, simple_table
    from specdec.errors import ConfigError

    systems = drafters or ("plain", "ngram")
    for name in systems:
        check_system(name, peers=False)
    if len(set(systems)) < len(systems):
        raise ConfigError(f"a drafter is given twice: {', '.join(systems)}")
    console = Console()
    with console.status("loading") as status:
        work = _work(options)
        rows = measure_latency(work, systems, status.update)
    keys = ("ttft_ms", "tpot_ms", "inter_token_ms", "inter_chunk_ms", "e2el_ms")
    cells = [[row["system"], *(_pair(row[key]) for key in keys)] for row in rows]
    console.print(simple_table("ms, median / p99", ("system", *(key.removesuffix("_ms") for key in keys)), cells))
    console.print(f"{number(rows[0]['num_requests'], 0)} requests, one at a time", style="dim")
    _write(out, "specdec-latency", work, options, rows)


@click.command()
@click.option("--drafter", "drafters", multiple=True, help="May be repeated.  [default: ngram]")
@click.option("--peer", "peers", multiple=True, help="As for `bench acceptance`; may be repeated.")
@click.option("--baseline", default="plain", help="What speed-ups are against.")
@click.option("--batch-sizes", default="1,8", help="Most requests at once.")
@_work_options
def throughput(
    drafters: tuple[str, ...], peers: tuple[str, ...], baseline: str, batch_sizes: str, out: Path | None, **options: Any
) -> None:
    """Answer all prompts offline, so many at once, and show tokens a second."""
    from rich.console import Console

    from specdec.bench.speed import measure_throughput
    from specdec.bench.systems import check_system
    from specdec.bench.tables import number, simple_table, speed

    systems = list(dict.fromkeys([baseline, *(drafters or ("ngram",)), *peers]))
    for name in systems:
        check_system(name)
    sizes = numbers("--batch-sizes", batch_sizes)
    console = Console()
    with console.status("loading") as status:
        work = _work(options)
        rows = measure_throughput(work, systems, sizes, status.update)
    done = [row for row in rows if "error" not in row]
    cells = [
        [
            row["system"],
            str(row["batch_size"]),
            speed(row["output_tokens_per_second"]),
            number(row["requests_per_second"]),
            number(row["speedup"]),
        ]
        for row in done
    ]
    console.print(simple_table("offline throughput", ("system", "batch", "tok/s", "requests/s", "×"), cells))
    for row in rows:
        if "error" in row:
            click.echo(f"{row['system']}, batch {row['batch_size']}: not measured: {row['error']}", err=True)
    _write(out, "specdec-throughput", work, options, rows)
    if any("error" in row and row["system"] not in peers for row in rows):
        raise SystemExit(1)


def _work(options: dict[str, Any]) -> "Work":
    from specdec.bench.dataset import load_prompts
    from specdec.bench.speed import make_work
    from specdec.bench.systems import load_target

    prompts = load_prompts(options["prompts"], options["categories"], options["num_prompts"])
    loaded = load_target(options["model"], options["device"], options["dtype"])
    flags = {name: options[name] for name in ("ignore_eos", "deterministic")}
    return make_work(loaded, prompts, options["max_new_tokens"], **flags)


def _pair(ms: dict[str, float] | None) -> str:
    return "–" if ms is None else f"{ms['median']:.1f} / {ms['p99']:.1f}"


def _write(out: Path | None, kind: str, work: "Work", options: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    if out is None:
        return
    from specdec.bench.environment import environment
    from specdec.bench.results import write_json

    model = work.loaded.model
    value = {"format": kind, "version": 1, "settings": options, "environment": environment(model.device, model.dtype)}
    write_json(out, value | {"rows": rows})
