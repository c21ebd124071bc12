"""How long captured steps take as they run, drafts and the host's part included. Knows numbers only."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median

BELIEVED = 3
"""Steps of one size after which their time is known."""
KEPT = 15
"""Newest steps of a size that count."""
FORGOTTEN = 1024
"""Steps of as many sequences after which a size that hasn't come again is no longer known."""


@dataclass(slots=True)
class _Size:
    newest: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT))
    last: int = 0  # step that was seen last
    seconds: float | None = None


class StepTimes:
    """Seconds of steps by their sequences and the nodes of each: the median of the newest ones.

    A table or a guess knows nothing of what drafts take, so what was seen goes before them.
    """

    def __init__(self) -> None:
        self._sizes: dict[int, dict[int, _Size]] = {}  # by sequences, then by nodes
        self._steps: dict[int, int] = {}

    def observe(self, num_seqs: int, num_nodes: int, seconds: float) -> None:
        """Learn from a step of so many sequences, padding included, with so many nodes each."""
        step = self._steps[num_seqs] = self._steps.get(num_seqs, 0) + 1
        sizes = self._sizes.setdefault(num_seqs, {})
        size = sizes.setdefault(num_nodes, _Size())
        size.newest.append(seconds)
        size.last = step
        if len(size.newest) >= BELIEVED:
            size.seconds = median(size.newest)
        for n in [n for n, other in sizes.items() if step - other.last > FORGOTTEN]:
            del sizes[n]

    def lack_plain(self, num_seqs: int) -> bool:
        """Whether steps of so many sequences were seen, but not enough of one node each."""
        sizes = self._sizes.get(num_seqs)
        return sizes is not None and (1 not in sizes or sizes[1].seconds is None)

    def seconds(self, num_seqs: int, num_nodes: int, expected: Callable[[int], float]) -> float:
        """Return the seconds of a step: as seen, else as expected, in proportion to the nearest that was seen.

        Args:
            num_seqs: its sequences, padding included.
            num_nodes: of each.
            expected: nodes of each → seconds, in any unit, by a table or a guess.
        """
        known = {n: s.seconds for n, s in self._sizes.get(num_seqs, {}).items() if s.seconds is not None}
        if not known:
            return expected(num_nodes)
        nearest = min(known, key=lambda n: abs(n - num_nodes))
        return known[nearest] * expected(num_nodes) / expected(nearest)
