"""The write of keys and values into their pages."""

import torch

from specdec.kernels.formats import Pages, store


def kv_write(k: torch.Tensor, v: torch.Tensor, k_pages: Pages, v_pages: Pages, slot_mapping: torch.Tensor) -> None:
    """Store the rows' keys and values in their slots.

    Args:
        k, v: [N, num_kv_heads, D].
        k_pages, v_pages: [num_blocks, block_size, num_kv_heads, D], native or quantized, written in place.
        slot_mapping: [N] int64, block · block_size + offset of each row. No padding here: only the GPU op takes −1.
    """
    store(k_pages, slot_mapping, k)
    store(v_pages, slot_mapping, v)
