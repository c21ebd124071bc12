"""Tiny random models that the decoder doesn't know: those that run by their own forward, and those that can't."""

import torch
import transformers as hf
from transformers import PreTrainedConfig, PreTrainedModel

from tests.conftest import VOCAB

TOKENS = {"vocab_size": VOCAB, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
ONE_KIND = TOKENS | {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
}
DENSE = ONE_KIND | {"intermediate_size": 48}
GROUPED = DENSE | {"num_key_value_heads": 2}
GPT2 = TOKENS | {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
LATENT = {"kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 10}
SPARSE_QWEN = EXPERTS | {"num_experts": 4, "shared_expert_intermediate_size": 16, "decoder_sparse_step": 1}
WINDOW = 12  # longer than the self-check's prompts

REQUIRED = {
    "gpt2": lambda: hf.GPT2Config(**GPT2),
    "gpt_neox": lambda: hf.GPTNeoXConfig(**DENSE, use_parallel_residual=True),
    "olmo2": lambda: hf.Olmo2Config(**GROUPED),
    "starcoder2": lambda: hf.Starcoder2Config(**GROUPED, sliding_window=WINDOW),
    "cohere": lambda: hf.CohereConfig(**GROUPED, logit_scale=0.3, use_qk_norm=True),
    "mixtral": lambda: hf.MixtralConfig(**GROUPED, num_local_experts=4, sliding_window=WINDOW),
    "qwen2_moe": lambda: hf.Qwen2MoeConfig(  # its window is in the mask alone
        **GROUPED, **SPARSE_QWEN, sliding_window=WINDOW, use_sliding_window=True, max_window_layers=1
    ),
}
MORE = {
    "gpt2 by layer": lambda: hf.GPT2Config(**GPT2, scale_attn_by_inverse_layer_idx=True),
    "stablelm": lambda: hf.StableLmConfig(**GROUPED),
    "opt": lambda: hf.OPTConfig(**ONE_KIND | {"pad_token_id": 1}, ffn_dim=48, word_embed_proj_dim=16),
    "phi": lambda: hf.PhiConfig(**GROUPED, partial_rotary_factor=0.5),
    "gemma2": lambda: hf.Gemma2Config(
        **GROUPED, head_dim=8, sliding_window=WINDOW, attn_logit_softcapping=2.0, final_logit_softcapping=3.0
    ),
    "granite": lambda: hf.GraniteConfig(**GROUPED, logits_scaling=4.0, attention_multiplier=0.3),
    "deepseek_v3": lambda: hf.DeepseekV3Config(
        **DENSE,
        **EXPERTS,
        **LATENT,
        num_key_value_heads=4,
        n_routed_experts=4,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
    ),
    "bert decoder": lambda: hf.BertConfig(**DENSE, is_decoder=True),
}
REFUSED = {
    "bloom": (lambda: hf.BloomConfig(**TOKENS, hidden_size=32, n_layer=1, n_head=2), r"\(BloomAttention\) doesn't go"),
    "falcon": (lambda: hf.FalconConfig(**ONE_KIND), r"\(FalconAttention\) doesn't go"),
    "mpt": (lambda: hf.MptConfig(vocab_size=VOCAB, d_model=32, n_layers=1, n_heads=2), r"\(MptAttention\) doesn't go"),
    "mamba": (lambda: hf.MambaConfig(**TOKENS, hidden_size=32, num_hidden_layers=1, state_size=4), "recurrent state"),
    "lfm2": (lambda: hf.Lfm2Config(**GROUPED, layer_types=["conv", "full_attention"]), "layers of type 'conv'"),
    "llama4": (
        lambda: hf.Llama4TextConfig(**GROUPED, head_dim=8, num_local_experts=2),
        "layers of type 'chunked_attention'",
    ),
    "gpt_oss": (lambda: hf.GptOssConfig(**GROUPED, head_dim=8, num_local_experts=4), "asks for attention sinks"),
    "doge": (lambda: hf.DogeConfig(**GROUPED), "DogeAttention gets a mask of the model's own making"),
    "diffllama": (lambda: hf.DiffLlamaConfig(**GROUPED), "DiffLlamaAttention runs more than once a forward"),
}


def tiny(config: PreTrainedConfig, dtype: torch.dtype = torch.float64, seed: int = 0) -> PreTrainedModel:
    """A random model whose every parameter does something."""
    with torch.random.fork_rng():
        model = hf.AutoModelForCausalLM.from_config(config, attn_implementation="eager").to(dtype)
        torch.manual_seed(seed)
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:  # embeddings are small, or a tied head repeats the token it was given
                torch.nn.init.normal_(parameter, std=0.3 if "emb" in name or "wte" in name else 0.6)
            else:  # a norm's weight or a bias; large biases would drown the tokens
                weight = name.endswith("weight")
                torch.nn.init.normal_(parameter, mean=float(weight), std=0.3 if weight else 0.05)
    if dtype == torch.float64:
        model.config._experts_implementation = "eager"  # the grouped products know no float64
    return model.eval()
