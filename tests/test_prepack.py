"""Weights in the order in which products read them: the same products, copies that follow the model, and when."""

from types import SimpleNamespace

import psutil
import pytest
import torch

import specdec
from specdec import LLM
from specdec.build import cost_key
from specdec.errors import ConfigError
from specdec.kernels.gpu import launch
from specdec.kernels.linear import gated_linear, linear
from specdec.kernels.prepack import can_prepack, gains_by_prepacking, prepack
from specdec.kernels.slabs import SLAB, fits_slabs, from_slabs, in_slabs, to_slabs
from specdec.models import load, weights
from specdec.models.decoder import Decoder
from specdec.models.head import DecoderHead
from specdec.models.load import make_target
from tests.conftest import tiny_llama

CPU = torch.device("cpu")
HERE = can_prepack(CPU, torch.float32)
needs_onednn = pytest.mark.skipif(not HERE, reason="torch has no oneDNN here, or the CPU no AVX2")
PROMPT = [3, 4, 5, 6, 3, 4, 5]


@needs_onednn
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("n", [0, 1, 7, 300])
def test_products(n: int, dtype: torch.dtype) -> None:
    if not can_prepack(CPU, dtype):
        pytest.skip("the CPU has no products in this dtype")
    generator = torch.Generator().manual_seed(n)
    x, w, bias = (torch.randn(shape, generator=generator).to(dtype) for shape in ((n, 72), (50, 72), (50,)))
    tolerance = {"atol": 1e-4, "rtol": 1e-4} if dtype == torch.float32 else {"atol": 0.15, "rtol": 1e-2}
    for b in (None, bias):
        want = x.double() @ w.double().T + (0 if b is None else b.double())
        got = linear(x, prepack(w), b)
        assert got.is_contiguous() and got.dtype == dtype
        torch.testing.assert_close(got.double(), want, **tolerance)
        torch.testing.assert_close(gated_linear(x, prepack(w), b, "silu"), gated_linear(x, w, b, "silu"), **tolerance)


def test_what_can_be_prepacked(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not can_prepack(CPU, torch.float64) and not can_prepack(CPU, torch.float16)
    for hopper in (False, True):
        monkeypatch.setattr(launch, "on_hopper", lambda device, hopper=hopper: hopper)
        for dtype in (torch.float16, torch.bfloat16):
            assert can_prepack(torch.device("cuda"), dtype) is hopper
        assert not can_prepack(torch.device("cuda"), torch.float32)


def test_what_gains_on_a_gpu() -> None:
    """Large matrices, whose rows are whole slabs; on a CPU each does."""
    for shape, gains in (((8, 2048), True), ((8, 14336), True), ((8, 1792), False), ((8, 2304 + 64), False)):
        weight = torch.empty(shape, dtype=torch.bfloat16, device="meta")
        assert gains_by_prepacking(weight) is gains
    assert not gains_by_prepacking(torch.empty(8, 2048, device="meta")), "float32"
    assert gains_by_prepacking(torch.empty(8, 8))


def test_slabs_hold_columns_of_all_rows() -> None:
    weight = torch.arange(6 * 2 * SLAB, dtype=torch.float32).view(6, -1)
    slabs = to_slabs(weight)
    assert in_slabs(slabs) and not in_slabs(weight) and slabs.shape == (6, 2, SLAB)
    memory = slabs.as_strided((12, SLAB), (SLAB, 1))
    assert torch.equal(memory, torch.cat([weight[:, :SLAB], weight[:, SLAB:]]))
    assert torch.equal(from_slabs(slabs), weight)
    assert torch.empty_like(slabs).stride() == slabs.stride(), "as benchmarks make copies"
    slabs.copy_(to_slabs(weight + 1))
    assert torch.equal(memory, torch.cat([weight[:, :SLAB], weight[:, SLAB:]]) + 1), "in the same memory"


def test_a_decoder_over_slabs_scores_as_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where some matrices don't gain; but by the reference."""
    monkeypatch.setattr(weights, "prepack", to_slabs)
    monkeypatch.setattr(weights, "gains_by_prepacking", lambda weight: weight.shape[1] == SLAB)
    model = tiny_llama(hidden_size=SLAB, dtype=torch.float32)
    plain, packed = Decoder(model), Decoder(model, prepacked=True)
    layer = packed.weights.layers[0]
    assert (
        isinstance(layer.down, torch.Tensor) and not in_slabs(layer.down) and packed.prepacked and not plain.prepacked
    )
    assert all(isinstance(w, torch.Tensor) and in_slabs(w) for w in (layer.qkv, layer.gate_up, packed.weights.head))
    assert torch.equal(packed.logits(hidden := torch.randn(3, SLAB)), plain.logits(hidden))
    matrix = DecoderHead(packed).matrix
    assert matrix is not None and matrix[0] is packed.head and torch.equal(packed.head, plain.weights.head)
    model.load_state_dict(tiny_llama(hidden_size=SLAB, dtype=torch.float32, seed=1).state_dict())
    packed.refresh()
    assert torch.equal(packed.logits(hidden), plain.logits(hidden))


@needs_onednn
def test_a_decoder_scores_as_without() -> None:
    model = tiny_llama(dtype=torch.float32)
    plain, packed = Decoder(model), Decoder(model, prepacked=True)
    assert packed.weights.head.is_mkldnn and packed.weights.layers[0].qkv.is_mkldnn  # type: ignore[union-attr]
    hidden = torch.randn(3, plain.hidden_size)
    torch.testing.assert_close(packed.logits(hidden), plain.logits(hidden))
    matrix = DecoderHead(packed).matrix
    assert matrix is not None and torch.equal(matrix[0], plain.weights.head)


@needs_onednn
def test_engines_over_one_model_share_the_copies() -> None:
    model = tiny_llama(dtype=torch.float32)
    one, other = Decoder(model, prepacked=True), Decoder(model, prepacked=True)
    assert one.weights.head is other.weights.head and one.weights.layers[1].down is other.weights.layers[1].down
    assert Decoder(tiny_llama(seed=1, dtype=torch.float32), prepacked=True).weights.head is not one.weights.head


@needs_onednn
def test_copies_follow_the_model() -> None:
    """Where engines call `refresh`, and where a new one is made of a model that was trained meanwhile."""
    model, changed = tiny_llama(dtype=torch.float32), tiny_llama(seed=1, dtype=torch.float32)
    decoder = Decoder(model, prepacked=True)
    hidden = torch.randn(2, decoder.hidden_size)
    want = Decoder(changed).logits(hidden)
    model.load_state_dict(changed.state_dict())
    assert not torch.allclose(decoder.logits(hidden), want)
    decoder.refresh()
    torch.testing.assert_close(decoder.logits(hidden), want)
    model.load_state_dict(tiny_llama(seed=2, dtype=torch.float32).state_dict())
    again = Decoder(model, prepacked=True)
    torch.testing.assert_close(again.logits(hidden), Decoder(model).logits(hidden))


@needs_onednn
def test_answers_are_the_same() -> None:
    answers = [LLM(tiny_llama(dtype=torch.float32), "ngram", prepack=how).generate(PROMPT)[0] for how in (True, False)]
    assert answers[0].token_ids == answers[1].token_ids


@needs_onednn
def test_the_drop_in_prepacks_only_if_told_and_follows_training() -> None:
    asked = {"inputs": torch.tensor([PROMPT]), "max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    for how in (None, True):
        model = tiny_llama(dtype=torch.float32)
        with specdec.accelerate(model, num_blocks=64, prepack=how) as accelerated:
            assert accelerated.engine is not None and accelerated.engine.model.prepacked is bool(how)  # type: ignore[attr-defined]
            for seed in (3, 4):
                other = tiny_llama(seed=seed, dtype=torch.float32)
                model.load_state_dict(other.state_dict())
                assert model.generate(**asked).tolist() == other.generate(**asked).tolist()
                assert accelerated.completions


@needs_onednn
def test_by_default_where_memory_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_llama(dtype=torch.float32)
    size = model.get_memory_footprint()
    for left, prepacked in ((2 * size, True), (2 * size - 1, False)):
        monkeypatch.setattr(psutil, "virtual_memory", lambda left=left: SimpleNamespace(available=left))
        target = make_target(model, prepack=None)
        assert target.prepacked is prepacked
        assert make_target(model, prepack=True).prepacked and not make_target(model, prepack=False).prepacked
        assert ("prepacked" in cost_key(model, prepacked=target.prepacked).file_name) is prepacked


def test_memory_that_is_left_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is free, and what torch has reserved and doesn't use."""
    for name, value in (("mem_get_info", (100, 1000)), ("memory_reserved", 70), ("memory_allocated", 30)):
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
    assert load._left(torch.device("cuda")) == 140


def test_a_small_model_on_a_gpu_gains_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "can_prepack", lambda *kind: True)
    monkeypatch.setattr(weights, "gains_by_prepacking", fits_slabs)
    model = tiny_llama(dtype=torch.float32)
    assert not make_target(model, prepack=None).prepacked
    with pytest.raises(ConfigError, match="no matrix that gains by it on cpu: of 2,048 inputs.*leave prepack out"):
        make_target(model, prepack=True)


def test_what_it_is_not_for_is_named() -> None:
    with pytest.raises(ConfigError, match="float64 can't be prepacked on cpu.*leave prepack out"):
        LLM(tiny_llama(dtype=torch.float64), prepack=True)
    assert not make_target(tiny_llama(dtype=torch.float64), prepack=None).prepacked
    with pytest.raises(ConfigError, match="prepack must be True, False or None, not 'yes'"):
        LLM(tiny_llama(), prepack="yes")


@needs_onednn
def test_a_model_that_runs_by_its_own_forward_has_none() -> None:
    own = tiny_llama(hidden_act="quick_gelu", dtype=torch.float32)
    assert not make_target(own, prepack=None).prepacked
    with pytest.raises(ConfigError, match="this llama runs by its own forward.*leave prepack out"):
        make_target(own, prepack=True)
