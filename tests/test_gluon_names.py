"""What Gluon calls differently in other versions of Triton is found there."""

import importlib.util
from types import ModuleType

import pytest
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import tma

from specdec.kernels.gpu import gluon_names

OLD = (gl, "thread_barrier"), (async_copy, "async_copy_global_to_shared"), (tma, "async_copy_global_to_shared")
NEW = (gl, "barrier"), (async_copy, "async_load"), (tma, "async_load")


@pytest.mark.parametrize(("names", "others"), [(OLD, NEW), (NEW, OLD)], ids=["old", "new"])
def test_names_of_each_version(
    names: tuple[tuple[ModuleType, str], ...],
    others: tuple[tuple[ModuleType, str], ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The old ones are gone there, or are still there and do nothing but complain."""
    found = [object() for _ in names]
    for (module, name), what in zip(names, found, strict=True):
        monkeypatch.setattr(module, name, what, raising=False)
    for module, name in others if names is OLD else ():
        monkeypatch.delattr(module, name, raising=False)
    spec = importlib.util.spec_from_file_location("names_of_that_version", gluon_names.__file__)
    assert spec is not None and spec.loader is not None
    there = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(there)
    assert [there.group_barrier, there.copy_values, there.copy_box] == found
