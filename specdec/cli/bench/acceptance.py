"""`specdec bench acceptance`: τ, acceptance by depth, speed and exactness of drafters and peers, by kind of work."""

from pathlib import Path
from typing import Any

import click

from specdec.cli.bench.options import json_option, numbers, prompt_options
from specdec.cli.options import DEFAULT_MODEL, OutputFile, deterministic_option

_BASELINES = "plain (our engine without drafts), hf, hf-compiled or another peer"
_PEERS = "hf, hf-compiled, hf-prompt-lookup, hf-assisted:PATH, vllm, vllm-ngram, economize, flashspec"


@click.command()
@click.option("--model", default=DEFAULT_MODEL, help="A folder, a hub id, or a name that `specdec pull` knows.")
@click.option("--drafter", "drafters", multiple=True, help="As for `generate`; repeat it to compare.  [default: ngram]")
@click.option("--peer", "peers", multiple=True, help=f"Run this beside them: {_PEERS}; may be repeated.")
@click.option("--baseline", default="plain", help=f"What speed-ups are against: {_BASELINES}.")
@click.option(
    "--peer-prompts", type=click.IntRange(min=1), help="Prompts of each category for peers, in whole batches."
)
@prompt_options
@click.option("--temperature", type=float, default=0.0, help="0 is greedy.")
@click.option("--max-new-tokens", type=click.IntRange(min=1), default=128, help="Most tokens an answer.")
@click.option("--batch-sizes", default="1", help="Prompts answered together, such as 1,8.")
@click.option("--trees", default="", show_default="what pays", help="Most nodes of a tree, such as 1,8,64.")
@click.option("--seed", type=click.IntRange(min=0), default=0, help="Of the requests' seeds.")
@click.option("--device", default="auto", help="auto takes a GPU where there is one.")
@click.option("--dtype", default="auto", help="auto is float32 on a CPU, bfloat16 on a GPU.")
@deterministic_option
@json_option
@click.option("--html", type=OutputFile(), help="Also write a page with plots.")
@click.option("--resume", is_flag=True, help="Go on with the file that --json names.")
def acceptance(
    drafters: tuple[str, ...],
    batch_sizes: str,
    trees: str,
    out: Path | None,
    html: Path | None,
    resume: bool,
    **options: Any,
) -> None:
    """Measure how many draft tokens are accepted and what that gains, by category and over all.

    The file that --json names is written after each category, so that --resume can go on after an interruption.
    """
    from rich.console import Console
    from rich.live import Live

    from specdec.bench.acceptance import run
    from specdec.bench.plots import check_can_plot
    from specdec.bench.results import Result, Settings
    from specdec.bench.tables import acceptance_table, failures

    if html is not None:
        check_can_plot()
    settings = Settings(
        drafters=drafters or ("ngram",),
        batch_sizes=numbers("--batch-sizes", batch_sizes),
        trees=numbers("--trees", trees),
        **options,
    )
    console = Console()
    with Live(console=console, auto_refresh=False, vertical_overflow="visible") as live:

        def show(result: Result, doing: str) -> None:
            live.update(acceptance_table(result, doing), refresh=True)
            if doing and not console.is_terminal:  # which shows nothing before the end
                click.echo(doing, err=True)

        result = run(settings, out, resume=resume, report=show)
    for line in failures(result):
        click.echo(line, err=True)
    if html is not None:
        from specdec.bench.page import page, write_page

        write_page(page(result), html)
    if any(failure.system not in settings.peers for failure in result.failures):
        raise SystemExit(1)
