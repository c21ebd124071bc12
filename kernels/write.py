"""The write of keys and values into their pages."""

import torch


def kv_write(
    k: torch.Tensor, v: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    """Store the rows' keys and values in their slots.

    Args:
        k, v: [N, num_kv_heads, D].
        k_pages, v_pages: [num_blocks, block_size, num_kv_heads, D], written in place.
        slot_mapping: [N] int64, block · block_size + offset of each row. No padding here: only the GPU op takes −1.
    """
    k_pages.view(-1, *k_pages.shape[2:]).index_copy_(0, slot_mapping, k.to(k_pages.dtype))
    v_pages.view(-1, *v_pages.shape[2:]).index_copy_(0, slot_mapping, v.to(v_pages.dtype))
