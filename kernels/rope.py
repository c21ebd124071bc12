"""Rotary embedding of queries and keys, and the write of keys and values into their pages."""

import torch

from specdec.kernels.formats import Pages, spreads
from specdec.kernels.spread import spread
from specdec.kernels.write import kv_write


def rope_write(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    k_pages: Pages,
    v_pages: Pages,
    slot_mapping: torch.Tensor,
    num_heads: int,
) -> torch.Tensor:
    """Rotate queries and keys, spread both where the pages' format says so, and store keys and values.

    Args:
        qkv: [N, num_heads + 2 num_kv_heads, D]: queries, keys, values of each row.
        cos: [N, R], R ≤ D even; only the first R of D dimensions turn.
        sin: [N, R], its first half negated (so that rotation is x · cos + roll(x, R / 2) · sin).
        k_pages, v_pages: [num_blocks, block_size, num_kv_heads, D], native or quantized, written in place.
        slot_mapping: [N] int64, block · block_size + offset of each row. No padding here: only the GPU op takes −1.
        num_heads: number of query heads.

    Returns:
        [N, num_heads, D], the rotated queries, spread (`specdec.kernels.spread`) if the keys are.
    """
    num_kv_heads = k_pages.shape[2]
    qk, value = qkv[:, : num_heads + num_kv_heads], qkv[:, num_heads + num_kv_heads :]
    qk = _rotate(qk, cos.unsqueeze(1), sin.unsqueeze(1))
    if spreads(k_pages):
        qk = spread(qk)
    kv_write(qk[:, num_heads:], value, k_pages, v_pages, slot_mapping)
    return qk[:, :num_heads]


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    width = cos.shape[-1]
    turned = x[..., :width]
    out = turned * cos + turned.roll(width // 2, -1) * sin
    return out if width == x.shape[-1] else torch.cat([out, x[..., width:]], dim=-1)
