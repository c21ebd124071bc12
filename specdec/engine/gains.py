"""What the nodes of a tree are expected to buy, and how that is learned from what was accepted. Knows numbers only."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

FIRST_RATE = 0.7
"""Acceptance rate that a request is credited with before anything of it was verified."""
LEARNING_RATE = 0.2
"""Weight of the newest verified depth in the running acceptance rate."""
STEP_WEIGHT = 0.1
"""Weight of the newest step in the running quality of a measured tree's drafts."""
BEST_QUALITY = 2.0
"""How much better than on average drafts may be that come back from one node."""


class Gains(Protocol):
    """How good a request's drafts are is one number; `first` before anything is known, `best` at the most."""

    first: float
    best: float

    def of(self, quality: ArrayLike) -> NDArray[np.float64]:
        """Return the tokens that each further node is expected to buy, falling: [...] to [..., most nodes - 1]."""
        ...

    def learn(self, quality: float, num_accepted: int, num_refused: int, num_nodes: int) -> float:
        """Return the quality after a step.

        Args:
            quality: before it.
            num_accepted, num_refused: depths of its path that were verified.
            num_nodes: nodes that its tree could have, root included.
        """
        ...


class ChainGains:
    """Drafts of which nothing is known: each is accepted at one rate once its parent is.

    Args:
        most: most nodes of a tree, root included.
    """

    first, best = FIRST_RATE, 1.0

    def __init__(self, most: int) -> None:
        self._depths = np.arange(1, most)

    def of(self, quality: ArrayLike) -> NDArray[np.float64]:
        """Return the rate to the power of each node's depth."""
        return np.asarray(quality, dtype=np.float64)[..., None] ** self._depths

    def learn(self, quality: float, num_accepted: int, num_refused: int, num_nodes: int) -> float:
        """Take each verified depth into the running rate."""
        for accepted in [1.0] * num_accepted + [0.0] * num_refused:
            quality += LEARNING_RATE * (accepted - quality)
        return quality


class TreeGains:
    """A tree whose nodes' chances were measured: a request's drafts are so many times as good as on average.

    Args:
        chances: that each node but the root is accepted, in the order in which a budget takes them.
        most: most nodes of a tree, root included.
    """

    first, best = 1.0, BEST_QUALITY

    def __init__(self, chances: Sequence[float], most: int) -> None:
        self._chances = np.zeros(max(0, most - 1))
        known = np.asarray(chances[: most - 1], dtype=np.float64)
        self._chances[: len(known)] = np.minimum.accumulate(known)
        self._expected = np.cumsum(self._chances)

    def of(self, quality: ArrayLike) -> NDArray[np.float64]:
        """Return each node's chance, so many times as good; what the tree doesn't have buys nothing."""
        return np.minimum(1.0, np.asarray(quality, dtype=np.float64)[..., None] * self._chances)

    def learn(self, quality: float, num_accepted: int, num_refused: int, num_nodes: int) -> float:
        """Compare what was accepted with what such a tree is accepted on average."""
        expected = float(self._expected[min(num_nodes - 1, len(self._expected)) - 1]) if num_nodes > 1 else 0.0
        if expected == 0 or num_accepted + num_refused == 0:
            return quality
        return quality + STEP_WEIGHT * (num_accepted / expected - quality)
