"""How the attention kernels divide a packed batch: which rows go together, and where their keys are.

All of it is tensors on the device, so that a captured graph reads the lengths of the step that it replays.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, chain, pairwise

import torch

MIN_BLOCK = 16
"""Fewest rows of a matrix instruction."""
MAX_TREE_BLOCK = 64
"""More nodes in a tile would read a context fewer times, but leave multiprocessors idle: tiles of 128 rows were slower
in short contexts, and in long ones as fast or faster, by the number of nodes. Tiles of one sequence can share what they
read (`pairs`)."""


@dataclass(frozen=True, slots=True)
class AttentionWork:
    """Rows of a packed batch, as the kernels take them. N rows of B sequences; a tile's rows follow each other.

    Args:
        block_table: [B, M] int32, block ids of each sequence.
        context_lens: [B] int32, keys before the first tree node.
        positions: [N] int64, of each row.
        ancestors: [N] int64 bitmask of each row; 0 for causal rows and padding.
        tree_rows: [T] int32, rows that are tree nodes.
        tree_sequences: [T] int32, the sequence of each of them.
        tree_tiles: [tiles, 4] int32: sequence, first row, number of rows, and the first's index in `tree_rows`, of
            nodes that share a tile of queries.
        tree_block: rows × grouped heads that such a tile holds.
        chunk_tiles: [tiles, 3] int32, the same of causal rows.
        chunk_block: rows × grouped heads that such a tile holds.
        max_context: no context is longer.
        nodes_per_sequence: n where row i is node i % n of sequence i // n, and there are no other rows; else 0.
        chains: whether all trees are chains; `nodes_per_sequence` is set then.
        pairs: whether each two of `tree_tiles`, one behind the other, are of one sequence.
        early: whether all of this, and the keys and values of contexts, may be read while kernels that were launched
            before attention still run: nothing in its forward writes them.
        paths: of tree nodes, once they are found (`gpu/paths.py`): by keys a tile and slots a block, [T, …] int32.
            They hold while the tensors here do; `anew` has none yet.
    """

    block_table: torch.Tensor
    context_lens: torch.Tensor
    positions: torch.Tensor
    ancestors: torch.Tensor
    tree_rows: torch.Tensor
    tree_sequences: torch.Tensor
    tree_tiles: torch.Tensor
    tree_block: int
    chunk_tiles: torch.Tensor
    chunk_block: int
    max_context: int
    nodes_per_sequence: int = 0
    chains: bool = False
    pairs: bool = False
    early: bool = False
    paths: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict, init=False, repr=False, compare=False)

    def anew(self) -> "AttentionWork":
        """The same for another forward, before which its tensors may have been filled with another batch."""
        return replace(self)

    def work(self, group: int, max_block: int) -> "AttentionWork":
        """Itself: made for the kernel that asks."""
        assert group <= self.tree_block <= max_block, "made for another attention"
        return self


def make_work(
    cu_seqlens_q: Sequence[int],
    num_causal: Sequence[int],
    context_lens: Sequence[int],
    block_table: torch.Tensor,
    positions: torch.Tensor,
    ancestors: torch.Tensor,
    group: int,
    max_block: int,
) -> AttentionWork:
    """Divide a batch of B sequences whose lengths the host knows.

    Nodes that are alone in their sequences, as in plain decoding, are chains: their kernels are the faster ones.

    Args:
        cu_seqlens_q: B + 1 offsets of each sequence's rows.
        num_causal: how many of each sequence's rows stand before its nodes.
        context_lens: keys before the first node of each.
        block_table: [B, M] int64.
        positions, ancestors: [N] int64.
        group: query heads that share a key head.
        max_block: most rows × grouped heads in a tile of causal rows, a power of 2.
    """
    num_nodes = [end - row - n for (row, end), n in zip(pairwise(cu_seqlens_q), num_causal, strict=True)]
    chunk_block = tile_block(max(num_causal, default=1), group, max_block)
    tree_block = tree_tile_block(max(num_nodes, default=1), group)
    parts = divide(cu_seqlens_q, num_causal, chunk_block // group, tree_block // group)
    ends = list(accumulate(map(len, (context_lens, *parts)), initial=0))
    flat = torch.tensor([*context_lens, *chain(*parts)], dtype=torch.int32, device=positions.device)
    blocks = chunk_block, tree_block
    work = assemble(flat, ends, block_table.to(torch.int32), positions, ancestors, blocks, max(context_lens))
    work = replace(work, pairs=_in_pairs(num_nodes, tree_block // group))
    if set(num_nodes) == {1} and not any(num_causal):
        return replace(work, nodes_per_sequence=1, chains=True)
    return work


def assemble(
    flat: torch.Tensor,
    ends: Sequence[int],
    block_table: torch.Tensor,
    positions: torch.Tensor,
    ancestors: torch.Tensor,
    blocks: tuple[int, int],
    max_context: int,
) -> AttentionWork:
    """Return the work whose parts stand behind each other in one tensor; all of it are views.

    Args:
        flat: int32: the contexts' lengths, and then what `divide` returns.
        ends: offsets of these five parts, and of their end.
        block_table, positions, ancestors, max_context: as in `AttentionWork`.
        blocks: its chunk_block and tree_block.
    """
    contexts, rows, sequences, tree_tiles, chunk_tiles = (flat[a:b] for a, b in pairwise(ends))
    return AttentionWork(
        block_table=block_table,
        context_lens=contexts,
        positions=positions,
        ancestors=ancestors,
        tree_rows=rows,
        tree_sequences=sequences,
        tree_tiles=tree_tiles.view(-1, 4),
        tree_block=blocks[1],
        chunk_tiles=chunk_tiles.view(-1, 3),
        chunk_block=blocks[0],
        max_context=max_context,
    )


def divide(
    cu_seqlens_q: Sequence[int], num_causal: Sequence[int], chunk_rows: int, tree_rows: int
) -> tuple[list[int], list[int], list[int], list[int]]:
    """Cut a batch into tiles of at most so many rows.

    Args:
        cu_seqlens_q, num_causal: as for `make_work`.
        chunk_rows, tree_rows: most rows of a tile of causal rows, and of nodes.

    Returns:
        `AttentionWork`'s tree_rows, tree_sequences, tree_tiles and chunk_tiles, flat.
    """
    starts = [
        (b, row, row + n, end) for b, ((row, end), n) in enumerate(zip(pairwise(cu_seqlens_q), num_causal, strict=True))
    ]
    trees = [(b, node, end - node) for b, _, node, end in starts if end > node]
    rows = [row for _, first, n in trees for row in range(first, first + n)]
    sequences = [b for b, _, n in trees for _ in range(n)]
    chunk_tiles = _tiles([(b, row, node - row) for b, row, node, _ in starts], chunk_rows)
    chunk_tiles.reverse()  # the longest rows first
    return rows, sequences, list(chain(*_tree_tiles(trees, tree_rows))), list(chain(*chunk_tiles))


def uniform_work(
    num_seqs: int,
    num_nodes: int,
    block_table: torch.Tensor,
    context_lens: torch.Tensor,
    positions: torch.Tensor,
    ancestors: torch.Tensor,
    group: int,
    max_context: int,
    chains: bool,
) -> AttentionWork:
    """Divide a batch of B sequences of n nodes each, whose lengths only the device knows.

    What is given here, and the keys and values of contexts, may be read while the kernel that was launched before
    attention still runs. That one writes none of these: in a model it writes queries and the nodes' own keys.

    Args:
        num_seqs, num_nodes: B and n.
        block_table: [B, M] int32.
        context_lens: [B] int32.
        positions, ancestors: [B n] int64; ancestors of padding are 0.
        group: query heads a key head.
        max_context: no context is longer.
        chains: whether each tree is a chain.
    """
    block = tree_tile_block(num_nodes, group)
    tiles = _tree_tiles([(b, b * num_nodes, num_nodes) for b in range(num_seqs)], block // group)
    device = positions.device
    rows = torch.arange(num_seqs * num_nodes, dtype=torch.int32, device=device)
    tree_tiles = torch.tensor(tiles, dtype=torch.int32, device=device)
    return AttentionWork(
        block_table=block_table,
        context_lens=context_lens,
        positions=positions,
        ancestors=ancestors,
        tree_rows=rows,
        tree_sequences=rows // num_nodes,
        tree_tiles=tree_tiles,
        tree_block=block,
        chunk_tiles=tree_tiles[:0, :3],
        chunk_block=block,
        max_context=max_context,
        nodes_per_sequence=num_nodes,
        chains=chains,
        pairs=_in_pairs([num_nodes], block // group),
        early=True,
    )


def max_block(head_dim: int) -> int:
    """Most rows × grouped heads of a tile of causal rows: what the registers of a multiprocessor hold."""
    return 128 if head_dim <= 128 else 64


def tree_tile_block(num_nodes: int, group: int) -> int:
    """Rows × grouped heads of a tile of nodes, at most `MAX_TREE_BLOCK` unless one row's are more."""
    return tile_block(num_nodes, group, MAX_TREE_BLOCK)


def tile_block(num_rows: int, group: int, max_block: int) -> int:
    """Rows × grouped heads of a tile that is to hold `num_rows` rows, or as many as fit."""
    needed = max(MIN_BLOCK, group, min(num_rows * group, max_block))
    return 1 << (needed - 1).bit_length()


def _in_pairs(num_nodes: Sequence[int], rows: int) -> bool:
    """Return whether the nodes of each sequence, in tiles of as many rows, are an even number of tiles."""
    return any(num_nodes) and all(-(-n // rows) % 2 == 0 for n in num_nodes)


def _tiles(parts: Sequence[tuple[int, int, int]], rows: int) -> list[tuple[int, int, int]]:
    """Cut the rows of each sequence into tiles."""
    return [(b, first + i, min(rows, n - i)) for b, first, n in parts for i in range(0, n, rows)]


def _tree_tiles(parts: Sequence[tuple[int, int, int]], rows: int) -> list[tuple[int, int, int, int]]:
    """The same of nodes, with the index of each tile's first among all nodes."""
    tiles = _tiles(parts, rows)
    firsts = accumulate((n for *_, n in tiles), initial=0)
    return [(*tile, first) for tile, first in zip(tiles, firsts, strict=False)]
