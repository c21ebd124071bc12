"""Which fields of a `GenerationConfig` the engine follows, which change nothing, and which are transformers' alone.

The three tables name every field of transformers 5.17 to 5.24. A field that none of them names, a model's own or one
of a later version, goes to transformers as soon as it is set.
"""

from typing import Any

FOLLOWED = frozenset(
    {
        *("max_length", "max_new_tokens", "min_length", "min_new_tokens", "max_time", "stop_strings"),
        *("do_sample", "temperature", "top_k", "top_p", "min_p", "num_return_sequences"),
        *("repetition_penalty", "no_repeat_ngram_size", "bad_words_ids", "suppress_tokens"),
        *("output_scores", "output_logits", "return_dict_in_generate", "pad_token_id", "eos_token_id"),
        "prompt_lookup_num_tokens",  # the drafter of `accelerate` looks up instead, and a warning says so
    }
)
"""What the engine does as transformers would."""

WITHOUT_EFFECT = frozenset(
    {
        *("bos_token_id", "decoder_start_token_id"),  # begin a prompt that is missing, and an encoder's
        *("early_stopping", "length_penalty"),  # beams
        *("num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold"),  # an assistant's
        *("assistant_lookbehind", "target_lookbehind", "assistant_ensemble_weight", "speculation_type"),
        "max_matching_ngram_size",  # prompt_lookup_num_tokens
        *(
            "use_cache",
            "max_cache_len",
            "compile_config",
            "disable_compile",
            "prefill_chunk_size",
        ),  # how it is computed
        "transformers_version",
    }
)
"""What can't change the result where the other tables let a call through."""

NOT_FOLLOWED: dict[str, tuple[Any, ...]] = {
    "num_beams": (1,),
    "num_beam_groups": (1,),
    "diversity_penalty": (0.0,),
    "constraints": (),
    "force_words_ids": (),
    "penalty_alpha": (0.0,),
    "dola_layers": (),
    "low_memory": (False,),
    "top_h": (),
    "typical_p": (1.0,),
    "epsilon_cutoff": (0.0,),
    "eta_cutoff": (0.0,),
    "guidance_scale": (1.0,),
    "watermarking_config": (),
    "sequence_bias": (),
    "encoder_repetition_penalty": (1.0,),
    "encoder_no_repeat_ngram_size": (0,),
    "renormalize_logits": (False,),
    "remove_invalid_values": (False,),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
    "exponential_decay_length_penalty": (),
    "begin_suppress_tokens": (),
    "token_healing": (False,),
    "output_attentions": (False,),
    "output_hidden_states": (False,),
    "use_mtp": (False,),
    "is_assistant": (False,),
    "assistant_early_exit": (),
    "cache_implementation": (),
    "cache_config": (),
    "continuous_batching_config": (),
}
"""What the engine doesn't do, and the values besides None that don't ask for it."""


def not_followed(config: Any) -> list[str]:
    """Name what a prepared `GenerationConfig` asks for that only transformers does, as "field=value"."""
    asked = []
    for name, value in vars(config).items():
        known = name in FOLLOWED or name in WITHOUT_EFFECT or name.startswith("_")
        if not known and value is not None and value not in NOT_FOLLOWED.get(name, ()):
            asked.append(f"{name}={value!r}")
    return asked
