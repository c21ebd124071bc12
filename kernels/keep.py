"""Keeps the hidden state of each sequence's last accepted node. The torch reference."""

import torch
from torch import Tensor


def keep(hidden: Tensor, path: Tensor, num_accepted: Tensor, kept: Tensor, known: Tensor) -> None:
    """Keep hidden states for the next step's drafts, in place.

    Args:
        hidden: [B, n, H] of a step's nodes.
        path: [B, n] int64, accepted nodes, padded with -1.
        num_accepted: [B] int32, nodes on each path; sequences with 0 stay untouched.
        kept: [B, H], changed in place.
        known: [B] bool, changed in place: whether a row of `kept` holds anything.

    Raises:
        ValueError: the shapes don't fit each other, or a tensor changed in place isn't contiguous.
    """
    check_shapes(hidden, path, num_accepted, kept, known)
    active = num_accepted > 0
    last = path.gather(1, (num_accepted.long() - 1).clamp(min=0).unsqueeze(1)).clamp(min=0)  # [B, 1]
    rows = hidden[torch.arange(len(path), device=path.device), last.squeeze(1)]
    kept.copy_(rows.where(active.unsqueeze(1), kept))
    known.logical_or_(active)


def check_shapes(hidden: Tensor, path: Tensor, num_accepted: Tensor, kept: Tensor, known: Tensor) -> None:
    """Refuse arguments of `keep` that don't fit each other or can't be changed in place.

    Raises:
        ValueError: with the shapes.
    """
    batch, size = path.shape[:1], hidden.shape[2]
    fits = hidden.shape[:2] == path.shape and kept.shape == (*batch, size)
    if not fits or num_accepted.shape != batch or known.shape != batch:
        shapes = [list(t.shape) for t in (hidden, path, num_accepted, kept, known)]
        raise ValueError(f"hidden, path, num_accepted, kept and known don't fit each other: {shapes}")
    if not kept.is_contiguous() or not known.is_contiguous():
        raise ValueError("kept and known are changed in place and must be contiguous")
