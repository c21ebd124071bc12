"""What follows from the cells of a result, by category and over all: τ, acceptance, speeds, speed-ups, spread."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import quantiles
from typing import Any

from specdec.bench.counts import accepted_lengths, cumulative_acceptance, mean_accepted, total
from specdec.bench.results import Cell, Result

ALL = "all"
"""Stands for all categories together."""


@dataclass(frozen=True, slots=True)
class Spread:
    """A value over everything, and the quartiles over the groups of prompts that were answered together."""

    value: float
    low: float
    high: float


def summarize(result: Result) -> list[dict[str, Any]]:
    """Return one row for each system, tree size, batch size and category, and one for all categories together.

    A speed is tokens a second from the prompts' start to the answers' end. Speed-ups compare with the baseline on the
    groups of prompts that both answered.
    """
    rows = []
    for system, max_nodes, batch_size in dict.fromkeys((c.system, c.max_nodes, c.batch_size) for c in result.cells):
        cells = [c for c in result.cells if (c.system, c.max_nodes, c.batch_size) == (system, max_nodes, batch_size)]
        parts = [(cell.category, [cell]) for cell in cells] + [(ALL, cells)]
        rows += [_row(category, part, result) for category, part in parts]
    return rows


def system_name(row: Mapping[str, Any]) -> str:
    """Return a row's system; behind it its drafter where the name leaves that open, as "auto" does; its tree's size."""
    named = "+".join(part.partition(":")[0] for part in row["system"].split("+"))
    behind = "" if row["drafter"] in (None, "none", named) else f" ({row['drafter']})"
    nodes = "" if row["max_nodes"] is None else f" ≤{row['max_nodes']}"
    return f"{row['system']}{behind}{nodes}"


def _row(category: str, cells: Sequence[Cell], result: Result) -> dict[str, Any]:
    first = cells[0]
    tokens = [n for cell in cells for n in cell.num_tokens]
    seconds = [s for cell in cells for s in cell.seconds]
    compared = [cell.divergences for cell in cells if cell.divergences is not None]
    return {
        "name": system_name(asdict(first)),
        "system": first.system,
        "drafter": first.drafter,
        "max_nodes": first.max_nodes,
        "batch_size": first.batch_size,
        "category": category,
        "num_prompts": sum(len(cell.prompts) for cell in cells),
        "num_tokens": sum(tokens),
        "tokens_per_second": _as_dict(_speed(tokens, seconds)),
        "speedup": _as_dict(_speedup(cells, result)),
        **_acceptance(cells),
        "num_compared": sum(len(cell.prompts) for cell in cells if cell.divergences is not None),
        "num_different": sum(map(len, compared)) if compared else None,
        "largest_margin": max((d.margin for part in compared for d in part), default=None),
        "time_shares": _shares(cells),
        "memory_bytes": max((cell.memory_bytes for cell in cells if cell.memory_bytes is not None), default=None),
    }


def _acceptance(cells: Sequence[Cell]) -> dict[str, Any]:
    stats = [cell.stats for cell in cells if cell.stats is not None]
    if not stats:
        return {}
    whole = total(stats)
    return {
        "mean_acceptance_length": whole.mean_acceptance_length,
        "mean_accepted_drafts": mean_accepted(whole),
        "draft_acceptance_rate": whole.draft_acceptance_rate,
        "draft_tokens_per_forward": whole.num_draft_tokens / whole.num_forwards if whole.num_forwards else 0.0,
        "acceptance_by_depth": whole.acceptance_by_depth,
        "cumulative_by_depth": cumulative_acceptance(whole),
        "accepted_lengths": accepted_lengths(whole),
    }


def _speed(tokens: Sequence[int], seconds: Sequence[float]) -> Spread:
    return _spread(sum(tokens) / sum(seconds), [n / s for n, s in zip(tokens, seconds, strict=True)])


def _speedup(cells: Sequence[Cell], result: Result) -> Spread | None:
    """Against the baseline on the same groups of prompts; None without any, and for the baseline."""
    base = {key: value for c in result.cells if c.system == result.settings.baseline for key, value in _groups(c)}
    pairs = [(group, base[key]) for cell in cells for key, group in _groups(cell) if key in base]
    if not pairs or cells[0].system == result.settings.baseline:
        return None
    ours, theirs = (sum(n for n, _ in side) / sum(s for _, s in side) for side in zip(*pairs, strict=True))
    return _spread(ours / theirs, [(n / s) / (m / t) for (n, s), (m, t) in pairs])


def _groups(cell: Cell) -> list[tuple[tuple[str, ...], tuple[int, float]]]:
    """For each group of prompts that were answered together: their ids, then tokens and seconds."""
    size = cell.batch_size
    ids = [(str(size), *cell.prompts[i : i + size]) for i in range(0, len(cell.prompts), size)]
    return list(zip(ids, zip(cell.num_tokens, cell.seconds, strict=True), strict=True))


def _spread(value: float, parts: Sequence[float]) -> Spread:
    if len(parts) < 2:
        return Spread(value, parts[0], parts[0])
    low, _, high = quantiles(parts, n=4, method="inclusive")
    return Spread(value, low, high)


def _as_dict(spread: Spread | None) -> dict[str, float] | None:
    return None if spread is None else {"value": spread.value, "low": spread.low, "high": spread.high}


def _shares(cells: Sequence[Cell]) -> dict[str, float] | None:
    """Shares of the time of eager steps."""
    splits = [cell.split for cell in cells if cell.split is not None]
    if not splits:
        return None
    sums = {name: sum(getattr(s, name) for s in splits) for name in ("draft", "forward", "accept", "host")}
    return {name: value / sum(sums.values()) for name, value in sums.items()}
