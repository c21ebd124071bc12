"""Draws the figures of the documents from the committed results; the same results give the same bytes.

    python benchmarks/figures.py benchmarks/results docs/figures

Results of `specdec bench acceptance` and `specdec bench serve` are drawn; other files are passed over.
"""

import json
from pathlib import Path
from typing import Any

import click

from specdec.bench.page import trees
from specdec.bench.plots import depth_plot, load_plot, save_png, speedup_plot, tree_plot
from specdec.bench.results import FORMAT, read_result


def draw(path: Path, out: Path) -> list[Path]:
    """Draw what a result file shows; return the files made."""
    value: Any = json.loads(path.read_text(encoding="utf-8"))
    kind = value.get("format")
    plots = {}
    if kind == FORMAT:
        plots = {"depth": depth_plot(value["summary"])}
        plots["speedup"] = speedup_plot(value["summary"], value["settings"]["baseline"])
        for name, tree in trees(read_result(path)).items():
            plots["tree-" + "".join(c if c.isalnum() else "-" for c in name)] = tree_plot(tree)
    elif kind == "specdec-serve":
        plots = {"load": load_plot(value["runs"])}
    made = [out / f"{path.stem}-{name}.png" for name in plots]
    for file, plot in zip(made, plots.values(), strict=True):
        save_png(plot, file)
    return made


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
