"""Products of queries and stored keys, before any factor: as the values are, or in integers.

int8 keys of a group of 32 or more values and bf16 queries meet in integers: a query is a multiple of the 16256th part
of its largest value, 128 · high + low, and both halves are int8. Their products with the codes are exact, whatever the
order of their sums, and codes go to the tensor cores as they are stored. A query is off by a 32,512th part of its
largest value at most, which bf16 itself has rounded 64 times as coarsely. A group's sum is below 2^28.
"""

import triton
import triton.language as tl

from specdec.kernels.gpu.pages import load_groups, load_stored, values_of

_PARTS = tl.constexpr(16256.0)  # 127 · 128


@triton.jit
def load_queries(q_ptr, pages, row, head, ok, H: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Queries of rows and heads as they meet keys of these pages, 0 where not ok: a tuple that `scores` takes."""
    if pages.integers:
        return load_integers(q_ptr, row, head, ok, H, D, pages.group)
    else:
        return (_load(q_ptr, row, head, ok, 0, H, D, D, BLOCK_D),)


@triton.jit
def load_keys(pages, row, ok, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Keys of rows [TILE] of pages, 0 where not ok: a tuple that `scores` takes."""
    if pages.integers:
        return load_groups(pages, row, ok, D)
    else:
        return load_stored(pages, row, ok, D, BLOCK_D)


@triton.jit
def scores(q, pages, k, dtype: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Products of queries and keys: [M, TILE] fp32."""
    if pages.integers:
        return dot_integers(q, k, D // pages.group)
    else:
        return tl.dot(q[0], tl.trans(values_of(pages, k, dtype, D, BLOCK_D)), input_precision="ieee")


@triton.jit
def _load(
    q_ptr, row, head, ok, first: tl.constexpr, H: tl.constexpr, D: tl.constexpr,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """`WIDTH` values of each query from the `first` on: [M, BLOCK]."""
    d = tl.arange(0, BLOCK)
    at = (row.to(tl.int64) * H + head)[:, None] * D + first + d[None, :]
    return tl.load(q_ptr + at, mask=ok[:, None] & (d < WIDTH)[None, :], other=0.0)


@triton.jit
def load_integers(q_ptr, row, head, ok, H: tl.constexpr, D: tl.constexpr, GROUP: tl.constexpr):
    """The worth of a step [M], fp32; then of each group the high and low halves of its queries [M, GROUP], int8."""
    largest = tl.zeros([row.shape[0]], tl.float32)
    for g in tl.static_range(D // GROUP):
        q = _load(q_ptr, row, head, ok, g * GROUP, H, D, GROUP, GROUP).to(tl.float32)
        largest = tl.maximum(largest, tl.max(tl.abs(q), 1))
    step = tl.where(largest == 0.0, 1.0, largest * (1.0 / _PARTS))
    parts = (step,)
    for g in tl.static_range(D // GROUP):
        q = _load(q_ptr, row, head, ok, g * GROUP, H, D, GROUP, GROUP).to(tl.float32)
        steps = tl.clamp(tl.div_rn(q, step[:, None]), -_PARTS, _PARTS)
        whole = ((steps + 12582912.0) - 12582912.0).to(tl.int32)  # to the nearest; ties to even
        high = (whole + 64) >> 7
        parts = parts + (high.to(tl.int8), (whole - (high << 7)).to(tl.int8))
    return parts


@triton.jit
def dot_integers(q, k, GROUPS: tl.constexpr):
    """Products of what `load_integers` and `load_groups` give: [M, TILE] fp32."""
    total = tl.zeros([q[0].shape[0], k[1].shape[0]], tl.float32)
    for g in tl.static_range(GROUPS):
        codes = tl.trans(k[2 * g])
        high = tl.dot(q[1 + 2 * g], codes, out_dtype=tl.int32)
        both = tl.dot(q[2 + 2 * g], codes, high * 128, out_dtype=tl.int32)
        total += both.to(tl.float32) * k[2 * g + 1][None, :]
    return total * q[0][:, None]
