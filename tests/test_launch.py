"""When a kernel lets the next one begin: before it waits itself where that is faster, else behind its wait."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from specdec.drafters.ngram import NGramDrafter
from specdec.drafters.protocol import Drafter
from specdec.kernels.gpu import attention, linear, norm
from specdec.kernels.gpu.launch import SMALL_INPUTS, lets_begin
from specdec.kernels.gpu.tiles import tile_of
from specdec.params import SamplingParams
from tests.conftest import VOCAB, tiny_llama
from tests.engines import make_engine, outputs, run
from tests.medusa import random_medusa
from tests.test_formats import on_hopper

ROWS = (1, 16, 17, 32, 33, 127, 128, 256, 257, 8192)


@pytest.mark.parametrize(
    ("kind", "rows"), [("merge", {1, 16, 128, 256}), ("norm", {1, 16, 17, 32, 128, 256}), ("product", {128, 256})]
)
def test_small_products_begin_early_by_how_many_rows_there_are(kind: str, rows: set[int]) -> None:
    assert {n for n in ROWS if lets_begin(kind, n, 576)} == rows
    assert not any(lets_begin(kind, n, SMALL_INPUTS) for n in ROWS)


def test_small_products_leave_room_on_a_multiprocessor() -> None:
    """Programs of others take most of one."""
    assert all(tile_of(n, 4096, 576, tma=True).num_bytes() < 90_000 for n in ROWS if n <= 64)
    assert all(tile_of(n, 4096, SMALL_INPUTS, tma=True).num_bytes() > 130_000 for n in ROWS if n <= 64)


@pytest.mark.parametrize(
    ("rows", "heads", "tiles", "parts", "early"),
    [(1, 32, 1, 8, 1), (1, 32, 1, 9, 0), (4, 32, 4, 2, 1), (4, 32, 4, 3, 0), (5, 32, 1, 1, 0), (16, 32, 1, 3, 0),
     (1, 8, 1, 99, 1), (16, 8, 16, 9, 1), (17, 8, 2, 1, 0), (64, 8, 4, 9, 0), (128, 8, 8, 9, 1)],
)  # fmt: skip
def test_what_is_behind_a_merge_begins_early(rows: int, heads: int, tiles: int, parts: int, early: int) -> None:
    """Of 128 values a head, a fourth of the heads are keys' or, of eight, all: 64 programs read contexts, or fewer."""
    work = SimpleNamespace(tree_tiles=range(tiles))
    call: Any = SimpleNamespace(q=torch.empty(rows, heads, 128), num_kv_heads=8, work=work)
    assert attention._next_early(call, parts) == early


def test_norms_of_heads_are_of_whole_rows() -> None:
    assert [norm._next_early(torch.empty(4, *shape)) for shape in ((576,), (4096,), (9, 64), (32, 128))] == [1, 0, 1, 0]


def test_kernels_that_let_the_next_one_begin_do_so_before_they_wait() -> None:
    """If they are told, and in any case behind their wait: it is the same kernel, so the bits are the same."""
    orders = on_hopper("""
import re
import torch
from specdec.kernels.gpu import attention, linear, norm
from tests.hopper import COMPILED, attend
attention.overlap = linear.overlap = norm.overlap = lambda device: {"PDL": True, "launch_pdl": True}
attend(None, 1, chains=True)
attend(None, 1, chains=True, merged_by_heads=True)
attend(None, 4, chains=False)
rows = torch.zeros(8, 576, dtype=torch.bfloat16)
norm.rmsnorm(rows, rows[0], 1e-5)
norm.add_rmsnorm(rows, rows, rows[0], 1e-5)
linear.linear(rows, torch.zeros(960, 576, dtype=torch.bfloat16))
for name, made in COMPILED:
    print([name, *re.findall(r"(?<=griddepcontrol[.])[a-z_]+", made["ptx"])])
""")
    found = {name: order for name, *order in orders}
    names = "merge_kernel", "merge_heads_kernel", "tail_kernel", "_rmsnorm_kernel", "_add_rmsnorm_kernel"
    for name in (*names, "_linear_kernel"):
        assert found[name] == ["launch_dependents", "wait", "launch_dependents"]
    assert found["context_kernel"] == ["wait", "launch_dependents"]


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["ngram", "medusa"])
def test_no_token_depends_on_when_kernels_begin(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps, captured and eager, of up to 160 rows whose kernels all let the next one begin, and of none."""
    model = tiny_llama(dtype=torch.bfloat16, head_dim=64, num_attention_heads=8).to("cuda")
    prompts = [[(7 * i + i * i // 9 + j) % VOCAB for i in range(40 + 9 * j)] for j in range(20)]
    asked = [SamplingParams(max_new_tokens=16, seed=i, temperature=0.0 if i % 2 else 1.2) for i in range(20)]
    found = []
    for early in (False, True):
        for module in (attention, linear, norm):
            monkeypatch.setattr(module, "lets_begin", lambda *args, early=early: early)
        monkeypatch.setattr(attention, "EARLY_ROWS", 0)
        for cuda_graphs in (True, False):
            drafter: Drafter = NGramDrafter() if name == "ngram" else random_medusa(model)
            engine = make_engine(model, drafter, cuda_graphs=cuda_graphs, num_blocks=512)
            found.append(outputs(run(engine, prompts, asked)))
    assert found == [found[0]] * 4
