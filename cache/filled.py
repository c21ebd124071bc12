"""Which blocks other layers than the target's have filled. Knows block ids and how often they were given out."""

from collections.abc import Sequence


class FilledBlocks:
    """Which blocks hold the keys and values of layers that lag behind the target's, such as a draft model's.

    Block tables are the target's. A block that is found again by its prefix has kept what these layers wrote in it; one
    that was given out anew since then holds nothing of theirs.

    Args:
        versions: how often each block was given out, kept up to date by the pool.
        block_size: tokens a block.
    """

    def __init__(self, versions: Sequence[int], block_size: int) -> None:
        self._versions, self._block_size = versions, block_size
        self._filled: dict[int, int] = {}  # block -> version in which it was filled

    def note(self, block_table: Sequence[int], num_tokens: int) -> None:
        """Take note that the layers hold the first tokens of a sequence."""
        for block in reversed(block_table[: num_tokens // self._block_size]):
            if self._filled.get(block) == self._versions[block]:
                break  # so are those before it
            self._filled[block] = self._versions[block]

    def count(self, block_table: Sequence[int]) -> int:
        """Return how many of a sequence's first tokens the layers hold in full blocks."""
        for i, block in enumerate(block_table):
            if self._filled.get(block) != self._versions[block]:
                return i * self._block_size
        return len(block_table) * self._block_size
