"""The write of keys and values into their pages, on a GPU."""

import torch
import triton
import triton.language as tl

from specdec.kernels.formats import Pages
from specdec.kernels.gpu.pages import pointers, store_values

_HEADS = 4


@triton.jit(do_not_specialize_on_alignment=["slots_ptr"])  # a batch's columns are parts of one tensor
def _kv_write_kernel(
    k_ptr, v_ptr, k_pages, v_pages, slots_ptr, k_row, k_head, v_row, v_head,
    KV: tl.constexpr, D: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    col = tl.arange(0, BLOCK)[None, :]
    ok = (head < KV) & (slot >= 0)
    mask = ok[:, None] & (col < D)
    k = tl.load(k_ptr + row * k_row + head[:, None] * k_head + col, mask=mask)
    v = tl.load(v_ptr + row * v_row + head[:, None] * v_head + col, mask=mask)
    store_values(k_pages, slot * KV + head, ok, k, D, BLOCK)
    store_values(v_pages, slot * KV + head, ok, v, D, BLOCK)


def kv_write(k: torch.Tensor, v: torch.Tensor, k_pages: Pages, v_pages: Pages, slot_mapping: torch.Tensor) -> None:
    """Store the rows' keys and values in their slots.

    Args:
        k, v: [N, num_kv_heads, D]; may be slices of a larger tensor, but the last dimension is dense.
        k_pages, v_pages: [num_blocks, block_size, num_kv_heads, D], contiguous, native or quantized, written in place.
        slot_mapping: [N] int64, block · block_size + offset of each row. Beyond the torch reference, −1 marks a
            padded row, which writes nothing.

    Raises:
        ValueError: shapes disagree, or a tensor is not dense where it must be.
    """
    n, heads, dim = k.shape
    if k.shape != v.shape or k_pages.shape != v_pages.shape or k_pages.shape[2:] != k.shape[1:]:
        raise ValueError(f"keys {list(k.shape)} and values {list(v.shape)} do not fit pages of {list(k_pages.shape)}")
    if k.stride(-1) != 1 or v.stride(-1) != 1 or not (k_pages.is_contiguous() and v_pages.is_contiguous()):
        raise ValueError("the last dimension of keys and values and the whole of the pages must be dense")
    _kv_write_kernel[(n, triton.cdiv(heads, _HEADS))](
        k, v, pointers(k_pages), pointers(v_pages), slot_mapping.contiguous(),
        k.stride(0), k.stride(1), v.stride(0), v.stride(1),
        KV=heads, D=dim, HEADS=_HEADS, BLOCK=triton.next_power_of_2(dim),
    )  # fmt: skip
