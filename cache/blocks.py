"""Who holds which block of the KV cache. Blocks are numbers here; their contents are in `pages`."""

from collections.abc import Iterable, Sequence

from specdec.errors import OutOfBlocks


class BlockPool:
    """A fixed number of blocks with reference counts.

    Args:
        num_blocks: blocks in the pool; ids run from 0.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))  # a stack: low ids first, so that runs stay consecutive
        self._refs = [0] * num_blocks

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds."""
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Take `count` blocks, each held once.

        Raises:
            OutOfBlocks: fewer are free; nothing was taken.
        """
        if count > len(self._free):
            raise OutOfBlocks(f"{count} KV cache blocks are needed and {len(self._free)} of {self.num_blocks} are free")
        blocks = [self._free.pop() for _ in range(count)]
        for block in blocks:
            self._refs[block] = 1
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """Hold blocks once more that somebody holds already."""
        for block in blocks:
            assert self._refs[block] > 0, f"block {block} is free and can't be shared"
            self._refs[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Let go of blocks once; those that nobody holds any more become free."""
        for block in reversed(blocks):
            assert self._refs[block] > 0, f"block {block} was released twice"
            self._refs[block] -= 1
            if self._refs[block] == 0:
                self._free.append(block)

    def check_integrity(self, block_tables: Iterable[Sequence[int]]) -> None:
        """Check that free + in use = total and that reference counts match the block tables.

        Raises:
            AssertionError: a block is lost, free twice, or its count is wrong; the message names it.
        """
        expected = [0] * self.num_blocks
        for table in block_tables:
            for block in table:
                expected[block] += 1
        for block, (have, want) in enumerate(zip(self._refs, expected, strict=True)):
            assert have == want, f"block {block} is held {have} times but stands in {want} block tables"
        free = set(self._free)
        assert len(free) == len(self._free), "a block is free twice"
        in_use = sum(1 for count in self._refs if count)
        assert len(free) + in_use == self.num_blocks, f"{len(free)} free + {in_use} in use ≠ {self.num_blocks} blocks"
        assert not any(self._refs[block] for block in free), "a free block is still held"
