"""How the model families differ, as data. The decoder reads these; it has no family names of its own."""

from dataclasses import dataclass

from specdec.errors import UnsupportedModel


@dataclass(frozen=True, slots=True)
class Family:
    """What a family does besides the common decoder (RMS norm, rotary, grouped attention, gated MLP).

    Args:
        norm_offset: norms scale by 1 + w (Gemma).
        sandwich: norms after attention and MLP too, named as Gemma does.
        qk_norm: queries and keys are normalised per head.
        merged: q, k, v and gate, up are stored as one matrix each (Phi-3).
    """

    norm_offset: bool = False
    sandwich: bool = False
    qk_norm: bool = False
    merged: bool = False


FAMILIES: dict[str, Family] = {
    "llama": Family(),
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
