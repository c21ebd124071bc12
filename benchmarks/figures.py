"""Draws the figures of the documents from the committed results; the same results give the same bytes.

    python benchmarks/figures.py benchmarks/results docs/figures

Results of `specdec bench acceptance` and `specdec bench serve` are drawn; other files are passed over.
"""

import json
from pathlib import Path
from typing import Any

import click

from specdec.bench.page import trees
from specdec.bench.plots import Draw, batches, depth_plot, load_plot, save_png, speedup_plot, tree_plot, tree_size
from specdec.bench.results import FORMAT, read_result


def draw(path: Path, out: Path) -> list[Path]:
    """Draw what a result file shows; return the files made."""
    value: Any = json.loads(path.read_text(encoding="utf-8"))
    kind = value.get("format")
    plots: dict[str, Draw] = {}
    inches: dict[str, tuple[float, float]] = {}
    if kind == FORMAT:
        sizes = batches(value["summary"])
        for size, rows in sizes.items():
            name = "speedup" if rows is next(iter(sizes.values())) else f"speedup-{size}-at-once"
            if any(row["speedup"] is not None for row in rows):
                plots[name] = speedup_plot(rows, value["settings"]["baseline"])
        least = next(iter(sizes.values()), [])
        if any(row.get("draft_tokens_per_forward") for row in least):
            plots["depth"] = depth_plot(least)
        for name, tree in trees(read_result(path)).items():
            figure = "tree-" + "".join(c if c.isalnum() else "-" for c in name)
            plots[figure], inches[figure] = tree_plot(tree), tree_size(tree)
    elif kind == "specdec-serve" and len(value["runs"]) > 1:
        plots = {"load": load_plot(value["runs"])}
    for name, plot in plots.items():
        save_png(plot, out / f"{path.stem}-{name}.png", inches.get(name, (8.4, 3.6)))
    return [out / f"{path.stem}-{name}.png" for name in plots]


@click.command()
@click.argument("results", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.argument("out", type=click.Path(file_okay=False, path_type=Path))
def main(results: Path, out: Path) -> None:
    """Draw the figures of all results of a folder."""
    out.mkdir(parents=True, exist_ok=True)
    made = [file for path in sorted(results.glob("*.json")) for file in draw(path, out)]
    click.echo("\n".join(map(str, made)) if made else f"no result in {results} has figures")


if __name__ == "__main__":
    main()
