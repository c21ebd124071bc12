"""Heads that draft by int8 products: how far off they may be, that rows are alone, and where fp32 stays."""

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from specdec.drafters.draft_heads import DraftHeads
from specdec.drafters.heads import HeadsConfig, make_heads, save_heads
from specdec.drafters.int8 import INPUT_MAX, WEIGHT_MAX, HostHeads, Int8Linear, has_int8
from specdec.drafters.protocol import DraftQuery, Observation
from specdec.params import SamplingParams
from specdec.training.trees import draft_seconds
from tests.conftest import tiny_llama
from tests.engines import make_engine, outputs, run
from tests.hydra import random_hydra, random_recurrent
from tests.medusa import random_medusa

H, V, K = 96, 500, 3
pytestmark = pytest.mark.skipif(not has_int8(torch.zeros(1)), reason="torch has no engine for int8 products here")
HEADS = pytest.mark.parametrize("random_heads", [random_medusa, random_hydra, random_recurrent])
KINDS = pytest.mark.parametrize("kind", ["medusa", "hydra", "recurrent"])


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class Head:
    """The base's head as decoders and draft vocabularies have it."""

    def __init__(self, weight: Tensor, plain: bool = True) -> None:
        self.weight, self.plain = weight, plain

    @property
    def matrix(self) -> tuple[Tensor, Tensor | None] | None:
        return (self.weight, None) if self.plain else None

    def __call__(self, states: Tensor) -> Tensor:
        return states @ self.weight.T


def heads_of(kind: str, projection: str = "shared", **changes: Any) -> Any:
    """Random heads whose layers keep the size of what they read."""
    num_layers = 0 if kind == "recurrent" else 1
    sizes: dict[str, Any] = {"num_heads": K, "num_layers": num_layers, "hidden_size": H, "vocab_size": V}
    heads = make_heads(HeadsConfig(kind=kind, projection=projection, **sizes, **changes))  # type: ignore[arg-type]
    for seed, parameter in enumerate(heads.parameters()):
        parameter.data = random(*parameter.shape, seed=seed) / parameter.shape[-1] ** 0.5
    return heads.requires_grad_(False)


def logits_of(host: HostHeads[Any]) -> Tensor:
    return host.project(host.heads.states(random(50, H), random(50, K, H, seed=1)))


# ---- the product ----


@pytest.mark.parametrize(("rows", "inputs", "outputs_"), [(1, 1, 1), (3, 5, 7), (9, 576, 33), (200, 64, 40)])
@pytest.mark.parametrize("biased", [False, True])
def test_products_are_as_close_as_rounding_allows(rows: int, inputs: int, outputs_: int, biased: bool) -> None:
    """A rounded weight is off by at most w = largest / (2 WEIGHT_MAX) of its row, a rounded input by
    x = largest / (2 INPUT_MAX) of its own. So a sum of products is off by at most Σ |x_i| w + Σ |w_i| x + in w x.
    """
    weight, bias = random(outputs_, inputs).mul(random(outputs_, 1, seed=1).exp()), random(outputs_, seed=2)
    given = random(rows, inputs, seed=3) * random(rows, 1, seed=4).exp()
    got = Int8Linear(weight, bias if biased else None)(given)
    want = given.double() @ weight.double().T + (bias if biased else 0)
    assert got.shape == (rows, outputs_) and got.dtype == torch.float32
    w = weight.abs().amax(1) / (2 * WEIGHT_MAX)
    x = given.abs().amax(1, keepdim=True) / (2 * INPUT_MAX)
    bound = given.abs().sum(1, keepdim=True) * w + weight.abs().sum(1) * x + inputs * w * x
    assert ((got - want).abs() <= bound * 1.001 + 1e-5).all()


def test_whole_inputs_and_weights_are_exact_at_their_largest() -> None:
    """Sums of the largest products, which 16 bits couldn't hold if inputs had all 8 bits."""
    weight = torch.full((4, 64), float(WEIGHT_MAX))
    weight[1::2] *= -1
    given = torch.full((3, 64), float(INPUT_MAX))
    given[1] *= -1
    torch.testing.assert_close(Int8Linear(weight)(given), given @ weight.T, rtol=1e-6, atol=0)


def test_rows_do_not_influence_each_other() -> None:
    product = Int8Linear(random(40, H), random(40))
    given = random(9, H) * torch.logspace(-6, 6, 9).unsqueeze(1)
    given[4] = torch.nan
    together = product(given)
    for i in (0, 1, 2, 3, 5, 6, 7, 8):
        assert torch.equal(product(given[i : i + 1])[0], together[i])
    assert torch.equal(product(given.view(3, 3, H))[2], together[6:])


def test_rows_of_zeros_and_no_rows() -> None:
    weight = random(5, 8)
    weight[2] = 0
    product = Int8Linear(weight)
    assert not product(torch.zeros(2, 8)).any() and not product(random(3, 8))[:, 2].any()
    assert product(torch.zeros(0, 8)).shape == (0, 5)


# ---- heads ----


@KINDS
@pytest.mark.parametrize("projection", ["shared", "own"])
def test_heads_in_int8_mostly_guess_the_same(kind: str, projection: str, request: pytest.FixtureRequest) -> None:
    heads, head = heads_of(kind, projection), Head(random(V, H))
    got = logits_of(HostHeads(heads, head))
    request.getfixturevalue("no_int8")
    want = logits_of(HostHeads(heads, head))
    assert not torch.equal(got, want), "int8 is used"
    assert (got - want).norm() < 0.05 * want.norm()
    assert (got.argmax(-1) == want.argmax(-1)).double().mean() > 0.8


def test_own_projections_keep_their_heads_and_biases() -> None:
    heads = heads_of("hydra", "own", projection_bias=True)
    host, states = HostHeads(heads, Head(random(V, H))), random(7, K, H)
    whole, want = host.project(states), heads.project(states, Head(random(V, H)))
    assert (whole - want).norm() < 0.05 * want.norm()
    for k in range(K):
        assert torch.equal(host.project(states[:, k : k + 1], k), whole[:, k : k + 1])


@KINDS
def test_the_heads_given_stay_as_they_are(kind: str, tmp_path: Path) -> None:
    heads = heads_of(kind)
    before = deepcopy(heads.state_dict())
    host = HostHeads(heads, Head(random(V, H)))
    logits_of(host)
    save_heads(heads, tmp_path)
    saved = load_file(tmp_path / "heads.safetensors")
    assert saved.keys() == before.keys() and all(torch.equal(saved[name], before[name]) for name in before)
    assert not any(isinstance(module, Int8Linear) for module in heads.modules())
    kept = {id(tensor) for tensor in heads.parameters()}
    assert all(id(tensor) in kept for tensor in host.heads.parameters()), "what isn't in int8 is shared"


@KINDS
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes_stay_exact(kind: str, dtype: torch.dtype) -> None:
    heads, head = heads_of(kind).to(dtype), Head(random(V, H).to(dtype))
    host = HostHeads(heads, head)
    assert host.heads is heads and host.lm_head is head
    own = heads_of(kind, "own").to(dtype)
    states = random(4, K, H).to(dtype)
    assert torch.equal(HostHeads(own, head).project(states), own.project(states, head))


@KINDS
def test_without_an_engine_heads_stay_exact(kind: str, no_int8: None) -> None:
    heads, own, head, states = heads_of(kind), heads_of(kind, "own"), Head(random(V, H)), random(4, K, H)
    host = HostHeads(heads, head)
    assert host.heads is heads and host.lm_head is head
    assert torch.equal(HostHeads(own, head).project(states), own.project(states, head))


@pytest.mark.parametrize("lacking", ["quantize_per_channel", "ops"])
def test_a_torch_without_quantized_tensors_has_no_int8(lacking: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if lacking == "ops":
        monkeypatch.setattr("specdec.drafters.int8._PRODUCT", "linear_that_is_no_more")
    else:
        monkeypatch.delattr(torch, lacking)
    assert not has_int8(torch.zeros(1))


def test_weights_that_are_stored_otherwise_are_left_alone() -> None:
    class Stored(Tensor):
        """As torchao's weights, which say fp32."""

    weight = random(V, H).as_subclass(Stored)
    assert weight.dtype == torch.float32 and not has_int8(weight) and has_int8(nn.Parameter(random(3, 3)))


@pytest.mark.parametrize("head", [Head(random(V, H), plain=False), nn.Linear(H, V, bias=False)])
def test_heads_that_are_more_than_a_product_are_called(head: Callable[[Tensor], Tensor]) -> None:
    assert HostHeads(heads_of("medusa"), head).lm_head is head


def test_the_fp32_rows_of_a_draft_vocabulary_are_not_kept() -> None:
    drafter = random_recurrent(tiny_llama(dtype=torch.float32), draft_vocab=31)
    guesses: Any = drafter._guesses
    assert isinstance(guesses._host.lm_head, Int8Linear) and guesses._candidates._lm_head is guesses._host.lm_head


# ---- drafts ----


@HEADS
@torch.inference_mode()
def test_drafts_of_a_request_do_not_depend_on_the_others(random_heads: Callable[..., Any]) -> None:
    drafter = random_heads(tiny_llama(dtype=torch.float32))
    drafter.observe(Observation([0, 1, 2], [1, 1, 1], random(3, 32) * torch.tensor([[1.0], [100.0], [0.01]])))
    queries = [DraftQuery(i, [3, 4 + i], 1, 6, SamplingParams(seed=i, temperature=i / 2)) for i in range(3)]
    together = drafter.propose(queries)
    for i, query in enumerate(queries):
        assert drafter.propose([query]).tokens_of(0) == together.tokens_of(i)


@HEADS
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_no_token_changes(random_heads: Callable[..., Any], temperature: float) -> None:
    model: PreTrainedModel = tiny_llama(dtype=torch.float32)
    prompts = [[5, 6, 7], [50] * 18, [11, 3]]
    params = [SamplingParams(max_new_tokens=12, temperature=temperature, seed=i) for i in range(3)]
    plain = outputs(run(make_engine(model), prompts, params))
    requests = run(make_engine(model, random_heads(model, draft_vocab=31)), prompts, params)
    assert outputs(requests) == plain and all(request.stats.num_draft_tokens for request in requests)


def test_the_time_of_drafts_is_that_of_int8(monkeypatch: pytest.MonkeyPatch) -> None:
    heads: DraftHeads = heads_of("recurrent")
    calls = []
    forward = Int8Linear.forward
    monkeypatch.setattr(Int8Linear, "forward", lambda self, x: calls.append(self) or forward(self, x))
    assert draft_seconds(heads, Head(random(V, H))) > 0
    assert len(set(calls)) == 3, "both layers of the cell, and the projection"
