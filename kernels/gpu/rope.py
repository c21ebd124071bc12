"""Rotary embedding of queries and keys and the write of keys and values into their pages, in one launch on a GPU."""

import torch
import triton
import triton.language as tl

from specdec.kernels.formats import Pages, spreads
from specdec.kernels.gpu.launch import let_next_begin, overlap, wait_for_inputs
from specdec.kernels.gpu.pages import pointers, store_values
from specdec.kernels.gpu.spread import spread_values
from specdec.kernels.spread import spread_size

NATIVE = (16, 8)
"""Heads and warps of a program that stores them as they are."""
FEW, QUANTIZED = 1024, ((1, 1), (4, 1))
"""Heads and warps of one that stores codes, for up to so many rows × heads and for more. It is one warp: the many sums
of two, and the largest of a group, need no barrier then. Few rows are spread over the device's cores; of many rows, to
start more programs takes longer than what they do (`benchmarks/results/rope_h200.json`)."""


@triton.jit(do_not_specialize_on_alignment=["slots_ptr"])  # a batch's columns are parts of one tensor
def _rope_write_kernel(
    qkv_ptr, cos_ptr, sin_ptr, q_ptr, k_pages, v_pages, slots_ptr, qkv_row, qkv_head, cos_row, sin_row,
    Q: tl.constexpr, KV: tl.constexpr, D: tl.constexpr, R: tl.constexpr, SPREAD: tl.constexpr,
    WIDE: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    let_next_begin(PDL)
    wait_for_inputs(PDL, False)
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    col = tl.arange(0, BLOCK)[None, :]
    inside = (head < Q + 2 * KV) & (col < D)
    turns = inside & (head < Q + KV) & (col < R)
    source = qkv_ptr + row * qkv_row + head * qkv_head
    partner = tl.where(col < R // 2, col + R // 2, col - R // 2)
    x = tl.load(source + col, mask=inside, other=0)  # [HEADS, BLOCK]
    rolled = tl.load(source + partner, mask=turns, other=0).to(WIDE)
    cos = tl.load(cos_ptr + row * cos_row + col, mask=col < R, other=0).to(WIDE)
    sin = tl.load(sin_ptr + row * sin_row + col, mask=col < R, other=0).to(WIDE)
    turned = tl.fma(x.to(WIDE), cos, rolled * sin)  # which product isn't rounded is not the compiler's choice
    out = tl.where(turns, turned.to(x.dtype), x)
    first = tl.program_id(1) * HEADS
    if SPREAD:
        if first < Q + KV:
            even = spread_values(tl.where(turns, turned, x.to(WIDE)), SPREAD)
            out = tl.where(head < Q + KV, even.to(x.dtype), x)
    tl.store(q_ptr + (row * Q + head) * D + col, out, mask=inside & (head < Q))
    heads = first + tl.arange(0, HEADS)
    key, value = heads - Q, heads - (Q + KV)
    if (first + HEADS > Q) & (first < Q + KV):  # few programs have keys, and as few values: only these make codes
        store_values(k_pages, slot * KV + key, (slot >= 0) & (key >= 0) & (key < KV), out, D, BLOCK)
    if first + HEADS > Q + KV:
        store_values(v_pages, slot * KV + value, (slot >= 0) & (value >= 0) & (value < KV), out, D, BLOCK)


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

    A rotated value is computed in fp32 (fp64 for fp64) and rounded once, where the torch reference rounds both
    products and their sum: it is the nearer of the two to the exact value.

    Args:
        qkv: [N, num_heads + 2 num_kv_heads, D]: queries, keys, values of each row; the last dimension is dense.
        cos: [N, R], R ≤ D even; only the first R of D dimensions turn.
        sin: [N, R], its first half negated (so that rotation is x · cos + roll(x, R / 2) · sin).
        k_pages, v_pages: [num_blocks, block_size, num_kv_heads, D], contiguous, native or quantized, written in place.
        slot_mapping: [N] int64, block · block_size + offset of each row. Beyond the torch reference, −1 marks a
            padded row: it writes no key and no value. Its query is rotated like any other.
        num_heads: number of query heads.

    Returns:
        [N, num_heads, D], the rotated queries, contiguous, spread (`specdec.kernels.spread`) if the keys are.

    Raises:
        ValueError: shapes disagree, or a tensor is not dense where it must be.
    """
    n, heads, dim = qkv.shape
    num_kv_heads, width = k_pages.shape[2], cos.shape[1]
    if heads != num_heads + 2 * num_kv_heads or k_pages.shape != v_pages.shape or k_pages.shape[3] != dim:
        raise ValueError(f"qkv {list(qkv.shape)} does not fit {num_heads} heads and pages of {list(k_pages.shape)}")
    if cos.shape != (n, width) or sin.shape != cos.shape or width > dim or width % 2:
        raise ValueError(f"cos {list(cos.shape)} and sin {list(sin.shape)} must be [{n}, R], R ≤ {dim} and even")
    if not all(x.stride(-1) == 1 for x in (qkv, cos, sin)) or not (k_pages.is_contiguous() and v_pages.is_contiguous()):
        raise ValueError("the last dimension of qkv, cos and sin and the whole of the pages must be dense")
    q = torch.empty(n, num_heads, dim, dtype=qkv.dtype, device=qkv.device)
    per_program, warps = NATIVE if isinstance(k_pages, torch.Tensor) else QUANTIZED[n * heads > FEW]
    spread = spread_size(dim) if spreads(k_pages) else 0
    _rope_write_kernel[(n, triton.cdiv(heads, per_program))](
        qkv, cos, sin, q, pointers(k_pages), pointers(v_pages), slot_mapping.contiguous(),
        qkv.stride(0), qkv.stride(1), cos.stride(0), sin.stride(0),
        Q=num_heads, KV=num_kv_heads, D=dim, R=width, SPREAD=spread, HEADS=per_program, num_warps=warps,
        BLOCK=triton.next_power_of_2(dim), WIDE=tl.float64 if qkv.dtype == torch.float64 else tl.float32,
        **overlap(qkv.device),
    )  # fmt: skip
    return q
