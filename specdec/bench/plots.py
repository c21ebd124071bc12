"""Plots of results, as SVG for pages and as PNG for documents. The same numbers give the same bytes.

Needs matplotlib, which is imported when a plot is made.
"""

import importlib.util
import io
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specdec.bench.summary import ALL
from specdec.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Row = Mapping[str, Any]
Tree = Sequence[tuple[Sequence[int], int, int]]
Draw = Callable[["Axes"], None]

_MOST_NODES = 40  # of a tree that is drawn
_STYLE = {"font.family": "DejaVu Sans", "font.size": 9, "axes.spines.top": False, "axes.spines.right": False}


def check_can_plot() -> None:
    """Check that plots can be made.

    Raises:
        ConfigError: matplotlib isn't installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("plots need matplotlib: pip install matplotlib")


def as_svg(draw: Draw, size: tuple[float, float] = (6.4, 3.6)) -> str:
    """Return a plot as an SVG element, its text as text."""
    import matplotlib

    out = io.StringIO()
    with matplotlib.rc_context(_STYLE | {"svg.fonttype": "none", "svg.hashsalt": "specdec"}):
        _figure(draw, size).savefig(out, format="svg", metadata={"Date": None, "Creator": None})
    text = out.getvalue()
    return text[text.index("<svg") :]


def save_png(draw: Draw, path: Path, size: tuple[float, float] = (6.4, 3.6)) -> None:
    """Write a plot as a PNG file."""
    import matplotlib

    with matplotlib.rc_context(_STYLE):
        _figure(draw, size).savefig(path, format="png", dpi=144, metadata={"Software": None})


def _figure(draw: Draw, size: tuple[float, float]) -> "Figure":
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    draw(figure.subplots())
    return figure


def depth_plot(rows: Sequence[Row]) -> Draw:
    """Acceptance by depth of each drafter over all categories: where that depth was reached, and of all forwards."""

    def draw(axes: "Axes") -> None:
        for i, row in enumerate(_drafters(rows)):
            for key, style, name in (
                ("acceptance_by_depth", "o-", row["name"]),
                ("cumulative_by_depth", "o--", None),
            ):
                rates = row[key]
                axes.plot(range(1, 1 + len(rates)), rates, style, color=f"C{i}", ms=3, label=name)
        axes.set(xlabel="depth of the draft token", ylabel="accepted where reached; dashed: of all", ylim=(0, 1.02))
        deepest = max((len(row["acceptance_by_depth"]) for row in _drafters(rows)), default=1)
        axes.set_xticks(range(1, 1 + deepest, 1 + deepest // 20))  # no more than have room
        _legend(axes)

    return draw


def length_plot(rows: Sequence[Row]) -> Draw:
    """How many draft tokens a forward delivered."""

    def draw(axes: "Axes") -> None:
        shown = _drafters(rows)
        for i, row in enumerate(shown):
            counts = row["accepted_lengths"]
            width = 0.8 / len(shown)
            places = [n - 0.4 + width * (i + 0.5) for n in range(len(counts))]
            axes.bar(places, [count / sum(counts) for count in counts], width, label=row["name"])
        axes.set(xlabel="draft tokens delivered by a forward", ylabel="share of forwards")
        _legend(axes)

    return draw


def speedup_plot(rows: Sequence[Row], baseline: str) -> Draw:
    """Speed-up by category, with quartiles over the prompts."""

    def draw(axes: "Axes") -> None:
        compared = [row for row in rows if row["speedup"] is not None]
        categories = list(dict.fromkeys(row["category"] for row in compared if row["category"] != ALL)) + [ALL]
        names = list(dict.fromkeys(row["name"] for row in compared))
        width = 0.8 / max(1, len(names))
        for i, name in enumerate(names):
            shown = [row for row in compared if row["name"] == name]
            places = [categories.index(row["category"]) - 0.4 + width * (i + 0.5) for row in shown]
            values = [row["speedup"]["value"] for row in shown]
            low = [max(0.0, row["speedup"]["value"] - row["speedup"]["low"]) for row in shown]
            high = [max(0.0, row["speedup"]["high"] - row["speedup"]["value"]) for row in shown]
            axes.bar(places, values, width, label=name, yerr=(low, high), error_kw={"lw": 0.8})
        axes.axhline(1, color="0.4", lw=0.8)
        axes.set(ylabel=f"× against {baseline}", xticks=range(len(categories)))
        axes.set_xticklabels(categories, rotation=20, ha="right")
        _legend(axes)

    return draw


def tree_plot(tree: Tree) -> Draw:
    """A tree of drafts; beside each node the share of the times proposed that it was accepted."""

    def draw(axes: "Axes") -> None:
        shown = _shown(tree)
        nodes = {tuple(ranks): accepted / proposed for ranks, proposed, accepted in shown}
        places = tree_places(list(nodes))
        for ranks, chance in nodes.items():
            (x, y), (px, py) = places[ranks], places[ranks[:-1]]
            axes.plot([px, x], [py, y], "-", color="C0", lw=0.4 + 4 * chance, alpha=0.6, zorder=1)
            text = f"{chance:.2f}".removeprefix("0")
            axes.annotate(text, (x, y), (6, 0), textcoords="offset points", va="center", fontsize=7, in_layout=False)
        xs, ys = zip(*places.values(), strict=True)
        axes.plot(xs, ys, "o", color="C0", ms=4, zorder=2)
        axes.margins(x=0.15)
        axes.set_axis_off()

    return draw


def _shown(tree: Tree) -> list[tuple[Sequence[int], int, int]]:
    return sorted(sorted(tree, key=lambda node: (-node[1], len(node[0]), node[0]))[:_MOST_NODES])


def tree_size(tree: Tree) -> tuple[float, float]:
    """Return the size of a tree's plot in inches: by its leaves and its depth."""
    places = tree_places([tuple(ranks) for ranks, *_ in _shown(tree)]).values()
    return 1.5 + 0.45 * max(x for x, _ in places), 0.6 - 0.5 * min(y for _, y in places)


def tree_places(nodes: Sequence[tuple[int, ...]]) -> dict[tuple[int, ...], tuple[float, float]]:
    """Return where each node stands, the root () included: leaves side by side, a parent above the middle of its own.

    Args:
        nodes: as in Medusa's choices; each one's parent is among them.
    """
    children: dict[tuple[int, ...], list[tuple[int, ...]]] = {(): []}
    for node in sorted(nodes):
        children[node] = []
        children[node[:-1]].append(node)
    places: dict[tuple[int, ...], tuple[float, float]] = {}
    num_leaves = 0
    for node in sorted(children, key=lambda n: (n + (1 << 30,) * (64 - len(n)), -len(n))):  # children before parents
        own = [places[child][0] for child in children[node]]
        x = (own[0] + own[-1]) / 2 if own else float(num_leaves)
        num_leaves += not own
        places[node] = (x, -float(len(node)))
    return places


def load_plot(runs: Sequence[Row]) -> Draw:
    """Latency against load: median and 99th percentile of TTFT and TPOT by requests a second."""

    def draw(axes: "Axes") -> None:
        for i, name in enumerate(("ttft", "tpot")):
            timed = [run for run in runs if run[f"{name}_ms"] is not None]
            at = [run["request_throughput"] for run in timed]
            for key, style in (("median", "o-"), ("p99", "o--")):
                shown = f"{name.upper()}, {'median' if key == 'median' else '99th percentile'}"
                axes.plot(at, [run[f"{name}_ms"][key] for run in timed], style, color=f"C{i}", ms=3, label=shown)
        axes.set(xlabel="answers a second", ylabel="ms", yscale="log")
        _legend(axes)

    return draw


def _legend(axes: "Axes") -> None:
    """Above the plot, where it hides nothing, in as many columns as there is room for."""
    figure, (_, names) = axes.get_figure(root=True), axes.get_legend_handles_labels()
    assert figure is not None, "it was drawn on one"
    room = 11 * figure.get_figwidth()  # letters
    num_columns = int(room / (6 + max(map(len, names), default=0)))
    axes.legend(frameon=False, loc="lower left", bbox_to_anchor=(0, 1), ncols=max(1, min(4, num_columns)))


def batches(rows: Sequence[Row]) -> dict[int, list[Row]]:
    """Return the rows of each batch size; counts of tokens are the same in all of them."""
    return {n: [row for row in rows if row["batch_size"] == n] for n in sorted({row["batch_size"] for row in rows})}


def _drafters(rows: Sequence[Row]) -> list[Row]:
    """The rows over all categories of the systems that drafted."""
    return [row for row in rows if row["category"] == ALL and row.get("draft_tokens_per_forward", 0) > 0]
