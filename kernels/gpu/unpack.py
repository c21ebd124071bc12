"""Quantized values in fp16, two a register: a code is its scale's multiple, and a packed instruction makes two of them.

What stands here gives the bits of `kernels/formats.py`, except that a sum with a zero point is rounded once, not to
fp32 before. Other dtypes, other vendors' GPUs and the interpreter take the way of `gpu/pages.py`.

A byte below the exponent of 1,024 is 1,024 more than it was: that is taken off again. With a scale of seven bits the
multiple of it that is to be taken off is a number of fp16, and one instruction does both. A small float's exponent and
fraction stand as well in fp16, whose bias is larger by 12 (e3m4) or 8 (e4m3): the scale makes up for that.

`word_assembly` and `pairs_assembly` are for `gpu/codes.py`, whose codes come as words of four.
"""

import torch
import triton
import triton.language as tl

PACKED = tl.constexpr(not triton.knobs.runtime.interpret and torch.version.hip is None)
"""Whether these instructions are there."""

# $0, $1 become four values; $2 holds four codes, $3 and $4 the four scales.
_INT8 = tl.constexpr("""{
.reg .b32 a, b, magic, base;
mov.b32 magic, 0x64646464;
mov.b32 base, 0xE480E480;
prmt.b32 a, $2, magic, 0x4140;
prmt.b32 b, $2, magic, 0x4342;
add.rn.f16x2 a, a, base;
add.rn.f16x2 b, b, base;
mul.rn.f16x2 $0, a, $3;
mul.rn.f16x2 $1, b, $4;
}""")

_FLOAT8 = """{{
.reg .b32 a, b, x, y, unit;
mov.b32 unit, {unit};
prmt.b32 a, $2, 0, 0x1404;
prmt.b32 b, $2, 0, 0x3424;
shr.b32 x, a, {shift};
shr.b32 y, b, {shift};
and.b32 x, x, {mask};
and.b32 y, y, {mask};
lop3.b32 a, a, 0x80008000, x, 0xEA;
lop3.b32 b, b, 0x80008000, y, 0xEA;
mul.rn.f16x2 a, a, unit;
mul.rn.f16x2 b, b, unit;
mul.rn.f16x2 $0, a, $3;
mul.rn.f16x2 $1, b, $4;
}}"""
_E3M4 = tl.constexpr(_FLOAT8.format(shift=2, mask="0x1FC01FC0", unit="0x6C006C00"))
_E4M3 = tl.constexpr(_FLOAT8.format(shift=1, mask="0x3F803F80", unit="0x5C005C00"))

# $0, $1 become the values of four bytes' lower halves, $2, $3 of the upper ones; $4 holds the bytes, $5 and $6 the
# scales, $7 and $8 the zero points.
_INT4 = tl.constexpr("""{
.reg .b32 a, b, c, d, base;
mov.b32 base, 0xE400E400;
prmt.b32 a, $4, 0, 0x4140;
prmt.b32 b, $4, 0, 0x4342;
shr.b32 c, a, 4;
shr.b32 d, b, 4;
lop3.b32 a, a, 0x000F000F, 0x64006400, 0xEA;
lop3.b32 b, b, 0x000F000F, 0x64006400, 0xEA;
lop3.b32 c, c, 0x000F000F, 0x64006400, 0xEA;
lop3.b32 d, d, 0x000F000F, 0x64006400, 0xEA;
add.rn.f16x2 a, a, base;
add.rn.f16x2 b, b, base;
add.rn.f16x2 c, c, base;
add.rn.f16x2 d, d, base;
fma.rn.f16x2 $0, a, $5, $7;
fma.rn.f16x2 $1, b, $6, $8;
fma.rn.f16x2 $2, c, $5, $7;
fma.rn.f16x2 $3, d, $6, $8;
}""")


@triton.jit
def unpack8(codes, scale, kind: tl.constexpr):
    """Values of codes of eight bits, uint8, by their scales, fp16 of the codes' shape."""
    ASM: tl.constexpr = _INT8 if kind == "int8" else _E3M4 if kind == "fp8" else _E4M3
    return tl.inline_asm_elementwise(ASM, "=r,=r,r,r,r", [codes, scale], dtype=tl.float16, is_pure=True, pack=4)


@triton.jit
def unpack4(codes, scale, zero):
    """Values of bytes' lower and upper halves by their scales and zero points, fp16 of the bytes' shape."""
    return tl.inline_asm_elementwise(
        _INT4, "=r,=r,=r,=r,r,r,r,r,r", [codes, scale, zero], dtype=(tl.float16, tl.float16), is_pure=True, pack=4
    )


@triton.constexpr_function
def scales_assembly(kind):
    """PTX: $0 and $1 become what two codes are multiplied by and, for int8, what is added then.

    Their scales are halves of $2 and $3, which $4 says. Zero points of int4 are taken as scales are.
    """
    take = ".reg .b32 a; prmt.b32 $0, $2, $3, $4;"
    if kind == "int8":
        return f"{{{take} mov.b32 a, 0xE480E480; mul.rn.f16x2 $1, $0, a;}}"
    unit = {"fp8": "mov.b32 a, 0x6C006C00;", "fp8_e4m3": "mov.b32 a, 0x5C005C00;"}
    less = f"{unit[kind]} mul.rn.f16x2 $0, $0, a;" if kind in unit else ""
    return f"{{{take} {less} mov.b32 $1, $0;}}"


@triton.constexpr_function
def word_assembly(kind):
    """PTX: $0 to $3 become the values of a word of codes, $4, by what `scales_assembly` has made: $5 and $6.

    Of int4 the word's codes 0, 4, 1 and 5; of floats 0, 2, 1 and 3.
    """
    if kind == "int8":
        body = [_int8("$4", 0x4140, 0, "$5", "$6"), _int8("$4", 0x4342, 1, "$5", "$6")]
    elif kind == "int4":
        body = [_int4("$4", False, 0, "$5", "$6"), _int4("$4", True, 1, "$5", "$6")]
    else:
        body = ["shl.b32 a, $4, 8;", _float8(kind, "a", 0, "$5"), _float8(kind, "$4", 1, "$5")]
    return "\n".join(["{", _declared(kind), *body, "}"])


@triton.constexpr_function
def pairs_assembly(kind):
    """PTX: $0, $2, $4 and $6 become the values of a word, $8, those between of $9, by $10 and $11.

    Of int4, $8 holds four codes of each, in its lower and its upper half.
    """
    if kind == "int8":
        low = ["prmt.b32 x, $8, $9, 0x5140;", _int8("x", 0x4140, 0, "$10", "$11"), _int8("x", 0x4342, 1, "$10", "$11")]
        high = ["prmt.b32 x, $8, $9, 0x7362;", _int8("x", 0x4140, 2, "$10", "$11"), _int8("x", 0x4342, 3, "$10", "$11")]
        body = low + high
    elif kind == "int4":
        body = ["shr.b32 x, $8, 8;"]
        body += [_int4(("$8", "x")[i // 2], i % 2 == 1, i, "$10", "$11") for i in range(4)]
    else:
        both = [f"prmt.b32 a, $8, $9, {0x4400 + 0x1111 * i:#06x};" for i in range(4)]
        body = [take + _float8(kind, "a", i, "$10") for i, take in enumerate(both)]
    return "\n".join(["{", _declared(kind), *body, "}"])


@triton.constexpr_function
def _declared(kind):
    if kind == "int8":
        return ".reg .b32 a, x, magic; mov.b32 magic, 0x64646464;"
    if kind == "int4":
        return ".reg .b32 a, x, high, low; mov.b32 high, 0xE400E400; mov.b32 low, 0xD400D400;"
    return ".reg .b32 a, x;"


@triton.constexpr_function
def _int8(codes, select, pair, scales, less):
    """The values of a pair: of two bytes of a register."""
    take = f"prmt.b32 a, {codes}, magic, {select:#06x}; fma.rn.f16x2 a, a, {scales}, {less};"
    return f"{take} mov.b32 {{${2 * pair}, ${2 * pair + 1}}}, a;"


@triton.constexpr_function
def _int4(codes, upper, pair, scales, zeros):
    """The values of a pair: of the lower or the upper four bits of both halves of a register, above 1,024 or 64."""
    mask, magic, base = ("0x00F000F0", "0x54005400", "low") if upper else ("0x000F000F", "0x64006400", "high")
    take = f"lop3.b32 a, {codes}, {mask}, {magic}, 0xEA; add.rn.f16x2 a, a, {base};"
    return f"{take} fma.rn.f16x2 a, a, {scales}, {zeros}; mov.b32 {{${2 * pair}, ${2 * pair + 1}}}, a;"


@triton.constexpr_function
def _float8(kind, codes, pair, scales):
    """The values of a pair: of the upper byte of both halves of a register."""
    shift, mask = (2, "0x1FC01FC0") if kind == "fp8" else (1, "0x3F803F80")
    take = f"shr.b32 x, {codes}, {shift}; and.b32 x, x, {mask}; lop3.b32 a, {codes}, 0x80008000, x, 0xEA;"
    return f"{take} mul.rn.f16x2 a, a, {scales}; mov.b32 {{${2 * pair}, ${2 * pair + 1}}}, a;"
