"""The self-check of quantized pages."""

import warnings

import pytest
import torch
from transformers import PreTrainedModel

from specdec.build import build_engine
from specdec.cache.pages import KVLayout
from specdec.engine.config import EngineConfig
from specdec.models.cachecheck import MAX_KL, check_cache
from specdec.models.decoder import Decoder
from tests.conftest import tiny_llama
from tests.families import hf_logits


def calm() -> PreTrainedModel:
    """A tiny model whose logits aren't so large that any error tips them over."""
    return tiny_llama(head_dim=32, initializer_range=0.2, dtype=torch.float32)


def outlier() -> PreTrainedModel:
    """The same model in other numbers: two key channels, turned together, are large, and the queries' small."""
    model = calm()
    with torch.no_grad():
        for layer in model.model.layers:
            for projection, factor in ((layer.self_attn.k_proj, 1500.0), (layer.self_attn.q_proj, 1 / 1500)):
                heads = projection.weight.view(-1, 32, projection.in_features)
                heads[:, [5, 21]] *= factor
    return model


def layout_of(decoder: Decoder, name: str) -> KVLayout:
    return decoder.kv_layout.stored_as(name)


def test_an_ordinary_model_passes_in_every_format() -> None:
    decoder = Decoder(calm())
    reports = {name: check_cache(decoder, layout_of(decoder, name)) for name in ("fp8", "int8", "int4")}
    assert not any(report.hurts for report in reports.values()), list(map(str, reports.values()))
    assert 0 < reports["int8"].kl < reports["fp8"].kl < reports["int4"].kl < MAX_KL
    assert all(report.key_outlier < 20 and report.num_tokens == 256 for report in reports.values())


def test_an_outlier_model_says_the_same_and_trips_the_check() -> None:
    ids = torch.arange(40)
    torch.testing.assert_close(hf_logits(outlier(), ids), hf_logits(calm(), ids), atol=1e-3, rtol=1e-3)
    decoder = Decoder(outlier())
    reports = {name: check_cache(decoder, layout_of(decoder, name)) for name in ("fp8", "fp8_e4m3", "int8", "int4")}
    hurts = {name for name, report in reports.items() if report.hurts}
    assert hurts == {"fp8", "int8", "int4"}, list(map(str, reports.values()))
    assert reports["int8"].key_outlier > 500
    assert {name for name, report in reports.items() if report.cut_off} == {"fp8"}
    assert "larger than the format stores" in reports["fp8"].warning


@pytest.mark.parametrize("name", ["auto", "fp8_e4m3", "int4"])
def test_a_format_that_hurts_is_warned_of_at_load(name: str) -> None:
    config = EngineConfig(kv_cache_dtype=name, max_model_len=64, num_blocks=8)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        build_engine(outlier(), "none", config)
    ours = [str(w.message) for w in caught if "quantized keys" in str(w.message)]
    assert len(ours) == (name == "int4")
    said = ("int4 g32: KL", "limit is a KL of 0.1", 'kv_cache_dtype="fp8_e4m3"')
    assert not ours or all(part in ours[0] for part in said)
