"""The kernels that draft: a recurrent head's cell, and candidates without logits, against their torch references."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - the field's name for it
from torch import Tensor

from specdec.kernels import candidates as torch_candidates
from specdec.kernels import cell as torch_cell
from specdec.kernels.gpu import candidates as gpu_candidates
from specdec.kernels.gpu import cell as gpu_cell
from specdec.kernels.rank import rank
from tests.kernels import DEVICE, DTYPES, ON_GPU, assert_close

pytestmark = pytest.mark.gpu if ON_GPU else []
CANDIDATES = pytest.mark.parametrize(
    "candidates", [torch_candidates.candidates, gpu_candidates.candidates], ids=["torch", "triton"]
)


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def whole(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Small whole numbers, whose sums of products are exact, and often equal."""
    return torch.randint(-2, 3, shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def put(values: list[int] | list[float], dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.tensor(values, dtype=dtype, device=DEVICE)


# --- the cell


def weights(size: int, inner: int, dtype: torch.dtype, vocab: int = 23) -> tuple[Tensor, ...]:
    up, down = random(inner, 2 * size, seed=1, dtype=dtype), random(size, inner, seed=2, dtype=dtype)
    biases = random(inner, seed=3, dtype=dtype), random(size, seed=4, dtype=dtype)
    return random(vocab, size, seed=5, dtype=dtype) / 50, up / size**0.5, biases[0], down / inner**0.5, biases[1]


@pytest.mark.parametrize(("num_trees", "paths", "size", "inner"), [(1, [0], 64, 80), (3, [1, 0, 0, 2], 72, 200)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_cell_is_the_reference(dtype: torch.dtype, num_trees: int, paths: list[int], size: int, inner: int) -> None:
    states = random(num_trees, 3, size, dtype=dtype) * 9
    found = torch.arange(num_trees * 11, device=DEVICE).view(num_trees, 11)[:, 2:] % 23
    above, last = put(paths), put([8, 0, 3, 3][: len(paths)])
    parts = weights(size, inner, dtype)
    got = gpu_cell.cell(states, above, found, last, *parts)
    assert_close(got, torch_cell.cell(states.double(), above, found, last, *(part.double() for part in parts)))
    assert got.is_contiguous()


def test_the_cell_of_more_rows_than_a_small_tile_and_of_nan() -> None:
    """NaN, which inactive sequences may have, stays in its own tree."""
    states, above = random(5, 2, 32), put([1, 0, 1, 0])
    found, last = torch.arange(15, device=DEVICE).view(5, 3), put([0, 1, 1, 2])
    parts = weights(32, 48, torch.float32)
    want = torch_cell.cell(states, above, found, last, *parts)
    states[3] = torch.nan
    got = gpu_cell.cell(states, above, found, last, *parts)
    assert got[3].isnan().all()
    assert_close(got[[0, 1, 2, 4]], want[[0, 1, 2, 4]])


def test_norms_add_the_same_in_every_dtype() -> None:
    """A state of tiny embeddings isn't shrunk, as it would be by the precision of bf16."""
    parts = weights(64, 80, torch.float32)
    tiny, ones = torch.full((1, 64), 2.0**-9), torch.ones(1, 64)
    up, up_bias, down, down_bias = (part.cpu().to(torch.bfloat16) for part in parts[1:])
    arguments = partial(F.linear, weight=up, bias=up_bias), partial(F.linear, weight=down, bias=down_bias)
    got, want = (torch_cell.next_state(ones.bfloat16(), e.bfloat16(), *arguments) for e in (tiny, ones))
    torch.testing.assert_close(got, want, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("cell", [torch_cell.cell, gpu_cell.cell], ids=["torch", "triton"])
def test_what_does_not_fit_the_cell_is_refused(cell) -> None:  # type: ignore[no-untyped-def]
    states, found, parts = random(2, 1, 32), put([1, 2]).view(2, 1), weights(32, 48, torch.float32)
    with pytest.raises(ValueError, match="don't fit each other"):
        cell(states, put([0]), found, put([0, 0]), *parts)
    with pytest.raises(ValueError, match="don't fit states of 32"):
        cell(states, put([0]), found, put([0]), *parts[:3], parts[3].T, parts[4])
    if cell is gpu_cell.cell:
        with pytest.raises(ValueError, match="must be contiguous"):
            cell(states, put([0]), found, put([0]), parts[0].half(), *parts[1:])


# --- candidates


@CANDIDATES
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("vocab", "num_ranks", "num_paths"), [(5, 5, 1), (150, 7, 3), (300, 2, 18)])
def test_candidates_are_ranked_as_their_logits(candidates, dtype, vocab, num_ranks, num_paths) -> None:  # type: ignore[no-untyped-def]
    """Exactly, many ties among them; with and without a bias, a draft vocabulary and a step of positions."""
    states, weight = whole(2, num_paths, 24, dtype=dtype), whole(vocab, 24, seed=1, dtype=dtype)
    temperature, seeds, positions = put([0, 1.3], torch.float32), put([1, 2**40 + 7]), put([3, 0])
    ids = torch.randperm(3 * vocab, generator=torch.Generator().manual_seed(2))[:vocab].sort().values.to(DEVICE)
    for bias, step, token_ids in ((None, 0, None), (whole(vocab, seed=3, dtype=dtype), 1, ids)):
        out = torch.full((2, num_paths + 1, num_ranks + 3), -7, device=DEVICE)
        arguments = states, weight, bias, temperature, seeds, positions, out[:, 1:, 2:-1]
        candidates(*arguments, ahead=2 * step, step=step, token_ids=token_ids)
        logits = states.float().flatten(0, 1) @ weight.float().T + (0 if bias is None else bias.float())
        at = (positions[:, None] + 2 * step + step * torch.arange(num_paths, device=DEVICE)).flatten()
        want = rank(logits, temperature, seeds, at, num_ranks, num_paths, token_ids)
        assert torch.equal(out[:, 1:, 2:-1], want.view(2, num_paths, num_ranks))
        out[:, 1:, 2:-1] = -7
        assert (out == -7).all(), "something else was written"


@pytest.mark.parametrize("dtype", DTYPES)
def test_candidates_of_any_logits(dtype: torch.dtype) -> None:
    states, weight = random(3, 2, 72, dtype=dtype), random(333, 72, seed=1, dtype=dtype) / 72**0.5
    out = torch.empty(3, 2, 4, dtype=torch.int64, device=DEVICE)
    gpu_candidates.candidates(states, weight, None, torch.zeros(3, device=DEVICE), put([0] * 3), put([0] * 3), out)
    logits = states.double() @ weight.double().T
    assert_close(logits.gather(2, out).to(torch.float32), logits.topk(4).values)


@CANDIDATES
def test_rows_of_nan_and_of_nothing_but_minus_infinity_still_name_tokens(candidates) -> None:  # type: ignore[no-untyped-def]
    states, weight = torch.ones(4, 1, 8, device=DEVICE), torch.zeros(100, 8, device=DEVICE)
    states[0], states[1, 0, 0] = torch.nan, torch.inf
    weight[:, 0] = -1
    weight[70, 0] = 1
    bias = torch.full((100,), -torch.inf, device=DEVICE)
    out = torch.full((4, 1, 3), -7, device=DEVICE)
    arguments = put([0, 0, 0, 1], torch.float32), put([1] * 4), put([0] * 4)
    candidates(states, weight, None, *arguments, out)
    assert ((out >= 0) & (out < 100)).all()
    assert out[:3, 0].tolist() == [[0, 1, 2], [70, 0, 1], [70, 0, 1]]
    states[1] = 1
    candidates(states, weight, bias, *arguments, out)
    assert ((out >= 0) & (out < 100)).all() and out[2, 0].tolist() == [0, 1, 2]


@CANDIDATES
def test_sizes_that_do_not_fit_candidates_are_refused(candidates) -> None:  # type: ignore[no-untyped-def]
    states, weight, out = random(2, 1, 8), random(9, 8), torch.empty(2, 1, 3, dtype=torch.int64, device=DEVICE)
    three = torch.zeros(2, device=DEVICE), put([0, 0]), put([0, 0])
    for arguments, match in (
        ((states, weight[:, :7], None, *three, out), "don't fit each other"),
        ((states, weight, None, *three, out[:1]), "don't fit each other"),
        ((states, weight, None, three[0], three[1][:1], three[2], out), "2 sequences"),
        ((states, weight[:2], None, *three, out), "1 to 2 candidates, not 3"),
        ((states, weight, random(8), *three, out), "must have 9 values"),
    ):
        with pytest.raises(ValueError, match=match):
            candidates(*arguments)
    if candidates is gpu_candidates.candidates:
        with pytest.raises(ValueError, match="must be contiguous"):
            candidates(states, weight.half(), None, *three, out)
