"""A result of `bench acceptance` or `bench serve` as one HTML page that needs nothing else."""

from collections.abc import Mapping
from dataclasses import asdict
from importlib import resources
from pathlib import Path
from typing import Any

from jinja2 import Environment, FunctionLoader, StrictUndefined
from markupsafe import Markup

from specdec.bench.plots import as_svg, batches, depth_plot, length_plot, load_plot, speedup_plot, tree_plot, tree_size
from specdec.bench.results import Result
from specdec.bench.summary import summarize, system_name
from specdec.bench.tables import LATENCIES, LEGEND, by_system, depths, failures, number, rate, shares, speed
from specdec.errors import ConfigError
from specdec.hub.cache import replace_file


def page(result: Result) -> str:
    """Return the page of a result of `bench acceptance`."""
    rows = summarize(result)
    return _render(
        "page.html",
        title=f"Acceptance of {result.settings.model}",
        result=result,
        systems=by_system(rows),
        legend=LEGEND,
        failures=failures(result),
        plots=_plots(result, rows),
    )


def load_page(value: Mapping[str, Any]) -> str:
    """Return the page of a result of `bench serve`, as its file holds it."""
    runs = value["runs"]
    plots = {"Latency against load": as_svg(load_plot(runs))} if len(runs) > 1 else {}
    return _render("load_page.html", title=f"Load for {value['settings']['base_url']}", result=value, plots=plots)


def _render(name: str, *, plots: Mapping[str, str], **values: Any) -> str:
    files = FunctionLoader(lambda file: (resources.files("specdec.bench") / file).read_text("utf-8"))
    made = Environment(loader=files, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    made.globals.update(number=number, speed=speed, depths=depths, shares=shares, rate=rate, metrics=LATENCIES)
    safe = {title: Markup(svg) for title, svg in plots.items()}
    return made.get_template(name).render(plots=safe, **values)


def write_page(text: str, path: Path) -> None:
    """Write a page, whole or not at all.

    Raises:
        ConfigError: it can't be written.
    """
    try:
        replace_file(path, lambda file: file.write_text(text, encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: can't be written ({error.strerror}); give another file") from error


def _plots(result: Result, rows: list[dict[str, object]]) -> dict[str, str]:
    plots = {}
    sizes = batches(rows)
    for size, shown in sizes.items():
        if any(row["speedup"] is not None for row in shown):
            title = "Speed-up by category" if len(sizes) == 1 else f"Speed-up by category, {size} at once"
            plots[title] = as_svg(speedup_plot(shown, result.settings.baseline), (8.4, 3.6))
    shown = next(iter(sizes.values()), [])
    if any(row.get("draft_tokens_per_forward") for row in shown):
        plots["Acceptance by depth"] = as_svg(depth_plot(shown))
        plots["Draft tokens delivered by a forward"] = as_svg(length_plot(shown))
    for name, tree in trees(result).items():
        plots[f"Trees of {name}: share accepted of the times proposed"] = as_svg(tree_plot(tree), tree_size(tree))
    return plots


def trees(result: Result) -> dict[str, list[tuple[list[int], int, int]]]:
    """Return for each drafter the nodes of its trees over all cells, with times proposed and accepted."""
    sums: dict[str, dict[tuple[int, ...], tuple[int, int]]] = {}
    for cell in result.cells:
        for ranks, proposed, accepted in cell.split.tree if cell.split else ():
            nodes = sums.setdefault(system_name(asdict(cell)), {})
            before = nodes.get(tuple(ranks), (0, 0))
            nodes[tuple(ranks)] = before[0] + proposed, before[1] + accepted
    return {name: [(list(ranks), *n) for ranks, n in sorted(nodes.items())] for name, nodes in sums.items()}
