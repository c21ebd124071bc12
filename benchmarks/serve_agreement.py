"""`specdec bench serve` at several rates, and how its numbers compare with the server's own metrics.

    python -m benchmarks.serve_agreement --json benchmarks/results/serve_cpu.json

The server runs in a process of its own on one thread, so that the load generator has a core for itself. Run it on an
idle machine with two cores or more: what the generator waits for a core counts as latency on its side alone.
"""

from pathlib import Path

import click
import torch

from benchmarks.serving import serving
from specdec.bench.dataset import load_prompts
from specdec.bench.environment import environment
from specdec.bench.results import write_json
from specdec.bench.serve import ServeSettings, as_json, measure_server

CATEGORIES = ("chat", "code", "extraction")


@click.command()
@click.option("--model", default="smollm2-135m", show_default=True, help="What is served.")
@click.option("--rates", default="0.3,0.6,1.2", show_default=True, help="Requests a second.")
@click.option("--num-prompts", default=15, show_default=True, help="Requests at each rate.")
@click.option("--max-new-tokens", default=24, show_default=True, help="Most tokens an answer.")
@click.option("--json", "path", type=click.Path(dir_okay=False, path_type=Path), help="Write the result to this file.")
def main(model: str, rates: str, num_prompts: int, max_new_tokens: int, path: Path | None) -> None:
    """Serve the model, send requests, and print our means divided by the server's."""
    with serving("--max-num-seqs", "8", model=model) as server:
        settings = ServeSettings(
            base_url=server.url,
            num_prompts=num_prompts,
            request_rates=tuple(map(float, rates.split(","))),
            max_new_tokens=max_new_tokens,
            extra_body={"speculation": {"trace": True}},  # says which tokens came together
        )
        runs = measure_server(settings, load_prompts("builtin", CATEGORIES), lambda rate, done: None)
    for run in runs:
        ratios = ", ".join(f"{name} {ratio:.4f}" for name, ratio in run["against_server"].items())
        click.echo(f"{run['request_rate']:g} requests a second, {run['completed']} of {num_prompts} answered: {ratios}")
    if path:
        command = "python -m benchmarks.serve_agreement"
        shown = {"rates": rates, "num-prompts": num_prompts, "max-new-tokens": max_new_tokens}
        command += "".join(f" --{name} {value}" for name, value in shown.items())
        made = environment(torch.device("cpu"), torch.float32) | {
            "command": command,
            "device": "cpu, 1 thread",
            "threads": 1,
        }
        write_json(path, as_json(settings, "builtin", command, runs) | {"served": model, "environment": made})


if __name__ == "__main__":
    main()
