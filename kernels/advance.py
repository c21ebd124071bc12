"""Appends the emitted tokens to each sequence's history. The torch reference."""

import torch
from torch import Tensor


def advance(history: Tensor, lengths: Tensor, emitted: Tensor, num_accepted: Tensor) -> None:
    """Write each sequence's emitted tokens behind its last one and count them, both in place.

    A history that is full keeps what it holds: the tokens that don't fit are dropped, and `lengths` stops at L. A -1
    (no choice) is stored as 0: the host raises it one step later, and until then the root must be a token id.

    Args:
        history: [B, L] int32, tokens of each sequence; written in place.
        lengths: [B] int64, tokens known, at most L; changed in place.
        emitted: [B, n] int64, tokens to append; only the first `num_accepted` of a row are read.
        num_accepted: [B] int32; sequences with 0 stay untouched.

    Raises:
        ValueError: the shapes don't fit each other, or a tensor changed in place isn't contiguous.
    """
    check_shapes(history, lengths, emitted, num_accepted)
    index = torch.arange(history.shape[1], device=history.device) - lengths.unsqueeze(1)  # [B, L], in `emitted`
    fresh = (index >= 0) & (index < num_accepted.unsqueeze(1))
    tokens = emitted.clamp(min=0).gather(1, index.where(fresh, 0)).to(history.dtype)
    history.copy_(tokens.where(fresh, history))
    lengths.add_(num_accepted).clamp_(max=history.shape[1])


def check_shapes(history: Tensor, lengths: Tensor, emitted: Tensor, num_accepted: Tensor) -> None:
    """Refuse arguments of `advance` that don't fit each other or can't be changed in place.

    Raises:
        ValueError: with the shapes.
    """
    batch = history.shape[:1]
    if lengths.shape != batch or emitted.shape[:1] != batch or num_accepted.shape != batch:
        shapes = [list(t.shape) for t in (history, lengths, emitted, num_accepted)]
        raise ValueError(f"the sizes of history, lengths, emitted and num_accepted differ: {shapes}")
    if not history.is_contiguous() or not lengths.is_contiguous():
        raise ValueError("history and lengths are changed in place and must be contiguous")
