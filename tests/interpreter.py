"""Triton's interpreter, faster: what it does again and again though it can't change, is done once. Same results.

- At every call of a kernel, and of every function that a kernel calls, it goes through all attributes of Triton's
  modules for the ones to replace.
- Each result gets a type that describes its shape anew, and a shape of constants.
- It computes integer operations again in 64 bits, for an assertion that is then left out, since `debug` is off there.
"""

import inspect
from dataclasses import replace
from functools import cache
from types import FunctionType

import numpy as np
import triton.language as tl
from triton.language import core
from triton.runtime import interpreter


def make_faster() -> None:
    """Let the interpreter remember builtins, types and shapes. Called once a process."""
    _patch_once_a_launch()
    _remember_shapes()
    _remember_dtypes()
    interpreter.interpreter_builder.options = replace(interpreter.interpreter_builder.options, sanitize_overflow=False)


def _patch_once_a_launch() -> None:
    patched: set[object] = set()  # modules, while a kernel runs
    patch_lang = interpreter._patch_lang

    @cache
    def names(package: object) -> list[str]:
        return [name for name, member in inspect.getmembers(package) if core.is_builtin(member)]

    def patch_builtin(package, builder, scope) -> None:  # type: ignore[no-untyped-def]
        for name in names(package):
            member = getattr(package, name)
            if core.is_builtin(member):  # not replaced by a caller yet
                interpreter._patch_attr(package, name, member, builder, scope)

    @cache
    def modules(fn: FunctionType) -> frozenset[object]:
        return frozenset(v for v in fn.__globals__.values() if inspect.ismodule(v) and v in (tl, core))

    class Scope(interpreter._LangPatchScope):
        def restore(self) -> None:  # called for the kernel, not for what it calls
            patched.clear()
            super().restore()

    def patch_lang_once(fn: FunctionType) -> object:
        if modules(fn) <= patched:
            return Scope()
        scope = patch_lang(fn)
        scope.__class__ = Scope
        patched.update(modules(fn))
        return scope

    interpreter._patch_builtin = patch_builtin
    interpreter._patch_lang = patch_lang_once


def _remember_shapes() -> None:
    make_block_type = core.block_type.__init__
    unwrap = core._unwrap_if_constexpr
    known: dict[tuple[int, ...], tuple[core.tuple, int, str]] = {}  # sizes -> shape, numel, text
    constants: dict[tuple[int, ...], tuple[core.tuple, core.constexpr]] = {}

    def block_type(self, element_ty, shape) -> None:  # type: ignore[no-untyped-def]
        values = shape.values if type(shape) is core.tuple else unwrap(shape)
        sizes = tuple([size if type(size) is int else unwrap(size) for size in values])
        if sizes not in known:
            make_block_type(self, element_ty, shape)
            known[sizes] = self.shape, self.numel, str(self.shape)
        self.element_ty = element_ty
        self.shape, self.numel, text = known[sizes]
        self.name = f"<{text}, {element_ty}>"

    def tensor(self, handle, kind) -> None:  # type: ignore[no-untyped-def]
        sizes = tuple(kind.shape.values) if kind.is_block() else ()
        if sizes not in constants:
            shape = core.tuple([core.constexpr(size) for size in sizes])
            constants[sizes] = shape, core.constexpr(int(np.prod(sizes, dtype=np.int64)))
        self.shape, self.numel = constants[sizes]
        self.handle, self.type, self.dtype = handle, kind, kind.scalar

    core.block_type.__init__ = block_type
    core.tensor.__init__ = tensor
    _ask_tuples_for_their_type_late()


def _ask_tuples_for_their_type_late() -> None:
    make = core.tuple.__init__

    def init(self, args, kind=None) -> None:  # type: ignore[no-untyped-def]
        if kind is None:
            self.values, self.kind = list(args), None
        else:
            make(self, args, kind)

    def get(self):  # type: ignore[no-untyped-def]
        if self.kind is None:
            self.kind = core._type_for_tuple_values(self.values)
        return self.kind

    core.tuple.__init__ = init
    core.tuple.type = property(get, lambda self, kind: setattr(self, "kind", kind))


def _remember_dtypes() -> None:
    numpy_dtype = interpreter._get_np_dtype
    equal = core.dtype.__eq__
    known: dict[str, np.dtype] = {}

    def remembered(kind) -> np.dtype:  # type: ignore[no-untyped-def, type-arg]
        scalar = kind.scalar
        if isinstance(scalar, core.pointer_type):
            return np.dtype(np.uint64)
        if scalar.name not in known:
            known[scalar.name] = numpy_dtype(scalar)
        return known[scalar.name]

    interpreter._get_np_dtype = remembered
    core.dtype.__eq__ = lambda self, other: self is other or equal(self, other)
