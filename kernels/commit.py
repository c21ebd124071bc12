"""Moves accepted keys and values to where a plain decoder would have written them."""

import torch


def kv_commit(storage: torch.Tensor, src: torch.Tensor, dst: torch.Tensor) -> None:
    """Copy slots verbatim in every layer; source and destination ranges may overlap.

    Args:
        storage: [layers, 2, num_slots, num_kv_heads, D], written in place.
        src: [M] or [B, n] int64, slots to read. All are read before any is written. -1 here or in dst moves nothing.
        dst: src's shape, distinct slots to write.
    """
    moving = (src >= 0) & (dst >= 0)
    storage.index_copy_(2, dst[moving], storage.index_select(2, src[moving]))
