"""Reads a loaded Hugging Face model's weights into the decoder's layout, without a second copy of them."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from specdec.errors import UnsupportedModel
from specdec.kernels.activation import ACTIVATIONS
from specdec.models.families import family_of

_STATIC_ROPE = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer. Matrices are [out, in]; H is the hidden size, I the MLP's.

    Args:
        attn_norm, mlp_norm: [H].
        qkv: [(heads + 2 kv heads) · D, H].
        o: [H, heads · D].
        gate_up: [2 I, H].
        down: [H, I].
        qkv_bias, o_bias, gate_up_bias, down_bias: [out] or None.
    """

    attn_norm: torch.Tensor
    mlp_norm: torch.Tensor
    qkv: torch.Tensor
    o: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    qkv_bias: torch.Tensor | None
    o_bias: torch.Tensor | None
    gate_up_bias: torch.Tensor | None
    down_bias: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """A whole model.

    Args:
        embed: [V, H].
        layers: the decoder layers.
        norm: [H], the last norm.
        head: [V, H]; the same storage as `embed` where tied.
        head_bias: [V] or None.
        inv_freq: [R / 2] fp32, rotary frequencies.
        rope_scale: factor on cos and sin.
        num_heads, num_kv_heads, head_dim: attention's shape.
        scale: factor on the scores.
        eps: of the norms.
        activation: of the MLP's gate.
    """

    embed: torch.Tensor
    layers: tuple[LayerWeights, ...]
    norm: torch.Tensor
    head: torch.Tensor
    head_bias: torch.Tensor | None
    inv_freq: torch.Tensor
    rope_scale: float
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    eps: float
    activation: str


def share_weights(model: PreTrainedModel) -> DecoderWeights:
    """Merge the model's projections in place and return everything as tensors on the same storage.

    Raises:
        UnsupportedModel: the config asks for something that the decoder doesn't do; the message names it.
    """
    config = model.config
    family_of(config.model_type)
    _refuse_unknown(config)
    base: Any = model.model
    head: Any = model.get_output_embeddings()
    attn = base.layers[0].self_attn
    return DecoderWeights(
        embed=base.embed_tokens.weight.detach(),
        layers=tuple(_layer(layer) for layer in base.layers),
        norm=base.norm.weight.detach(),
        head=head.weight.detach(),
        head_bias=None if head.bias is None else head.bias.detach(),
        inv_freq=base.rotary_emb.inv_freq.float(),
        rope_scale=base.rotary_emb.attention_scaling,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=attn.head_dim,
        scale=attn.scaling,
        eps=config.rms_norm_eps,
        activation=config.hidden_act,
    )


def _refuse_unknown(config: Any) -> None:
    rope = config.rope_parameters["rope_type"]
    if rope not in _STATIC_ROPE:
        raise UnsupportedModel(f"rotary scaling {rope!r} is not supported yet; supported: {', '.join(_STATIC_ROPE)}")
    if config.hidden_act not in ACTIVATIONS:
        raise UnsupportedModel(
            f"activation {config.hidden_act!r} is not supported; supported: {', '.join(sorted(ACTIVATIONS))}"
        )


def _layer(layer: Any) -> LayerWeights:
    attn, mlp = layer.self_attn, layer.mlp
    qkv, qkv_bias = _merge(attn.q_proj, attn.k_proj, attn.v_proj)
    gate_up, gate_up_bias = _merge(mlp.gate_proj, mlp.up_proj)
    o, o_bias = _merge(attn.o_proj)
    down, down_bias = _merge(mlp.down_proj)
    return LayerWeights(
        attn_norm=layer.input_layernorm.weight.detach(),
        mlp_norm=layer.post_attention_layernorm.weight.detach(),
        qkv=qkv,
        o=o,
        gate_up=gate_up,
        down=down,
        qkv_bias=qkv_bias,
        o_bias=o_bias,
        gate_up_bias=gate_up_bias,
        down_bias=down_bias,
    )


def _merge(*modules: nn.Linear) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Stack the modules' weights and biases; each module's parameter becomes a view of the stack."""
    weight = _stack([m.weight for m in modules])
    biases: list[torch.Tensor] = [m.bias for m in modules if m.bias is not None]
    return weight, _stack(biases) if biases else None


def _stack(params: list[torch.Tensor]) -> torch.Tensor:
    if len(params) == 1:
        return params[0].detach()
    merged = _already_merged(params)
    if merged is None:
        merged = torch.cat([p.detach() for p in params])
        views = torch.split(merged, [len(p) for p in params])
        for param, view in zip(params, views, strict=True):
            param.data = view
    return merged


def _already_merged(params: list[torch.Tensor]) -> torch.Tensor | None:
    """The stack itself where the parameters follow each other in one storage, from an earlier call; else None."""
    first = params[0]
    rows, offset = 0, first.storage_offset()
    for p in params:
        same = p.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        if not (same and p.is_contiguous() and p.storage_offset() == offset + rows * first[0].numel()):
            return None
        rows += len(p)
    return first.detach().as_strided((rows, *first.shape[1:]), first.stride(), offset)
