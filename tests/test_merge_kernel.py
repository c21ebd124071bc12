"""The merge of chains' parts by programs of several heads: its bits, what is compiled of it, and when it is taken."""

from typing import Any

import pytest
import torch
from torch import Tensor

from specdec.kernels.gpu import merge
from specdec.kernels.gpu.chain import merge_kernel
from specdec.kernels.gpu.launch import overlap
from specdec.kernels.gpu.merge import FEW_ROWS, MANY_ROWS, SOME_ROWS, Merge, merge_heads, merge_of, takes_heads
from specdec.kernels.gpu.online import BY_CONTEXT, LARGE_SPLIT, NUM_SMALL, SMALL_SPLIT, first_part, num_parts
from specdec.kernels.work import AttentionWork, uniform_work
from tests.kernels import DEVICE, ON_GPU
from tests.test_direct import TILE, InTorch
from tests.test_formats import on_hopper

pytestmark = pytest.mark.gpu if ON_GPU else []
CONTEXTS, NODES = [0, 60, 1100, 2100, 9000], 2
MERGES = sorted({merge_of(parts, rows) for parts in (1, 5, 10, 20, 32, 99) for rows in (1, 2, 99)}, key=str)


def make_batch(heads: int, dim: int, first: int, programs: int) -> tuple[AttentionWork, tuple[Tensor, ...], int]:
    """Chains, the last row of which is padding, states of all their parts, and how many a row has at most."""
    lens = torch.tensor(CONTEXTS, dtype=torch.int32)
    table, nodes = torch.zeros(len(lens), 1, dtype=torch.int32), torch.arange(NODES).repeat(len(lens))
    ancestors = (2 << nodes) - 1
    ancestors[-1] = 0
    positions = lens.repeat_interleave(NODES) + nodes
    batch = (x.to(DEVICE) for x in (table, lens, positions, ancestors))
    work = uniform_work(len(lens), NODES, *batch, 4, max(CONTEXTS), True)
    splits = first_part(max(CONTEXTS), programs, dim) if first == BY_CONTEXT else first
    parts = num_parts(max(CONTEXTS) + NODES, 1 if first == BY_CONTEXT else first, 1)
    shape, rng = (parts, len(nodes), heads), torch.Generator().manual_seed(0)
    m, total, acc = (torch.randn(*shape, *more, generator=rng).to(DEVICE) for more in ((), (), (dim,)))
    if not ON_GPU:  # where powers of two of whole numbers alone are the same by any library
        m = (4 * m).round()
    nothing = torch.rand(*shape, generator=rng).to(DEVICE) < 0.2  # of which a row saw no key
    nothing[0] = False
    m[nothing], total[nothing], acc[nothing] = -torch.inf, 0, 0
    most = num_parts(max(CONTEXTS) + NODES, splits, 1)
    return work, (m.flatten(), total.abs().flatten(), acc.flatten()), most


def sizes_of(heads: int, dim: int) -> dict[str, Any]:
    """What is compiled in."""
    splits = {"SMALL": SMALL_SPLIT // TILE, "NUM": NUM_SMALL, "LARGE": LARGE_SPLIT // TILE}
    return {"H": heads, "D": dim, **splits, **overlap(torch.device(DEVICE))}


@pytest.mark.parametrize(
    ("heads", "dim", "first", "programs"),
    [(9, 64, 1, 1), (4, 128, 1, 1), (12, 128, 1, 1), (12, 128, NUM_SMALL, 1), (9, 64, BY_CONTEXT, 4)],
)
@pytest.mark.parametrize("how", MERGES, ids=str)
def test_bits_are_those_of_one_head_a_program(
    how: Merge, heads: int, dim: int, first: int, programs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    work, state, parts = make_batch(heads, dim, first, programs)
    sizes, num_rows = sizes_of(heads, dim), len(work.positions)
    want, got = (torch.full((num_rows, heads, dim), torch.nan, dtype=torch.float16, device=DEVICE) for _ in range(2))
    given = work.context_lens, work.positions, work.ancestors, num_rows, NODES, programs, 0
    constants = {"BLOCK_D": dim, "TILE": TILE, "FIRST": first, "HEADS": 1, "AT_ONCE": 8, "enable_fp_fusion": False}
    merge_kernel[(num_rows, heads)](want, *state, *given, num_warps=1, **constants, **sizes)
    if not ON_GPU:
        monkeypatch.setattr(merge, "merge_heads_kernel", InTorch(merge.merge_heads_kernel))
    monkeypatch.setattr(merge, "merge_of", lambda *args: how)
    merge_heads(got, state, work, parts, first, programs, 1, sizes)
    assert torch.equal(got.view(torch.int16), want.view(torch.int16))
    assert not got[-1].any() and got[:-1].any(-1).all(), "padding is 0, and nothing else"


def test_states_are_asked_for_before_any_is_merged() -> None:
    """By one load of each thread; and where few states are there, no more are asked for than may be."""
    kernels = on_hopper("""
import re
from tests.hopper import COMPILED, assembly, attend, registers
for dim in 128, 64:
    for nodes, context in (1, 512), (1, 1024), (64, 1000), (1, 9000), (2, 9000), (1, 20000), (1, 32768), (64, 9000):
        COMPILED.clear()
        attend(None, nodes, chains=True, codes="NATIVE", context=context, dim=dim, merged_by_heads=True)
        for name, made in COMPILED:
            if name == "merge_heads_kernel":
                order = re.findall(r"LDG|FMUL", assembly(made))
                loads = order.count("LDG")
                products = order[: -order[::-1].index("LDG")].count("FMUL")
                print((dim, loads, products / order.count("FMUL"), registers(made), made["shared"]))
""")
    states = 5, 10, 10, 24, 24, 48, 48, 16
    assert [made[0] for made in kernels] == [128] * 8 + [64] * 8
    for (_, loads, share, (_, stack), shared), most in zip(kernels, 2 * states, strict=True):
        assert 3 * most < loads < 3 * most + 8, "of each two numbers, its values, and what a program is for"
        assert share < (0.06 if most <= 24 else 0.4), "of products in front of a load; 48 states are more than fit"
        assert not stack and not shared


def test_how_parts_are_merged() -> None:
    assert [merge_of(n, MANY_ROWS + 1).at_once for n in (1, 2, 5, 6, 10, 11, 47)] == [1, 5, 5, 10, 10, 16, 16]
    assert [merge_of(n, MANY_ROWS).at_once for n in (16, 17, 24, 25, 47)] == [16, 24, 24, 16, 16]
    assert [merge_of(n, SOME_ROWS).at_once for n in (17, 24, 25, 32, 33, 99)] == [24, 24, 32, 32, 48, 48]
    assert (merge_of(9, FEW_ROWS).warps, merge_of(9, FEW_ROWS + 1).warps) == (8, 1)
    assert (merge_of(20, 1).lanes, merge_of(20, 2).lanes) == (128, 32)
    assert Merge(32, 8, 10).fitting(32, 128) == Merge(32, 8, 10)
    assert Merge(32, 8, 10).fitting(9, 64) == Merge(16, 1, 10), "five programs of two heads: one is nobody's"
    assert Merge(32, 8, 10).fitting(12, 128) == Merge(32, 4, 10)
    assert Merge(16, 8, 1).fitting(14, 64) == Merge(16, 8, 1), "two of sixteen"
    assert Merge(64, 8, 10).fitting(9, 128) == Merge(64, 4, 10), "a head's values are two warps'"
    assert Merge(128, 4, 24).fitting(9, 64) == Merge(64, 4, 24), "and of half of the values, half of the threads'"


def test_devices_and_heads_that_it_is_made_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ON_GPU or not takes_heads(torch.zeros(1, 1, 64))
    monkeypatch.setattr(merge, "on_hopper", lambda device: True)
    assert [takes_heads(torch.zeros(1, 1, dim)) for dim in (64, 80, 96, 128, 256)] == [True, False, False, True, False]
