"""How the Triton kernels read and write pages, native or quantized; the definition is `kernels/formats.py`.

A kernel takes one layer's keys or values as `PagePointers` and never asks which format they have: what depends on it
is compiled in here. Rows of pages are counted as slot · num_kv_heads + head. Loads take them as two summands: where a
block starts, int64, and what stays the same from tile to tile, int32.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from specdec.kernels.formats import Pages
from specdec.kernels.gpu.unpack import PACKED, unpack4, unpack8


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
        M: tl.constexpr = ok.shape[0]
        GROUPS: tl.constexpr = D // pages.group
        BLOCK_G: tl.constexpr = 1 if GROUPS == 1 else BLOCK_D // pages.group
        if pages.kind == "int4":  # the rows of scales are twice as wide: zero points stand behind
            codes = tl.reshape(
                _load(pages.codes, row, ok, D // 2, BLOCK_D // 2, 0), [M, BLOCK_G, BLOCK_D // BLOCK_G // 2]
            )
            scale = _load_scales(pages.scales, (row[0] * 2, row[1] * 2), ok, GROUPS, BLOCK_G)
            zero = _load_scales(pages.scales, (row[0] * 2, row[1] * 2 + 1), ok, GROUPS, BLOCK_G)
            low, high = _from_int4(codes, scale[:, :, None], zero[:, :, None], dtype)
            x = tl.interleave(low, high)
        else:
            # Of what isn't loaded the scale is 0, but not where the only one is of columns behind D, too.
            NOTHING: tl.constexpr = 128 if pages.kind == "int8" and GROUPS == 1 and D < BLOCK_D else 0
            codes = _load(pages.codes, row, ok, D, BLOCK_D, NOTHING)
            codes = tl.reshape(codes, [M, BLOCK_G, BLOCK_D // BLOCK_G])
            scale = _load_scales(pages.scales, row, ok, GROUPS, BLOCK_G)
            x = _from_code(codes, scale[:, :, None], pages.kind, dtype)
        # A sum of one value each. Where the compiler sees that a product's operand was loaded as bytes, it takes the
        # values of a row in another order, and in some kernels only: rows would have other bits in each of them.
        return tl.sum(tl.reshape(x, [M, BLOCK_D, 1]), 2)


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
        MAX: tl.constexpr = 448.0 if pages.kind == "fp8" else 7168.0
        x = tl.clamp(tl.where(inside, x, 0.0).to(tl.float32), -MAX, MAX)
        x = tl.reshape(x, [M, BLOCK_G, GROUP])
        if pages.kind == "int4":
            zero = tl.min(x, 2).to(tl.float16)
            x = x - zero.to(tl.float32)[:, :, None]
            scale = (tl.maximum(tl.max(x, 2), 0.0) * (1.0 / 15.0)).to(tl.float16)
            codes = tl.reshape(_round(_divide(x, scale, 0.0, 15.0)), [M, BLOCK_D // 2, 2])
            low, high = tl.split(codes)
            _store(pages.codes, row, ok, (low & 15 | high << 4).to(tl.uint8), D // 2, BLOCK_D // 2)
            _store(pages.scales, row * 2, ok, scale, GROUPS, BLOCK_G)
            _store(pages.scales, row * 2 + 1, ok, zero, GROUPS, BLOCK_G)
        else:
            IS_FLOAT: tl.constexpr = pages.kind == "fp8" or pages.kind == "fp8_e4m3"
            tl.static_assert(IS_FLOAT or pages.kind == "int8", "a format without code here")
            FRACTION: tl.constexpr = 4 if pages.kind == "fp8" else 3
            LARGEST: tl.constexpr = (31.0 if FRACTION == 4 else 256.0) if IS_FLOAT else 127.0
            scale = tl.max(tl.abs(x), 2) * (1.0 / LARGEST)
            if not IS_FLOAT:  # up to a number of seven bits
                scale = ((scale.to(tl.int32, bitcast=True) + 0x1FFFF) & -0x20000).to(tl.float32, bitcast=True)
            scale = scale.to(tl.float16)
            if IS_FLOAT:
                sign = x.to(tl.int32, bitcast=True) >> 24 & 0x80
                codes = _to_float8(_divide(tl.abs(x), scale, 0.0, LARGEST), FRACTION) | sign
            else:
                codes = _round(_divide(x, scale, -LARGEST, LARGEST)) + 128
            _store(pages.codes, row, ok, tl.reshape(codes, [M, BLOCK_D]).to(tl.uint8), D, BLOCK_D)
            _store(pages.scales, row, ok, scale, GROUPS, BLOCK_G)


@triton.jit
def _load(ptr, row, ok, WIDTH: tl.constexpr, BLOCK: tl.constexpr, other: tl.constexpr):
    """Rows of a dense matrix: [M, BLOCK]."""
    at = tl.arange(0, BLOCK)
    inside = (row[1] * WIDTH)[:, None] + at[None, :]
    return tl.load(ptr + (row[0] * WIDTH)[:, None] + inside, mask=ok[:, None] & (at < WIDTH)[None, :], other=other)


@triton.jit
def _load_scales(ptr, row, ok, GROUPS: tl.constexpr, BLOCK_G: tl.constexpr):
    """Rows of scales: [M, BLOCK_G] fp16. In words, two scales each, since less isn't loaded ahead of its tile."""
    if GROUPS == 1:  # a word is of two rows, and blocks hold an even number
        word = _load(ptr.to(tl.pointer_type(tl.uint32), bitcast=True), (row[0] // 2, row[1] // 2), ok, 1, 1, 0)
        return _low_half(word >> (row[1] % 2 * 16).to(tl.uint32)[:, None])
    elif GROUPS % 2 == 0:
        words = _load(ptr.to(tl.pointer_type(tl.uint32), bitcast=True), row, ok, GROUPS // 2, BLOCK_G // 2, 0)
        return tl.interleave(_low_half(words), _low_half(words >> 16))
    else:
        return _load(ptr, row, ok, GROUPS, BLOCK_G, 0.0)


@triton.jit
def _low_half(words):
    return words.to(tl.uint16).to(tl.float16, bitcast=True)


@triton.jit
def _store(ptr, row, ok, x, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    mask = ok[:, None] & (at < WIDTH)[None, :]
    tl.store(ptr + row[:, None] * WIDTH + at[None, :], x.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def _divide(x, scale, LOWEST: tl.constexpr, LARGEST: tl.constexpr):
    """Values [M, groups, group] by scales [M, groups], within the codes' bounds; each quotient is rounded once.

    What a product with the reciprocal misses is made up for: that is the rounded quotient, since a scale has few bits
    (Markstein 1990, "Computation of elementary functions on the IBM RISC System/6000"), but for the sign of 0. The
    interpreter's sums of products are rounded twice.
    """
    scale = tl.where(scale == 0.0, 1.0, scale.to(tl.float32))[:, :, None]
    if PACKED:
        reciprocal = tl.div_rn(1.0, scale)
        near = x * reciprocal
        y = tl.fma(tl.fma(-near, tl.broadcast_to(scale, x.shape), x), tl.broadcast_to(reciprocal, x.shape), near)
    else:
        y = tl.div_rn(x, scale)
    return tl.clamp(y, LOWEST, LARGEST)


@triton.jit
def _round(x):
    """The last bits of the nearest integer, ties to even, below 2^22: conversions run at a quarter of the speed."""
    return (x + 12582912.0).to(tl.int32, bitcast=True)


@triton.jit
def _from_code(codes, scale, kind: tl.constexpr, dtype: tl.constexpr):
    """Values of codes of eight bits, by scales that broadcast to them."""
    tl.static_assert(kind == "int8" or kind == "fp8" or kind == "fp8_e4m3", "a format without code here")
    if PACKED and dtype == tl.float16:
        x = unpack8(codes, tl.broadcast_to(scale, codes.shape), kind)
    elif kind == "int8":
        x = (_to_float(codes, 128.0) * scale.to(tl.float32)).to(dtype)
    else:
        x = (_from_float8(codes, 4 if kind == "fp8" else 3) * scale.to(tl.float32)).to(dtype)
    return x


@triton.jit
def _from_int4(codes, scale, zero, dtype: tl.constexpr):
    """Values of bytes' lower and upper halves, by scales and zero points that broadcast to them."""
    if PACKED and dtype == tl.float16:
        low, high = unpack4(codes, tl.broadcast_to(scale, codes.shape), tl.broadcast_to(zero, codes.shape))
    else:
        scale, zero = scale.to(tl.float32), zero.to(tl.float32)
        low = (_to_float(codes & 15, 0.0) * scale + zero).to(dtype)
        high = (_to_float(codes >> 4, 0.0) * scale + zero).to(dtype)
    return low, high


@triton.jit
def _to_float(byte, ZERO: tl.constexpr):
    """A byte less `ZERO`, as the last bits of 2^23: no conversion either."""
    return (byte.to(tl.int32) | 0x4B000000).to(tl.float32, bitcast=True) - (8388608.0 + ZERO)


@triton.jit
def _from_float8(code, FRACTION: tl.constexpr):
    """The code's exponent and fraction stand as well in fp32, whose bias is larger."""
    code = code.to(tl.int32)
    bits = (code & 0x7F) << (23 - FRACTION) | (code & 0x80) << 24
    UNIT: tl.constexpr = 2.1267647932558654e37 if FRACTION == 4 else 1.329227995784916e36  # 2^124, 2^120
    return bits.to(tl.float32, bitcast=True) * UNIT


@triton.jit
def _to_float8(x, FRACTION: tl.constexpr):
    """Of x ≥ 0. Ties to even. By hand, since not all GPUs have the conversion, and the interpreter's drops carries."""
    BIAS: tl.constexpr = (1 << (6 - FRACTION)) - 1
    DROPPED: tl.constexpr = 23 - FRACTION
    size = x.to(tl.int32, bitcast=True)
    normal = ((size + ((1 << (DROPPED - 1)) - 1) + ((size >> DROPPED) & 1)) >> DROPPED) - ((127 - BIAS) << FRACTION)
    small = _round(x * (1 << (FRACTION + BIAS - 1))) & 0xFF  # the steps below the least normal number
    return tl.where(size < ((128 - BIAS) << 23), small, normal)
