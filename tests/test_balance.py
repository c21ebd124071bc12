"""Channels of queries and keys that are made alike in size."""

import pytest
import torch
from transformers import PreTrainedModel

from specdec.models.balance import MAX_EXPONENT, balance
from specdec.models.cachecheck import check_cache
from specdec.models.decoder import Decoder
from tests.conftest import VOCAB
from tests.families import packed_logits, tiny_model

IDS = torch.randint(VOCAB, (40,), generator=torch.Generator().manual_seed(3))


def uneven(family: str, dtype: torch.dtype) -> PreTrainedModel:
    """A model of which three key channels are large, and the queries' small."""
    model = tiny_model(family, dtype=dtype, head_dim=64, initializer_range=0.2)
    offset = 1 if family.startswith("gemma") else 0
    with torch.no_grad():
        for layer in model.model.layers:
            attn = layer.self_attn
            for norm, factor in ((attn.q_norm.weight, 1 / 100), (attn.k_norm.weight, 100)):
                norm[[3, 35, 40]] = (norm[[3, 35, 40]] + offset) * factor - offset
    return model


def unbalanced(model: PreTrainedModel) -> Decoder:
    """A decoder with the norms that the model came with."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("specdec.models.weights.balance", lambda norm, projection, num_heads: torch.ones_like(norm))
        return Decoder(model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", ["qwen3", "gemma3_text"])
def test_native_pages_hold_other_keys_and_give_the_same_bits(family: str, dtype: torch.dtype) -> None:
    model = uneven(family, dtype)
    plain, decoder = unbalanced(model), Decoder(model)
    ours, theirs = decoder.weights.layers[0].qk_norm, plain.weights.layers[0].qk_norm
    assert ours is not None and theirs is not None and not torch.equal(ours, theirs)
    assert torch.equal(packed_logits(decoder, IDS, [40]), packed_logits(plain, IDS, [40]))


@pytest.mark.parametrize("family", ["qwen3", "gemma3_text"])
def test_large_key_channels_hurt_less(family: str) -> None:
    model = uneven(family, torch.float32)
    layout = Decoder(model).kv_layout.stored_as("int8")
    before, after = (check_cache(decoder, layout) for decoder in (unbalanced(model), Decoder(model)))
    assert after.key_outlier < before.key_outlier / 4 and after.kl < before.kl / 4, (str(before), str(after))


def test_factors_are_powers_of_two_that_turned_pairs_share() -> None:
    """Four heads over two; their middle pairs' keys are 16 times, 10⁹ times and 0 times as large as the queries."""
    norm = torch.ones(6, 10)
    norm[4:, [1, 6]], norm[4:, [2, 7]], norm[4:, [3, 8]] = 16, 1e9, 0
    norm[5, [1, 6]] = 1
    factor = balance(norm, torch.ones(6, 10, 7), 4)
    least, most = 2.0**-MAX_EXPONENT, 2.0**MAX_EXPONENT
    first, second = torch.tensor([[1, 1 / 4, least, most, 1] * 2, [1, 1, least, most, 1] * 2])
    assert torch.equal(factor[4:], torch.stack([first, second]))
    assert torch.equal(factor[:4], 1 / torch.stack([first, first, second, second]))
