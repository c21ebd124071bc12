"""How the Triton kernels read and write pages, native or quantized; the definition is `kernels/formats.py`.

A kernel takes one layer's keys or values as `PagePointers` and never asks which format they have: what depends on it
is compiled in here. Rows of pages are counted as slot · num_kv_heads + head.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from specdec.kernels.formats import Pages


class PagePointers(NamedTuple):
    """One layer's keys or values, as kernels take them.

    Args:
        codes: pointer to what is stored for the values.
        scales: pointer to scales and zero points; unused in native pages.
        kind: constexpr, the format's name, or "native".
        group: constexpr, values that share a scale; 0 in native pages.
    """

    codes: Any
    scales: Any
    kind: Any
    group: Any


def pointers(pages: Pages) -> PagePointers:
    """Return pages as kernels take them."""
    if isinstance(pages, Tensor):
        return PagePointers(pages, pages, tl.constexpr("native"), tl.constexpr(0))
    return PagePointers(pages.codes, pages.scales, tl.constexpr(pages.format.name), tl.constexpr(pages.format.group))


@triton.jit
def load_values(pages, row, ok, dtype: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Values of rows [M] in the dtype that is computed in: [M, BLOCK_D], 0 where not ok and behind D."""
    if pages.kind == "native":
        return _load(pages.codes, row, ok, D, BLOCK_D, 0.0)
    else:
        M: tl.constexpr = row.shape[0]
        GROUP: tl.constexpr = BLOCK_D if pages.group == D else pages.group
        GROUPS: tl.constexpr = D // pages.group
        BLOCK_G: tl.constexpr = BLOCK_D // GROUP
        if pages.kind == "int4":
            codes = _load(pages.codes, row, ok, D // 2, BLOCK_D // 2, 0)
            x = _to_float(tl.interleave(codes & 15, codes >> 4), 0.0)
        elif pages.kind == "fp8":
            x = _from_e4m3(_load(pages.codes, row, ok, D, BLOCK_D, 0))
        else:
            tl.static_assert(pages.kind == "int8", "a format without code here")
            x = _to_float(_load(pages.codes, row, ok, D, BLOCK_D, 0) ^ 0x80, 128.0)
        x = tl.reshape(x, [M, BLOCK_G, GROUP])
        if pages.kind == "int4":  # the rows of scales are twice as wide: zero points stand behind
            scale = _load(pages.scales, row * 2, ok, GROUPS, BLOCK_G, 0.0).to(tl.float32)
            zero = _load(pages.scales, row * 2 + 1, ok, GROUPS, BLOCK_G, 0.0).to(tl.float32)
            x = x * scale[:, :, None] + zero[:, :, None]
        else:
            x = x * _load(pages.scales, row, ok, GROUPS, BLOCK_G, 0.0).to(tl.float32)[:, :, None]
        # A sum of one value each. Where the compiler sees that a product's operand was loaded as bytes, it takes the
        # values of a row in another order, and in some kernels only: rows would have other bits in each of them.
        return tl.sum(tl.reshape(x.to(dtype), [M, BLOCK_D, 1]), 2)


@triton.jit
def store_values(pages, row, ok, x, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Put values [M, BLOCK_D] into rows [M], where ok."""
    if pages.kind == "native":
        _store(pages.codes, row, ok, x, D, BLOCK_D)
    else:
        M: tl.constexpr = row.shape[0]
        GROUP: tl.constexpr = BLOCK_D if pages.group == D else pages.group
        GROUPS: tl.constexpr = D // pages.group
        BLOCK_G: tl.constexpr = BLOCK_D // GROUP
        inside = ok[:, None] & (tl.arange(0, BLOCK_D) < D)[None, :]
        x = tl.reshape(tl.where(inside, x, 0.0).to(tl.float32), [M, BLOCK_G, GROUP])
        if pages.kind == "int4":
            zero = _to_scale(tl.min(x, 2))
            x = x - zero.to(tl.float32)[:, :, None]
            scale = _to_scale(tl.maximum(tl.max(x, 2), 0.0) * (1.0 / 15.0))
            codes = tl.reshape(_round(_divide(x, scale, 0.0, 15.0)), [M, BLOCK_D // 2, 2])
            low, high = tl.split(codes)
            _store(pages.codes, row, ok, (low + high * 16.0).to(tl.uint8), D // 2, BLOCK_D // 2)
            _store(pages.scales, row * 2, ok, scale, GROUPS, BLOCK_G)
            _store(pages.scales, row * 2 + 1, ok, zero, GROUPS, BLOCK_G)
        else:
            tl.static_assert(pages.kind == "fp8" or pages.kind == "int8", "a format without code here")
            LARGEST: tl.constexpr = 256.0 if pages.kind == "fp8" else 127.0
            scale = _to_scale(tl.max(tl.abs(x), 2) * (1.0 / LARGEST))
            x = tl.reshape(_divide(x, scale, -LARGEST, LARGEST), [M, BLOCK_D])
            codes = _to_e4m3(x) if pages.kind == "fp8" else _round(x).to(tl.int8).to(tl.uint8, bitcast=True)
            _store(pages.codes, row, ok, codes, D, BLOCK_D)
            _store(pages.scales, row, ok, scale, GROUPS, BLOCK_G)


@triton.jit
def _load(ptr, row, ok, WIDTH: tl.constexpr, BLOCK: tl.constexpr, other: tl.constexpr):
    """Rows of a dense matrix: [M, BLOCK]."""
    at = tl.arange(0, BLOCK)
    return tl.load(ptr + row[:, None] * WIDTH + at[None, :], mask=ok[:, None] & (at < WIDTH)[None, :], other=other)


@triton.jit
def _store(ptr, row, ok, x, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    mask = ok[:, None] & (at < WIDTH)[None, :]
    tl.store(ptr + row[:, None] * WIDTH + at[None, :], x.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def _to_scale(x):
    return tl.clamp(x, -65504.0, 65504.0).to(tl.float16)  # MAX_SCALE


@triton.jit
def _divide(x, scale, LOWEST: tl.constexpr, LARGEST: tl.constexpr):
    """Values [M, groups, group] by scales [M, groups], within the codes' bounds."""
    wide = scale.to(tl.float32)
    return tl.clamp(tl.div_rn(x, tl.where(wide == 0.0, 1.0, wide)[:, :, None]), LOWEST, LARGEST)


@triton.jit
def _round(x):
    """To the nearest integer, ties to even, below 2^22: the sum has no bits for a fraction."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def _to_float(byte, ZERO: tl.constexpr):
    """A byte less `ZERO`, as the last bits of 2^23: conversions of integers run at a quarter of the speed."""
    return (byte.to(tl.int32) | 0x4B000000).to(tl.float32, bitcast=True) - (8388608.0 + ZERO)


@triton.jit
def _from_e4m3(code):
    """The code's exponent and fraction stand as well in fp32, whose exponents are 120 higher."""
    code = code.to(tl.int32)
    bits = (code & 0x7F) << 20 | (code & 0x80) << 24
    return bits.to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2^120


@triton.jit
def _to_e4m3(x):
    """Ties to even. By hand, since not all GPUs have the conversion, and the interpreter's drops carries."""
    bits = x.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - (120 << 3)
    small = _round(tl.abs(x) * 512.0).to(tl.int32)  # below the least normal number, codes count 2^-9
    return (tl.where(size < 0x3C800000, small, normal) | (bits >> 24) & 0x80).to(tl.uint8)
