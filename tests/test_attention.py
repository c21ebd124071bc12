"""The attention reference against a dense one written from the definition."""

from dataclasses import replace

import pytest
import torch

from specdec.kernels import attention
from specdec.kernels.attention import AttentionMetadata, tree_attention
from specdec.kernels.rope import rope_write
from specdec.verifier.tree import TokenTree

BLOCK = 16
SHAPES = [(1, 1, 8), (4, 1, 16), (4, 2, 8), (6, 6, 64), (8, 1, 32)]  # heads, key heads, head_dim


def build(
    sequences: list[tuple[int, int, list[int]]], seed: int = 0, block: int = BLOCK, device: str = "cpu"
) -> tuple[AttentionMetadata, list[list[int]]]:
    """Metadata of sequences given as (cached keys, causal rows, parents of the tree), on scattered blocks."""
    generator = torch.Generator().manual_seed(seed)
    trees = [p for _, _, p in sequences if p]
    tree = TokenTree.build([[0] * len(p) for p in trees], trees)
    cu, contexts, totals, positions, visible, ancestors = [0], [], [], [], [], []
    first = iter(tree.cu_nodes)
    for cached, causal, parents in sequences:
        context = cached + causal
        start = next(first) if parents else 0
        nodes = slice(start, start + len(parents))
        positions += [*range(cached, context), *(context + tree.depth[nodes]).tolist()]
        visible += [*range(cached + 1, context + 1), *[context] * len(parents)]
        ancestors += [0] * causal + tree.ancestors[nodes].tolist()
        cu.append(cu[-1] + causal + len(parents))
        contexts.append(context)
        totals.append(context + len(parents))
    width = -(-max(totals) // block)
    blocks = torch.randperm(width * len(sequences), generator=generator).view(len(sequences), width)
    meta = AttentionMetadata(
        tuple(cu),
        tuple(contexts),
        tuple(totals),
        blocks.to(device),
        torch.tensor(positions, device=device),
        torch.tensor(visible, device=device),
        torch.tensor(ancestors, device=device),
        block,
    )
    keys = [[int(blocks[b, k // block]) * block + k % block for k in range(n)] for b, n in enumerate(totals)]
    return meta, keys


def sees(cached: int, causal: int, parents: list[int], row: int, key: int) -> bool:
    """The definition: a causal row sees the keys up to itself, a node its context and its ancestors."""
    if row < causal:
        return key <= cached + row
    node = row - causal
    while node >= 0:
        if key == cached + causal + node:
            return True
        node = parents[node]
    return key < cached + causal


def position(cached: int, causal: int, parents: list[int], key: int) -> int:
    depth, node = 0, key - cached - causal
    while node > 0:
        depth, node = depth + 1, parents[node]
    return min(key, cached + causal) + depth


def dense(q, k, v, cached, causal, parents, scale, window, softcap):  # type: ignore[no-untyped-def]
    out = torch.empty_like(q)
    group = q.shape[1] // k.shape[1]
    for row in range(q.shape[0]):
        own = position(cached, causal, parents, cached + row)
        keys = [
            key
            for key in range(k.shape[0])
            if sees(cached, causal, parents, row, key)
            and (window is None or own - position(cached, causal, parents, key) < window)
        ]
        for head in range(q.shape[1]):
            scores = k[keys, head // group] @ q[row, head] * scale
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            out[row, head] = scores.softmax(0) @ v[keys, head // group]
    return out


CHAIN, WIDE, BUSHY = [-1, 0, 1, 2], [-1, 0, 0, 0, 0], [-1, 0, 0, 1, 1, 2, 3, 0, 7]
BATCHES = {
    "one token": [(0, 0, [-1])],
    "plain": [(31, 0, [-1])],
    "prefill": [(0, 17, [])],
    "prompt and tree": [(0, 15, BUSHY)],
    "chunk": [(16, 33, [])],
    "two trees": [(40, 0, CHAIN), (5, 0, WIDE)],
    "all kinds": [(33, 0, BUSHY), (16, 7, []), (0, 3, CHAIN), (64, 0, [-1])],
    "64 nodes": [(20, 0, list(range(-1, 63)))],
}


@pytest.mark.parametrize("heads, kv_heads, dim", SHAPES)
@pytest.mark.parametrize("window, softcap", [(None, None), (5, None), (None, 2.0), (3, 5.0)])
@pytest.mark.parametrize("name", BATCHES)
def test_matches_the_definition(name, heads, kv_heads, dim, window, softcap) -> None:  # type: ignore[no-untyped-def]
    check(name, heads, kv_heads, dim, window, softcap)


@pytest.mark.parametrize("window, softcap", [(None, None), (5, None), (None, 2.0), (3, 5.0)])
@pytest.mark.parametrize("name", BATCHES)
def test_rows_may_attend_in_parts(name, window, softcap, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(attention, "PART_ROWS", 4)
    check(name, 4, 2, 8, window, softcap)


def check(name, heads, kv_heads, dim, window, softcap) -> None:  # type: ignore[no-untyped-def]
    meta, keys = build(BATCHES[name])
    torch.manual_seed(1)
    num_blocks = int(meta.block_table.max()) + 1
    k_pages, v_pages = (torch.full((num_blocks, BLOCK, kv_heads, dim), torch.nan, dtype=torch.float64) for _ in "kv")
    for slots in keys:  # only the slots in use hold numbers: a NaN in the result is a leak
        for pages in (k_pages, v_pages):
            pages.view(-1, kv_heads, dim)[slots] = torch.randn(len(slots), kv_heads, dim, dtype=torch.float64)
    q = torch.randn(meta.cu_seqlens_q[-1], heads, dim, dtype=torch.float64)
    out = tree_attention(q, k_pages, v_pages, meta, scale=0.3, window=window, softcap=softcap)
    for b, (cached, causal, parents) in enumerate(BATCHES[name]):
        rows = slice(meta.cu_seqlens_q[b], meta.cu_seqlens_q[b + 1])
        k, v = (pages.view(-1, kv_heads, dim)[keys[b]] for pages in (k_pages, v_pages))
        want = dense(q[rows], k, v, cached, causal, parents, 0.3, window, softcap)
        torch.testing.assert_close(out[rows], want, atol=1e-12, rtol=1e-10)


@pytest.mark.parametrize("window", [None, 20])
def test_a_part_of_a_chunk_reads_no_key_that_none_of_its_rows_sees(window: int | None) -> None:
    meta, _ = build([(3, 0, [-1]), (60, 300, [])])
    parts = meta.parts(1, window, 2)
    assert [(rows.start, rows.stop) for rows, _, _ in parts] == [(1, 129), (129, 257), (257, 301)]
    for rows, keys, mask in parts:
        assert mask is not None and mask.shape == (2 * (rows.stop - rows.start), keys.stop - keys.start)
        assert bool(mask[:, 0].any()) and bool(mask[:, -1].any())
        first = 60 + rows.start - 1  # the first row's own key
        assert keys == slice(0 if window is None else first - 19, 60 + rows.stop - 1)


def test_consecutive_blocks_are_read_without_a_copy() -> None:
    meta, _ = build([(40, 0, [-1])])
    straight = AttentionMetadata(
        meta.cu_seqlens_q,
        meta.context_lens,
        meta.seq_lens,
        torch.tensor([[2, 3, 4]]),
        meta.positions,
        meta.visible,
        meta.ancestors,
        BLOCK,
    )
    assert straight.slots == [slice(32, 32 + 41)]


def test_metadata_of_another_block_table_forgets_how_the_first_was_divided() -> None:
    meta, _ = build([(5, 0, [-1, 0])])
    assert torch.equal(meta.work(1, 64).block_table, meta.block_table)
    meta.parts(0, None, 1)
    other = replace(meta, block_table=meta.block_table + 3, ancestors=torch.tensor([1, 2]))
    assert torch.equal(other.work(1, 64).block_table, meta.block_table + 3)
    [(_, _, mask)] = other.parts(0, None, 1)
    assert mask is not None and not bool(mask[1, 5])


@pytest.mark.parametrize("width", [4, 8])
def test_rope_write_rotates_and_stores(width: int) -> None:
    torch.manual_seed(0)
    heads, kv_heads, dim = 3, 1, 8
    qkv = torch.randn(2, heads + 2 * kv_heads, dim, dtype=torch.float64)
    angle = torch.rand(2, width // 2, dtype=torch.float64)
    cos, sin = angle.cos().repeat(1, 2), torch.cat([-angle.sin(), angle.sin()], -1)
    k_pages, v_pages = torch.zeros(2, 4, kv_heads, dim, dtype=torch.float64), torch.zeros(2, 4, kv_heads, dim).double()
    q = rope_write(qkv, cos, sin, k_pages, v_pages, torch.tensor([6, 1]), heads)
    want = qkv.clone()
    low, high = qkv[..., : width // 2], qkv[..., width // 2 : width]
    c, s = angle.cos()[:, None], angle.sin()[:, None]
    want[..., : width // 2], want[..., width // 2 : width] = low * c - high * s, high * c + low * s
    torch.testing.assert_close(q, want[:, :heads])
    torch.testing.assert_close(k_pages[1, 2], want[0, heads : heads + kv_heads])
    torch.testing.assert_close(v_pages[0, 1], qkv[1, heads + kv_heads :])
    assert k_pages.count_nonzero() == v_pages.count_nonzero() == 2 * kv_heads * dim
