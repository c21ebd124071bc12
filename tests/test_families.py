"""Every family of the decoder against transformers: logits, greedy answers, and trees that cross a sliding window."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedModel

from specdec.drafters.protocol import Drafter
from specdec.errors import UnsupportedModel
from specdec.models.decoder import Decoder
from specdec.models.families import FAMILIES
from specdec.params import SamplingParams
from tests.conftest import VOCAB
from tests.engines import make_engine, outputs, run
from tests.families import LAYERS, OWN, WINDOW, hf_logits, packed_logits, tiny_model
from tests.scripted import AdversarialDrafter, OracleDrafter, RandomDrafter, SometimesDrafter

NUM_IDS = 41
IDS = torch.arange(NUM_IDS) * 7 % VOCAB
CHUNKS = ([NUM_IDS], [1] * NUM_IDS, [17, 1, 3, 19, 1])  # the window of 7 is reached in the middle of chunks
TOLERANCE = {"atol": 3e-4, "rtol": 3e-4}  # transformers rounds norms, angles and softmax to fp32 in a float64 model
VARIANTS: dict[str, dict[str, object]] = {
    "groups of 2": {},
    "mqa": {"num_key_value_heads": 1},
    "no grouping": {"num_key_value_heads": 4},
    "tied": {"tie_word_embeddings": True},
}
SPECIAL: list[tuple[str, dict[str, object]]] = [
    ("llama", {"attention_bias": True, "mlp_bias": True}),
    ("llama", {"head_dim": 16}),
    ("llama", {"hidden_act": "gelu_pytorch_tanh"}),
    ("mistral", {"sliding_window": None}),
    ("mistral", {"head_dim": 16, "sliding_window": 1}),
    ("qwen2", {"use_sliding_window": False, "layer_types": None}),
    ("qwen2", {"layer_types": None, "max_window_layers": 2}),
    ("qwen3", {"attention_bias": True, "head_dim": 16}),
    ("qwen3", {"use_sliding_window": False, "layer_types": None}),
    ("gemma2", {"attn_logit_softcapping": None, "final_logit_softcapping": None}),
    ("gemma2", {"attention_bias": True, "head_dim": 16, "hidden_activation": "gelu"}),
    ("gemma2", {"layer_types": ["full_attention"] * 3}),
    ("gemma3_text", {"final_logit_softcapping": 5.0, "head_dim": 16}),
    ("gemma3_text", {"layer_types": ["sliding_attention"] * 3}),
    ("phi3", {"sliding_window": None, "rope_parameters": {"rope_type": "default", "rope_theta": 100.0}}),
]


def assert_logits(model: PreTrainedModel, ids: torch.Tensor = IDS) -> None:
    want = hf_logits(model, ids)
    decoder = Decoder(model)
    for chunks in CHUNKS:
        torch.testing.assert_close(packed_logits(decoder, ids, chunks), want, **TOLERANCE)
    torch.testing.assert_close(hf_logits(model, ids), want)  # the HF model still works


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("family", OWN)
def test_logits_equal_transformers(family: str, variant: str) -> None:
    assert set(OWN) == set(FAMILIES)
    assert_logits(tiny_model(family, **VARIANTS[variant]))


@pytest.mark.parametrize("family, overrides", SPECIAL)
def test_logits_of_what_only_some_families_do(family: str, overrides: dict[str, object]) -> None:
    assert_logits(tiny_model(family, **overrides))


@pytest.mark.parametrize("family", OWN)
def test_half_precision_rounds_where_transformers_does(family: str) -> None:
    """bf16: not further from the exact logits than transformers' own are."""
    model = tiny_model(family, dtype=torch.bfloat16)
    got, want = packed_logits(Decoder(model), IDS, [NUM_IDS]).float(), hf_logits(model, IDS).float()
    exact = hf_logits(model.double(), IDS).float()
    assert (got - exact).norm() < 1.25 * (want - exact).norm()


def test_gemma_in_half_precision_rounds_the_embedding_scale_and_not_the_norms() -> None:
    model = tiny_model("gemma3_text", dtype=torch.bfloat16)
    weights = Decoder(model).weights
    assert weights.embed_scale == 5.65625 != 32**0.5
    assert torch.equal(weights.norm, 1 + model.model.norm.weight.float())
    assert weights.layers[0].qk_norm is not None and weights.layers[0].qk_norm.dtype == torch.float32


@pytest.mark.parametrize("family", OWN)
def test_weights_are_shared_and_saved(family: str, tmp_path: Path) -> None:
    model = tiny_model(family, dtype=torch.float32)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    decoder = Decoder(model)
    named = {name: p.untyped_storage().data_ptr() for name, p in model.named_parameters()}
    layer = decoder.weights.layers[1]
    for matrix in (layer.qkv, layer.o, layer.gate_up, layer.down, decoder.weights.embed, decoder.weights.head):
        assert matrix.untyped_storage().data_ptr() in named.values()
    assert named["model.layers.1.self_attn.o_proj.weight"] == layer.o.untyped_storage().data_ptr()
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert all(torch.equal(p, before[name]) for name, p in again.named_parameters())
    torch.testing.assert_close(packed_logits(Decoder(again), IDS, [NUM_IDS]), packed_logits(decoder, IDS, [NUM_IDS]))


def greedy(model: PreTrainedModel, prompt: list[int], num_new: int) -> list[int]:
    """transformers' answer."""
    ids = torch.tensor([prompt])
    mask = torch.ones_like(ids)
    out = model.generate(ids, attention_mask=mask, max_new_tokens=num_new, do_sample=False, pad_token_id=VOCAB - 1)
    return out[0, len(prompt) :].tolist()


@pytest.mark.parametrize("family", OWN)
def test_greedy_equals_generate_past_the_window(family: str) -> None:
    model = tiny_model(family, seed=5)
    prompts = [[5, 6, 7], list(range(20, 32))]  # shorter and longer than the window
    want = [greedy(model, prompt, WINDOW + 60) for prompt in prompts]
    assert all(len(set(tokens)) > 8 for tokens in want), "a loop would hide the window"
    params = [SamplingParams(max_new_tokens=WINDOW + 60, seed=0)] * 2
    answers = {tuple(prompt): tokens for prompt, tokens in zip(prompts, want, strict=True)}
    for drafter in (None, OracleDrafter(answers, "ragged")):
        assert outputs(run(make_engine(model, drafter), prompts, params)) == want


Answers = dict[tuple[int, ...], list[int]]
DRAFTERS: dict[str, Callable[[Answers], Drafter]] = {
    "oracle chain": lambda answers: OracleDrafter(answers, "chain"),
    "oracle wide": lambda answers: OracleDrafter(answers, "wide"),
    "oracle ragged": lambda answers: OracleDrafter(answers, "ragged"),
    "adversarial wide": lambda answers: AdversarialDrafter(answers, "wide"),
    "random": lambda answers: RandomDrafter(),
    "sometimes": lambda answers: SometimesDrafter(answers, 0.7),
}
PROMPTS = [[5, 6, 7], [3], [11, 12, 13] * 9, list(range(20, 27))]  # the third is run in chunks, the last fills a window


@pytest.fixture(scope="module", params=["mistral", "gemma3_text"])
def sliding(request: pytest.FixtureRequest) -> tuple[PreTrainedModel, dict[float, Answers]]:
    """A model with a window, and its plain answers by temperature."""
    model = tiny_model(request.param)
    plain = {}
    for temperature in (0.0, 1.0):
        params = [SamplingParams(max_new_tokens=24, temperature=temperature, seed=i) for i in range(4)]
        alone = [outputs(run(make_engine(model), [p], [q]))[0] for p, q in zip(PROMPTS, params, strict=True)]
        plain[temperature] = {tuple(prompt): tokens for prompt, tokens in zip(PROMPTS, alone, strict=True)}
    return model, plain


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("max_nodes", [4, 64])
@pytest.mark.parametrize("name", DRAFTERS)
def test_trees_that_cross_the_window_change_no_token(name, max_nodes, temperature, sliding) -> None:  # type: ignore[no-untyped-def]
    """CASES i1: the window counts depth, not rows. Trees of 64 nodes are far larger than the window, chains deeper."""
    model, plain = sliding
    answers = plain[temperature]
    engine = make_engine(model, DRAFTERS[name](answers), max_nodes=max_nodes, max_num_batched_tokens=512)
    params = [SamplingParams(max_new_tokens=24, temperature=temperature, seed=i) for i in range(4)]
    requests = run(engine, PROMPTS, params)
    assert dict(zip(answers, outputs(requests), strict=True)) == answers
    if name == "oracle chain" and max_nodes == 64:
        assert min(r.stats.mean_acceptance_length for r in requests) > WINDOW


REFUSED: list[tuple[str, dict[str, object], str]] = [
    ("gemma3_text", {"attn_logit_softcapping": 20.0}, "attn_logit_softcapping=20.0 is not supported for gemma3_text"),
    ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention=True is not supported"),
    ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention=True is not supported"),
    ("llama", {"sliding_window": 8}, "sliding_window=8 is not supported for llama"),
    ("mistral", {"layer_types": LAYERS}, "mistral with layer_types .*full_attention.* is not supported"),
    ("qwen3", {"layer_types": ["full_attention", "chunked_attention", "full_attention"]}, "type chunked_attention"),
    ("qwen2", {"use_sliding_window": False, "layer_types": LAYERS}, "no sliding_window"),
    ("qwen2", {"hidden_act": "quick_gelu"}, "activation 'quick_gelu' is not supported"),
    ("gemma2", {"hidden_activation": "relu2"}, "activation 'relu2' is not supported"),
]


@pytest.mark.parametrize("family, overrides, message", REFUSED)
def test_what_the_decoder_cannot_do_is_refused_by_name(family, overrides, message) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(UnsupportedModel, match=message):
        Decoder(tiny_model(family, **overrides))


def test_a_model_without_a_head_is_refused_by_name() -> None:
    model = AutoModelForSequenceClassification.from_config(tiny_model("llama").config)
    with pytest.raises(UnsupportedModel, match="LlamaForSequenceClassification has no language-modelling head"):
        Decoder(model)


def test_a_model_with_fewer_layers_than_its_config_says_is_refused() -> None:
    model = tiny_model("llama")
    del model.model.layers[2]
    with pytest.raises(UnsupportedModel, match="has 2 layers and its config says 3; set num_hidden_layers"):
        Decoder(model)


def test_parameters_that_would_not_be_read_are_refused_and_nothing_is_changed() -> None:
    model = tiny_model("qwen2")
    storage = model.model.layers[0].self_attn.q_proj.weight.data_ptr()
    model.model.layers[2].self_attn.sinks = nn.Parameter(torch.zeros(4))
    with pytest.raises(UnsupportedModel, match="parameter model.layers.2.self_attn.sinks is not a qwen2 model's"):
        Decoder(model)
    assert model.model.layers[0].self_attn.q_proj.weight.data_ptr() == storage


def test_projections_that_are_no_plain_matrices_are_refused() -> None:
    class Linear8bit(nn.Linear):
        pass

    model = tiny_model("qwen3")
    model.model.layers[1].mlp.up_proj = Linear8bit(32, 48, bias=False)
    with pytest.raises(UnsupportedModel, match="mlp.up_proj is a Linear8bit of Parameter, not a plain Linear"):
        Decoder(model)
