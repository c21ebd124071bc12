"""Every kind of rotary scaling against transformers."""

import pytest
import torch
import transformers
from packaging.version import Version
from transformers import PreTrainedModel

from specdec.errors import UnsupportedModel
from specdec.models.decoder import Decoder
from tests.conftest import VOCAB
from tests.families import COMMON, hf_logits, packed_logits, tiny_model

ORIGINAL = 24
"""Length from which dynamic and longrope change their frequencies."""
NUM_IDS = 60
IDS = torch.arange(NUM_IDS) * 5 % VOCAB
TOLERANCE = {"atol": 3e-4, "rtol": 3e-4}  # transformers rounds norms, angles and softmax to fp32 in a float64 model
BASE = {"rope_theta": 100.0, "original_max_position_embeddings": ORIGINAL}
LONG = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.1, 1.3, 1.5],
    "long_factor": [1.2, 2.0, 3.0, 5.0],
    **BASE,
}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 100.0, "factor": 3.0}
FIXED: dict[str, dict[str, object]] = {
    "default": {"rope_type": "default", "rope_theta": 100.0},
    "linear": {"rope_type": "linear", "rope_theta": 100.0, "factor": 2.5},
    "llama3": {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **BASE},
    "yarn": {"rope_type": "yarn", "factor": 4.0, **BASE},
    "yarn with options": {
        "rope_type": "yarn",
        "factor": 4.0,
        "beta_fast": 8.0,
        "beta_slow": 2.0,
        "mscale": 1.0,
        "mscale_all_dim": 0.5,
        "truncate": False,
        **BASE,
    },
}


def by_layer(parameters: dict[str, object]) -> dict[str, object]:
    """Gemma 3: the full layers have the scaling, the sliding ones keep their own frequencies."""
    return {"full_attention": parameters, "sliding_attention": {"rope_type": "default", "rope_theta": 20.0}}


def growing(name: str) -> PreTrainedModel:
    """A model whose frequencies depend on the length beyond ORIGINAL."""
    if name == "llama dynamic":
        return tiny_model("llama", rope_parameters=dict(DYNAMIC), max_position_embeddings=ORIGINAL)
    if name == "gemma3 dynamic":
        parameters = by_layer(dict(DYNAMIC))
        return tiny_model("gemma3_text", rope_parameters=parameters, max_position_embeddings=ORIGINAL)
    if name == "gemma3 longrope":
        return tiny_model("gemma3_text", rope_parameters=by_layer(dict(LONG)))
    partial = {"partial_rotary_factor": 0.5, "short_factor": [1.0, 1.3], "long_factor": [2.0, 5.0]}
    parameters = LONG | (partial if name == "phi3 partial longrope" else {})
    return tiny_model("phi3", rope_parameters=parameters, original_max_position_embeddings=ORIGINAL)


GROWING = ["llama dynamic", "gemma3 dynamic", "phi3 longrope", "phi3 partial longrope"]
if Version(transformers.__version__) >= Version("5.24"):  # 5.17's own longrope fails where layers have different ropes
    GROWING.append("gemma3 longrope")


@pytest.mark.parametrize("name", FIXED)
@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_fixed_frequencies(family: str, name: str) -> None:
    parameters = dict(FIXED[name])
    model = tiny_model(family, rope_parameters=by_layer(parameters) if family == "gemma3_text" else parameters)
    want = hf_logits(model, IDS)
    decoder = Decoder(model)
    for chunks in ([NUM_IDS], [1] * NUM_IDS, [17, 1, 3, 38, 1]):
        torch.testing.assert_close(packed_logits(decoder, IDS, chunks), want, **TOLERANCE)
    assert decoder.max_len == COMMON["max_position_embeddings"]


@pytest.mark.parametrize("name", GROWING)
def test_growing_frequencies_within_the_original_length(name: str) -> None:
    model = growing(name)
    ids = IDS[:ORIGINAL]
    want = hf_logits(model, ids)
    for _ in range(2):  # also after a longer forward, which leaves its frequencies in the HF model
        decoder = Decoder(model)
        for chunks in ([ORIGINAL], [1] * ORIGINAL, [17, 1, 3, 3]):
            torch.testing.assert_close(packed_logits(decoder, ids, chunks), want, **TOLERANCE)
        hf_logits(model, IDS)
    assert decoder.max_len == ORIGINAL  # longer ones are refused: no forward of transformers is like them


@pytest.mark.parametrize("name", GROWING)
def test_growing_frequencies_beyond_it_token_by_token(name: str) -> None:
    """Each position has the frequencies of a sequence that ends there, however it is fed."""
    model = growing(name)
    want = hf_logits(model, IDS, [1] * NUM_IDS)
    decoder = Decoder(model)
    for chunks in ([NUM_IDS], [1] * NUM_IDS, [17, 1, 3, 38, 1]):
        torch.testing.assert_close(packed_logits(decoder, IDS, chunks), want, **TOLERANCE)
    short, whole = hf_logits(growing(name), IDS[:ORIGINAL]), hf_logits(growing(name), IDS)[:ORIGINAL]
    assert not torch.allclose(short, whole, atol=0.1), "the frequencies never changed"


def test_other_kinds_are_refused_by_name() -> None:
    proportional = {"rope_type": "proportional", "rope_theta": 100.0, "partial_rotary_factor": 1.0}
    with pytest.raises(UnsupportedModel, match="rotary scaling 'proportional' is not supported; supported: default"):
        Decoder(tiny_model("llama", rope_parameters=proportional))


def test_partial_rotary_is_refused_where_the_family_has_none() -> None:
    partial = {"rope_type": "linear", "rope_theta": 100.0, "factor": 2.0, "partial_rotary_factor": 0.5}
    with pytest.raises(UnsupportedModel, match="partial rotary embedding is not supported for mistral"):
        Decoder(tiny_model("mistral", rope_parameters=partial))
