"""The packed decoder as an object over a Hugging Face model; tests/test_families.py compares what it computes."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from specdec.errors import UnsupportedModel
from specdec.models.decoder import Decoder
from tests.conftest import tiny_llama


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
