"""How long answers will be, by those that ended before, and how many blocks that will take."""

from bisect import bisect_right, insort
from collections import deque
from collections.abc import Sequence

QUANTILE = 0.5
"""Share of the answers that are expected to be no longer than predicted. More leaves more of the pool unused."""
WINDOW = 512
"""Ended answers that are remembered."""
FIRST_GUESS = 256
"""Tokens that an answer is expected to have while none that long has ended."""


class LengthPredictor:
    """Predicts output lengths by a quantile of the answers that ended last.

    An answer that goes on has outlived the shorter ones, so only longer ones count for it. Where there is none it is
    expected to double.
    """

    def __init__(self) -> None:
        self._ended: deque[int] = deque()
        self._sorted: list[int] = []

    def observe(self, num_tokens: int) -> None:
        """Take note of the length of an answer that ended by itself."""
        if len(self._ended) == WINDOW:
            del self._sorted[bisect_right(self._sorted, self._ended.popleft()) - 1]
        self._ended.append(num_tokens)
        insort(self._sorted, num_tokens)

    def remaining(self, num_output: int, max_tokens: int) -> int:
        """Return how many tokens an answer is expected to get yet, at least 1.

        Args:
            num_output: tokens that it has.
            max_tokens: most that it may have.
        """
        first = bisect_right(self._sorted, num_output)
        num_longer = len(self._sorted) - first
        if num_longer:
            length = self._sorted[first + int(QUANTILE * num_longer)]
        else:
            length = max(FIRST_GUESS, 2 * num_output)
        return max(1, min(length, max_tokens) - num_output)


def peak_blocks(num_used: int, sequences: Sequence[tuple[int, int]], block_size: int) -> float:
    """Return the most blocks that are in use at any time until all sequences have ended.

    Each is taken to get one token a step and to give its blocks back at its end. A sequence grows by remaining ÷
    block_size blocks, since on average half of its last block is free.

    Source: Gong et al., "Past-Future Scheduler for LLM Serving under SLA Guarantees" (2025).

    Args:
        num_used: blocks in use now; fewer than the sequences' own where they share some.
        sequences: of each the blocks that it holds and the tokens that it will get yet.
        block_size: slots a block.
    """
    peak = float(num_used)
    for num_ended, (num_held, remaining) in enumerate(sorted(sequences, key=lambda s: s[1])):
        peak = max(peak, num_used + (len(sequences) - num_ended) * remaining / block_size)
        num_used -= num_held
    return peak
