"""Reads a loaded Hugging Face model's weights into the decoder's layout, without a second copy of them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import nn
from transformers import PreTrainedModel

from specdec.errors import UnsupportedModel
from specdec.kernels.prepack import gains_by_prepacking, prepack
from specdec.models.balance import balance
from specdec.models.families import Family, family_of
from specdec.models.rope import Rotary, read_rotary
from specdec.models.support import SLIDING, check_model, is_plain, layer_types

Projection = torch.Tensor | tuple[nn.Module, ...]
"""A matrix, or quantized modules that are called as they are and whose outputs stand side by side."""

Copies = list[tuple[torch.Tensor, Callable[[], torch.Tensor]]]
"""Tensors that are not the model's own storage, each with what makes it anew of the model's parameters."""

_PREPACKED: WeakValueDictionary[tuple[object, ...], torch.Tensor] = WeakValueDictionary()
"""Prepacked matrices by place, address and kind; who has one keeps the matrix too, in its `copies`."""


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer. Projections are [out, in] or prepacked; H is the hidden size, I the MLP's.

    Args:
        attn_norm, mlp_norm: [H], before attention and MLP.
        post_attn_norm, post_mlp_norm: [H], after them, before the residual addition; or None.
        qk_norm: [heads + kv heads, D], of queries and keys per head, balanced; or None.
        qkv: [(heads + 2 kv heads) · D, H].
        o: [H, heads · D].
        gate_up: [2 I, H].
        down: [H, I].
        qkv_bias, o_bias, gate_up_bias, down_bias: [out] or None; quantized modules add their own.
        window: a row at position p sees keys at positions above p − window; None for all.
        rotary: index in `DecoderWeights.rotary`.
    """

    attn_norm: torch.Tensor
    mlp_norm: torch.Tensor
    post_attn_norm: torch.Tensor | None
    post_mlp_norm: torch.Tensor | None
    qk_norm: torch.Tensor | None
    qkv: Projection
    o: Projection
    gate_up: Projection
    down: Projection
    qkv_bias: torch.Tensor | None
    o_bias: torch.Tensor | None
    gate_up_bias: torch.Tensor | None
    down_bias: torch.Tensor | None
    window: int | None
    rotary: int


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """A whole model.

    Args:
        embed: [V, H].
        embed_scale: factor on the embeddings, rounded to their dtype; None for 1.
        layers: the decoder layers.
        norm: [H], the last norm.
        head: [V, H]; the same storage as `embed` where tied, unless prepacked.
        head_bias: [V] or None.
        rotary: the kinds of rotation; `LayerWeights.rotary` says which one a layer has.
        num_heads, num_kv_heads, head_dim: attention's shape.
        scale: factor on the scores.
        score_softcap, logit_softcap: scores and logits become cap · tanh(x / cap); None leaves them.
        eps: of the norms.
        activation: of the MLP's gate.
        copies: those among all these that don't follow the model's parameters by themselves.
    """

    embed: torch.Tensor
    embed_scale: float | None
    layers: tuple[LayerWeights, ...]
    norm: torch.Tensor
    head: torch.Tensor
    head_bias: torch.Tensor | None
    rotary: tuple[Rotary, ...]
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    score_softcap: float | None
    logit_softcap: float | None
    eps: float
    activation: str
    copies: Copies


def share_weights(model: PreTrainedModel) -> DecoderWeights:
    """Merge the model's projections in place, but for quantized ones, and return everything on the same storage.

    Only norms of queries and keys, and norms that scale by 1 + w (in fp32 at least), are copies; `copies` lists them.

    Raises:
        UnsupportedModel: the config or the model asks for something that the decoder doesn't do; the message names it.
    """
    config = model.config
    family = family_of(config.model_type)
    check_model(model, family)
    types = layer_types(config, family)
    rotary, layer_rotary = _rotary(model, family, types)
    base: Any = model.model
    head: Any = model.get_output_embeddings()
    attn = base.layers[0].self_attn
    embed = base.embed_tokens
    copies: Copies = []
    return DecoderWeights(
        embed=embed.weight.detach(),
        embed_scale=float(embed.embed_scale.to(embed.weight.dtype)) if family.embed_scale else None,
        layers=tuple(
            _layer(layer, family, config, config.sliding_window if kind == SLIDING else None, r, copies)
            for layer, kind, r in zip(base.layers, types, layer_rotary, strict=True)
        ),
        norm=_norm(base.norm, family, copies),
        head=head.weight.detach(),
        head_bias=None if head.bias is None else head.bias.detach(),
        rotary=rotary,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=attn.head_dim,
        scale=attn.scaling,
        score_softcap=config.attn_logit_softcapping if family.score_softcap else None,
        logit_softcap=config.final_logit_softcapping if family.logit_softcap else None,
        eps=config.rms_norm_eps,
        activation=getattr(config, family.activation),
        copies=copies,
    )


def prepack_weights(weights: DecoderWeights) -> DecoderWeights:
    """Return the weights with their matrices prepacked: a copy that all who want it of these matrices share.

    What isn't a matrix stays, quantized modules too, and so do matrices that don't gain by it.
    """
    copies = list(weights.copies)

    def one(matrix: torch.Tensor) -> torch.Tensor:
        if not gains_by_prepacking(matrix):
            return matrix
        key = matrix.device, matrix.data_ptr(), matrix.shape, matrix.dtype
        packed = _PREPACKED.get(key)
        if packed is None:
            packed = _PREPACKED[key] = prepack(matrix)
        else:
            packed.copy_(prepack(matrix))  # it may be of before an update in place
        copies.append((packed, lambda: prepack(matrix)))
        return packed

    def some(projection: Projection) -> Projection:
        return one(projection) if isinstance(projection, torch.Tensor) else projection

    layers = tuple(
        replace(w, qkv=some(w.qkv), o=some(w.o), gate_up=some(w.gate_up), down=some(w.down)) for w in weights.layers
    )
    return replace(weights, layers=layers, head=one(weights.head), copies=copies)


def _rotary(model: PreTrainedModel, family: Family, types: list[str]) -> tuple[tuple[Rotary, ...], list[int]]:
    """The model's rotations, and which of them each layer has."""
    module, config = model.model.rotary_emb, model.config
    kinds: Sequence[str | None] = types if family.layer_rotary else [None] * len(types)
    names = list(dict.fromkeys(kinds))
    rotary = tuple(read_rotary(module, config, name) for name in names)
    head_dim = model.model.layers[0].self_attn.head_dim
    if not family.partial_rotary and any(r.width != head_dim for r in rotary):
        raise UnsupportedModel(f"partial rotary embedding is not supported for {config.model_type}")
    return rotary, [names.index(kind) for kind in kinds]


def _layer(layer: Any, family: Family, config: Any, window: int | None, rotary: int, copies: Copies) -> LayerWeights:
    attn, mlp = layer.self_attn, layer.mlp
    qkv, qkv_bias = _merge(*(getattr(attn, name) for name in family.qkv))
    attn_norm = _norm(layer.input_layernorm, family, copies)
    gate_up, gate_up_bias = _merge(*(getattr(mlp, name) for name in family.gate_up))
    o, o_bias = _merge(attn.o_proj)
    down, down_bias = _merge(mlp.down_proj)
    return LayerWeights(
        attn_norm=attn_norm,
        mlp_norm=_norm(getattr(layer, family.mlp_norm), family, copies),
        post_attn_norm=_norm(layer.post_attention_layernorm, family, copies) if family.sandwich else None,
        post_mlp_norm=_norm(layer.post_feedforward_layernorm, family, copies) if family.sandwich else None,
        qk_norm=_qk_norm(attn, family, config, qkv, attn_norm, copies) if family.qk_norm else None,
        qkv=qkv,
        o=o,
        gate_up=gate_up,
        down=down,
        qkv_bias=qkv_bias,
        o_bias=o_bias,
        gate_up_bias=gate_up_bias,
        down_bias=down_bias,
        window=window,
        rotary=rotary,
    )


def _norm(module: Any, family: Family, copies: Copies) -> torch.Tensor:
    return _copy(lambda: _scale(module, family), copies) if family.norm_offset else _scale(module, family)


def _scale(module: Any, family: Family) -> torch.Tensor:
    """What a norm multiplies by."""
    weight: torch.Tensor = module.weight.detach()
    return 1 + weight.to(torch.promote_types(weight.dtype, torch.float32)) if family.norm_offset else weight


def _qk_norm(
    attn: Any, family: Family, config: Any, qkv: Projection, attn_norm: torch.Tensor, copies: Copies
) -> torch.Tensor:
    """[heads + kv heads, D], so that one call normalises queries and keys; balanced behind a plain projection."""
    num_heads, num_kv_heads = config.num_attention_heads, config.num_key_value_heads

    def norm() -> torch.Tensor:
        q = _scale(attn.q_norm, family).expand(num_heads, -1)
        k = _scale(attn.k_norm, family).expand(num_kv_heads, -1)
        return torch.cat([q, k])

    if not isinstance(qkv, torch.Tensor):
        return _copy(norm, copies)
    size = norm()
    # They stay: whatever the weights become, factors change no score.
    factors = balance(size, qkv[: size.numel()].view(*size.shape, -1) * attn_norm, num_heads)
    return _copy(lambda: norm() * factors, copies)


def _copy(make: Callable[[], torch.Tensor], copies: Copies) -> torch.Tensor:
    copy = make()
    copies.append((copy, make))
    return copy


def _merge(*modules: nn.Linear) -> tuple[Projection, torch.Tensor | None]:
    """Stack the modules' weights and biases; each module's parameter becomes a view of the stack.

    Modules of which one is quantized are left alone.
    """
    if not all(map(is_plain, modules)):
        return modules, None
    weight = _stack([m.weight for m in modules])
    biases: list[torch.Tensor] = [m.bias for m in modules if m.bias is not None]
    assert len(biases) in (0, len(modules)), "a family with biases on some of its merged projections"
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
