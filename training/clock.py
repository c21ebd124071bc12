"""The time that a command may take, and what share of it is spent. Knows nothing of what it is spent on."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from specdec.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Clock:
    """Runs from when it is made.

    Args:
        seconds: all that may be spent.
        start: when it was made, by `time.monotonic`.

    Raises:
        ConfigError: there is no time to spend.
    """

    seconds: float
    start: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        if not 0 < self.seconds < math.inf:
            raise ConfigError(f"the time limit must be above 0, not {self.seconds:g} seconds")

    def runs_until(self, share: float) -> Callable[[], bool]:
        """Return what says whether less than this share of the time is spent."""
        end = self.start + share * self.seconds
        return lambda: time.monotonic() < end

    def span_to(self, share: float) -> Callable[[], float]:
        """Return what says how much is spent of the time from now until this share of all time: from 0 to 1."""
        now, end = time.monotonic(), self.start + share * self.seconds
        return lambda: min(1.0, (time.monotonic() - now) / (end - now)) if now < end else 1.0
