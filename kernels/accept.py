"""Walks each sequence's tree along the target's choices. The torch reference."""

import torch
from torch import Tensor

Accepted = tuple[Tensor, Tensor]


def accept(tokens: Tensor, parents: Tensor, num_nodes: Tensor, choices: Tensor, out: Tensor) -> Accepted:
    """Go from each root to the first child that holds the target's choice, until no child does.

    Args:
        tokens: [B, n] int64, token of each node.
        parents: [B, n] int64, index of the parent, before its children; -1 for node 0.
        num_nodes: [B] int32; nodes from there on are padding, whatever they hold. 0: the sequence is inactive.
        choices: [B, n] int64, the target's choice at each node. -1: none; it is emitted and ends the walk.
        out: [B, n + 3] int64, what the host reads; written in place: the choice at each visited node, padded with -1;
            whether the last one has no children; how many they are; how many nodes the tree has.

    Returns:
        path: [B, n] int64, visited nodes, root first; padded with -1.
        num_accepted: [B] int32, how many there are; 0 for inactive sequences.

    Raises:
        ValueError: the shapes differ.
    """
    check_shapes(tokens, parents, num_nodes, choices, out)
    num_columns = tokens.shape[1]
    node = torch.arange(num_columns, device=tokens.device)
    inside = node < num_nodes.unsqueeze(1)
    path, emitted = torch.full_like(tokens, -1), torch.full_like(tokens, -1)
    current, walking = torch.zeros_like(tokens[:, :1]), num_nodes.unsqueeze(1) > 0  # [B, 1]
    for depth in range(num_columns):
        choice = choices.gather(1, current)
        path[:, depth : depth + 1] = current.where(walking, -1)
        emitted[:, depth : depth + 1] = choice.where(walking, -1)
        holds = inside & (node > current) & (parents == current) & (tokens == choice) & (choice >= 0)
        found, first = holds.max(1, keepdim=True)
        current, walking = first, walking & found
    num_accepted = (path >= 0).sum(1, dtype=torch.int32)
    leaf = ~(inside & (parents == path.amax(1, keepdim=True))).any(1)  # nodes stand behind their parents
    out.copy_(torch.cat([emitted, torch.stack([leaf, num_accepted, num_nodes], 1)], 1))
    return path, num_accepted


def check_shapes(tokens: Tensor, parents: Tensor, num_nodes: Tensor, choices: Tensor, out: Tensor) -> None:
    """Refuse arguments of `accept` whose shapes don't fit each other.

    Raises:
        ValueError: with the shapes.
    """
    if not tokens.shape == parents.shape == choices.shape or num_nodes.shape != tokens.shape[:1]:
        shapes = [list(t.shape) for t in (tokens, parents, choices, num_nodes)]
        raise ValueError(f"tokens, parents and choices must be [B, n] and num_nodes [B], not {shapes}")
    if out.shape != (len(tokens), tokens.shape[1] + 3) or not out.is_contiguous():
        raise ValueError(f"out must be [B, n + 3] = {[len(tokens), tokens.shape[1] + 3]}, contiguous, not {out.shape}")
