"""How the model families differ, as data. The decoder reads these; it has no family names of its own."""

from dataclasses import dataclass
from typing import Literal

from specdec.errors import UnsupportedModel


@dataclass(frozen=True, slots=True)
class Family:
    """What a family does besides the common decoder (RMS norm, rotary, grouped attention, gated MLP).

    Biases, tied heads and the scale of the scores are read from the loaded model, whatever the family.

    Args:
        norm_offset: norms scale by 1 + w (Gemma).
        sandwich: norms after attention and MLP too, named as Gemma does.
        qk_norm: queries and keys are normalised per head.
        merged: q, k, v and gate, up are stored as one matrix each (Phi-3).
        embed_scale: embeddings are multiplied by their module's factor.
        score_softcap, logit_softcap: the config's `attn_logit_softcapping`, `final_logit_softcapping` are obeyed.
        partial_rotary: the rotary part may be narrower than a head.
        layer_rotary: rotary parameters and buffers are per layer type.
        windows: the layers that have the config's `sliding_window`: none, all, or those whose `layer_types` say so.
        activation: the config's name for the MLP's activation.
    """

    norm_offset: bool = False
    sandwich: bool = False
    qk_norm: bool = False
    merged: bool = False
    embed_scale: bool = False
    score_softcap: bool = False
    logit_softcap: bool = False
    partial_rotary: bool = False
    layer_rotary: bool = False
    windows: Literal["none", "all", "by type"] = "none"
    activation: str = "hidden_act"

    @property
    def qkv(self) -> tuple[str, ...]:
        """The attention's input projections, in the order they are merged."""
        return ("qkv_proj",) if self.merged else ("q_proj", "k_proj", "v_proj")

    @property
    def gate_up(self) -> tuple[str, ...]:
        """The MLP's input projections, in the order they are merged."""
        return ("gate_up_proj",) if self.merged else ("gate_proj", "up_proj")

    @property
    def mlp_norm(self) -> str:
        """The norm before the MLP. Gemma's `post_attention_layernorm` is what it says, everyone else's is this."""
        return "pre_feedforward_layernorm" if self.sandwich else "post_attention_layernorm"


FAMILIES: dict[str, Family] = {
    "gemma2": Family(
        norm_offset=True,
        sandwich=True,
        embed_scale=True,
        score_softcap=True,
        logit_softcap=True,
        windows="by type",
        activation="hidden_activation",
    ),
    "gemma3_text": Family(
        norm_offset=True,
        sandwich=True,
        qk_norm=True,
        embed_scale=True,
        logit_softcap=True,
        layer_rotary=True,
        windows="by type",
        activation="hidden_activation",
    ),
    "llama": Family(),
    "mistral": Family(windows="all"),
    "phi3": Family(merged=True, partial_rotary=True, windows="all"),
    "qwen2": Family(windows="by type"),
    "qwen3": Family(qk_norm=True, windows="by type"),
}
"""By `model_type` of the Hugging Face config."""


def family_of(model_type: str) -> Family:
    """Return the family of a config's `model_type`.

    Raises:
        UnsupportedModel: the decoder doesn't know it.
    """
    if model_type not in FAMILIES:
        raise UnsupportedModel(
            f"model type {model_type!r} is not supported yet; supported: {', '.join(sorted(FAMILIES))}"
        )
    return FAMILIES[model_type]
