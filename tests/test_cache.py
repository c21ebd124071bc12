"""Blocks are never lost, and commit moves bytes verbatim."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specdec.cache.blocks import BlockPool
from specdec.cache.pages import KVLayout, KVPages
from specdec.errors import OutOfBlocks


def test_allocates_low_ids_in_order_and_takes_them_back() -> None:
    pool = BlockPool(5)
    first, second = pool.allocate(2), pool.allocate(2)
    assert (first, second, pool.num_free) == ([0, 1], [2, 3], 1)
    pool.release(first)
    assert pool.allocate(3) == [0, 1, 4]


def test_too_few_blocks_take_nothing() -> None:
    pool = BlockPool(3)
    pool.allocate(2)
    with pytest.raises(OutOfBlocks, match="2 KV cache blocks are needed and 1 of 3"):
        pool.allocate(2)
    assert pool.num_free == 1


def test_a_block_released_twice_is_caught() -> None:
    pool = BlockPool(2)
    blocks = pool.allocate(1)
    pool.release(blocks)
    with pytest.raises(AssertionError, match="released twice"):
        pool.release(blocks)


def test_integrity_names_a_lost_block() -> None:
    pool = BlockPool(4)
    table = pool.allocate(2)
    pool.check_integrity([table])
    with pytest.raises(AssertionError, match="block 1 is held 1 times but stands in 0"):
        pool.check_integrity([table[:1]])


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 6)), max_size=60))
def test_any_sequence_of_allocations_keeps_every_block(ops: list[tuple[bool, int]]) -> None:
    pool, tables = BlockPool(12), []
    for take, n in ops:
        if take and n <= pool.num_free:
            tables.append(pool.allocate(n))
        elif not take and tables:
            pool.release(tables.pop(n % len(tables)))
        pool.check_integrity(tables)
        assert pool.num_free == 12 - sum(map(len, tables))


@given(st.permutations(range(24)), st.integers(1, 24))
def test_commit_reads_every_source_before_it_writes(order: list[int], count: int) -> None:
    pages = KVPages(KVLayout(2, 1, 4, torch.float32), num_blocks=3, block_size=8, device=torch.device("cpu"))
    for layer in (*pages.k, *pages.v):
        layer.copy_(torch.randn(3, 8, 1, 4))
    before = [layer.clone().view(24, 4) for layer in (*pages.k, *pages.v)]
    src, dst = order[:count], sorted(order)[:count]
    pages.commit(src, dst)
    for old, layer in zip(before, (*pages.k, *pages.v), strict=True):
        want = old.clone()
        want[dst] = old[src]
        assert torch.equal(layer.view(24, 4), want)


def test_bytes_per_token() -> None:
    assert KVLayout(30, 3, 64, torch.float32).bytes_per_token == 30 * 2 * 3 * 64 * 4
