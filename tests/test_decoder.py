"""The packed decoder against Hugging Face's forward."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from specdec.errors import UnsupportedModel
from specdec.models.decoder import Decoder
from tests.conftest import VOCAB, tiny_llama
from tests.families import packed_logits

VARIANTS: dict[str, dict[str, object]] = {
    "plain": {},
    "tied": {"tie_word_embeddings": True},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "mqa": {"num_key_value_heads": 1},
    "no grouping": {"num_key_value_heads": 4},
    "wide heads": {"head_dim": 16},
    "gelu": {"hidden_act": "gelu_pytorch_tanh"},
}


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_equal_transformers(name: str) -> None:
    model = tiny_llama(**VARIANTS[name])
    for parameter in model.parameters():
        if parameter.ndim == 1:
            torch.nn.init.normal_(parameter, mean=0.7)  # norms and biases that do something
    ids = torch.arange(50) * 7 % VOCAB
    with torch.inference_mode():
        want = model(ids[None]).logits[0]
    decoder = Decoder(model)
    for chunks in ([50], [1] * 50, [17, 1, 31, 1]):
        # transformers rounds norms and angles to fp32 in a float64 model, hence the tolerance
        torch.testing.assert_close(packed_logits(decoder, ids, chunks), want, atol=2e-4, rtol=2e-4)
    with torch.inference_mode():
        torch.testing.assert_close(model(ids[None]).logits[0], want)  # the HF model still works


def test_weights_are_shared_and_merged_once(tmp_path: Path) -> None:
    model = tiny_llama(dtype=torch.float32)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    first, second = Decoder(model), Decoder(model)
    attn = model.model.layers[0].self_attn
    storage = attn.q_proj.weight.untyped_storage().data_ptr()
    assert attn.v_proj.weight.untyped_storage().data_ptr() == storage
    assert first.weights.layers[0].qkv.untyped_storage().data_ptr() == storage
    assert second.weights.layers[0].qkv.untyped_storage().data_ptr() == storage
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert all(torch.equal(p, before[name]) for name, p in again.named_parameters())


def test_unknown_families_and_features_are_refused_by_name() -> None:
    gpt2 = GPT2LMHeadModel(GPT2Config(vocab_size=11, n_embd=8, n_layer=1, n_head=1, n_positions=16))
    with pytest.raises(UnsupportedModel, match="model type 'gpt2' is not supported yet; supported: .*llama"):
        Decoder(gpt2)
    with pytest.raises(UnsupportedModel, match="activation 'quick_gelu' is not supported; supported: gelu"):
        Decoder(tiny_llama(hidden_act="quick_gelu"))
