"""Runs Gluon kernels on the CPU, a program at a time, with layouts left out: they move values and don't change them.

What a kernel computes, reads and writes can be tested so; that its layouts fit each other, the compiler says
(`tests/hopper.py`). Reads and writes outside of tensors are errors, and what a masked load leaves open is garbage.
"""

import itertools
import operator
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from threading import Condition, get_ident
from types import FunctionType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

from specdec.kernels.gpu.pages import PagePointers
from tests import ptx

GARBAGE = 0x5B
"""What each byte of a value holds that was not loaded."""
_DTYPES = {"int32": torch.int32, "int64": torch.int64, "float32": torch.float32, "float16": torch.float16}
_WORD = "uint32"
PATIENCE = 60
"""Seconds after which a barrier that isn't complete is taken for one that never will be."""
_GARBAGE_WORD = GARBAGE * 0x01010101


class Value:
    """A tensor, or a scalar of no dimensions."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    @property
    def shape(self) -> list[int]:
        return list(self.tensor.shape)

    @property
    def dtype(self) -> str | None:
        return next((name for name, dtype in _DTYPES.items() if dtype == self.tensor.dtype), None)

    @property
    def type(self) -> SimpleNamespace:
        return SimpleNamespace(layout=None)

    def to(self, dtype: str, bitcast: bool = False) -> "Value":
        return Value(self.tensor.view(_DTYPES[dtype]) if bitcast else self.tensor.to(_DTYPES[dtype]))

    def __getitem__(self, index: Any) -> "Value":
        return Value(self.tensor[index])

    def __bool__(self) -> bool:
        return bool(self.tensor)

    def __index__(self) -> int:
        return int(self.tensor)

    def __neg__(self) -> "Value":
        return Value(-self.tensor)


def _operator(name: str, do: Callable[[Any, Any], Any]) -> None:
    setattr(
        Value,
        f"__{name.strip('_')}__",
        lambda self, other: NotImplemented if _is_pointer(other) else _apply(do, self, other),
    )
    if name in ("add", "sub", "mul"):
        setattr(Value, f"__r{name}__", lambda self, other: _apply(do, other, self))


def _apply(do: Callable[[Any, Any], Any], a: Any, b: Any) -> Value:
    return Value(torch.as_tensor(do(_plain(a), _plain(b))))


def _plain(x: Any) -> Any:
    return x.tensor if isinstance(x, Value) else x


def _is_pointer(x: Any) -> bool:
    return isinstance(x, Pointer)


for _name in (
    "add",
    "sub",
    "mul",
    "floordiv",
    "mod",
    "lt",
    "le",
    "gt",
    "ge",
    "eq",
    "ne",
    "or_",
    "and_",
    "xor",
    "truediv",
    "rshift",
):
    _operator(_name, getattr(operator, _name))


@dataclass
class Before:
    """What a program sees of the kernel before: what stands in tensors, by their addresses, until it has waited.

    Warps that go their own way wait for themselves, each group of them a thread here.
    """

    stands: Mapping[int, Tensor] = field(default_factory=dict)
    threads: set[int] = field(default_factory=set)
    some_waited: bool = False

    @property
    def waited(self) -> bool:
        return get_ident() in self.threads

    def wait(self) -> None:
        self.threads.add(get_ident())
        self.some_waited = True


class Pointer:
    """Places in a tensor, counted in elements."""

    def __init__(self, memory: Tensor, before: Before, at: Any = 0, words: bool = False) -> None:
        self.memory, self.before, self.at, self.words = memory, before, torch.as_tensor(_plain(at)), words

    @property
    def dtype(self) -> SimpleNamespace:
        return SimpleNamespace(element_ty=Value(self.memory).dtype)

    def __add__(self, other: Any) -> "Pointer":
        return Pointer(self.memory, self.before, self.at + _plain(other), self.words)

    __radd__ = __add__

    def to(self, kind: tuple[str, str], bitcast: bool) -> "Pointer":
        assert bitcast and kind == ("pointer", _WORD) and not self.at.any()
        return Pointer(self.memory, self.before, 0, words=True)

    def __getitem__(self, index: Any) -> "Pointer":
        return Pointer(self.memory, self.before, self.at[index], self.words)

    def flat(self) -> Tensor:
        seen = self.memory
        if not self.before.waited:
            seen = self.before.stands.get(seen.data_ptr(), seen)
        flat = seen.view(-1)
        return flat.view(torch.int32).to(torch.int64) & 0xFFFFFFFF if self.words else flat

    def read(self, there: Tensor, other: Any) -> Tensor:
        """What stands there, and something else where nothing is to be read; garbage if that is None."""
        flat = self.flat()
        out = torch.empty(self.at.shape, dtype=flat.dtype)
        if other is None:
            out.view(-1).view(torch.uint8).fill_(GARBAGE)
            out = out & 0xFFFFFFFF if self.words else out
        else:
            out.fill_(other)
        out[there] = flat[_inside(self.at[there], flat)]
        return out


class Shared:
    """Shared memory, or a part of it; garbage until something is put there."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    @property
    def dtype(self) -> str | None:
        return Value(self.tensor).dtype

    @property
    def shape(self) -> list[int]:
        return list(self.tensor.shape)

    def index(self, place: Any) -> "Shared":
        return Shared(self.tensor[int(_plain(place))])

    def load(self, layout: Any) -> Value:
        return Value(self.tensor.clone())

    def store(self, value: Value) -> None:
        self.tensor.copy_(value.tensor)

    def reshape(self, shape: Sequence[int]) -> "Shared":
        return Shared(self.tensor.view(list(shape)))

    def permute(self, order: Sequence[int]) -> "Shared":
        return Shared(self.tensor.permute(list(order)))

    def slice(self, start: int, length: int, dim: int) -> "Shared":
        return Shared(self.tensor.narrow(dim, start, length))


class AsyncCopy:
    """Copies that come when they are waited for, and not before; what nothing was copied to becomes 0."""

    def __init__(self) -> None:
        self._groups: list[list[tuple[Tensor, Tensor]]] = [[]]

    def copy_values(self, to: Shared, at: Pointer, mask: Any = True) -> None:
        there = torch.broadcast_to(torch.as_tensor(_plain(mask)), at.at.shape)
        assert at.at.shape == to.tensor.shape, "what is copied fits"
        to.tensor.fill_(torch.nan if to.tensor.is_floating_point() else _GARBAGE_WORD)
        self._groups[-1].append((to.tensor, at.read(there, 0)))

    def commit_group(self) -> None:
        self._groups.append([])

    def wait_group(self, num_outstanding: int) -> None:
        assert not self._groups[-1], "copies that nobody committed"
        while len(self._groups) > num_outstanding + 1:
            for to, value in self._groups.pop(0):
                to.copy_(value)


class Barriers:
    """Barriers in shared memory, by their addresses, and copies that complete them.

    A copy leaves garbage behind where it goes, until the barrier that it completes was waited for.
    """

    def __init__(self) -> None:
        self._barriers: dict[int, _Barrier] = {}
        self._changed = Condition()

    def MBarrierLayout(self) -> None:  # noqa: N802
        return None

    def init(self, at: Shared, count: int) -> None:
        self._barriers[at.tensor.data_ptr()] = _Barrier(count, count)

    def arrive(self, at: Shared, *, count: int) -> None:
        with self._changed:
            self._of(at).arrive(count)
            self._changed.notify_all()

    def expect(self, at: Shared, num_bytes: int) -> None:
        with self._changed:
            self._of(at).missing += num_bytes
            self._of(at).arrive(1)
            self._changed.notify_all()

    def wait(self, at: Shared, phase: Any) -> None:
        with self._changed:
            barrier, parity = self._of(at), int(_plain(phase))
            assert self._changed.wait_for(lambda: barrier.phase % 2 != parity, PATIENCE), "never complete"
            for to, value in barrier.brought:
                to.copy_(value)
            barrier.brought.clear()

    def copy_box(self, desc: "Described", at: Sequence[Any], done: Shared, to: Shared) -> None:
        with self._changed:
            to.tensor.fill_(torch.nan)
            self._of(done).bring(to.tensor, desc.box(*(int(_plain(x)) for x in at)))
            self._changed.notify_all()

    def _of(self, at: Shared) -> "_Barrier":
        return self._barriers[at.tensor.data_ptr()]


@dataclass
class _Barrier:
    """How many arrivals complete it, how many are missing, and bytes; how often it was complete; what was brought."""

    count: int
    pending: int
    missing: int = 0
    phase: int = 0
    coming: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    brought: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def arrive(self, count: int) -> None:
        assert count <= self.pending, "more arrivals than there are to be"
        self.pending -= count
        self._complete()

    def bring(self, to: Tensor, value: Tensor) -> None:
        self.missing -= value.numel() * value.element_size()
        self.coming.append((to, value))
        self._complete()

    def _complete(self) -> None:
        assert self.missing >= 0 or self.pending, "more bytes than were expected"
        if not self.pending and not self.missing:
            self.brought += self.coming
            self.coming, self.pending = [], self.count
            self.phase += 1


class Described:
    """A matrix in global memory, and the boxes of it that are brought at once."""

    def __init__(self, desc: TensorDescriptor, before: Before) -> None:
        self._pointer, self._shape, self._block = Pointer(desc.base, before), desc.shape, desc.block_shape

    def box(self, row: int, column: int) -> Tensor:
        rows, columns = (first + torch.arange(n) for first, n in zip((row, column), self._block, strict=True))
        assert row + len(rows) <= self._shape[0] and column + len(columns) <= self._shape[1]
        there = torch.ones(len(rows), len(columns), dtype=torch.bool)
        return (self._pointer + (rows[:, None] * self._shape[1] + columns)).read(there, None)


@dataclass(frozen=True)
class Awaited:
    """A product that nobody has waited for: its operands may not change until then."""

    make: Callable[[], Value]


class Language:
    """What kernels know as `gl`, for one program."""

    int32, int64, float32, float16, uint32 = "int32", "int64", "float32", "float16", _WORD

    def __init__(self, program: Sequence[int], grid: Sequence[int], before: Before) -> None:
        self._program, self._grid, self._before = program, grid, before
        self._under_way: dict[int, list[Awaited]] = {}  # of each group of warps, a thread here

    def program_id(self, axis: int) -> Value:
        return Value(torch.tensor(self._program[axis], dtype=torch.int32))

    def num_programs(self, axis: int) -> Value:
        return Value(torch.tensor(self._grid[axis], dtype=torch.int32))

    def pointer_type(self, dtype: str) -> tuple[str, str]:
        return "pointer", dtype

    def SliceLayout(self, *args: Any) -> None:  # noqa: N802
        return None

    SwizzledSharedLayout = SliceLayout

    def fence_async_shared(self) -> None: ...

    def warp_specialize(self, parts: Sequence[tuple[Any, Any]], num_warps: Sequence[int], regs: Sequence[int]) -> None:
        assert len(parts) - 1 == len(num_warps) == len(regs)
        inherited = get_ident() in self._before.threads

        def run(part: Callable[..., None], args: Sequence[Any]) -> None:
            (self._before.threads.add if inherited else self._before.threads.discard)(get_ident())
            part(*args)

        with ThreadPoolExecutor(len(parts)) as pool:
            for done in [pool.submit(run, *part) for part in parts]:
                done.result()

    def arange(self, start: int, end: int, layout: Any = None) -> Value:
        return Value(torch.arange(start, end, dtype=torch.int32))

    def to_tensor(self, x: Any) -> Value:
        return x if isinstance(x, Value) else Value(torch.tensor(x, dtype=torch.int32))

    def load(self, at: Pointer, mask: Any = True, other: Any = None, cache_modifier: str = "") -> Value:
        return Value(at.read(torch.broadcast_to(torch.as_tensor(_plain(mask)), at.at.shape), other))

    def store(self, at: Pointer, value: Value, mask: Any = True, eviction_policy: str = "") -> None:
        flat = at.flat()
        there = torch.broadcast_to(torch.as_tensor(_plain(mask)), at.at.shape)
        flat[_inside(at.at[there], flat)] = value.tensor[there].to(flat.dtype)

    def allocate_shared_memory(
        self, dtype: str, shape: Sequence[int], layout: Any, value: Value | None = None
    ) -> Shared:
        if value is not None:
            return Shared(value.tensor.clone())
        if dtype in (_WORD, self.int64):
            return Shared(torch.full(list(shape), _GARBAGE_WORD))
        return Shared(torch.full(list(shape), torch.nan, dtype=_DTYPES[dtype]))

    def full(self, shape: Sequence[int], value: float, dtype: str, layout: Any) -> Value:
        return Value(torch.full(list(shape), value, dtype=torch.int64 if dtype == _WORD else _DTYPES[dtype]))

    def zeros(self, shape: Sequence[int], dtype: str, layout: Any) -> Value:
        return self.full(shape, 0, dtype, layout)

    def where(self, condition: Value, a: Any, b: Any) -> Value:
        return Value(torch.where(torch.as_tensor(_plain(condition)), _plain(a), _plain(b)))

    def maximum(self, a: Any, b: Any) -> Value:
        return Value(torch.maximum(torch.as_tensor(_plain(a)), torch.as_tensor(_plain(b))))

    def minimum(self, a: Any, b: Any) -> Value:
        return Value(torch.minimum(torch.as_tensor(_plain(a)), torch.as_tensor(_plain(b))))

    def cdiv(self, a: Any, b: Any) -> Value:
        return Value(-(-torch.as_tensor(_plain(a)) // _plain(b)))

    def max(self, x: Value, axis: int) -> Value:
        return Value(x.tensor.amax(axis))

    def min(self, x: Value, axis: int) -> Value:
        return Value(x.tensor.amin(axis))

    def exp2(self, x: Value) -> Value:
        return Value(torch.exp2(x.tensor))

    def fma(self, x: Value, y: Any, z: Value) -> Value:
        return Value(x.tensor * _plain(y) + z.tensor)

    def expand_dims(self, x: Any, dim: int) -> Any:
        if _is_pointer(x):
            return Pointer(x.memory, x.before, x.at.unsqueeze(dim), x.words)
        return Value(x.tensor.unsqueeze(dim))

    def broadcast(self, a: Value, b: Value) -> tuple[Value, Value]:
        x, y = torch.broadcast_tensors(a.tensor, b.tensor)
        return Value(x), Value(y)

    def convert_layout(self, x: Value, layout: Any, assert_trivial: bool = False) -> Value:
        return x

    def reshape(self, x: Value, shape: Sequence[int]) -> Value:
        return Value(x.tensor.reshape(list(shape)))

    def permute(self, x: Value, order: Sequence[int]) -> Value:
        return Value(x.tensor.permute(list(order)))

    def join(self, a: Value, b: Value) -> Value:
        return Value(torch.stack([a.tensor, b.tensor], -1))

    def split(self, x: Value) -> tuple[Value, ...]:
        return tuple(Value(part) for part in x.tensor.unbind(-1))

    def static_range(self, count: int) -> range:
        return range(count)

    def static_assert(self, condition: bool, message: str) -> None:
        assert condition, message

    def inline_asm_elementwise(
        self,
        assembly: str,
        constraints: str,
        args: Sequence[Value],
        dtype: str | Sequence[str],
        is_pure: bool,
        pack: int,
    ) -> Any:
        assert pack == 1
        out = ptx.run(assembly, constraints, [_bits(arg.tensor) for arg in args])
        shape = args[0].tensor.shape
        if isinstance(dtype, str):
            return Value(torch.from_numpy(out[0]).view(shape))
        as_said = {"int32": lambda x: x, "float16": lambda x: x.astype(np.uint16).view(np.float16)}
        return [Value(torch.from_numpy(as_said[kind](x)).view(shape)) for kind, x in zip(dtype, out, strict=True)]

    def mma_v2(self, a: Value, b: Value, acc: Value) -> Value:
        return Value(a.tensor.float() @ b.tensor.float() + acc.tensor)

    def warpgroup_mma(
        self, a: Value | Shared, b: Shared, acc: Value, *, use_acc: bool = True, is_async: bool = False
    ) -> Any:
        def make() -> Value:
            product = a.tensor.float() @ b.tensor.float()
            return Value(product + acc.tensor if use_acc else product)

        if not is_async:
            return make()
        product = Awaited(make)
        self._under_way.setdefault(get_ident(), []).append(product)
        return product

    def warpgroup_mma_wait(self, num_outstanding: int, deps: Sequence[Any]) -> Any:
        asked_for = self._under_way.get(get_ident(), [])
        left = self._under_way[get_ident()] = asked_for[max(0, len(asked_for) - num_outstanding) :]
        assert not any(dep is product for dep in deps for product in left), "what may be under way still"
        found = tuple(dep.make() if isinstance(dep, Awaited) else dep for dep in deps)
        return found if len(found) > 1 else found[0]


def _bits(x: Tensor) -> np.ndarray:
    return x.to(torch.int64).contiguous().numpy()


def _inside(at: Tensor, flat: Tensor) -> Tensor:
    if at.numel() and not 0 <= int(at.min()) <= int(at.max()) < len(flat):
        raise IndexError(f"places {int(at.min())} to {int(at.max())} of a tensor of {len(flat)}")
    return at.long()


def launch(
    kernel: Any, grid: tuple[int, int, int], *args: Any, stands: Mapping[int, Tensor] | None = None
) -> set[tuple[int, ...]]:
    """Run a kernel's programs one after the other. Tensors become pointers; constants are given by their place.

    Args:
        kernel: decorated by `gluon.jit`; so are the functions that it calls, or by `triton.jit` if they take scalars.
        grid: how many programs.
        args: tensors, `PagePointers`, numbers.
        stands: by the addresses of tensors that the kernel before writes, what stands there until that one has ended.

    Returns:
        The programs that have waited for the kernel before.
    """
    waited = set()
    for program in itertools.product(*map(range, grid)):
        before, barriers = Before(stands or {}), Barriers()
        language = Language(program, grid, before)
        given = [_argument(arg, before) for arg in args]
        cuda = SimpleNamespace(gdc_wait=before.wait, gdc_launch_dependents=lambda: None)
        copies = AsyncCopy()
        patched: dict[str, Any] = {"gl": language, "async_copy": copies, "mbarrier": barriers}
        patched |= {"copy_values": copies.copy_values, "copy_box": barriers.copy_box, "group_barrier": lambda: None}
        language.extra = SimpleNamespace(cuda=cuda)
        patched["tl"] = language
        patched |= {
            name: getattr(language, name)
            for name in ("mma_v2", "warpgroup_mma", "warpgroup_mma_wait", "fence_async_shared")
        }
        _within(kernel.fn, patched, {})(*given)
        if before.some_waited:
            waited.add(program)
    return waited


def _within(fn: FunctionType, patched: dict[str, Any], scopes: dict[int, dict[str, Any]]) -> FunctionType:
    """A function whose module, and those that it takes functions from, know other things by the patched names."""
    known = fn.__globals__
    if id(known) not in scopes:
        here = scopes[id(known)] = known | patched
        for name, value in known.items():
            if isinstance(value, (JITFunction, InterpretedFunction)):
                here[name] = _within(value.fn, patched, scopes)
            elif hasattr(value, "value") and name.isupper():
                here[name] = value.value
    return FunctionType(fn.__code__, scopes[id(known)], fn.__name__, fn.__defaults__, fn.__closure__)


def _argument(arg: Any, before: Before) -> Any:
    if isinstance(arg, PagePointers):
        codes, scales = Pointer(arg.codes, before), Pointer(arg.scales, before)
        return PagePointers(codes, scales, arg.kind.value, arg.group.value)
    if isinstance(arg, TensorDescriptor):
        return Described(arg, before)
    return Pointer(arg, before) if isinstance(arg, Tensor) else arg
