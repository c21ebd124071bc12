"""Moves accepted keys and values to where a plain decoder would have written them."""

import torch


def kv_commit(storage: torch.Tensor, src: torch.Tensor, dst: torch.Tensor) -> None:
    """Copy slots verbatim in every layer; source and destination ranges may overlap.

    Args:
        storage: [layers, 2, num_slots, num_kv_heads, D], written in place.
        src: [M] int64, slots to read. All are read before any is written.
        dst: [M] int64, distinct slots to write.
    """
    storage.index_copy_(2, dst, storage.index_select(2, src))
