"""The cuts of captured steps keep what `process_logits` keeps, so that the choice is the rule's."""

import pytest
import torch
from torch import Tensor

from specdec.kernels.cuts import cut
from specdec.kernels.sample import choose
from specdec.params import SamplingParams
from specdec.verifier import rules
from specdec.verifier.processors import NodeContext, VerifyQuery, process_logits
from tests.kernels import DEVICE, DTYPES, ON_GPU

pytestmark = pytest.mark.gpu if ON_GPU else []
INF, NAN = float("inf"), float("nan")
MIX = [
    SamplingParams(top_k=3, top_p=0.5, min_p=0.2),  # greedy: never cut
    SamplingParams(temperature=0.3),
    SamplingParams(temperature=1.0, top_k=5),
    SamplingParams(temperature=1.0, top_k=1),
    SamplingParams(temperature=2.0, top_k=10**30),
    SamplingParams(temperature=0.7, top_p=0.9),
    SamplingParams(temperature=1.0, top_p=1e-9),
    SamplingParams(temperature=50.0, top_p=0.999),  # nearly uniform: keeps more than the host's short sort
    SamplingParams(temperature=1e-7, top_p=0.5),
    SamplingParams(temperature=2.0, min_p=0.05),
    SamplingParams(temperature=1.3, top_k=40, top_p=0.8, min_p=0.01),
    SamplingParams(temperature=5.0, top_p=0.7, min_p=0.3),
]


def put(values: object, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.tensor(values, dtype=dtype, device=DEVICE)


def fields(params: list[SamplingParams], dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """The parameters as `cut` takes them."""
    return [
        put([p.temperature for p in params], torch.float32),
        put([min(p.top_k, 2**63 - 1) for p in params]),
        put([p.top_p for p in params], dtype),
        put([p.min_p for p in params], dtype),
    ]


def contexts(params: list[SamplingParams], rows_per_sequence: int) -> list[NodeContext]:
    queries = [VerifyQuery(p.with_seed(b), [1], 0) for b, p in enumerate(params)]
    return [
        NodeContext(b, query, (1,) * depth) for b, query in enumerate(queries) for depth in range(rows_per_sequence)
    ]


def check(logits: Tensor, params: list[SamplingParams], real: int, rows_per_sequence: int = 1) -> Tensor:
    """Compare the kept tokens and the choices with the rule's."""
    nodes, before = contexts(params, rows_per_sequence), logits.clone()
    got = cut(logits, *fields(params), real, rows_per_sequence)
    want = process_logits(logits, nodes, real)
    assert got.dtype == torch.float32
    assert torch.equal(got == -INF, want == -INF)
    assert torch.equal(got.where(got != -INF, 0).nan_to_num(7), logits.float().where(got != -INF, 0).nan_to_num(7))
    assert torch.equal(logits.nan_to_num(7), before.nan_to_num(7))
    seeds, positions = put(list(range(len(params)))), put([node.position for node in nodes])
    chosen = choose(got, fields(params)[0], seeds, positions, real, rows_per_sequence)
    assert chosen.tolist() == rules.choose(want, nodes).tolist()
    return got


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("step", [0.0, 0.5], ids=["distinct", "ties"])
@pytest.mark.parametrize(("vocab", "real", "per_sequence"), [(2500, 2500, 6), (2051, 2049, 2), (97, 90, 3), (7, 1, 1)])
def test_what_is_kept_is_what_the_rule_keeps(dtype, step, vocab, real, per_sequence):
    generator = torch.Generator().manual_seed(vocab)
    logits = 3 * torch.randn(len(MIX) * per_sequence, vocab, generator=generator)
    logits = ((logits / step).round() * step if step else logits).to(DEVICE, dtype)
    logits[:, real:] = 100
    got = check(logits, MIX, real, per_sequence)
    kept = (got > -INF).sum(-1).view(len(MIX), -1)
    assert (kept[[0, 1, 4]] == real).all()
    assert real == 1 or (kept[[2, 5, 10, 11]] < real).all()


def test_ties_at_the_threshold_of_top_k_stay_and_at_the_cut_of_top_p_the_lowest_ids():
    logits = put([[0.0, 2, 1, 2, 1, 1]] * 3, torch.float32)
    params = [
        SamplingParams(temperature=1.0, top_k=3),
        SamplingParams(temperature=1.0, top_p=0.7),  # 2 of .309 and 1 of .114 reach it
        SamplingParams(temperature=1.0, top_k=2, top_p=0.5, min_p=0.9),  # of the two that top-k leaves, the first
    ]
    kept = check(logits, params, 6) > -INF
    assert [row.nonzero().flatten().tolist() for row in kept] == [[1, 2, 3, 4, 5], [1, 2, 3], [1]]


def test_top_p_reached_to_the_last_bit_keeps_no_more():
    logits = torch.zeros(4, 8, device=DEVICE)
    p = [0.5, 0.5 + 2**-50, 0.25, 1 - 2**-50]
    kept = check(logits, [SamplingParams(temperature=1.0, top_p=x) for x in p], 8) > -INF
    assert kept.sum(-1).tolist() == [4, 5, 2, 8]


@pytest.mark.parametrize("params", MIX)
def test_rows_without_a_choice_still_have_none(params):
    logits = torch.randn(5, 50, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    logits[0, 40] = NAN
    logits[1] = -INF
    logits[2] = -INF
    logits[2, 11] = -5
    logits[3] = NAN
    logits[4, 45:] = NAN  # padding
    got = check(logits, [params] * 5, 45)
    assert got[0].isnan().any() and got[3].isnan().any()
    assert got[2, 11] == -5


def test_p_may_be_rounded():
    logits = torch.randn(len(MIX), 60, generator=torch.Generator().manual_seed(3)).to(DEVICE)
    assert torch.equal(cut(logits, *fields(MIX), 60), cut(logits, *fields(MIX, torch.float32), 60))


def test_neither_shapes_nor_the_host_depend_on_values():
    """Meta tensors have no values: what asks for one, and could not be captured, fails."""
    columns = [field.to("meta") for field in fields(MIX)]
    assert cut(torch.empty(len(MIX) * 8, 300, device="meta"), *columns, 290, 8).shape == (len(MIX) * 8, 300)


@pytest.mark.skipif(not ON_GPU, reason="captures a CUDA graph")
def test_a_graph_reads_the_parameters_anew():
    logits, columns = torch.randn(len(MIX) * 8, 5000, device=DEVICE), fields(MIX)
    cut(logits, *columns, 4990, 8)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = cut(logits, *columns, 4990, 8)
    for shift in range(3):
        logits.normal_()
        for column, value in zip(columns, fields(MIX[shift:] + MIX[:shift]), strict=True):
            column.copy_(value)
        graph.replay()
        assert torch.equal(got, cut(logits, *columns, 4990, 8))


def test_sizes_that_do_not_fit_are_refused():
    columns = fields(MIX[:2])
    with pytest.raises(ValueError, match="6 rows of logits don't fit .* 2, 2, 2, 2 sequences of 2 rows each"):
        cut(torch.zeros(6, 9), *columns, 9, 2)
    for real in (0, 10):
        with pytest.raises(ValueError, match=f"from 1 to 9, not {real}"):
            cut(torch.zeros(4, 9), *columns, real, 2)
