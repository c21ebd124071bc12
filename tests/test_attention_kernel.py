"""The Triton attention: against the torch reference, and its promise that a row's bits don't depend on its company."""

import math
import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from specdec.kernels.attention import AttentionMetadata
from specdec.kernels.attention import tree_attention as reference
from specdec.kernels.formats import FORMATS, Pages, QuantizedPages, load, quantize
from specdec.kernels.gpu import attention
from specdec.kernels.gpu import paths as gpu_paths
from specdec.kernels.gpu.attention import tree_attention
from specdec.kernels.gpu.online import num_parts, num_splits
from specdec.kernels.gpu.paths import LENGTH, path_slots
from specdec.kernels.ops import FLOAT32_SHARED_MEMORY
from specdec.kernels.work import AttentionWork, uniform_work
from specdec.verifier.tree import chain_parents
from tests.kernels import DEVICE, DTYPES, ON_GPU, assert_close
from tests.test_attention import build
from tests.test_formats import on_hopper

pytestmark = pytest.mark.gpu if ON_GPU else []
WIDE = [-1, *[0] * 63]
RAGGED = [-1, 0, 0, 1, 1, 2, 3, 5, 5, 7]
Sequences = list[tuple[int, int, list[int]]]
BATCHES: dict[str, Sequences] = {
    "plain": [(0, 0, [-1]), (70, 0, [-1]), (64, 0, [-1]), (63, 0, [-1])],
    "chunks": [(0, 21, []), (50, 30, []), (130, 3, [])],
    "trees": [(15, 0, RAGGED), (120, 0, [-1, 0, 1, 2]), (1, 0, WIDE[:18])],
    "mixed": [(3, 40, RAGGED), (33, 0, [-1]), (0, 1, []), (60, 70, [-1, 0, 0])],
    "over a split": [(125, 0, RAGGED), (122, 20, [-1, 0, 1]), (300, 0, [-1, 0, 0])],
}
SHAPES = [(9, 3, 64, 16), (4, 1, 80, 16), (4, 4, 96, 32), (8, 1, 128, 64), (2, 1, 256, 16), (2, 1, 160, 64)]
"""Heads, key heads, head_dim, block size; a block of the last one holds two tiles of keys."""


def make_pages(
    num_blocks: int, block: int, kv_heads: int, dim: int, dtype: torch.dtype, keys: list[list[int]]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values [num_blocks, block, kv_heads, D]; slots that belong to no sequence hold NaN."""
    pages = torch.full((2, num_blocks * block, kv_heads, dim), torch.nan, dtype=dtype)
    used = torch.tensor(sorted(key for part in keys for key in part))
    pages[:, used] = torch.randn(2, len(used), kv_heads, dim).to(dtype)
    k, v = pages.view(2, num_blocks, block, kv_heads, dim).to(DEVICE).unbind()
    return k, v


def stored(pages: torch.Tensor, name: str, group: int | None = None) -> Pages:
    """The same pages in a format; the scales of slots that hold NaN are NaN."""
    if name == "native":
        return pages
    how = FORMATS[name].of_head_dim(pages.shape[-1], group)
    return QuantizedPages(*quantize(pages, how), how)


def wide(meta: AttentionMetadata, q: torch.Tensor, k: Pages, v: Pages, **how: object) -> torch.Tensor:
    """The reference, in float64, on the values that are computed with."""
    k, v = (load(x, slice(None), q.dtype).view(x.shape).double() for x in (k, v))
    return reference(q.double(), k, v, meta, **how)  # type: ignore[arg-type]


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_batches(batch: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    meta, keys = build(BATCHES[batch], device=DEVICE)
    k, v = make_pages(int(meta.block_table.max()) + 1, 16, 2, 64, dtype, keys)
    q = torch.randn(meta.cu_seqlens_q[-1], 4, 64, device=DEVICE).to(dtype)
    assert_close(tree_attention(q, k, v, meta, scale=0.125), wide(meta, q, k, v, scale=0.125))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes(shape: tuple[int, int, int, int]) -> None:
    torch.manual_seed(1)
    heads, kv_heads, dim, block = shape
    meta, keys = build(BATCHES["mixed"], block=block, device=DEVICE)
    k, v = make_pages(int(meta.block_table.max()) + 1, block, kv_heads, dim, torch.float16, keys)
    q = torch.randn(meta.cu_seqlens_q[-1], heads, dim, device=DEVICE).half()
    assert_close(tree_attention(q, k, v, meta, scale=dim**-0.5), wide(meta, q, k, v, scale=dim**-0.5))


QUANTIZED = [
    ("fp8", None, 80),
    ("fp8_e4m3", None, 128),
    ("int8", 8, 80),
    ("int8", 64, 64),
    ("int4", 32, 96),
    ("int4", 64, 128),
]
"""Format, group, head_dim."""


@pytest.mark.parametrize(("name", "group", "dim"), QUANTIZED)
@pytest.mark.parametrize("batch", ["mixed", "trees"])
def test_quantized_pages(batch: str, name: str, group: int | None, dim: int) -> None:
    torch.manual_seed(5)
    meta, keys = build(BATCHES[batch], device=DEVICE)
    native = make_pages(int(meta.block_table.max()) + 1, 16, 1, dim, torch.float16, keys)
    k, v = (stored(x, name, group) for x in native)
    q = torch.randn(meta.cu_seqlens_q[-1], 3, dim, device=DEVICE).half()
    how = {"scale": dim**-0.5, "window": 50}
    assert_close(tree_attention(q, k, v, meta, **how), wide(meta, q, k, v, **how))


@pytest.mark.parametrize(("name", "group", "dim"), QUANTIZED[2:5:2])
def test_quantized_chains(name: str, group: int | None, dim: int) -> None:
    torch.manual_seed(6)
    chain = chain_parents(5)
    meta, keys = build([(0, 0, chain), (150, 0, chain)], device=DEVICE)
    native = make_pages(int(meta.block_table.max()) + 1, 16, 2, dim, torch.float32, keys)
    k, v = (stored(x, name, group) for x in native)
    q = torch.randn(10, 4, dim, device=DEVICE)
    got = tree_attention(q, k, v, chain_work(meta, 2), scale=0.1)
    assert_close(got, wide(meta, q, k, v, scale=0.1))


@pytest.mark.parametrize("window", [7, 64])
@pytest.mark.parametrize("batch", ["chunks", "trees", "over a split"])
def test_windows_count_positions(batch: str, window: int) -> None:
    torch.manual_seed(2)
    meta, keys = build(BATCHES[batch], device=DEVICE)
    k, v = make_pages(int(meta.block_table.max()) + 1, 16, 1, 32, torch.float16, keys)
    q = torch.randn(meta.cu_seqlens_q[-1], 3, 32, device=DEVICE).half()
    how = {"scale": 0.2, "window": window}
    assert_close(tree_attention(q, k, v, meta, **how), wide(meta, q, k, v, **how))


def test_scores_are_capped_before_they_are_masked() -> None:
    torch.manual_seed(3)
    meta, keys = build(BATCHES["mixed"], device=DEVICE)
    k, v = make_pages(int(meta.block_table.max()) + 1, 16, 2, 32, torch.float32, keys)
    q = torch.randn(meta.cu_seqlens_q[-1], 4, 32, device=DEVICE) * 3
    how = {"scale": 0.9, "softcap": 2.5}
    assert_close(tree_attention(q, k, v, meta, **how), wide(meta, q, k, v, **how))


def test_rows_of_padding_hold_zero() -> None:
    meta, keys = build([(70, 0, [-1, 0]), (0, 0, [-1])], device=DEVICE)
    k, v = make_pages(int(meta.block_table.max()) + 1, 16, 1, 16, torch.float16, keys)
    meta.ancestors[1:] = 0
    out = tree_attention(torch.randn(3, 2, 16, device=DEVICE).half(), k, v, meta, scale=1.0)
    assert not bool(out[1:].any()) and bool(out[0].any())


def chain_work(meta: AttentionMetadata, group: int, *, chains: bool = True) -> AttentionWork:
    """The same batch as a captured step has it; all its sequences have chains of as many nodes, or trees."""
    lens = torch.tensor(meta.context_lens, dtype=torch.int32, device=DEVICE)
    table, nodes = meta.block_table.int(), len(meta.positions) // len(lens)
    return uniform_work(len(lens), nodes, table, lens, meta.positions, meta.ancestors, group, int(lens.max()), chains)


@pytest.mark.parametrize("window", [None, 7, 100])
@pytest.mark.parametrize("nodes", [1, 5, 7])
def test_chains(nodes: int, window: int | None) -> None:
    """One sequence is of padding but for its root."""
    torch.manual_seed(4)
    chain = chain_parents(nodes)
    meta, keys = build([(0, 0, chain), (127, 0, chain), (40, 0, chain)], device=DEVICE)
    meta.ancestors[2 * nodes + 1 :] = 0
    k, v = make_pages(int(meta.block_table.max()) + 1, 16, 2, 32, torch.float16, keys)
    q = torch.randn(3 * nodes, 6, 32, device=DEVICE).half()
    how = {"scale": 0.2, "window": window}
    want = wide(meta, q, k, v, **how)
    want[2 * nodes + 1 :] = 0
    assert_close(tree_attention(q, k, v, chain_work(meta, 3), **how), want)


def test_no_loop_carries_what_triton_would_drop() -> None:
    """The interpreter does as it is told: on a machine without a GPU, this alone shows it."""
    [wrong, *kernels] = on_hopper("""
import torch
from tests.hopper import COMPILED, attend, bounds_alone, dropped
from specdec.kernels.gpu import attention
bounds_alone[(1,)](torch.zeros(1, dtype=torch.int32), 9)
attention._first_part = lambda *args: 2
attend(None, 16, chains=True)
attend(None, 16, chains=False)
for name, made in COMPILED:
    print((name, dropped(str(made["ttir"]))))
""")
    assert wrong[0] == "bounds_alone" and len(wrong[1]) == 1 and wrong[1][0].startswith("%low")
    names = "chain_kernel", "merge_kernel", "paths_kernel", "context_kernel", "tail_kernel"
    assert kernels == [(name, []) for name in names]


def test_programs_that_merge_two_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nine heads: the last program has one."""
    meta, keys = build([(0, 0, chain_parents(7)), (300, 0, chain_parents(7))], device=DEVICE)
    k, v = make_pages(int(meta.block_table.max()) + 1, 16, 3, 32, torch.float16, keys)
    q, found = torch.randn(14, 9, 32, device=DEVICE).half(), []
    for first in (1, 2):
        monkeypatch.setattr(attention, "_first_part", lambda *args, first=first: first)
        found.append(tree_attention(q, k, v, chain_work(meta, 3), scale=0.2))
    assert torch.equal(*found)
    assert_close(found[0], wide(meta, q, k, v, scale=0.2))


def test_trees_in_captured_steps_have_the_bits_of_eager_ones() -> None:
    """Whose nodes' rows and sequences are found without a load. One has no context, another a node of padding."""
    meta, keys = build([(70, 0, [-1, 0, 0, 1]), (0, 0, [-1, 0, 1, 1]), (129, 0, [-1, 0, 1, 0])], device=DEVICE)
    meta.ancestors[7] = 0
    k, v = make_pages(int(meta.block_table.max()) + 1, meta.block_size, 1, 64, torch.float16, keys)
    q = torch.randn(12, 2, 64, device=DEVICE).half()
    captured, eager = (tree_attention(q, k, v, work, scale=0.125) for work in (chain_work(meta, 2, chains=False), meta))
    assert torch.equal(captured, eager) and not captured[7].any()
    assert_close(captured, wide(meta, q, k, v, scale=0.125))


@pytest.mark.parametrize(("dim", "block"), [(64, 64), (256, 16), (256, 64)])
def test_chains_over_blocks_and_tiles_of_any_size(dim: int, block: int) -> None:
    chain = chain_parents(3)
    meta, keys = build([(70, 0, chain), (150, 0, chain)], block=block, device=DEVICE)
    k, v = make_pages(int(meta.block_table.max()) + 1, block, 1, dim, torch.float16, keys)
    q = torch.randn(6, 2, dim, device=DEVICE).half()
    got = tree_attention(q, k, v, chain_work(meta, 2), scale=dim**-0.5)
    assert_close(got, wide(meta, q, k, v, scale=dim**-0.5))


@pytest.mark.parametrize(
    ("sequences", "chains"),
    [
        ([(70, 0, [-1]), (0, 0, [-1]), (64, 0, [-1])], True),
        ([(70, 0, [-1]), (0, 1, []), (64, 0, [-1])], False),
        ([(70, 0, [-1]), (5, 1, [-1])], False),
        ([(70, 0, [-1, 0]), (64, 0, [-1])], False),
        ([(3, 2, []), (5, 1, [])], False),
    ],
    ids=["alone", "beside a prompt", "behind its prompt", "two nodes", "prompts"],
)
def test_nodes_that_are_alone_in_their_sequences_are_chains(sequences: Sequences, chains: bool) -> None:
    work = build(sequences, device=DEVICE)[0].work(2, 64)
    assert (work.chains, work.nodes_per_sequence) == (chains, int(chains)) and not work.early


def test_chains_of_a_batch_that_was_just_divided_wait_before_they_read() -> None:
    """In captured steps they may read the tables before, since the kernel in front writes none of them."""
    [waits] = on_hopper("""
import re
from specdec.kernels.gpu import attention
from tests.hopper import COMPILED, attend
attention.overlap = lambda device: {"PDL": True, "launch_pdl": True}
attend(None, 1, chains=True)
[ptx] = [made["ptx"] for name, made in COMPILED if name == "chain_kernel"]
print(re.findall(r"griddepcontrol.wait|ld.global", ptx))
""")
    assert waits[0] == "griddepcontrol.wait" and waits.count("griddepcontrol.wait") == 2
    assert waits.index("ld.global") < len(waits) - 1 - waits[::-1].index("griddepcontrol.wait")


def test_programs_with_nothing_to_do_wait_for_no_kernel() -> None:
    """Each program of a merge has something to do."""
    ends = on_hopper("""
from specdec.kernels.gpu import attention
from tests.hopper import COMPILED, attend, may_end_unwaited
attention.overlap = lambda device: {"PDL": True, "launch_pdl": True}
for pages, nodes, codes in (
    (None, 1, None), (None, 4, "NATIVE_NARROW"), (None, 16, "NATIVE"),
    ("int8", 1, "SINGLE"), ("int8", 1, "DIRECT"), ("int8", 16, "WIDE"),
):
    attend(pages, nodes, chains=True, codes=codes, merged_by_heads=codes == "NATIVE")
for name, made in COMPILED:
    print([name, may_end_unwaited(made["ptx"])])
""")
    names = ["chain_kernel", "native_kernel", "native_kernel", "single_kernel", "direct_kernel", "wide_kernel"]
    merges = ["merge_heads_kernel" if at == 2 else "merge_kernel" for at in range(6)]
    ends_of = zip(names, merges, strict=True)
    assert ends == [end for name, merge in ends_of for end in ([name, True], [merge, False])]


def test_splits_cover_every_length() -> None:
    lengths = (1, 128, 129, 2048, 2049, 3072, 3073)
    assert [num_splits(n) for n in lengths] == [num_parts(n, 1, 2) for n in lengths] == [1, 1, 2, 16, 17, 17, 18]
    assert [num_parts(n, 16, 2) for n in lengths] == [2, 2, 2, 2, 2, 2, 3], "a tree's last split is a part of its own"
    assert [num_parts(n, 16, 1) for n in lengths] == [1, 1, 1, 1, 2, 2, 3]


@pytest.mark.parametrize(
    ("sequences", "nodes", "context", "window", "first"),
    [(32, 16, 4096, None, 16), (32, 16, 8192, None, 1), (16, 16, 1024, None, 1), (32, 16, 1024, 64, 1),
     (64, 1, 8192, None, 16), (32, 1, 1024, None, 1), (32, 8, 8192, None, 16),
     (16, 8, 1024, None, 1)],
)  # fmt: skip
def test_when_a_program_takes_many_splits_of_native_pages(
    sequences: int, nodes: int, context: int, window: int | None, first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight key heads of four query heads each; nothing is launched."""
    found: list[int] = []
    monkeypatch.setattr(attention, "_run_chains", lambda call: found.append(call.first))
    table, rows = torch.zeros(sequences, 1, dtype=torch.int32), torch.zeros(sequences * nodes, dtype=torch.int64)
    work = uniform_work(sequences, nodes, table, table[:, 0], rows, rows, 4, context, True)
    k = torch.zeros(1, 16, 8, 16)
    tree_attention(torch.zeros(len(rows), 32, 16), k, k, work, scale=1.0, window=window)
    assert found == [first]


@pytest.mark.parametrize(
    ("nodes", "context", "at_once"),
    [(1, 512, 8), (64, 512, 8), (1, 1024, 16), (64, 1024, 16), (1, 32768, 16), (64, 32768, 16)],
)
def test_how_many_states_are_merged_at_once(
    nodes: int, context: int, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One sequence, 32 heads; nothing is launched."""
    found: list[int] = []
    monkeypatch.setattr(attention, "chain_kernel", {(1, -(-nodes * 32 // 64), n): lambda *a, **k: 0 for n in range(99)})
    merges = {(nodes, 32): lambda *args, AT_ONCE, **sizes: found.append(AT_ONCE)}  # noqa: N803
    monkeypatch.setattr(attention, "merge_kernel", merges)
    table, rows = torch.zeros(1, 1, dtype=torch.int32), torch.zeros(nodes, dtype=torch.int64)
    work = uniform_work(1, nodes, table, table[:, 0], rows, rows, 32, context, True)
    k = torch.zeros(1, 16, 1, 16)
    tree_attention(torch.zeros(nodes, 32, 16), k, k, work, scale=1.0)
    assert found == [at_once]


@pytest.mark.parametrize(
    ("nodes", "parts", "warps", "at_once"),
    [(64, 2, 2, 2), (64, 3, 2, 2), (64, 4, 2, 4), (64, 24, 2, 4), (64, 30, 2, 6), (32, 3, 4, 2), (16, 5, 4, 4),
     (1, 9, 4, 8), (16, 10, 4, 16), (16, 47, 4, 16)],
)  # fmt: skip
def test_how_many_states_a_tail_loads_at_once(nodes: int, parts: int, warps: int, at_once: int) -> None:
    """Eight key heads of four query heads with 128 values each; of more values there is no room for sixteen."""
    work = SimpleNamespace(tree_rows=range(nodes))
    for dim in (128, 256):
        call: Any = SimpleNamespace(work=work, num_kv_heads=8, q=torch.empty(nodes, 32, dim))
        most = 16 if dim == 128 else 8
        assert attention._tail_of(call, parts) == {"num_warps": warps, "AT_ONCE": min(at_once, most)}


def test_states_are_asked_for_before_any_is_merged() -> None:
    """Each by an instruction of its own; those that come of memory one after the other take as often its latency."""
    orders = on_hopper("""
import re
from tests.hopper import COMPILED, assembly, attend
for context in 512, 1024:
    attend(None, 1, chains=True, context=context)
for name, made in COMPILED:
    if name == "merge_kernel":
        print(re.findall(r"LDG.E.128|MUFU.EX2", assembly(made)))
""")
    assert [order[: order.index("MUFU.EX2")] for order in orders] == [["LDG.E.128"] * n for n in (8, 16)]
    assert all("LDG.E.128" not in order[order.index("MUFU.EX2") :] for order in orders)


@pytest.mark.parametrize("num_blocks", [16, 14])
def test_slots_of_paths(num_blocks: int) -> None:
    """The rest of the context and a node's ancestors in their order; what lies behind the block table has none."""
    rng, context, block_size = random.Random(0), [37, 64, 191], 16
    paths = [sorted({0, *rng.sample(range(64), n)}) for n in range(1, 64)] + [[0, 63], [62, 63], [*range(32, 64)]]
    masks = [sum(1 << node for node in path) for path in paths] + [0]
    ancestors = torch.tensor([mask - (1 << 64 if mask >> 63 else 0) for mask in masks] * 3, device=DEVICE)
    num_nodes = len(masks)
    depths = torch.tensor([len(path) - 1 for path in paths] + [0]).repeat(3)
    lens = torch.tensor(context, dtype=torch.int32)
    positions = (lens.repeat_interleave(num_nodes) + depths).to(DEVICE)
    table = torch.tensor([rng.sample(range(99), 16) for _ in context], dtype=torch.int32, device=DEVICE)
    given = table[:, :num_blocks]
    work = uniform_work(3, num_nodes, given, lens.to(DEVICE), positions, ancestors, 1, 191, False)
    for tile in (32, 64):
        found = iter(path_slots(work, tile, block_size).tolist())
        for blocks, length in zip(table.tolist(), context, strict=True):
            for path in [*paths, None]:
                keys = [] if path is None else [*range(length // tile * tile, length), *(length + n for n in path)]
                end = num_blocks * block_size
                want = [blocks[n // block_size] * block_size + n % block_size if n < end else -1 for n in keys]
                assert next(found) == want + [-1] * (LENGTH - len(want))


def test_paths_are_found_once_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    meta, keys = build([(70, 0, RAGGED)] * 2, device=DEVICE)
    k, v = make_pages(int(meta.block_table.max()) + 1, 16, 1, 32, torch.float16, keys)
    q, kernel = torch.randn(2 * len(RAGGED), 2, 32, device=DEVICE).half(), MagicMock(wraps=gpu_paths.paths_kernel)
    kernel.__getitem__.side_effect = gpu_paths.paths_kernel.__getitem__
    monkeypatch.setattr(gpu_paths, "paths_kernel", kernel)
    work = meta.work(2, 128)
    for batch in (meta, meta, work, replace(work, early=False)):
        tree_attention(q, k, v, batch, scale=0.2)
    asked = [call.args for call in kernel.__getitem__.call_args_list]
    assert asked == [((len(q),),)] * 2, "the next layer's work is the same; what is made of it has paths of its own"


def test_what_a_tail_waits_for() -> None:
    """For the slots of a path, and then at once for all its keys and values; no key is found in it.

    And all values of a thread that are merged are of one row: none of the others' maxima is asked for.
    """
    [(count, loads, order, _), *others] = on_hopper("""
import re
from tests.hopper import COMPILED, assembly, attend, attention, registers
attention.overlap = lambda device: {"PDL": True, "launch_pdl": True}
attend(None, 64, chains=False, codes="NATIVE")
attend(None, 64, chains=False, codes="PAIR", first=0, context=32768)
attend(None, 16, chains=False, codes="NATIVE")
for name, made in COMPILED:
    if name == "tail_kernel":
        text = assembly(made)
        count = len(re.findall("^ +/[*][0-9a-f]{4,5}[*]/", text, re.M))
        order = re.findall(r"LDG[.]E[.]128(?= )|STS|ACQBULK|STRONG[.]GPU", text)
        print((count, text.count("STRONG.GPU"), order, registers(made)))
""")
    assert count < 2700, "it was 4,531 once"
    assert loads == 2 + 2 + 2 + 4 * (2 + 1 + 2), "of two tiles, the last part and four; maxima twice, as there are sums"
    first = order.index("LDG.E.128", order.index("STRONG.GPU"))
    assert order[first : first + 32] == ["LDG.E.128"] * 32
    assert [stack for *_, (_, stack) in others] == [0, 0]


@pytest.mark.parametrize("dim", [32, 128])
def test_a_tail_gives_the_same_bits_however_many_states_it_loads_at_once(
    dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    meta, keys = build([(n, 0, RAGGED) for n in (0, 700, 1100, 2100, 3100, 6300)], device=DEVICE)
    k, v = make_pages(int(meta.block_table.max()) + 1, 16, 1, dim, DTYPES[-1], keys)
    q = torch.randn(6 * len(RAGGED), 4, dim, device=DEVICE).to(DTYPES[-1])
    own, found, asked = attention._tail_of, [], []
    for at_once in (16, 8, 4, 2):

        def launch(call: Any, parts: int, at_once: int = at_once) -> dict[str, int]:
            asked.append(own(call, parts))
            return asked[-1] | {"AT_ONCE": at_once}

        monkeypatch.setattr(attention, "_tail_of", launch)
        found.append(tree_attention(q, k, v, meta, scale=dim**-0.5))
    assert all(torch.equal(found[0], other) for other in found[1:])
    assert asked == [{"num_warps": 4, "AT_ONCE": 16}] * 4, "as it is chosen"
    assert_close(found[0], wide(meta, q, k, v, scale=dim**-0.5))


@pytest.mark.parametrize("chains", [True, False])
@pytest.mark.parametrize(("splits", "dim"), [(2, 32), (3, 128), (16, 32)])
def test_a_program_of_many_splits_gives_the_same_bits(
    chains: bool, splits: int, dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Contexts end before, at and behind the splits that it takes, and padding sees nothing."""
    nodes = 7
    meta, keys = build([(n, 0, chain_parents(nodes)) for n in (0, 127, 128, 300, 390, 700)], device=DEVICE)
    meta.ancestors[-2:] = 0
    k, v = make_pages(int(meta.block_table.max()) + 1, 16, 2, dim, DTYPES[-1], keys)
    q = torch.randn(6 * nodes, 6, dim, device=DEVICE).to(DTYPES[-1])
    work = chain_work(meta, 3) if chains else meta
    found = []
    for first in (1, splits):
        monkeypatch.setattr(attention, "_first_part", lambda *args, first=first: first)
        found.append(tree_attention(q, k, v, work, scale=dim**-0.5))
    assert torch.equal(*found)
    want = wide(meta, q, k, v, scale=dim**-0.5)
    want[-2:] = 0
    assert_close(found[1], want)


@pytest.mark.skipif(not ON_GPU, reason="the interpreter's products are a BLAS library's, whose bits depend on the size")
@pytest.mark.parametrize("window", [None, 90])
@pytest.mark.parametrize("shape", [(9, 3, 64), (32, 8, 128), (8, 1, 128), (4, 1, 256)], ids=str)
@pytest.mark.parametrize(
    ("dtype", "name"),
    [(torch.float16, "native"), *((torch.bfloat16, name) for name in ("native", *FORMATS))],
    ids=str,
)
def test_bits_are_those_of_one_by_one(
    dtype: torch.dtype, name: str, shape: tuple[int, int, int], window: int | None
) -> None:
    """The same tokens as one chunk, as ragged chunks, one by one, and as paths of a tree."""
    for length in (63, 300, 2100):
        _check_bits(dtype, name, shape, window, length)


def _check_bits(dtype: torch.dtype, name: str, shape: tuple[int, int, int], window: int | None, length: int) -> None:
    heads, kv_heads, dim = shape
    torch.manual_seed(length)
    q = torch.randn(length, heads, dim, device=DEVICE).to(dtype)
    new = torch.randn(2, length, kv_heads, dim, device=DEVICE).to(dtype)
    blocks = -(-(length + 64) // 16)

    def run(cached: int, causal: int, parents: list[int], tokens: list[int], chain: bool = False) -> torch.Tensor:
        """Attention of rows that stand for the given tokens, whose keys are at those rows' own places."""
        meta, keys = build([(cached, causal, parents)], device=DEVICE)
        pages = torch.full((2, blocks * 16, kv_heads, dim), torch.nan, dtype=dtype, device=DEVICE)
        slots = torch.tensor(keys[0], device=DEVICE)
        pages[:, slots[:cached]] = new[:, :cached]
        pages[:, slots[cached:]] = new[:, tokens]
        k, v = (stored(x, name) for x in pages.view(2, blocks, 16, kv_heads, dim))
        work = chain_work(meta, heads // kv_heads) if chain else meta
        return tree_attention(q[tokens], k, v, work, scale=dim**-0.5, window=window)

    whole = run(0, length, [], list(range(length)))
    cut = length // 3
    assert torch.equal(whole[cut:], run(cut, length - cut, [], list(range(cut, length))))
    for at in {0, 1, 15, 16, length // 2, length - 1}:
        for chain in (False, True):
            assert torch.equal(whole[at], run(at, 0, [-1], [at], chain)[0]), f"token {at} of {length}"
    for nodes in (2, 16, 60):
        at = length - nodes
        assert torch.equal(whole[at:], run(at, 0, chain_parents(nodes), list(range(at, length)), True)), nodes
    # A tree with two copies of the true path below the root: the second one's nodes are far from their places. Of
    # several sizes, since each size of a tile of queries is compiled for itself.
    for depth in (1, 3, 7, 20, 31):
        root = length - 1 - depth
        path = list(range(root + 1, length))
        parents = [-1, *chain_parents(depth + 1)[1:], 0, *range(depth + 1, 2 * depth)]
        out = run(root, 0, parents, [root, *path, *path])
        assert torch.equal(out[: depth + 1], whole[root:]), f"first path of {depth}"
        assert torch.equal(out[depth + 1 :], whole[root + 1 :]), f"second path of {depth}"


def test_attention_fits_the_shared_memory_of_other_gpus() -> None:
    """As it is compiled for Ada: of 16 bits in 99 KiB; of 32 bits in as much as the kernels are taken with."""
    [halves, floats] = on_hopper("""
import torch
from tests.hopper import COMPILED, attend, attend_prompt, pretend
pretend(89, 99 << 10)
for pages_format, dtype in ((None, torch.bfloat16), ("int8", torch.bfloat16), (None, torch.float32)):
    attend_prompt(pages_format, 300, dtype=dtype)
    attend(pages_format, 64, chains=False, dtype=dtype)
    if pages_format or dtype == torch.float32:
        assert all(made["capability"] == 89 for _, made in COMPILED)
        print({name: made["shared"] for name, made in sorted(COMPILED, key=lambda found: found[1]["shared"])})
        COMPILED.clear()
""")
    assert set(halves) == set(floats) == {"chunk_kernel", "paths_kernel", "context_kernel", "tail_kernel"}
    assert 64 << 10 < max(halves.values()) <= 99 << 10
    assert max(floats.values()) == FLOAT32_SHARED_MEMORY


def test_a_scale_that_is_not_above_zero_is_refused() -> None:
    """The largest score is looked for before the scale is applied."""
    meta, _ = build([(3, 0, [-1])], device=DEVICE)
    pages = torch.zeros(2, int(meta.block_table.max()) + 1, meta.block_size, 1, 64, device=DEVICE)
    q = torch.zeros(1, 1, 64, device=DEVICE)
    for scale in (0.0, -0.125, math.nan):
        with pytest.raises(ValueError, match="scale must be above 0, not"):
            tree_attention(q, pages[0], pages[1], meta, scale=scale)
