"""Sums of the engine's own counters, and what follows from them."""

from collections.abc import Iterable
from itertools import zip_longest

from specdec.outputs import SpeculationStats


def total(parts: Iterable[SpeculationStats]) -> SpeculationStats:
    """Return the counters of all requests together."""
    whole = SpeculationStats()
    for part in parts:
        whole.add(part)
    return whole


def accepted_lengths(stats: SpeculationStats) -> list[int]:
    """Return a histogram: entry n counts the forwards that delivered exactly n draft tokens."""
    at_least = [stats.num_forwards, *stats.accepted_by_depth]
    return [a - b for a, b in zip_longest(at_least, stats.accepted_by_depth, fillvalue=0)]


def cumulative_acceptance(stats: SpeculationStats) -> list[float]:
    """Return for depth 1, 2, … the share of all forwards that delivered a draft token there; its sum is τ's gain."""
    return [count / stats.num_forwards for count in stats.accepted_by_depth] if stats.num_forwards else []


def mean_accepted(stats: SpeculationStats) -> float:
    """Return τ without the bonus token: draft tokens delivered a forward."""
    return stats.num_accepted_tokens / stats.num_forwards if stats.num_forwards else 0.0
