"""Results as tables for the terminal."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from specdec.bench.results import Result
from specdec.bench.summary import ALL, summarize

_HEADINGS = ("category", "τ", "drafts", "by depth", "tok/s", "×", "quartiles", "≠", "d/f/a/h %")
LEGEND = (
    "τ: tokens a forward; drafts: those of them that were drafted; by depth: acceptance at depths 1, 2, 3; ×: against "
    "the baseline; ≠: answers that differ from it; d/f/a/h: time in draft, forward, accept and host, of eager steps"
)

LATENCIES = {
    "ttft_ms": "TTFT",
    "tpot_ms": "TPOT",
    "inter_token_ms": "between tokens",
    "inter_chunk_ms": "between chunks",
    "e2el_ms": "end to end",
}
"""What a run of `bench serve` reports in ms, and what to call it."""


def acceptance_table(result: Result, doing: str = "") -> RenderableType:
    """Return one table a system with a line for each category, and what is being measured now."""
    tables = [_system_table(name, rows) for name, rows in by_system(summarize(result)).items()]
    return Group(*tables, Text(doing or LEGEND, style="dim"))


def failures(result: Result) -> list[str]:
    """Return a line for each thing that couldn't be measured."""
    lines = []
    for f in result.failures:
        where = f"{f.system}: " if f.category is None else f"{f.system}, {f.category}, batch {f.batch_size}: "
        lines.append(f"{where}not measured: {f.error}")
    return lines


def simple_table(title: str, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """Return a table whose first column is text and whose others are numbers."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    for i, heading in enumerate(headings):
        table.add_column(heading, justify="right" if i else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return table


def number(value: float | None, digits: int = 2) -> str:
    """Return a number, or a dash for none."""
    return "–" if value is None else f"{value:,.{digits}f}"


def speed(value: float) -> str:
    """Return tokens a second in few characters."""
    return number(value, 1 if value < 1000 else 0)


def rate(run: Mapping[str, Any]) -> str:
    """Return how many requests a second a run of `bench serve` sent."""
    return "all at once" if run["request_rate"] is None else f"{run['request_rate']:g} requests a second"


def by_system(rows: Sequence[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Return a summary's rows for each system, size of trees and size of batches, by what to call them."""
    found: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        found.setdefault(f"{row['name']}, batch {row['batch_size']}", []).append(row)
    return found


def depths(row: dict[str, Any]) -> str:
    """Return a row's acceptance at the first depths, or a dash for none."""
    return " ".join(f"{x:.2f}".removeprefix("0") for x in row.get("acceptance_by_depth", [])[:3]) or "–"


def shares(row: dict[str, Any]) -> str:
    """Return where a row's time went, in percent, or a dash where that isn't known."""
    return "/".join(f"{100 * share:.0f}" for share in row["time_shares"].values()) if row["time_shares"] else "–"


def _system_table(name: str, rows: Sequence[dict[str, Any]]) -> Table:
    table = simple_table(name, _HEADINGS, [_cells(row) for row in rows])
    table.rows[-1].style = "bold"
    assert rows[-1]["category"] == ALL
    return table


def _cells(row: dict[str, Any]) -> list[str]:
    speedup = row["speedup"]
    different = "–" if row["num_different"] is None else f"{row['num_different']}/{row['num_compared']}"
    return [
        row["category"],
        number(row.get("mean_acceptance_length")),
        number(row.get("mean_accepted_drafts")),
        depths(row),
        speed(row["tokens_per_second"]["value"]),
        number(speedup and speedup["value"]),
        f"{speedup['low']:.2f}–{speedup['high']:.2f}" if speedup else "–",
        different,
        shares(row),
    ]
