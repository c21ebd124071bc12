"""What of a config and of a loaded model the decoder can run. All else is refused by name, before anything changes."""

import re
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from specdec.errors import UnsupportedModel
from specdec.kernels.activation import ACTIVATIONS
from specdec.models.families import Family

FULL, SLIDING = "full_attention", "sliding_attention"
_NORMS = ("input_layernorm", "post_attention_layernorm")
_SANDWICH_NORMS = (*_NORMS, "pre_feedforward_layernorm", "post_feedforward_layernorm")


def check_model(model: PreTrainedModel, family: Family) -> None:
    """Refuse what the family's description doesn't cover.

    Raises:
        UnsupportedModel: the config sets something that would change the result, the model has parameters that the
            decoder wouldn't read, or its projections are neither plain matrices nor quantized by transformers.
    """
    if model.get_output_embeddings() is None:
        raise UnsupportedModel(f"{type(model).__name__} has no language-modelling head; load the causal LM")
    _check_config(model.config, family)
    layers: Any = model.model.layers
    if len(layers) != model.config.num_hidden_layers:
        raise UnsupportedModel(
            f"the model has {len(layers)} layers and its config says {model.config.num_hidden_layers}; "
            "set num_hidden_layers to what is there"
        )
    _check_modules(model, family)


def is_plain(module: nn.Module) -> bool:
    """Whether a module is a matrix and maybe a bias, and nothing else: not quantized, sharded or parametrized."""
    return type(module) is nn.Linear and type(module.weight) is nn.Parameter


def quantized_by(model: PreTrainedModel) -> str | None:
    """Return the method by which transformers quantized a model's weights, e.g. "torchao"; None if it didn't."""
    if getattr(model, "hf_quantizer", None) is None:
        return None
    method = model.config.quantization_config.quant_method
    return str(getattr(method, "value", method))


def quantized_how(model: PreTrainedModel) -> list[str]:
    """Return what tells a model's quantized weights from others by the same method, behind the method; else nothing."""
    method = quantized_by(model)
    if method is None:
        return []
    config = model.config.quantization_config
    named = getattr(config, "quantization_method", None)
    kind = named() if callable(named) else getattr(config, "quant_type", None) or getattr(config, "bits", None)
    if kind is None or isinstance(kind, (str, int)):
        return [method, *([] if kind is None else [str(kind)])]
    return [method, type(kind).__name__]


def layer_types(config: Any, family: Family) -> list[str]:
    """Return "full_attention" or "sliding_attention" for each layer.

    Raises:
        UnsupportedModel: the config names another type, or a window that the family has no layers for.
    """
    if family.windows == "by type":
        types = list(config.layer_types)
    else:
        slides = family.windows == "all" and config.sliding_window is not None
        types = [SLIDING if slides else FULL] * config.num_hidden_layers
        named = getattr(config, "layer_types", None)
        if named is not None and list(named) != types:
            raise UnsupportedModel(f"{config.model_type} with layer_types {sorted(set(named))} is not supported")
    unknown = sorted(set(types) - {FULL, SLIDING})
    if unknown:
        raise UnsupportedModel(f"layers of type {', '.join(unknown)} are not supported; supported: {FULL}, {SLIDING}")
    if SLIDING in types and config.sliding_window is None:
        raise UnsupportedModel("the config has sliding layers but no sliding_window; set it")
    return types


def _check_config(config: Any, family: Family) -> None:
    unread = {
        "attn_logit_softcapping": family.score_softcap,
        "final_logit_softcapping": family.logit_softcap,
        "sliding_window": family.windows != "none",
        "use_bidirectional_attention": False,
        "is_heterogeneous": False,
    }
    for name, is_read in unread.items():
        value = getattr(config, name, None)
        if value and not is_read:
            raise UnsupportedModel(f"{name}={value!r} is not supported for {config.model_type}; unset it in the config")
    activation = getattr(config, family.activation)
    if activation not in ACTIVATIONS:
        raise UnsupportedModel(
            f"activation {activation!r} is not supported; supported: {', '.join(sorted(ACTIVATIONS))}"
        )


def _check_modules(model: PreTrainedModel, family: Family) -> None:
    """Hold every parameter against the list of those that are read, so that none is ignored."""
    projections = {f"self_attn.{name}" for name in (*family.qkv, "o_proj")}
    projections |= {f"mlp.{name}" for name in (*family.gate_up, "down_proj")}
    norms = set(_SANDWICH_NORMS if family.sandwich else _NORMS)
    norms |= {"self_attn.q_norm", "self_attn.k_norm"} if family.qk_norm else set()
    known = {"model.embed_tokens", "model.norm", "lm_head"} | {f"model.layers.*.{name}" for name in projections | norms}
    for name, _ in model.named_parameters():
        owner = name.rpartition(".")[0]
        if re.sub(r"^model\.layers\.\d+\.", "model.layers.*.", owner) not in known:
            raise UnsupportedModel(f"the parameter {name} is not a {model.config.model_type} model's; unload adapters")
    read = [(name, layer.get_submodule(name)) for layer in model.model.layers for name in projections]
    matrices = [] if quantized_by(model) else read
    for name, module in [*matrices, ("lm_head", model.get_output_embeddings())]:
        if not is_plain(module):
            found = f"{type(module).__name__} of {type(getattr(module, 'weight', None)).__name__}"
            raise UnsupportedModel(f"{name} is a {found}, not a plain Linear of Parameter; it is not supported")
