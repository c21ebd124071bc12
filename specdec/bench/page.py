"""A result of `bench acceptance` as one HTML page that needs nothing else."""

from dataclasses import asdict
from importlib import resources
from pathlib import Path

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from specdec.bench.plots import as_svg, batches, depth_plot, length_plot, speedup_plot, tree_plot, tree_size
from specdec.bench.results import Result
from specdec.bench.summary import summarize, system_name
from specdec.bench.tables import LEGEND, by_system, depths, failures, number, shares, speed
from specdec.errors import ConfigError
from specdec.hub.cache import replace_file


def page(result: Result) -> str:
    """Return the page."""
    rows = summarize(result)
    made = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    made.globals.update(number=number, speed=speed, depths=depths, shares=shares)
    template = made.from_string((resources.files("specdec.bench") / "page.html").read_text("utf-8"))
    return template.render(
        result=result,
        systems=by_system(rows),
        legend=LEGEND,
        failures=failures(result),
        plots={title: Markup(svg) for title, svg in _plots(result, rows).items()},
    )


def write_page(result: Result, path: Path) -> None:
    """Write the page, whole or not at all.

    Raises:
        ConfigError: it can't be written.
    """
    text = page(result)
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
