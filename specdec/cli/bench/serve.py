"""`specdec bench serve`: load for an OpenAI-compatible server, with the option names of vLLM's."""

import os
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from specdec.cli.bench.options import json_option
from specdec.cli.options import OutputFile
from specdec.errors import ConfigError

if TYPE_CHECKING:
    from rich.table import Table

DATASETS = ("builtin", "sharegpt", "spec_bench", "humaneval", "custom")


@click.command()
@click.option("--base-url", default="http://127.0.0.1:8000", help="The server's address, without /v1.")
@click.option("--model", help="The model to ask for.  [default: the first that the server names]")
@click.option("--endpoint", type=click.Choice(["chat", "completions"]), default="chat", help="Which API to use.")
@click.option("--dataset-name", type=click.Choice(DATASETS), default="builtin", help="Which prompts.")
@click.option("--dataset-path", type=click.Path(), help="Their file, for all but builtin.")
@click.option("--category", "categories", multiple=True, help="Only these; may be repeated.  [default: all]")
@click.option("--num-prompts", type=click.IntRange(min=1), default=100, help="Requests at each rate.")
@click.option("--request-rate", default="inf", help="Requests a second; inf is all at once; 1,2,4 one after the other.")
@click.option("--burstiness", type=float, default=1.0, help="1 is a Poisson process; less comes in bursts.")
@click.option("--max-concurrency", type=click.IntRange(min=1), help="Most requests in flight.  [default: any]")
@click.option("--max-new-tokens", type=click.IntRange(min=1), default=128, help="Most tokens an answer.")
@click.option("--temperature", type=float, default=0.0, help="0 is greedy.")
@click.option("--ignore-eos", is_flag=True, help="Ask for answers of full length, if the server knows ignore_eos.")
@click.option("--extra-body", default="{}", help="More fields of each request, as a JSON object.")
@click.option("--goodput", multiple=True, help="A limit in ms: ttft:200, tpot:50 or e2el:5000; may be repeated.")
@click.option("--seed", type=click.IntRange(min=0), default=0, help="Of prompts, pauses and answers.")
@json_option
@click.option("--html", type=OutputFile(), help="Also write a page with plots.")
@click.option("--save-result", is_flag=True, help="Write the result to a file named after the model and the time.")
@click.option("--result-dir", type=click.Path(file_okay=False, path_type=Path), default=".", help="Where it goes.")
def serve(
    request_rate: str,
    dataset_name: str,
    dataset_path: str | None,
    categories: tuple[str, ...],
    goodput: tuple[str, ...],
    extra_body: str,
    out: Path | None,
    html: Path | None,
    save_result: bool,
    result_dir: Path,
    **options: Any,
) -> None:
    """Send requests to a server and measure the streams that come back; a key is taken from OPENAI_API_KEY.

    TPOT is (end to end − TTFT) / (tokens − 1). Between chunks is the time from one piece of text to the next, which
    speculation lengthens since pieces hold several tokens. Between tokens it is divided by their number, where the
    server tells it: ask vLLM with --extra-body '{"return_token_ids": true}', and `specdec serve` with
    '{"speculation": {"trace": true}}'.
    """
    from rich.console import Console

    from specdec.bench.dataset import load_prompts
    from specdec.bench.latencies import parse_limits
    from specdec.bench.plots import check_can_plot
    from specdec.bench.results import write_json
    from specdec.bench.serve import ServeSettings, as_json, measure_server
    from specdec.training.jsonl import parse_object

    if (dataset_name == "builtin") != (dataset_path is None):
        raise click.UsageError("--dataset-path names the file of every dataset but builtin")
    if html is not None:
        check_can_plot()
    settings = ServeSettings(
        request_rates=_rates(request_rate),
        limits=parse_limits(goodput),
        extra_body=parse_object(extra_body, "--extra-body"),
        **options,
    )
    prompts = load_prompts(dataset_path or "builtin", categories)
    console = Console()
    with console.status("sending") as status:
        told = lambda rate, done: status.update(f"rate {rate}: {done} of {settings.num_prompts}")  # noqa: E731
        runs = measure_server(settings, prompts, told, os.environ.get("OPENAI_API_KEY"))
    for run in runs:
        console.print(_headline(run), soft_wrap=True, highlight=False)
        console.print(_table(run))
        if run["against_server"] is not None:
            console.print(_agreement(run), style="dim", soft_wrap=True, highlight=False)
        for error, count in run["errors"].items():
            click.echo(f"{count} failed: {error}", err=True)
    value = as_json(settings, dataset_path or "builtin", " ".join(["specdec", *sys.argv[1:]]), runs)
    for path in (out, _path(result_dir, settings.model) if save_result else None):
        if path is not None:
            write_json(path, value)
            click.echo(f"written to {path}", err=True)
    if html is not None:
        from specdec.bench.page import load_page, write_page

        write_page(load_page(value), html)


def _rates(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError as error:
        raise ConfigError(f"--request-rate takes numbers or inf with commas, not {text!r}") from error


def _path(folder: Path, model: str | None) -> Path:
    name = (model or "server").replace("/", "--")
    return folder / f"serve-{name}-{datetime.now(UTC):%Y%m%d-%H%M%S}.json"


def _headline(run: dict[str, Any]) -> str:
    from specdec.bench.tables import number, rate

    good = "" if run["request_goodput"] is None else f", {number(run['request_goodput'])} of them within the limits"
    return (
        f"{rate(run)}: {run['completed']} completed, {run['failed']} failed in {run['duration']:.1f} s; "
        f"{number(run['request_throughput'])} requests/s{good}; {number(run['output_throughput'], 1)} tokens/s"
    )


def _agreement(run: dict[str, Any]) -> str:
    """A line that compares with the server's own metrics."""
    if run["server"]["completed"] != run["completed"]:
        return f"the server counted {run['server']['completed']} answers meanwhile, so its times are of others, too"
    parts = [f"{name.removesuffix('_ms')} {ratio:.3f}" for name, ratio in run["against_server"].items()]
    return f"divided by the server's own metrics: {', '.join(parts)}"


def _table(run: dict[str, Any]) -> "Table":
    from specdec.bench.tables import LATENCIES, number, simple_table

    shown = {name: run[key] for key, name in LATENCIES.items() if run[key] is not None}
    rows = [[name, *(number(ms[k]) for k in ("mean", "median", "p99"))] for name, ms in shown.items()]
    return simple_table("", ("ms", "mean", "median", "p99"), rows)
