"""Where the nodes of each sequence's tree stand: positions, slots, ancestors. The torch reference."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class TreeRows:
    """Where the nodes of padded trees stand.

    Args:
        num_nodes: [B] int32, nodes of each tree that are left.
        contexts: [B] int32, keys before the root.
        positions: [B, n] int64, root's position + depth; 0 for padding.
        outputs: [B, n] int64, output position of the token that is chosen at each node; any for padding.
        slots: [B, n] int64, slot of key root + i; -1 for padding and for keys behind the block table.
        ancestors: [B, n] int64 bitmask over the sequence's nodes, the node itself included; 0 for padding.
    """

    num_nodes: Tensor
    contexts: Tensor
    positions: Tensor
    outputs: Tensor
    slots: Tensor
    ancestors: Tensor


def tree_rows(
    parents: Tensor,
    num_nodes: Tensor,
    max_nodes: Tensor,
    lengths: Tensor,
    prompt_lens: Tensor,
    block_table: Tensor,
    block_size: int,
) -> TreeRows:
    """Lay out one padded tree a sequence behind its context; the root is the last known token.

    Args:
        parents: [B, n] int64, n at most 64; index of the parent, before its children; -1 for node 0.
        num_nodes: [B] int32; nodes from there on are padding, whatever they hold. 0: the sequence is inactive.
        max_nodes: [B] int32, at least 1; nodes from there on are cut off. Parents stand before their children, so that
            what is left is a tree.
        lengths: [B] int64, tokens known, root included; the root's key and position is lengths - 1.
        prompt_lens: [B] int64.
        block_table: [B, M] int32, block ids of each sequence.
        block_size: slots a block.

    Raises:
        ValueError: the shapes don't fit each other.
    """
    check_tree_shapes(parents, num_nodes, max_nodes, lengths, prompt_lens, block_table)
    num_nodes = num_nodes.minimum(max_nodes)
    num_columns = parents.shape[1]
    node = torch.arange(num_columns, device=parents.device)
    inside = node < num_nodes.unsqueeze(1)
    ancestors, depth = torch.zeros_like(parents), torch.zeros_like(parents)
    ancestors[:, 0] = 1
    for i in range(1, num_columns):
        parent = parents[:, i : i + 1].clamp(0, i - 1)
        ancestors[:, i : i + 1] = ancestors.gather(1, parent) | 1 << node[i]
        depth[:, i : i + 1] = depth.gather(1, parent) + 1
    context = lengths.unsqueeze(1) - 1
    slots = slots_of(block_table, context + node, inside, block_size)
    positions = (context + depth).where(inside, 0)
    outputs = positions + 1 - prompt_lens.unsqueeze(1)
    contexts = context.squeeze(1).to(torch.int32)
    return TreeRows(num_nodes, contexts, positions, outputs, slots, ancestors.where(inside, 0))


def slots_of(block_table: Tensor, keys: Tensor, wanted: Tensor, block_size: int) -> Tensor:
    """Return the slot of each key, -1 where it isn't wanted or lies behind the block table.

    Args:
        block_table: [B, M] int32.
        keys: [B, n] int64.
        wanted: [B, n] bool.
        block_size: slots a block.
    """
    wanted = wanted & (keys < block_table.shape[1] * block_size)
    blocks = block_table.gather(1, (keys // block_size).where(wanted, 0)).long()
    return (blocks * block_size + keys % block_size).where(wanted, -1)


def check_tree_shapes(
    parents: Tensor, num_nodes: Tensor, max_nodes: Tensor, lengths: Tensor, prompt_lens: Tensor, block_table: Tensor
) -> None:
    """Refuse arguments of `tree_rows` that don't fit each other.

    Raises:
        ValueError: with the shapes.
    """
    check_shapes(parents, num_nodes, lengths, block_table)
    check_shapes(parents, max_nodes, prompt_lens, block_table)


def check_shapes(rows: Tensor, counts: Tensor, lengths: Tensor, block_table: Tensor) -> None:
    """Refuse [B, n] rows, [B] counts, [B] lengths and a [B, M] block table that don't fit each other.

    Raises:
        ValueError: with the shapes.
    """
    batch = rows.shape[:1]
    if counts.shape != batch or lengths.shape != batch or block_table.shape[:1] != batch:
        shapes = [list(t.shape) for t in (rows, counts, lengths, block_table)]
        raise ValueError(f"the sizes of {shapes[0]} rows, {shapes[1:3]} counts and {shapes[3]} blocks differ")
    if rows.shape[1] > 64:
        raise ValueError(f"a sequence has at most 64 nodes, not {rows.shape[1]}: ancestors fit one int64")
