"""Who holds which block of the KV cache. Blocks are numbers here; their contents are in `pages`."""

from collections.abc import Iterable, Sequence

from specdec.cache.prefix import PrefixIndex, PrefixStats
from specdec.errors import OutOfBlocks


class BlockPool:
    """A fixed number of blocks with reference counts: in use, free, or cached, which is held by nobody but known.

    Args:
        num_blocks: blocks in the pool; ids run from 0.
        index: finds blocks again by what they hold; None: what nobody holds is forgotten.
    """

    def __init__(self, num_blocks: int, index: PrefixIndex | None = None) -> None:
        self.num_blocks = num_blocks
        self.versions = [0] * num_blocks
        """How often each block was given out: while the number stays, what is committed in the block stays."""
        self._index = index
        self._free = list(range(num_blocks - 1, -1, -1))  # a stack: low ids first, so that runs stay consecutive
        self._cached: dict[int, None] = {}  # least recently used first
        self._refs = [0] * num_blocks
        self._num_queried_tokens = self._num_hit_tokens = self._num_evictions = 0

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds. The cached ones among them are evicted when they are needed."""
        return len(self._free) + len(self._cached)

    @property
    def stats(self) -> PrefixStats:
        """How often blocks were found again."""
        return PrefixStats(self._num_queried_tokens, self._num_hit_tokens, self._num_evictions, len(self._cached))

    def allocate(self, count: int) -> list[int]:
        """Take `count` blocks, each held once; the least recently used of the cached ones where no other is free.

        Raises:
            OutOfBlocks: fewer are free; nothing was taken.
        """
        if count > self.num_free:
            raise OutOfBlocks(f"{count} KV cache blocks are needed and {self.num_free} of {self.num_blocks} are free")
        while len(self._free) < count:
            self._evict()
            self._num_evictions += 1
        blocks = [self._free.pop() for _ in range(count)]
        for block in blocks:
            self._refs[block] = 1
            self.versions[block] += 1
        return blocks

    def find(self, tokens: Sequence[int], salt: str | None) -> list[int]:
        """Return the blocks that hold the first tokens already, the last token left out; nobody holds them for it."""
        return [] if self._index is None else self._index.find(tokens, salt)

    def num_left(self, found: Sequence[int]) -> int:
        """Blocks that nobody would hold after taking those that were found."""
        return self.num_free - sum(self._refs[block] == 0 for block in found)

    def take(self, found: Sequence[int], num_tokens: int) -> None:
        """Hold blocks that were found for a request of `num_tokens` tokens."""
        for block in found:
            if not self._refs[block]:
                del self._cached[block]
            self._refs[block] += 1
        if self._index is not None:
            self._num_queried_tokens += num_tokens
            self._num_hit_tokens += len(found) * self._index.block_size

    def remember(self, block_table: Sequence[int], tokens: Sequence[int], num_tokens: int, salt: str | None) -> None:
        """Let the full blocks of the first `num_tokens` tokens, which are committed, be found from now on."""
        if self._index is not None:
            self._index.add(block_table, tokens, num_tokens, salt)

    def release(self, blocks: Sequence[int]) -> None:
        """Let go of blocks once; those that nobody holds any more become cached or free."""
        for block in reversed(blocks):  # the end of a sequence is evicted before its beginning
            assert self._refs[block] > 0, f"block {block} was released twice"
            self._refs[block] -= 1
            if self._refs[block] == 0:
                if self._index is not None and block in self._index:
                    self._cached[block] = None
                else:
                    self._make_free(block)

    def forget_cached(self) -> None:
        """Free all cached blocks."""
        while self._cached:
            self._evict()

    def check_integrity(self, block_tables: Iterable[Sequence[int]]) -> None:
        """Check that free + cached + in use = total and that reference counts match the block tables.

        Raises:
            AssertionError: a block is lost, free twice, or its count is wrong; the message names it.
        """
        expected = [0] * self.num_blocks
        for table in block_tables:
            for block in table:
                expected[block] += 1
        for block, (have, want) in enumerate(zip(self._refs, expected, strict=True)):
            assert have == want, f"block {block} is held {have} times but stands in {want} block tables"
        unheld = {*self._free, *self._cached}
        assert len(unheld) == self.num_free, "a block is free twice"
        in_use = sum(1 for count in self._refs if count)
        assert len(unheld) + in_use == self.num_blocks, (
            f"{len(self._free)} free + {len(self._cached)} cached + {in_use} in use ≠ {self.num_blocks} blocks"
        )
        assert not any(self._refs[block] for block in unheld), "a free block is still held"
        if self._index is not None:
            unknown = [block for block in self._cached if block not in self._index]
            assert not unknown, f"blocks {unknown} are cached but can't be found"
            self._index.check_integrity(self._free)

    def _evict(self) -> None:
        block = next(iter(self._cached))
        del self._cached[block]
        self._make_free(block)

    def _make_free(self, block: int) -> None:
        if self._index is not None:
            self._index.drop(block)
        self._free.append(block)
