"""What one of our servers itself counted and timed during a run, by its `/metrics`, and how our numbers compare."""

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from httpx2 import AsyncClient

Totals = Mapping[str, float]
_LINE = re.compile(r"specdec_(\w+)(?:\{[^}]*\})? (\S+)")
_MEANS = {"ttft_ms": "time_to_first_token", "inter_token_ms": "inter_token_latency", "e2el_ms": "request_latency"}


async def server_totals(client: "AsyncClient") -> Totals | None:
    """Return the server's counters and sums since its start, labels added up; None where it has no such metrics."""
    import httpx2

    try:
        text = (await client.get("/metrics")).text
    except httpx2.HTTPError:  # another server; what it does with requests is measured all the same
        return None
    totals: dict[str, float] = {}
    for line in text.splitlines():
        if found := _LINE.fullmatch(line):
            totals[found[1]] = totals.get(found[1], 0.0) + float(found[2])
    return totals if f"{_MEANS['ttft_ms']}_seconds_count" in totals else None


def seen_by_server(before: Totals | None, after: Totals | None) -> dict[str, Any] | None:
    """Return what a run was by the server's own metrics; None where it has none.

    Returns:
        `completed` answers, `total_input_tokens` and `total_output_tokens`, and the means `ttft_ms`, `inter_token_ms`
        and `e2el_ms` in ms, None where there was nothing to time.
    """
    if before is None or after is None:
        return None

    def grown(name: str) -> float:
        return after.get(name, 0.0) - before.get(name, 0.0)

    def mean(name: str) -> float | None:
        count = grown(f"{name}_seconds_count")
        return grown(f"{name}_seconds_sum") / count * 1e3 if count else None

    return {
        "completed": round(grown("request_latency_seconds_count")),
        "total_input_tokens": round(grown("prompt_tokens_total")),
        "total_output_tokens": round(grown("generation_tokens_total")),
        **{ours: mean(theirs) for ours, theirs in _MEANS.items()},
    }


def against_server(run: Mapping[str, Any], server: Mapping[str, Any] | None) -> dict[str, float] | None:
    """Return our numbers of a run divided by the server's, where both have them.

    Args:
        run: as `bench serve` reports it.
        server: as `seen_by_server` returns it.
    """
    if server is None:
        return None
    both = {name: (run[name], value) for name, value in server.items() if value and run[name] is not None}
    return {name: (own["mean"] if isinstance(own, Mapping) else own) / value for name, (own, value) in both.items()}
