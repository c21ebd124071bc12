"""Tiny random models of every family that the decoder knows, and their logits, packed and as transformers has them."""

import inspect

import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, PreTrainedModel

from specdec.cache.pages import KVPages
from specdec.kernels.attention import AttentionMetadata
from specdec.models.batch import Batch
from specdec.models.decoder import Decoder
from specdec.models.families import FAMILIES
from tests.conftest import VOCAB

WINDOW = 7
"""Sliding window of the families that have one."""
LAYERS = ["sliding_attention", "full_attention", "sliding_attention"]
COMMON: dict[str, object] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.6,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}
OWN: dict[str, dict[str, object]] = {
    "llama": {},
    "mistral": {"sliding_window": WINDOW},
    "qwen2": {"use_sliding_window": True, "sliding_window": WINDOW, "layer_types": LAYERS},
    "qwen3": {"use_sliding_window": True, "sliding_window": WINDOW, "layer_types": LAYERS, "head_dim": 8},
    "gemma2": {
        "sliding_window": WINDOW,
        "head_dim": 8,
        "query_pre_attn_scalar": 12,
        "attn_logit_softcapping": 3.0,
        "final_logit_softcapping": 9.0,
    },
    "gemma3_text": {
        "sliding_window": WINDOW,
        "layer_types": LAYERS,
        "head_dim": 8,
        "query_pre_attn_scalar": 12,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
            "full_attention": {"rope_type": "linear", "rope_theta": 9000.0, "factor": 3.0},
        },
    },
    "phi3": {
        "sliding_window": WINDOW,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5},
    },
}
"""What each family's tiny model sets besides `COMMON`: everything that makes it differ from Llama does something."""


def tiny_model(
    model_type: str, seed: int = 0, dtype: torch.dtype = torch.float64, **overrides: object
) -> PreTrainedModel:
    """A random model of three layers whose norms and biases do something."""
    config = AutoConfig.for_model(model_type, **(COMMON | OWN[model_type] | overrides))
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        kernel = "eager" if model_type == "gemma2" else None  # sdpa drops the softcap, before transformers refused it
        model = AutoModelForCausalLM.from_config(config, attn_implementation=kernel).to(dtype)
        for parameter in model.parameters():
            if parameter.ndim == 1:
                mean = 0.0 if FAMILIES[model_type].norm_offset else 0.7
                torch.nn.init.normal_(parameter, mean, 0.3)
    model.generation_config.eos_token_id = model.config.eos_token_id
    return model.eval()


def packed_logits(decoder: Decoder, ids: torch.Tensor, chunks: list[int]) -> torch.Tensor:
    """Logits of one sequence that is fed in causal chunks: [N] int64 → [N, V]."""
    num_blocks = -(-len(ids) // 16)
    pages = KVPages(decoder.kv_layout, num_blocks, 16, decoder.device)
    out, start = [], 0
    for n in chunks:
        rows = torch.arange(start, start + n)
        table = torch.arange(num_blocks)[None]
        zeros = torch.zeros(n, dtype=torch.int64)
        meta = AttentionMetadata((0, n), (start + n,), (start + n,), table, rows, rows + 1, zeros, 16)
        out.append(decoder.logits(decoder.forward(Batch(ids[rows], rows, meta), pages)))
        start += n
    return torch.cat(out)


@torch.inference_mode()
def hf_logits(model: PreTrainedModel, ids: torch.Tensor, chunks: list[int] | None = None) -> torch.Tensor:
    """transformers' logits of one sequence: [N] int64 → [N, V]; fed in chunks over its cache where given."""
    if chunks is None:
        return model(ids[None]).logits[0]
    cache = DynamicCache(config=model.config)
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    return torch.cat([model(part[None], use_cache=True, **{name: cache}).logits[0] for part in ids.split(chunks)])
