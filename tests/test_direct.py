"""Kernels in Gluon: the states of splits, what becomes of them, and the assembly that makes values of codes."""

import itertools
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from specdec.kernels.formats import (
    FORMATS,
    SCALE_DTYPE,
    KVFormat,
    Pages,
    QuantizedPages,
    dequantize,
    load,
    quantize,
    store,
)
from specdec.kernels.gpu import attention, hopper, pair
from specdec.kernels.gpu.codes import HEAD_DIM
from specdec.kernels.gpu.direct import DIRECT
from specdec.kernels.gpu.hopper import KEY_TILE, HopperKernel
from specdec.kernels.gpu.native import NATIVE, NATIVE_NARROW
from specdec.kernels.gpu.online import (
    BY_CONTEXT,
    LARGE_SPLIT,
    NUM_SMALL,
    SMALL_SPLIT,
    first_part,
    num_parts,
    num_splits,
)
from specdec.kernels.gpu.pages import pointers
from specdec.kernels.gpu.pair import PAIR
from specdec.kernels.gpu.single import SINGLE
from specdec.kernels.gpu.unpack import pairs_assembly, scales_assembly, word_assembly
from specdec.kernels.gpu.wide import WIDE
from specdec.kernels.work import AttentionWork, make_work, uniform_work
from tests import gluon_torch, ptx
from tests.kernels import DEVICE, ON_GPU
from tests.test_formats import on_hopper

DIM, TILE = HEAD_DIM.value, KEY_TILE.value
GROUP, SCALE = 4, DIM**-0.5
WAYS: dict[str, HopperKernel] = {
    "single": SINGLE,
    "direct": DIRECT,
    "wide": WIDE,
    "pair": PAIR,
    "native": NATIVE,
    "narrow": NATIVE_NARROW,
}
MERGED = ("wide", "native", "narrow")
"""They can take many splits together, or one; of `pair` that is found by each context."""
NARROW = [
    ("int8", 64, 16, 2, 3),
    ("fp8", None, 32, 2, 4),
    ("fp8_e4m3", None, 64, 3, 3),
    ("int8", 128, 16, 1, 4),
    ("int8", 8, 16, 3, 4),
    ("int4", 64, 16, 2, 3),
    ("int4", 128, 32, 1, 4),
    ("int4", 32, 64, 3, 4),
]
WIDER = [
    ("int8", 64, 16, 2, 16),
    ("fp8", None, 32, 2, 16),
    ("fp8_e4m3", None, 64, 3, 13),
    ("int8", 128, 16, 1, 16),
    ("int8", 8, 16, 3, 9),
    ("int4", 64, 16, 2, 16),
    ("int4", 128, 32, 1, 13),
    ("int4", 32, 64, 3, 16),
    ("int8", 64, 16, 1, 37),  # three tiles a sequence
]
SHAPES = {
    "single": NARROW,
    "direct": NARROW,
    "wide": WIDER,
    "pair": [("native", 128, 16, 2, 32), ("native", 64, 32, 1, 23), ("native", 128, 64, 1, 55)],
    "native": [("native", 128, 16, 2, 16), ("native", 64, 32, 1, 7), ("native", 128, 64, 1, 37)],
    "narrow": [("native", 128, 16, 2, 3), ("native", 128, 32, 3, 2), ("native", 64, 64, 1, 4)],
}
"""Format, group size (native pages: size of a head), block size, key heads, nodes."""
Shape = tuple[str, int | None, int, int, int]
CASES = [(name, shape) for name in WAYS for shape in SHAPES[name]]


def first_of(name: str) -> int:
    """How many splits the first part takes where a kernel takes as few as it can."""
    return BY_CONTEXT if name == "pair" else 1


@dataclass(frozen=True)
class Batch:
    """Sequences that are to decode so many nodes each, with the slots [n] of each one's keys, its nodes' included."""

    q: Tensor
    pages: list[Pages]
    work: AttentionWork
    slots: list[Tensor]
    nodes: int

    def attended(self, row: int, first: int, end: int) -> tuple[Tensor, Tensor, Tensor]:
        """The state of a row's heads after some keys: maximum [H], weight [H] and weighted values [H, D]."""
        slots = self.slots[row // self.nodes][first : max(first, end)]
        k, v = (load(page, slots, torch.float16).repeat_interleave(GROUP, 1).float() for page in self.pages)
        scores = torch.einsum("hd,nhd->hn", self.q[row].float(), k) * (SCALE * 1.4426950408889634)
        m = scores.amax(1) if len(k) else torch.full((len(scores),), -torch.inf, device=scores.device)
        p = torch.exp2(scores - m.nan_to_num(neginf=0)[:, None])
        return m, p.sum(1), torch.einsum("hn,nhd->hd", p, v)


def make_batch(shape: Shape, contexts: list[int], *, chains: bool) -> Batch:
    """Random queries, and values of many sizes; slots that aren't in use hold all bits, and scales that are NaN."""
    kind, group, block_size, kv_heads, nodes = shape
    lengths = [n + nodes for n in contexts]
    counts = [-(-n // block_size) for n in lengths]
    tables = torch.randperm(sum(counts)).split(counts)
    slots = [
        (blocks[:, None] * block_size + torch.arange(block_size)).flatten()[:n].to(DEVICE)
        for blocks, n in zip(tables, lengths, strict=True)
    ]
    size, used, pages = (sum(counts), block_size, kv_heads), torch.cat(slots), []
    dim, dtype = (group or DIM, torch.float16) if kind == "native" else (DIM, torch.bfloat16)
    for _ in range(2):
        pages.append(unused_pages(kind, group, size))
        store(pages[-1], used, (torch.randn(len(used), kv_heads, dim) * torch.randn(len(used), 1, 1).exp()).to(DEVICE))
    table = torch.nn.utils.rnn.pad_sequence(list(tables), batch_first=True, padding_value=2**30).int().to(DEVICE)
    ancestors = torch.tensor([(2 << i) - 1 for i in range(nodes)] * len(contexts), device=DEVICE)
    ancestors[-1] = 0  # padding
    positions = torch.tensor([n + i for n in contexts for i in range(nodes)], device=DEVICE)
    lens = torch.tensor(contexts, dtype=torch.int32, device=DEVICE)
    sizes = GROUP, max(contexts)
    work = uniform_work(len(contexts), nodes, table, lens, positions, ancestors, *sizes, chains)
    return Batch(torch.randn(len(positions), kv_heads * GROUP, dim).to(DEVICE, dtype), pages, work, slots, nodes)


def unused_pages(kind: str, group: int | None, size: tuple[int, int, int]) -> Pages:
    """Pages of so many blocks, slots and heads, none of which hold numbers."""
    if kind == "native":
        return torch.full((*size, group or DIM), torch.nan, dtype=torch.float16, device=DEVICE)
    how = FORMATS[kind].of_head_dim(DIM, group)
    codes = torch.full((*size, how.code_width(DIM)), 0xFF, dtype=torch.uint8, device=DEVICE)
    scales = torch.full((*size, how.num_scales(DIM)), torch.nan, dtype=SCALE_DTYPE, device=DEVICE)
    return QuantizedPages(codes, scales, how)


@pytest.mark.skipif(ON_GPU, reason="the next test is for it")
@pytest.mark.parametrize("chains", [True, False])
@pytest.mark.parametrize(
    ("name", "shape", "first"),
    [
        *((*case, first_of(case[0])) for case in CASES),
        *((name, SHAPES[name][i], 3) for name in MERGED for i in (0, 2, -1)),
    ],
    ids=str,
)
def test_states_of_parts(name: str, shape: Shape, first: int, chains: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    contexts, way = [200, 63, 0, 128, 450, 700], WAYS[name]
    b = make_batch(shape, contexts, chains=chains)
    _, _, block_size, kv_heads, nodes = shape
    parts = num_parts(max(contexts) + nodes, first, 1 if chains else 2)
    m, total = (torch.full((parts, len(b.q), kv_heads * GROUP), torch.nan) for _ in range(2))
    acc = torch.full((*m.shape, b.q.shape[2]), torch.nan)
    sizes = {"H": kv_heads * GROUP, "G": kv_heads, "D": b.q.shape[2], "BLOCK_SIZE": block_size}
    sizes |= {"SMALL": SMALL_SPLIT // TILE, "NUM": NUM_SMALL, "LARGE": LARGE_SPLIT // TILE, "PDL": False}
    monkeypatch.setattr(way, "kernel", InTorch(way.kernel))
    pages = [pointers(side) for side in b.pages]
    way.attend(b.q, pages, (m, total, acc), b.work, SCALE, parts, first, sizes)
    assert (way.min_rows or way.rows) <= b.work.tree_block <= way.rows and way.kernel.programs
    checked = 0
    for row in range(len(b.q) - 1):  # nobody reads the state of the padding behind them
        sequence, node = divmod(row, nodes)
        context = contexts[sequence]
        seen = context + node + 1 if chains else context // TILE * TILE
        merged = first or first_part(context, way.programs(b.work, kv_heads), b.q.shape[2])
        for part, splits in parts_of(seen, merged, chains=chains, apart=first == 1):
            at = part, row
            want_m, want_total, want_acc = b.attended(
                row, splits.start * SMALL_SPLIT, min(splits.stop * SMALL_SPLIT, seen)
            )
            torch.testing.assert_close(m[at], want_m, rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(total[at], want_total, rtol=1e-2, atol=0)
            weight = want_total.clamp(min=1)[:, None]
            torch.testing.assert_close(acc[at] / weight, want_acc / weight, rtol=1e-2, atol=1e-2)
            checked += 1
    assert checked >= 20


@pytest.mark.skipif(ON_GPU, reason="on a GPU the kernel before may have ended by chance")
@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize("chains", [True, False])
@pytest.mark.parametrize("name", WAYS)
def test_programs_wait_for_what_the_kernel_before_writes(
    name: str, chains: bool, early: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In captured steps queries and the nodes' own keys; else, where a batch was just divided, all of it."""
    way, shape, contexts = WAYS[name], SHAPES[name][0], [200, 63, 300]
    b = make_batch(shape, contexts, chains=chains)
    late = [b.q, *(part for side in b.pages for part in parts_in(side))]
    stands = {x.data_ptr(): torch.full_like(x, torch.nan if x.is_floating_point() else 0xFF) for x in late}
    if early:
        for pages in (part for side in b.pages for part in parts_in(side)):
            flat, seen = (x.view(-1, *x.shape[2:]) for x in (pages, stands[pages.data_ptr()]))
            for slots, context in zip(b.slots, contexts, strict=True):
                seen[slots[:context]] = flat[slots[:context]]
    else:
        tables = (b.work.tree_tiles, b.work.block_table, b.work.context_lens, b.work.positions, b.work.ancestors)
        stands |= {x.data_ptr(): torch.zeros_like(x) for x in tables}
    work = b.work if early else replace(b.work, early=False)
    heads, dim = b.q.shape[1:]
    sizes = {"H": heads, "G": heads // GROUP, "D": dim, "BLOCK_SIZE": shape[2], "SMALL": SMALL_SPLIT // TILE}
    sizes |= {"NUM": NUM_SMALL, "LARGE": LARGE_SPLIT // TILE, "PDL": True}
    first = first_of(name)
    kernel, parts, found = way.kernel, num_parts(max(contexts) + shape[4], first, 2), []
    for hidden in ({}, stands):
        states = [torch.zeros(parts, len(b.q), heads, *size) for size in ((), (), (dim,))]
        run = InTorch(kernel, hidden)
        monkeypatch.setattr(way, "kernel", run)
        way.attend(b.q, [pointers(side) for side in b.pages], states, work, SCALE, parts, first, sizes)
        found.append(states)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert {program[:2] for program in run.waited} == {program[:2] for program in run.programs}, "of each tile and head"
    assert (run.waited < run.programs) == (early and name != "pair"), "some have nothing to do"


@pytest.mark.skipif(ON_GPU, reason="bits are compared there")
@pytest.mark.parametrize("chains", [True, False])
@pytest.mark.parametrize("programs", [1, 2, 3, 9])
def test_splits_are_shared_by_any_number_of_programs(
    programs: int, chains: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The states of long contexts are those that the kernel with a program for each part leaves."""
    contexts, nodes, found = [4096 + 127, 2048, 2047, 3000, 40], 17, []
    b = make_batch(("native", 64, 16, 1, nodes), contexts, chains=chains)
    b.work.ancestors[nodes - 1] = 0  # all of a second tile
    b.work.ancestors[nodes : nodes + 16] = 0  # and of a first one
    real = (b.work.ancestors != 0).nonzero()[:, 0]
    parts = num_parts(max(contexts) + nodes, BY_CONTEXT, 1 if chains else 2)
    sizes = {"H": GROUP, "G": 1, "D": 64, "BLOCK_SIZE": 16, "SMALL": SMALL_SPLIT // TILE, "NUM": NUM_SMALL}
    sizes |= {"LARGE": LARGE_SPLIT // TILE, "PDL": False}
    monkeypatch.setattr(pair, "multiprocessors", lambda device: programs * len(contexts))
    merged = [first_part(context, PAIR.programs(b.work, 1), 64) for context in contexts]
    for way, first in ((PAIR, BY_CONTEXT), *((NATIVE, max(2, first)) for first in merged)):
        monkeypatch.setattr(way, "kernel", way.kernel if isinstance(way.kernel, InTorch) else InTorch(way.kernel))
        states = [torch.full((parts + 1, len(b.q), GROUP, *size), torch.nan) for size in ((), (), (64,))]
        way.attend(b.q, [pointers(side) for side in b.pages], states, b.work, SCALE, parts, first, sizes)
        found.append(states)
    for sequence, want in enumerate(found[1:]):
        rows = real[real // nodes == sequence]
        if merged[sequence] == 1:  # of which the other kernel has no parts like these
            continue
        for x, y in zip(found[0], want, strict=True):
            torch.testing.assert_close(x[:, rows], y[:, rows], rtol=1e-6, atol=1e-6, equal_nan=True)
    assert sum(first > 1 for first in merged) >= 4


@pytest.mark.parametrize("programs", [1, 2, 3, 4, 8, 16])
def test_the_first_part_is_the_largest_that_no_other_program_ends_before(programs: int) -> None:
    """Of tiles that are shared as whole splits: its program merges them, and none waits for it."""
    for context in (0, 63, 64, 1000, 2047, 2048, 2112, 3000, 4096, 4160, 6144, 8192, 12288, 20000, 32768, 131072):
        tiles, first = context // TILE, first_part(context, programs, DIM)
        if programs == 1:
            assert first > num_splits(context + 64)
            continue
        unit = 2 if tiles <= 32 else 16

        def others(mine: int, tiles: int = tiles, unit: int = unit) -> int:
            units = -(-max(0, tiles - mine) // unit)
            return -(-units // (programs - 1)) * unit

        most = max((n for n in range(unit, tiles + unit, unit) if others(n) >= n), default=unit)
        assert first == num_splits(most * TILE), f"{context} tokens"
    assert [first_part(n, 2, DIM) for n in (2048, 4096, 8192)] == [8, 16, 18]
    assert [first_part(n, 8, DIM) for n in (2048, 8192, 32768)] == [2, 8, 18]


def test_tiles_of_nodes_come_in_pairs() -> None:
    def pairs(*nodes: int, group: int = 4, causal: int = 0) -> bool:
        ends = [0, *itertools.accumulate(n + causal for n in nodes)]
        rows, table = torch.zeros(ends[-1], dtype=torch.int64), torch.zeros(len(nodes), 1, dtype=torch.int64)
        return make_work(ends, [causal] * len(nodes), [64] * len(nodes), table, rows, rows, group, 128).pairs

    assert pairs(32) and pairs(17, 32, 64) and pairs(64, causal=5) and pairs(9, group=8) and pairs(32, 0, causal=5)
    assert not (pairs(16) or pairs(33) or pairs(32, 16) or pairs(0, causal=5) or pairs(64, group=1))
    for nodes, group, found in (32, 4, True), (48, 4, False), (48, 3, False), (42, 3, True), (1, 4, False):
        rows, table = torch.zeros(2 * nodes, dtype=torch.int64), torch.zeros(2, 1, dtype=torch.int32)
        assert uniform_work(2, nodes, table, table[:, 0], rows, rows, group, 64, True).pairs == found


def parts_in(pages: Pages) -> list[Tensor]:
    """The tensors that pages consist of."""
    return [pages] if isinstance(pages, Tensor) else [pages.codes, pages.scales]


def parts_of(seen: int, first: int, *, chains: bool, apart: bool) -> list[tuple[int, range]]:
    """Where the states of so many keys are, and the small splits that each is of; a tree's last one is alone.

    Where all splits are `apart`, a part is as far behind as its split.
    """
    if chains:
        count = num_splits(seen)
        whole = count
    else:
        whole = seen // SMALL_SPLIT
        count = whole + 1
    found = [(0, range(min(first, whole)))] if whole else []
    found += [(split - first + 1, range(split, split + 1)) for split in range(first, whole)]
    return found if chains else [*found, (whole if apart else max(1, count - first), range(whole, count))]


def only(way: HopperKernel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of these kernels, let one be taken, and always where it can be."""
    for other in WAYS.values():
        if other is not way:
            monkeypatch.setattr(other, "takes", lambda *args: False)
    monkeypatch.setattr(way, "min_context", 0)
    monkeypatch.setattr(way, "min_programs", 0)
    monkeypatch.setattr(pair, "multiprocessors", lambda device: 1)


@pytest.mark.parametrize(
    ("sequences", "nodes", "context", "name"),
    [
        (1, 1, 512, None), (1, 1, 1024, "direct"), (8, 4, 8192, "direct"), (32, 1, 1024, "single"),
        (8, 1, 32768, "single"), (1, 4, 131072, "single"), (1, 16, 2048, None), (32, 16, 8192, "wide"),
        (1, 5, 8192, None), (1, 16, 4096, "wide"), (8, 16, 2048, None), (32, 16, 1024, "wide"), (1, 64, 8192, "wide"),
    ],
)  # fmt: skip
def test_which_kernel_reads_a_batch(
    sequences: int, nodes: int, context: int, name: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hopper, "on_hopper", lambda device: True)
    table, rows = torch.zeros(sequences, 1, dtype=torch.int32), torch.zeros(sequences * nodes, dtype=torch.int64)
    work = uniform_work(sequences, nodes, table, table[:, 0], rows, rows, GROUP, context, True)
    pages = pointers(one_block("int8"))
    q, sizes = torch.zeros(1, 32, DIM, dtype=torch.bfloat16), {"G": 8, "SOFTCAP": False, "WINDOW": 0}
    found = [name for name, way in WAYS.items() if way.takes(q, pages, work, sizes)]
    assert found[:1] == ([] if name is None else [name])
    for other in ({"SOFTCAP": True}, {"WINDOW": 512}):
        assert not any(way.takes(q, pages, work, sizes | other) for way in WAYS.values())
    assert not any(
        way.takes(q[..., :64], pages, work, sizes) or way.takes(q.float(), pages, work, sizes) for way in WAYS.values()
    )


@pytest.mark.parametrize(
    ("sequences", "nodes", "context", "name", "first"),
    [
        (1, 1, 512, "narrow", 1), (32, 4, 8192, "narrow", 1), (64, 1, 512, None, None), (1, 8, 1024, "native", 1),
        (8, 16, 1024, "native", 1), (16, 16, 1024, "native", 16), (8, 16, 8192, "native", 16),
        (1, 64, 2048, "native", 1), (1, 64, 8192, "pair", 0), (1, 64, 32768, "pair", 0), (1, 48, 32768, "native", 1),
        (2, 64, 2048, "pair", 0), (2, 64, 8192, "pair", 0), (4, 64, 1024, "pair", 0), (4, 64, 2048, "pair", 0),
        (4, 64, 8192, "pair", 0), (8, 64, 1024, "pair", 0), (8, 64, 4096, "pair", 0), (16, 64, 2048, "pair", 0),
        (8, 8, 32768, "native", 1), (1, 32, 2048, "native", 1), (1, 32, 32768, "pair", 0), (2, 32, 32768, "pair", 0),
        (4, 32, 1024, "native", 1), (4, 32, 2048, "pair", 0), (8, 48, 16384, "native", 16), (8, 32, 4096, "pair", 0),
        (16, 32, 1024, "pair", 0),
    ],
)  # fmt: skip
def test_which_kernel_reads_native_pages(
    sequences: int, nodes: int, context: int, name: str | None, first: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    table, rows = torch.zeros(sequences, 1, dtype=torch.int32), torch.zeros(sequences * nodes, dtype=torch.int64)
    work = uniform_work(sequences, nodes, table, table[:, 0], rows, rows, GROUP, context, True)
    pages, sizes = pointers(torch.zeros(1, 16, 8, DIM)), {"G": 8, "SOFTCAP": False, "WINDOW": 0}
    for dim in (64, DIM, 80):
        q = torch.zeros(1, 32, dim, dtype=torch.bfloat16)
        assert not any(way.takes(q, pages, work, sizes) for way in WAYS.values()), "no Hopper GPU"
        with monkeypatch.context() as there:
            there.setattr(hopper, "on_hopper", lambda device: True)
            found = [(name, way.first(work, 8)) for name, way in WAYS.items() if way.takes(q, pages, work, sizes)]
        assert found[:1] == ([] if name is None or dim == 80 else [(name, first)])


def test_many_nodes_share_keys_sooner_where_contexts_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """A captured step's longest context is a bound, and its contexts may be much shorter."""
    monkeypatch.setattr(hopper, "on_hopper", lambda device: True)
    table, rows = torch.zeros(1, 1, dtype=torch.int32), torch.zeros(64, dtype=torch.int64)
    pages, sizes = pointers(torch.zeros(1, 16, 8, DIM)), {"G": 8, "SOFTCAP": False, "WINDOW": 0}
    q, taken = torch.zeros(1, 32, DIM, dtype=torch.bfloat16), []
    for context in (3008, 3072, 4096):
        bound = uniform_work(1, 64, table, table[:, 0], rows, rows, GROUP, context, True)
        for work in (bound, replace(bound, early=False)):
            taken.append(PAIR.takes(q, pages, work, sizes))
    assert taken == [False, False, False, True, True, True]


def one_block(kind: str) -> QuantizedPages:
    """Pages of one block."""
    how = FORMATS[kind].of_head_dim(DIM)
    scales = torch.zeros(1, 16, 8, how.num_scales(DIM), dtype=SCALE_DTYPE)
    return QuantizedPages(torch.zeros(1, 16, 8, how.code_width(DIM), dtype=torch.uint8), scales, how)


@pytest.mark.gpu
@pytest.mark.parametrize("chains", [True, False])
@pytest.mark.parametrize(("name", "shape"), CASES, ids=str)
def test_bits_are_those_of_the_kernels_that_keep_values(
    name: str, shape: Shape, chains: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    b = make_batch(shape, [200, 63, 0, 128, 5000, 2048, 12300], chains=chains)
    with monkeypatch.context() as none:
        for way in WAYS.values():
            none.setattr(way, "takes", lambda *args: False)
        want = attention.tree_attention(b.q, *b.pages, b.work, scale=SCALE)
    way, launched = WAYS[name], []
    only(way, monkeypatch)
    monkeypatch.setattr(way, "takes", lambda *args: True)
    monkeypatch.setattr(way, "attend", lambda *args, attend=way.attend: launched.append(attend(*args)))
    for splits, count in ways_to_share(name, len(b.work.tree_tiles)):
        monkeypatch.setattr(way, "first", lambda *args, splits=splits: splits)
        monkeypatch.setattr(pair, "multiprocessors", lambda device, count=count: count)
        assert torch.equal(attention.tree_attention(b.q, *b.pages, b.work, scale=SCALE), want)
    assert len(launched) == len(ways_to_share(name, 1)), "all were of the same kernel"


def ways_to_share(name: str, num_tiles: int) -> list[tuple[int, int]]:
    """How many splits are the first part, and by how many multiprocessors tiles of nodes share a context."""
    if name == "pair":
        return [(BY_CONTEXT, count) for count in (1, 2 * num_tiles, 5 * num_tiles, 1 << 20)]
    return [(1, 1), (3 if name in MERGED else 1, 1), (NUM_SMALL if name in MERGED else 1, 1)]


@pytest.mark.skipif(ON_GPU, reason="the test before is for it")
@pytest.mark.parametrize("chains", [True, False])
@pytest.mark.parametrize(
    ("name", "nodes"), [("single", 3), ("direct", 3), ("wide", 11), ("pair", 20), ("native", 11), ("narrow", 3)]
)
@pytest.mark.parametrize("contexts", [[200, 63, 321], [1100, 2100, 0]], ids=str)
def test_splits_that_are_merged(
    name: str, nodes: int, contexts: list[int], chains: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = "native" if name in ("pair", "native", "narrow") else "int8"
    b = make_batch((kind, 64, 16, 2, nodes), contexts, chains=chains)
    way = WAYS[name]
    only(way, monkeypatch)
    monkeypatch.setattr(way, "takes", lambda *args: True)
    monkeypatch.setattr(way, "kernel", InTorch(way.kernel))
    for splits, count in ways_to_share(name, len(b.work.tree_tiles))[:3]:
        monkeypatch.setattr(way, "first", lambda *args, splits=splits: splits)
        monkeypatch.setattr(pair, "multiprocessors", lambda device, count=count: count)
        got = attention.tree_attention(b.q, *b.pages, b.work, scale=SCALE)
        for row in range(len(b.q) - 1):
            _, total, acc = b.attended(row, 0, int(b.work.positions[row]) + 1)
            torch.testing.assert_close(got[row].float(), acc / total[:, None], rtol=1e-2, atol=1e-2)
        assert not got[-1].any(), "padding"
    assert way.kernel.programs


class InTorch:
    """A kernel, run by torch; `stands` is as for `gluon_torch.launch`.

    `programs` are the last launch's, and `waited` those of them that waited for the kernel before.
    """

    def __init__(self, kernel: Any, stands: dict[int, Tensor] | None = None) -> None:
        self._kernel, self._stands = kernel, stands
        self.programs: set[tuple[int, ...]] = set()
        self.waited: set[tuple[int, ...]] = set()

    def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., None]:
        self.programs = set(itertools.product(*map(range, grid)))
        return partial(self._run, grid)

    def _run(self, grid: tuple[int, int, int], *args: Any, **options: Any) -> None:
        self.waited = gluon_torch.launch(self._kernel, grid, *args, stands=self._stands)


def test_shared_memory_holds_codes_and_no_values() -> None:
    """That operands are in place already, the compiler says (`assert_trivial`); queries and weights are kept, too."""
    [single, narrow, wider, merged] = on_hopper("""
from tests.hopper import COMPILED, attend
for nodes, name, first in (1, "single", 1), (1, "direct", 1), (16, "wide", 1), (16, "wide", 16):
    COMPILED.clear()
    attend("int8", nodes, chains=True, codes=name.upper(), first=first)
    print(*((str(made["ttgir"]), made["ptx"]) for kernel, made in COMPILED if kernel == name + "_kernel"))
""")
    codes = {"tensor<64x32xi32", "tensor<64x1xi32"}
    loaded, stored, used = of_shared_memory(single[0])
    assert loaded == codes and not stored and not used
    loaded, stored, used = of_shared_memory(narrow[0])
    assert loaded == codes | {"tensor<16x128xf16", "tensor<16x64xf16"}
    assert stored == {"tensor<16x64xf16"} and not used
    loaded, stored, used = of_shared_memory(wider[0])
    assert loaded == codes | {"tensor<64x2xf32"}, "two numbers of each row"
    assert stored == {"tensor<64x64xf16", "tensor<64x2xf32"}
    keys, values, weights, ones = "tensor<64x128xf16", "tensor<128x64xf16", "memdesc<64x64xf16", "memdesc<64x8xf16"
    assert used == {(keys, "memdesc<128x64xf16"), (values, weights), (weights, ones)}
    states = {"tensor<64x2xf32", "tensor<128x64xf32"}
    loaded, stored, used_alike = of_shared_memory(merged[0])
    assert used_alike == used and (loaded, stored) == (codes | states, states | {"tensor<64x64xf16"})
    for _, ptx_text in (single, narrow, wider, merged):
        copies = set(re.findall(r"cp.async\S+ .*, (0x\w+), ", ptx_text))
        assert copies == {"0x10", "0x4"}, "sixteen bytes of codes at once, and words of scales"


@pytest.mark.parametrize(
    ("way", "nodes", "dim", "context", "programs"),
    [
        ("NATIVE", 16, 128, 1024, (2, 3)),  # few programs: of chains, two, so that they are spread
        ("NATIVE", 16, 128, 32768, (3, 3)),
        ("NATIVE", 16, 64, 32768, (3, 4)),
        ("NATIVE_NARROW", 4, 128, 1024, (3, 3)),
        ("NATIVE_NARROW", 4, 64, 1024, (4, 4)),
    ],
)
def test_programs_that_share_a_multiprocessor(
    way: str, nodes: int, dim: int, context: int, programs: tuple[int, int]
) -> None:
    """Nothing but the ring and what products take from shared memory is there, and copies are of sixteen bytes.

    Registers are enough for what a program holds, and few enough for as many programs, of chains and of trees.
    """
    kernels = on_hopper(f"""
from tests.hopper import COMPILED, attend, registers
for chains in (True, False):
    attend(None, {nodes}, chains=chains, codes="{way}", dim={dim}, context={context})
for name, made in COMPILED:
    if name == "native_kernel":
        print((str(made["ttgir"]), made["ptx"], made["shared"], registers(made)))
""")
    for most, (ttgir, ptx_text, shared, (count, stack)) in zip(programs, kernels, strict=True):
        by_memory = (228 << 10) // (shared + 1024)  # one KiB of each program's is the driver's
        by_registers = 65536 // (128 * -(-count // 8) * 8)  # eight of a thread's registers are given at once
        assert min(by_memory, by_registers) == most
        assert not stack
        loaded, stored, used = of_shared_memory(ttgir)
        copies = re.findall(r"cp.async\S+ .*, (0x\w+), (\S+);", ptx_text)
        assert {size for size, _ in copies} == {"0x10"} and not stored
        assert sum(copied == size for size, copied in copies) == dim // 8, "one loop leaves nothing out"
        assert "evict_last" in ptx_text, "states stay in the cache"
        if way == "NATIVE":
            weights, queries = "tensor<64x64xbf16", f"memdesc<64x{dim}xbf16"
            values = {(weights, "memdesc<64x8xbf16"), (weights, f"memdesc<64x{dim}xbf16")}
            assert not loaded and used == values | {(queries, f"memdesc<{dim}x64xbf16")}
        else:
            assert loaded == {f"tensor<{dim}x64xbf16", f"tensor<64x{dim}xbf16"} and not used


@pytest.mark.parametrize("dim", [128, 64])
def test_two_tiles_of_nodes_share_what_is_brought(dim: int) -> None:
    """One program fits a multiprocessor, and products take keys and values from where TMA put them.

    They run beside other work: the compiler says where it lets them wait for each other instead.
    """
    kernels = on_hopper(f"""
import re
from specdec.kernels.gpu.online import BY_CONTEXT
from tests.hopper import COMPILED, assembly, attend, registers, warnings
for chains in (True, False):
    attend(None, 64, chains=chains, codes="PAIR", first=BY_CONTEXT, dim={dim})
for name, made in COMPILED:
    if name == "pair_kernel":
        weighing = [block for block in re.split("BRA", assembly(made)) if "tnspB" in block]
        spills = [bool(re.search("LDL|STL", block)) for block in weighing]
        beside = [bool(re.search("DEPBAR.*?FMNMX.*?DEPBAR", block, re.S)) for block in weighing]
        handed = set(re.findall(r"store (\\S+) [^\\n]*ptr addrspace.3. getelementptr", made["llir"]))
        made_of = str(made["ttgir"]), made["ptx"], handed, made["shared"]
        print((*made_of, registers(made), warnings(made), spills, beside))
""")
    assert len(kernels) == 2
    for ttgir, ptx_text, handed, shared, (count, stack), said, spills, beside in kernels:
        assert handed == {"i8"}, "warps are told which part they run, and nothing else"
        assert shared <= 227 << 10 and count <= 168 and stack <= 96 and not said
        assert len(spills) == 6 and not any(spills), "a few words are in memory, but none in the loops of both groups"
        assert len(beside) == 6 and (all(beside) or (dim == 64 and sum(beside) >= 3)), (
            "maxima are found while values are multiplied"
        )
        _, _, used = of_shared_memory(ttgir)
        weights, one, values = "tensor<64x64xbf16", "memdesc<64x8xbf16", f"memdesc<64x{dim}xbf16"
        assert used == {(weights, one), (weights, values), (values, f"memdesc<{dim}x64xbf16")}
        assert "cp.async.bulk.tensor.2d" in ptx_text and not re.search(r"cp\.async\.c[ag]", ptx_text)
        assert "evict_last" in ptx_text, "states stay in the cache"


def test_registers_of_narrow_kernels_over_codes_are_enough() -> None:
    """With too few, a program of four warps puts some of what it holds into memory."""
    found = on_hopper("""
from tests.hopper import COMPILED, attend, registers
for kind in "int8", "fp8", "int4":
    for chains in (True, False):
        attend(kind, 1, chains=chains, codes="DIRECT")
print([registers(made)[1] for name, made in COMPILED if name == "direct_kernel"])
""")
    assert found == [[0] * 6]


def test_copies_have_come_before_their_room_is_taken() -> None:
    """The last copies bring nothing, but they write: the compiler, which doesn't know, puts other things there."""
    kernels = on_hopper("""
from tests.hopper import COMPILED, attend
for chains in (True, False):
    for name in "SINGLE", "DIRECT", "WIDE":
        attend("int8", 16 if name == "WIDE" else 1, chains=chains, codes=name)
    for name in "NATIVE", "NATIVE_NARROW":
        attend(None, 16 if name == "NATIVE" else 1, chains=chains, codes=name)
for name, made in COMPILED:
    if "async_commit_group" in made["ttgir"] and not made.get("ttir"):
        print((name, str(made["ttgir"])))
""")
    assert [name[:-7] for name, _ in kernels] == ["single", "direct", "wide", "native", "native"] * 2
    for name, ttgir in kernels:
        behind = ttgir[ttgir.rindex("ttg.async_commit_group") :].partition("scf.yield")[2]  # the loop
        first = re.search(r"ttg.async_wait {num = 0|tt.store|tt.reduce|ttg.convert_layout|ttg.local_", behind)
        assert first and first[0].startswith("ttg.async_wait"), name


def of_shared_memory(ttgir: str) -> tuple[set[str], set[str], set[tuple[str, str]]]:
    """What is loaded from there, what is put there, and the operands of products of which one is there."""
    loaded = set(re.findall(r"ttg.local_load .* -> (tensor<\w+)", ttgir))
    stored = set(re.findall(r"ttg.local_store .* : (tensor<\w+)", ttgir))
    used = re.findall(r"ttng.warp_group_dot .* : (?:!ttg.)?(\w+<\w+),.* \* !ttg.(\w+<\w+),", ttgir)
    return loaded, stored, set(used)


@pytest.mark.parametrize("kind", ["int8", "fp8", "fp8_e4m3", "int4"])
def test_assembly_gives_the_values_of_the_format(kind: str) -> None:
    """Of a word's codes, by either half of a word of scales; a sum with a zero point is rounded once."""
    how = FORMATS[kind].of_head_dim(128)
    codes = torch.arange(256, dtype=torch.uint8)
    if kind == "fp8_e4m3":
        codes = codes[(codes & 0x7F) != 0x7F]  # not numbers, and never stored
    codes = codes[: len(codes) // 4 * 4].view(-1, 4)
    words = codes.view(torch.int32).flatten().long().numpy() & 0xFFFFFFFF
    values = _codes(codes, kind)  # [words, 4 or 8]
    for size, offset in (0.0, 0.0), (127.0, -1.0), (1.56, 0.3), (4e-5, 2e-5), (7100.0, -3000.0), (2e-3, 900.0):
        (scale, zero), (other, more) = (_scales(how, *x) for x in ((size, offset), (0.7, -5.0)))
        want, second = ((values * s.double() + z.double()).half() for s, z in ((scale, zero), (other, more)))
        of_word = [0, 4, 1, 5] if kind == "int4" else [0, 1, 2, 3] if kind == "int8" else [0, 2, 1, 3]
        for upper in (0, 1):
            factors = _factors(kind, (scale, zero), (scale, zero), (other, more), upper)
            row = ptx.run(word_assembly(kind), "=h,=h,=h,=h,r,r,r", [words, *factors])
            assert torch.equal(as_values(row), want[:, of_word]), "a word of one row"
            factors = _factors(kind, (scale, zero), (other, more), (other, zero), upper)
            inputs = [words, np.roll(words, 5)]
            if kind == "int4":  # four codes of each are taken together before
                inputs = [inputs[0] & 0xFFFF | (inputs[1] & 0xFFFF) << 16, inputs[1]]
            pairs = ptx.run(pairs_assembly(kind), "=h,=h,=h,=h,=h,=h,=h,=h,r,r,r,r", [*inputs, *factors])
            assert torch.equal(as_values(pairs[::2]), want[:, :4]), "the first of two rows"
            assert torch.equal(as_values(pairs[1::2]), second[:, :4].roll(5, 0)), "the second"


def _codes(codes: Tensor, kind: str) -> Tensor:
    """What words of codes are before they are scaled: float64."""
    how = replace(FORMATS[kind], group=8 if kind == "int4" else 4, zero_point=False)
    return dequantize(codes, torch.ones(len(codes), 1, dtype=SCALE_DTYPE), how, torch.float64)


def _scales(how: KVFormat, size: float, offset: float) -> tuple[Tensor, Tensor]:
    """A scale, and a zero point or 0."""
    x = torch.full((1, how.group), size)
    x[0, 0] = offset
    scales = quantize(x, how)[1][0]
    return scales[0], scales[-1] if how.zero_point else torch.zeros(())


def _factors(
    kind: str, first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor], beside: tuple[Tensor, Tensor], upper: int
) -> list[Any]:
    """What the assembly makes of two rows' scales and zero points, which stand in words with others."""
    select, found = np.int64(0x7632 if upper else 0x5410), []
    for i in range(2 if kind == "int4" else 1):
        bits, more, other = (int(x[i].half().view(torch.int16)) & 0xFFFF for x in (first, second, beside))
        words = [np.int64(other | x << 16 if upper else x | other << 16) for x in (bits, more)]
        found.append(ptx.run(scales_assembly(kind), "=r,=r,r,r,r", [*words, select]))
    return [found[0][0], found[-1][0] if kind == "int4" else found[0][1]]


def as_values(outputs: Any) -> Tensor:
    return torch.from_numpy(np.stack(outputs, -1).astype(np.uint16).view(np.float16))
