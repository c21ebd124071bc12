"""Runs the few PTX instructions of our inline assembly on arrays, so that it can be tested without a GPU."""

import re
from collections.abc import Callable, Sequence

import numpy as np

Words = np.ndarray
"""int64, holding what a register of 32 or 16 bits holds."""


def run(assembly: str, constraints: str, inputs: Sequence[Words]) -> list[Words]:
    """Return the outputs of a piece of assembly, one for each `=` constraint, for each element of the inputs.

    Raises:
        KeyError: an instruction or a register is unknown here.
    """
    num_outputs = sum(part.startswith("=") for part in constraints.split(","))
    registers: dict[str, Words] = {f"${num_outputs + i}": words for i, words in enumerate(inputs)}
    for statement in re.sub(r"^\s*\{|\}\s*$", "", assembly).split(";"):
        name, _, operands = statement.strip().partition(" ")
        if not name or name.startswith(".reg"):
            continue
        into, *sources = re.findall(r"\{[^}]*\}|[^,\s]+", operands)
        if into.startswith("{"):
            low, high = _parts(into)
            registers[low], registers[high] = registers[sources[0]] & 0xFFFF, registers[sources[0]] >> 16
        else:
            registers[into] = _RUN[name](*(_value(source, registers) for source in sources)) & 0xFFFFFFFF
    return [registers[f"${i}"] for i in range(num_outputs)]


def _parts(pair: str) -> list[str]:
    return [part.strip() for part in pair.strip("{}").split(",")]


def _value(source: str, registers: dict[str, Words]) -> Words:
    if source.startswith("{"):
        low, high = (registers[part] for part in _parts(source))
        return low | high << 16
    return registers[source] if source in registers else np.int64(int(source, 0))


def _prmt(a: Words, b: Words, selector: Words) -> Words:
    both, out = a | b << 32, np.int64(0)
    for i in range(4):
        choice = np.asarray(selector >> 4 * i & 15)
        assert (choice < 8).all(), "the sign isn't copied here"
        out = out | (both >> 8 * choice & 255) << 8 * i
    return out


def _lop3(a: Words, b: Words, c: Words, table: Words) -> Words:
    assert int(table) == 0xEA, "(a & b) | c"
    return a & b | c


def _fma(x: Words, y: Words, z: Words) -> Words:
    """f16x2: exact in float64, then rounded once."""
    halves = []
    for shift in (0, 16):
        a, b, c = (_half(np.asarray(word >> shift & 0xFFFF)) for word in (x, y, z))
        with np.errstate(over="ignore", invalid="ignore"):
            halves.append(np.asarray(a * b + c).astype(np.float16).view(np.uint16).astype(np.int64))
    return np.asarray(halves[0] | halves[1] << 16)


def _half(bits: Words) -> Words:
    return bits.astype(np.uint16).view(np.float16).astype(np.float64)


_ONE, _NOTHING = np.int64(0x3C003C00), np.int64(0x80008000)
_RUN: dict[str, Callable[..., Words]] = {
    "mov.b32": lambda a: a,
    "prmt.b32": _prmt,
    "lop3.b32": _lop3,
    "and.b32": lambda a, b: a & b,
    "shr.b32": lambda a, b: a >> b,
    "shl.b32": lambda a, b: a << b,
    "fma.rn.f16x2": _fma,
    "mul.rn.f16x2": lambda a, b: _fma(a, b, _NOTHING),
    "add.rn.f16x2": lambda a, b: _fma(a, _ONE, b),
}
