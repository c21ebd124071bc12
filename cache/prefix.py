"""Which blocks hold which tokens, so that what was computed once is found again. Knows committed tokens only."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import count

_Key = tuple[int | str | None, tuple[int, ...]]
"""The number of the prefix that a block follows (a first block: the salt), and the block's own tokens."""


@dataclass(frozen=True, slots=True)
class PrefixStats:
    """How often blocks were found again, since the start.

    Args:
        num_queried_tokens: tokens of the requests that were taken in.
        num_hit_tokens: those of them whose keys and values were there.
        num_evictions: cached blocks that had to make room.
        num_cached_blocks: blocks that nobody holds now and that can be found.
    """

    num_queried_tokens: int = 0
    num_hit_tokens: int = 0
    num_evictions: int = 0
    num_cached_blocks: int = 0


class PrefixIndex:
    """Finds full blocks by their tokens and by all tokens before them.

    A block is looked up by its own tokens and the number of the prefix before it, and that number was given to exactly
    one sequence of tokens: a chain of hashes whose links are compared, not trusted. Keys that merely hash alike are
    told apart by the dict, so a collision costs time and never gives wrong keys and values.

    Args:
        block_size: tokens a block.
    """

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._blocks: dict[_Key, int] = {}
        self._keys: dict[int, _Key] = {}  # of the blocks that are found
        self._prefixes: dict[int, int] = {}  # block -> number of the prefix that ends with it; also of copies
        self._numbers = count()  # never used again, so that what followed an evicted block is not found by mistake

    def __contains__(self, block: int) -> bool:
        return block in self._keys

    def find(self, tokens: Sequence[int], salt: str | None) -> list[int]:
        """Return the blocks that hold the first tokens, as many as are known in a row.

        The last token is left out: it has to be run, since what follows it is wanted.
        """
        blocks: list[int] = []
        prefix: int | str | None = salt
        for end in range(self.block_size, len(tokens), self.block_size):
            block = self._blocks.get((prefix, tuple(tokens[end - self.block_size : end])))
            if block is None:
                break
            blocks.append(block)
            prefix = self._prefixes[block]
        return blocks

    def add(self, block_table: Sequence[int], tokens: Sequence[int], num_tokens: int, salt: str | None) -> None:
        """Make the full blocks of a sequence known. Where another block holds the same, that one goes on being found.

        Args:
            block_table: the sequence's blocks.
            tokens: its tokens.
            num_tokens: the leading tokens whose keys and values are committed.
            salt: only sequences with the same salt find each other's blocks.
        """
        num_full = num_tokens // self.block_size
        first = num_full
        while first and block_table[first - 1] not in self._prefixes:
            first -= 1
        prefix: int | str | None = self._prefixes[block_table[first - 1]] if first else salt
        for i in range(first, num_full):
            key = (prefix, tuple(tokens[i * self.block_size : (i + 1) * self.block_size]))
            block = block_table[i]
            found = self._blocks.setdefault(key, block)
            if found == block:
                self._keys[block] = key
                self._prefixes[block] = next(self._numbers)
            prefix = self._prefixes[block] = self._prefixes[found]

    def drop(self, block: int) -> None:
        """Forget what a block holds; one that isn't known stays unknown."""
        self._prefixes.pop(block, None)
        if block in self._keys:
            del self._blocks[self._keys.pop(block)]

    def check_integrity(self, free: Iterable[int]) -> None:
        """Check that every known block is found by its key, and that no free one is known.

        Raises:
            AssertionError: one isn't or is; the message names it.
        """
        for block, key in self._keys.items():
            assert self._blocks[key] == block, f"block {block} is known but block {self._blocks[key]} is found"
            assert block in self._prefixes, f"block {block} is known but not what follows it"
        assert len(self._keys) == len(self._blocks), "a block is found that isn't known"
        lost = self._prefixes.keys() & set(free)
        assert not lost, f"blocks {sorted(lost)} are free but still known"
