"""Triton's interpreter, a quarter faster.

At every call of a kernel, and of every function that a kernel calls, it goes through all attributes of Triton's modules
for the ones to replace. Which these are doesn't change.
"""

import inspect
from functools import cache

import triton.language as tl
from triton.runtime import interpreter


def remember_builtins() -> None:
    """Let the interpreter look up the names of a module's builtins once."""

    @cache
    def names(package: object) -> list[str]:
        return [name for name, member in inspect.getmembers(package) if tl.core.is_builtin(member)]

    def patch_builtin(package, builder, scope) -> None:  # type: ignore[no-untyped-def]
        for name in names(package):
            member = getattr(package, name)
            if tl.core.is_builtin(member):  # not replaced by a caller yet
                interpreter._patch_attr(package, name, member, builder, scope)

    interpreter._patch_builtin = patch_builtin
