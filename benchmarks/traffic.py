"""Sends random traffic (tests/traffic.py) to small engines and compares each answer with the one that it gets alone.

python -m benchmarks.traffic --requests 10000 --json benchmarks/results/traffic.json
"""

import json
import platform
import time
from dataclasses import asdict

import click
import torch
import transformers

from tests.conftest import tiny_llama
from tests.traffic import TRAFFIC_DRAFTERS, Counts, add_counts, draw_requests, run_traffic

ROUND = 250
"""Requests of one engine; the next has another drafter, pool and budget of rows."""


@click.command()
@click.option("--requests", default=10_000, show_default=True, help="Requests to send.")
@click.option("--different", default=600, show_default=True, help="Different requests among them.")
@click.option("--seed", default=0, show_default=True, help="Of everything that is random.")
@click.option("--json", "path", type=click.Path(dir_okay=False), help="Write the counts to this file.")
def main(requests: int, different: int, seed: int, path: str | None) -> None:
    """Count what was wrong or lost; both must be 0."""
    start = time.perf_counter()
    model, total, rounds = tiny_llama(), Counts(), 0
    asked = draw_requests(model, different, seed)
    while total.requests < requests:
        drafter = TRAFFIC_DRAFTERS[rounds % len(TRAFFIC_DRAFTERS)]
        count = min(ROUND, requests - total.requests)
        add_counts(total, run_traffic(model, asked, drafter, count, seed + rounds))
        rounds += 1
        click.echo(f"{total.requests} requests: {total.wrong} wrong, {total.lost_blocks} blocks lost", err=True)
    click.echo(f"{total} in {time.perf_counter() - start:.0f} s")
    if path:
        result = {
            "command": f"python -m benchmarks.traffic --requests {requests} --different {different} --seed {seed}",
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "engines": rounds,
            "different_requests": different,
            **asdict(total),
        }
        with open(path, "w", encoding="utf-8") as file:
            json.dump(result, file, indent=1)
            file.write("\n")
    if total.wrong or total.lost_blocks:
        raise SystemExit(1)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
