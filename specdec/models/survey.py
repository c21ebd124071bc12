"""What the packed path must know of a transformers model, found by running it once. Refuses what can't be run."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from specdec.errors import UnsupportedModel
from specdec.models.interface import SURVEY, answering, configs_of, refuse_options

_ATTENTION_LAYERS = {"full_attention", "sliding_attention"}


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    """One layer's attention, as it called the interface.

    Args:
        module: the attention module.
        num_kv_heads: key heads.
        k_dim, v_dim: width of a key and of a value.
        dtype: of the keys.
        window: a row at position p sees keys at positions above p − window; None sees all.
    """

    module: nn.Module
    num_kv_heads: int
    k_dim: int
    v_dim: int
    dtype: torch.dtype
    window: int | None


@dataclass(frozen=True, slots=True)
class Survey:
    """A model's parts.

    Args:
        body: the submodule whose first output is the hidden states that the head scores.
        wrap: puts hidden states [1, R, H] back into what the body returns.
        layers: the attention layers, in the order they run.
        hidden_size, vocab_size: H, and the columns of the logits.
        dtype: of the hidden states.
    """

    body: nn.Module
    wrap: Callable[[torch.Tensor], Any]
    layers: tuple[AttentionLayer, ...]
    hidden_size: int
    vocab_size: int
    dtype: torch.dtype


@dataclass(slots=True)
class _Recorder:
    """Answers for every module of a surveyed model, and writes down who called."""

    layers: list[AttentionLayer] = field(default_factory=list)

    def __call__(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: Any,
        dropout: float = 0.0,
        is_causal: bool | None = None,
        sliding_window: int | None = None,
        **options: Any,
    ) -> torch.Tensor:
        refuse_options(module, dropout, is_causal, options)
        name = type(module).__name__
        if key.shape[2] != query.shape[2]:
            raise UnsupportedModel(f"{name} attends to keys of other tokens (cross attention)")
        if any(layer.module is module for layer in self.layers):
            raise UnsupportedModel(f"{name} runs more than once a forward")
        window = _window_of(mask, name)
        if sliding_window is not None and sliding_window != window:
            raise UnsupportedModel(f"{name} asks for a window of {sliding_window}, its mask for {window or 'none'}")
        self.layers.append(AttentionLayer(module, key.shape[1], key.shape[3], value.shape[3], key.dtype, window))
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3])


@torch.inference_mode()
def survey(model: PreTrainedModel, ids: torch.Tensor) -> Survey:
    """Run a model twice over a short prompt: as it is, then with attention that only takes notes.

    Args:
        model: in evaluation mode.
        ids: [n] int64, the prompt.

    Raises:
        UnsupportedModel: it can't be run packed; the message is the reason.
    """
    body, output, logits = _run_as_it_is(model, ids)
    recorder = _Recorder()
    with answering(configs_of(model), SURVEY, dict.fromkeys(model.modules(), recorder)):
        body(input_ids=ids[None], use_cache=False)
    _check_layers(model, recorder.layers)
    return Survey(
        body=body,
        wrap=_wrapper(output),
        layers=tuple(recorder.layers),
        hidden_size=output[0].shape[-1],
        vocab_size=logits.shape[-1],
        dtype=output[0].dtype,
    )


def refuse_by_config(model: PreTrainedModel) -> None:
    """Refuse what is known to be impossible before anything runs.

    Raises:
        UnsupportedModel: an encoder-decoder, a model without a head, or one with recurrent layers.
    """
    if model.config.is_encoder_decoder:
        raise UnsupportedModel("it is an encoder-decoder; specdec runs decoder-only language models")
    if model.get_output_embeddings() is None:
        raise UnsupportedModel("it has no language modelling head; load it as a causal LM")
    if model._is_stateful:
        raise UnsupportedModel("it keeps a recurrent state, which can't be taken back when a draft is rejected")
    layer_types = getattr(model.config.get_text_config(), "layer_types", None) or ()
    others = sorted(set(layer_types) - _ATTENTION_LAYERS)
    if others:
        raise UnsupportedModel(f"it has layers of type {others[0]!r}; known are {', '.join(sorted(_ATTENTION_LAYERS))}")
    if model.training:
        raise UnsupportedModel("it is in training mode; call model.eval() first")


def _run_as_it_is(model: PreTrainedModel, ids: torch.Tensor) -> tuple[nn.Module, Any, torch.Tensor]:
    """The body below the head, its output, and the logits."""
    called: list[tuple[nn.Module, Any]] = []
    bodies = {m: None for m in (model.base_model, model.get_decoder()) if m is not None and m is not model}
    hooks = [m.register_forward_hook(lambda m, _, output: called.append((m, output))) for m in bodies]
    try:
        logits = model(input_ids=ids[None], use_cache=False).logits
    finally:
        for hook in hooks:
            hook.remove()
    if not called:
        raise UnsupportedModel("it has no body that its head can be told from")
    return (*called[-1], logits)  # the outermost ends last


def _check_layers(model: PreTrainedModel, layers: list[AttentionLayer]) -> None:
    if not layers:
        own = sorted({type(m).__name__ for m in model.modules() if "Attention" in type(m).__name__})
        raise UnsupportedModel(
            f"its attention ({', '.join(own) or 'none'}) doesn't go through transformers' AttentionInterface"
        )
    first = layers[0]
    for i, layer in enumerate(layers):
        if (layer.num_kv_heads, layer.k_dim, layer.v_dim) != (first.num_kv_heads, first.k_dim, first.v_dim):
            raise UnsupportedModel(
                f"layer {i} has {layer.num_kv_heads} key heads of {layer.k_dim} and {layer.v_dim}, layer 0 has "
                f"{first.num_kv_heads} of {first.k_dim} and {first.v_dim}; the pages need the same in all layers"
            )


def _window_of(mask: Any, name: str) -> int | None:
    if mask is None:
        return None
    is_code = isinstance(mask, torch.Tensor) and mask.dtype == torch.int64 and mask.numel() > 0
    if not is_code or bool((mask != mask.flatten()[0]).any()):
        raise UnsupportedModel(f"{name} gets a mask of the model's own making")
    return int(mask.flatten()[0]) or None


def _wrapper(output: Any) -> Callable[[torch.Tensor], Any]:
    if isinstance(output, tuple):
        return lambda hidden: (hidden,)
    kind = type(output)
    return lambda hidden: kind(last_hidden_state=hidden)
