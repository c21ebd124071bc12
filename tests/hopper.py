"""Compiles kernels for a Hopper GPU on a machine that has none; nothing is run. For a process of its own.

Importing this replaces Triton's driver: launches then take CPU tensors, compile, and do nothing.
"""

import re
import subprocess
from tempfile import NamedTemporaryFile
from typing import Any

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from specdec.kernels.formats import FORMATS, SCALE_DTYPE, Pages, QuantizedPages
from specdec.kernels.gpu import attention, linear, tma
from specdec.kernels.slabs import to_slabs
from specdec.kernels.work import make_work, max_block, uniform_work

COMPILED: list[tuple[str, dict[str, Any]]] = []
"""Name of each kernel that was launched, and what was made of it: "ttir" (none in Gluon), "ttgir", "ptx", "cubin";
"shared", the bytes of shared memory that a program takes; and "capability", what it was made for."""
VARIANTS: dict[str, set[str]] = {}
"""By file and name of each kernel that was launched, the specializations that were compiled."""


class _Driver:
    """A GPU of compute capability 9.0, or of another one."""

    capability = 90

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


_launch = JITFunction.run


def _compile(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
    compiled = _launch(kernel, *args, grid=grid, warmup=True, **options)
    shared, capability = compiled.metadata.shared, compiled.metadata.target.arch
    COMPILED.append((kernel.__name__, {**compiled.asm, "shared": shared, "capability": capability}))
    VARIANTS.setdefault(f"{kernel.fn.__module__.split('.')[-1]}.{kernel.__name__}", set()).add(compiled.hash)
    return compiled


driver.set_active(_Driver())
JITFunction.run = _compile


def pretend(capability: int, room: int) -> None:
    """Compile for another GPU from now on, whose programs may take so many bytes of shared memory.

    Products, prompts' attention and that of chains and trees in Triton.
    """
    _Driver.capability = capability
    linear.shared_memory = lambda device: room
    for module in (linear, attention):
        for kernel in vars(module).values():
            if isinstance(kernel, JITFunction):
                kernel.device_caches.clear()  # which remember the GPU that they were first compiled for


def assembly(made: dict[str, Any]) -> str:
    """The machine code, an instruction a line; what Triton shows of it ends at 64 KiB."""
    return _of_cubin(made, "-sass")


def registers(made: dict[str, Any]) -> tuple[int, int]:
    """How many registers a thread has, and the bytes of memory that hold what found none."""
    [(count, stack)] = re.findall(r"REG:(\d+) STACK:(\d+)", _of_cubin(made, "-res-usage"))
    return int(count), int(stack)


def _of_cubin(made: dict[str, Any], option: str) -> str:
    """What is shown of a kernel by this option of cuobjdump."""
    with NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made["cubin"])
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, option, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def warnings(made: dict[str, Any]) -> list[str]:
    """What the assembler says of lost performance."""
    with NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(made["ptx"])
        file.flush()
        command = [triton.knobs.nvidia.ptxas.path, "-v", "--gpu-name=sm_90a", "-o", "/dev/null", file.name]
        shown = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    return [line for line in shown.splitlines() if "Performance Loss" in line]


def may_end_unwaited(ptx: str) -> bool:
    """Whether a way through the program, whatever its conditions are, has no wait for the kernels in front."""
    blocks: dict[str, list[str]] = {"": []}
    at = ""
    for line in map(str.strip, ptx[ptx.index(".entry") :].splitlines()):
        if label := re.fullmatch(r"([$]\w+):.*", line):
            blocks[at].append(f"bra {label[1]};")
            at = label[1]
            blocks[at] = []
        else:
            blocks[at].append(line)
    seen, open_blocks = set(), [""]
    while open_blocks:
        at = open_blocks.pop()
        if at in seen:
            continue
        seen.add(at)
        for line in blocks[at]:
            if "griddepcontrol.wait" in line:
                break
            if line == "ret;":
                return True
            if jump := re.fullmatch(r"(@!?%p\d+\s+)?bra(?:[.]uni)?\s+([$]\w+);", line):
                open_blocks.append(jump[2])
                if not jump[1]:
                    break
    return False


def multiply(
    out: int, k: int, *, rows: int = 1, gated: bool = False, by_tma: bool = False, slabs: bool = False
) -> None:
    """Compile the product of so many rows with a bf16 matrix [out, k], or with two, as a captured step has it."""
    early = _Driver.capability >= 90
    linear.overlap = tma.overlap = lambda device: {"PDL": early, "launch_pdl": early}
    linear.takes_tma = lambda x, weight: by_tma
    x, w = torch.zeros(rows, k, dtype=torch.bfloat16), torch.zeros(out * (1 + gated), k, dtype=torch.bfloat16)
    if slabs:
        w = to_slabs(w)
    if gated:
        linear.gated_linear(x, w, None, "silu")
    else:
        linear.linear(x, w)


def attend(
    pages_format: str | None,
    num_nodes: int,
    *,
    chains: bool,
    dtype: torch.dtype = torch.bfloat16,
    codes: str | None = None,
    first: int = 1,
    dim: int = 128,
    context: int = 1024,
    merged_by_heads: bool = False,
) -> None:
    """Compile the attention kernels of a captured step: 32 heads, 8 of them keys' and values', of `dim` values.

    `codes` is the kernel in Gluon that reads contexts, if one does: SINGLE, DIRECT, WIDE, PAIR, NATIVE or
    NATIVE_NARROW; `first` is how many splits its first part takes; `context` is how many keys a sequence has at most
    before its nodes; `merged_by_heads` says that a program merges the parts of several heads.
    """
    heads, kv_heads = 32, 8
    pages = pages_of(pages_format, kv_heads, dim, dtype)
    rows = torch.zeros(num_nodes, dtype=torch.int64)
    group, table = heads // kv_heads, torch.zeros(1, 1, dtype=torch.int32)
    work = uniform_work(1, num_nodes, table, rows[:1].int(), rows, rows, group, context, chains)
    for name in ("SINGLE", "DIRECT", "WIDE", "PAIR", "NATIVE", "NATIVE_NARROW"):
        getattr(attention, name).takes = lambda *args, takes=name == codes: takes
        getattr(attention, name).first = lambda *args: first
    attention.takes_heads = lambda q: merged_by_heads
    attention.tree_attention(torch.zeros(num_nodes, heads, dim, dtype=dtype), pages[0], pages[1], work, scale=0.1)


def attend_prompt(pages_format: str | None, num_rows: int, *, dtype: torch.dtype, dim: int = 128) -> None:
    """Compile the attention of a prompt's rows, with heads as in `attend`."""
    pages, at = pages_of(pages_format, 8, dim, dtype), torch.arange(num_rows)
    table = torch.zeros(1, num_rows, dtype=torch.int64)
    work = make_work((0, num_rows), (num_rows,), (0,), table, at, at * 0, 4, max_block(dim))
    attention.tree_attention(torch.zeros(num_rows, 32, dim, dtype=dtype), pages[0], pages[1], work, scale=0.1)


def pages_of(pages_format: str | None, kv_heads: int, dim: int, dtype: torch.dtype = torch.bfloat16) -> list[Pages]:
    """Keys' and values' pages of one block, native or quantized."""
    if pages_format is None:
        return [torch.zeros(1, 16, kv_heads, dim, dtype=dtype) for _ in "kv"]
    how = FORMATS[pages_format].of_head_dim(dim)
    return [
        QuantizedPages(
            torch.zeros(1, 16, kv_heads, how.code_width(dim), dtype=torch.uint8),
            torch.zeros(1, 16, kv_heads, how.num_scales(dim), dtype=SCALE_DTYPE),
            how,
        )
        for _ in "kv"
    ]


@triton.jit
def bounds_alone(out_ptr, n):
    """What Triton 3.6 gets wrong: `low` is what it was before the loop, at each turn."""
    low, total = n // 7, 0
    for i in range(0, n):
        high = i * 2
        for j in range(low, high):
            total += j
        low = tl.maximum(low, high)
    tl.store(out_ptr, total)


def dropped(ttir: str) -> list[str]:
    """Values that a loop carries on and nothing but bounds of loops within it reads: Triton 3.6 drops them."""
    lines, found = ttir.splitlines(), []
    for at, line in enumerate(lines):
        carried = re.search(r"scf.for .* iter_args\((.*?)\) ->", line)
        if carried:
            indent = line[: len(line) - len(line.lstrip())]
            end = next(i for i in range(at + 1, len(lines)) if lines[i].startswith(indent + "}"))
            names = re.findall(r"(%\S+) =", carried[1])
            found += [name for name in names if _bounds_alone_read(name, lines[at + 1 : end], indent + "  ")]
    return found


def _bounds_alone_read(name: str, body: list[str], indent: str) -> bool:
    """Whether bounds of loops read a value, or what is made of it, and all else only hands it to the next turn."""
    bounds, seen, left = 0, set(), [name]
    while left:
        value = left.pop()
        seen.add(value)
        uses = [line for line in body if re.search(rf"{re.escape(value)}(?![\w#])", line.partition(" = ")[2] or line)]
        for line in uses:
            result = re.match(r"\s*(%[^\s:]+)(:\d+)? = ", line)
            begun = line.partition("iter_args")
            if "scf.for" in line and not re.search(rf"= {re.escape(value)}[,)]", begun[2]):
                bounds += 1
            elif result and "scf." not in line:
                left += [result[1]] if result[1] not in seen else []
            elif not line.startswith(f"{indent}scf.yield"):
                return False
    return bounds > 0
