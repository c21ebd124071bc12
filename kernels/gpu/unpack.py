"""Quantized values in bf16, two a register: a code is its scale's multiple, and a packed instruction makes two of them.

A code has eight bits at most and so has a scale, so their product is exact in fp32, and one bf16 multiplication rounds
it as fp32's product would be rounded. What stands here gives the bits of `kernels/formats.py`, except that a sum with a
zero point is rounded once, not to fp32 before. Other dtypes, other vendors' GPUs and the interpreter take the way of
`gpu/pages.py`.

A code's bits are put below the exponent of 128 (int8: or 256, where the sign bit is set), which is then taken off.

`word_assembly` and `pairs_assembly` are for `gpu/codes.py`, whose codes come as words of four.
"""

import torch
import triton
import triton.language as tl

PACKED = tl.constexpr(not triton.knobs.runtime.interpret and torch.version.hip is None)
"""Whether these instructions are there."""

# $0, $1 become four bf16 values; $2 holds four codes, $3 and $4 the four scales.
_INT8 = tl.constexpr("""{
.reg .b32 a, b, x, y, one, none;
mov.b32 one, 0x3F803F80;
mov.b32 none, 0x80008000;
prmt.b32 a, $2, 0, 0x4140;
prmt.b32 b, $2, 0, 0x4342;
lop3.b32 x, a, 0x007F007F, 0x43004300, 0xEA;
lop3.b32 y, b, 0x007F007F, 0x43004300, 0xEA;
lop3.b32 a, a, 0x00800080, 0xC300C300, 0xEA;
lop3.b32 b, b, 0x00800080, 0xC300C300, 0xEA;
fma.rn.bf16x2 x, x, one, a;
fma.rn.bf16x2 y, y, one, b;
fma.rn.bf16x2 $0, x, $3, none;
fma.rn.bf16x2 $1, y, $4, none;
}""")

# The code's exponent and fraction stand as well in bf16, whose bias is larger by 124 (e3m4) or 120 (e4m3).
_FLOAT8 = """{{
.reg .b32 a, b, x, y, unit, none;
mov.b32 unit, {unit};
mov.b32 none, 0x80008000;
prmt.b32 a, $2, 0, 0x1404;
prmt.b32 b, $2, 0, 0x3424;
shr.b32 x, a, {shift};
shr.b32 y, b, {shift};
and.b32 x, x, {mask};
and.b32 y, y, {mask};
lop3.b32 a, a, 0x80008000, x, 0xEA;
lop3.b32 b, b, 0x80008000, y, 0xEA;
fma.rn.bf16x2 a, a, unit, none;
fma.rn.bf16x2 b, b, unit, none;
fma.rn.bf16x2 $0, a, $3, none;
fma.rn.bf16x2 $1, b, $4, none;
}}"""
_E3M4 = tl.constexpr(_FLOAT8.format(shift=5, mask="0x03F803F8", unit="0x7D807D80"))
_E4M3 = tl.constexpr(_FLOAT8.format(shift=4, mask="0x07F007F0", unit="0x7B807B80"))

# $0, $1 become the values of four bytes' lower halves, $2, $3 of the upper ones; $4 holds the bytes, $5 and $6 the
# scales, $7 and $8 the zero points.
_INT4 = tl.constexpr("""{
.reg .b32 a, b, c, d, one, base;
mov.b32 one, 0x3F803F80;
mov.b32 base, 0xC300C300;
prmt.b32 a, $4, 0, 0x4140;
prmt.b32 b, $4, 0, 0x4342;
shr.b32 c, a, 4;
shr.b32 d, b, 4;
lop3.b32 a, a, 0x000F000F, 0x43004300, 0xEA;
lop3.b32 b, b, 0x000F000F, 0x43004300, 0xEA;
lop3.b32 c, c, 0x000F000F, 0x43004300, 0xEA;
lop3.b32 d, d, 0x000F000F, 0x43004300, 0xEA;
fma.rn.bf16x2 a, a, one, base;
fma.rn.bf16x2 b, b, one, base;
fma.rn.bf16x2 c, c, one, base;
fma.rn.bf16x2 d, d, one, base;
fma.rn.bf16x2 $0, a, $5, $7;
fma.rn.bf16x2 $1, b, $6, $8;
fma.rn.bf16x2 $2, c, $5, $7;
fma.rn.bf16x2 $3, d, $6, $8;
}""")


@triton.jit
def unpack8(codes, scale, kind: tl.constexpr):
    """Values of codes of eight bits, uint8, by their scales, bf16 of the codes' shape."""
    ASM: tl.constexpr = _INT8 if kind == "int8" else _E3M4 if kind == "fp8" else _E4M3
    return tl.inline_asm_elementwise(ASM, "=r,=r,r,r,r", [codes, scale], dtype=tl.bfloat16, is_pure=True, pack=4)


@triton.jit
def unpack4(codes, scale, zero):
    """Values of bytes' lower and upper halves by their scales and zero points, bf16 of the bytes' shape."""
    return tl.inline_asm_elementwise(
        _INT4, "=r,=r,=r,=r,r,r,r,r,r", [codes, scale, zero], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4
    )


@triton.constexpr_function
def word_assembly(kind):
    """PTX: $0 to $3 become the values of a word of codes, $4, by their scale, which $5 holds twice."""
    body = _values("$4", "$4", [(0, 1), (2, 3)], "$5", kind)
    return "\n".join(["{", _declared(kind), *body, "}"])


@triton.constexpr_function
def pairs_assembly(kind):
    """PTX: $0, $2, $4 and $6 become the values of a word, $8, those between of $9; $10 holds both scales."""
    body = _values("$8", "$9", [(0, 4), (1, 5), (2, 6), (3, 7)], "$10", kind)
    return "\n".join(["{", _declared(kind), *body, "}"])


@triton.constexpr_function
def _declared(kind):
    unit = {"int8": "0x3F803F80", "fp8": "0x7D807D80", "fp8_e4m3": "0x7B807B80"}[kind]
    return f".reg .b32 a, x, unit, none; mov.b32 unit, {unit}; mov.b32 none, 0x80008000;"


@triton.constexpr_function
def _values(first, second, pairs, scales, kind):
    """$0, $1, … become the values of pairs of bytes of two words, which are counted through; by two scales.

    A code stands in both bytes of its half of a register: int8 takes the bits of the lower one, floats of the upper.
    """
    if kind == "int8":
        decode = ["lop3.b32 x, a, 0x007F007F, 0x43004300, 0xEA;", "lop3.b32 a, a, 0x00800080, 0xC300C300, 0xEA;"]
        decode += ["fma.rn.bf16x2 a, x, unit, a;"]
    else:
        shift, mask = (5, "0x03F803F8") if kind == "fp8" else (4, "0x07F007F0")
        decode = [f"shr.b32 x, a, {shift};", f"and.b32 x, x, {mask};", "lop3.b32 a, a, 0x80008000, x, 0xEA;"]
        decode += ["fma.rn.bf16x2 a, a, unit, none;"]
    lines = []
    for i, pair in enumerate(pairs):
        low, high = pair
        lines += [
            f"prmt.b32 a, {first}, {second}, 0x{high}{high}{low}{low};",
            *decode,
            f"fma.rn.bf16x2 a, a, {scales}, none;",
        ]
        lines += [f"mov.b32 {{${2 * i}, ${2 * i + 1}}}, a;"]
    return lines
