"""Sums of the engine's own counters, and what follows from them."""

from collections.abc import Iterable
from itertools import zip_longest

from specdec.outputs import SpeculationStats


def total(parts: Iterable[SpeculationStats]) -> SpeculationStats:
    """Return the counters of all requests together."""
    whole = SpeculationStats()
    for part in parts:
        whole.num_forwards += part.num_forwards
        whole.num_output_tokens += part.num_output_tokens
        whole.num_drafts += part.num_drafts
        whole.num_draft_tokens += part.num_draft_tokens
        whole.num_accepted_tokens += part.num_accepted_tokens
        whole.tried_by_depth = _add(whole.tried_by_depth, part.tried_by_depth)
        whole.accepted_by_depth = _add(whole.accepted_by_depth, part.accepted_by_depth)
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


def _add(one: list[int], other: list[int]) -> list[int]:
    return [a + b for a, b in zip_longest(one, other, fillvalue=0)]
