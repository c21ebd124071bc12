"""Times of requests, and what is reported of them."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from specdec.errors import ConfigError

LIMITS = ("ttft", "tpot", "e2el")
"""What a goodput's limits may be of."""


@dataclass(slots=True)
class Timing:
    """One request, in seconds.

    Args:
        start: when it was sent.
        chunks: when each piece of text came.
        chunk_tokens: tokens of each piece, where that is known; else empty.
        end: when the answer was complete.
        num_prompt_tokens, num_output_tokens: as the engine or server counted them.
    """

    start: float
    chunks: list[float] = field(default_factory=list)
    chunk_tokens: list[int] = field(default_factory=list)
    end: float = 0.0
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0

    @property
    def ttft(self) -> float:
        """Time to the first token; to the end where no text came."""
        return (self.chunks[0] if self.chunks else self.end) - self.start

    @property
    def e2el(self) -> float:
        """End-to-end latency."""
        return self.end - self.start

    @property
    def tpot(self) -> float | None:
        """Time per output token behind the first: (E2EL − TTFT) / (n − 1); None for one token."""
        return (self.e2el - self.ttft) / (self.num_output_tokens - 1) if self.num_output_tokens > 1 else None

    @property
    def between_chunks(self) -> list[float]:
        """Time between one piece of text and the next: speculation lengthens it, for pieces hold several tokens."""
        return [b - a for a, b in zip(self.chunks, self.chunks[1:], strict=False)]

    @property
    def between_tokens(self) -> list[float]:
        """The same a token: tokens that came together share their time. Empty where their numbers aren't known."""
        return [
            gap / count
            for gap, count in zip(self.between_chunks, self.chunk_tokens[1:], strict=False)
            for _ in range(count)
        ]


def summarize_timings(timings: Sequence[Timing]) -> dict[str, Any]:
    """Return mean, median and 99th percentile in ms of TTFT, TPOT, E2EL, inter-chunk and inter-token latency."""
    return {
        "ttft_ms": _ms(t.ttft for t in timings),
        "tpot_ms": _ms(t.tpot for t in timings if t.tpot is not None),
        "e2el_ms": _ms(t.e2el for t in timings),
        "inter_chunk_ms": _ms(gap for t in timings for gap in t.between_chunks),
        "inter_token_ms": _ms(gap for t in timings for gap in t.between_tokens),
    }


def parse_limits(limits: Iterable[str]) -> dict[str, float]:
    """Read limits such as "ttft:200" (ms).

    Raises:
        ConfigError: one is of something else, or no number above 0.
    """
    found = {}
    for text in limits:
        name, _, value = text.partition(":")
        try:
            ms = float(value)
        except ValueError:
            ms = 0.0
        if name not in LIMITS or not ms > 0:
            raise ConfigError(f"goodput takes a name and ms, such as ttft:200, of {', '.join(LIMITS)}; not {text!r}")
        found[name] = ms
    return found


def num_good(timings: Sequence[Timing], limits: dict[str, float]) -> int:
    """Return how many requests kept all limits; a request without a TPOT keeps its limit."""
    return sum(all((getattr(t, name) or 0.0) * 1e3 <= ms for name, ms in limits.items()) for t in timings)


def _ms(seconds: Iterable[float]) -> dict[str, float] | None:
    """None of no values."""
    values = np.array(list(seconds)) * 1e3
    if not len(values):
        return None
    median, p99 = np.percentile(values, (50, 99))
    return {"mean": float(values.mean()), "median": float(median), "p99": float(p99)}
