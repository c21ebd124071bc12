"""Runs many random cases of tests/property.py and writes how many there were of each kind.

python -m benchmarks.property --examples 5000 --json benchmarks/results/property.json

In pieces, of other seeds: `--examples 1000 --seed 1 --more` adds its counts to those of the file.
"""

import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

import click
import torch
import transformers
from hypothesis import HealthCheck, Phase, given, seed, settings

from tests.property import Case, cases, check


@click.command()
@click.option("--examples", default=5000, show_default=True, help="Cases to run.")
@click.option("--seed", "number", default=0, show_default=True, help="Of the cases.")
@click.option("--json", "path", type=click.Path(dir_okay=False), help="Write the counts to this file.")
@click.option("--more", is_flag=True, help="Add to the counts in the file, which were taken with the same libraries.")
def main(examples: int, number: int, path: str | None, more: bool) -> None:
    """Run the cases; the first that fails ends the run with its description."""
    libraries = {"torch": torch.__version__, "transformers": transformers.__version__}
    before = _before(path, libraries) if more else None
    counts: dict[str, Counter[str]] = {
        kind: Counter() for kind in ("family", "drafter", "kv_cache_dtype", "num_requests")
    }

    @seed(number)
    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=cases())
    def run(case: Case) -> None:
        check(case)
        counts["family"][case.family] += 1
        counts["drafter"][case.drafter] += 1
        counts["num_requests"][str(len(case.prompts))] += 1
        counts["kv_cache_dtype"][case.kv_cache_dtype] += 1

    start = time.perf_counter()
    run()
    passed = counts["family"].total()
    click.echo(f"{passed} passed, 0 failed in {time.perf_counter() - start:.0f} s")
    if path:
        command = f"python -m benchmarks.property --examples {examples} --seed {number}"
        if before:
            command = f"{before['command']} && {command} --more"
            passed += before["passed"]
            for kind, counter in counts.items():
                counter.update(before[kind])
        result = {
            "command": command,
            "passed": passed,
            "failed": 0,
            **libraries,
            **{kind: dict(sorted(counter.items())) for kind, counter in counts.items()},
        }
        with open(path, "w", encoding="utf-8") as file:
            json.dump(result, file, indent=1)
            file.write("\n")


def _before(path: str | None, libraries: dict[str, str]) -> dict[str, Any]:
    """The file's counts.

    Raises:
        click.UsageError: there are none, or other libraries' ones.
    """
    if path is None or not Path(path).exists():
        raise click.UsageError("--more adds to the file of --json, which must exist")
    before: dict[str, Any] = json.loads(Path(path).read_text(encoding="utf-8"))
    if any(before[name] != version for name, version in libraries.items()):
        raise click.UsageError(f"{path} was made with other libraries than {libraries}; run without --more")
    return before


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
