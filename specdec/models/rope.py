"""Rotary angles as a function of a token's position alone, for every kind of scaling that transformers knows.

Most kinds scale the frequencies once and for all (default, linear, llama3, yarn). Two change them with the sequence's
length: dynamic NTK beyond the trained length, longrope beyond the original one. There transformers keeps state: a
forward uses one set of frequencies, that of the longest position in it, for all its rows, so a token's key depends on
what else was in the forward. Here the token at position p has the frequencies of a sequence of p + 1 tokens, always.
Plain, batched, chunked and speculative decoding then agree. It equals transformers

- for everything within the original length;
- beyond it, for tokens that transformers' forward runs one by one over its cache.

It differs from transformers for a prompt longer than the original length (transformers gives all of the prompt the
frequencies of its whole length), and from Phi-3's `generate`, which recomputes its cache where it crosses that length.
`Rotary.original_len` says up to where all agree; `Decoder.max_len` is never more, so that nothing is wrong in silence.
"""

from dataclasses import dataclass
from typing import Any

import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from specdec.errors import UnsupportedModel

ROPE_TYPES = ("default", "dynamic", "linear", "llama3", "longrope", "yarn")
"""Kinds of scaling, as `rope_type` in Hugging Face configs spells them."""


@dataclass(frozen=True, slots=True)
class DynamicNTK:
    """Frequencies that slow down with every token beyond `original_len`.

    Args:
        theta: the base of the frequencies.
        factor: how strongly they slow down.
        original_len: the longest sequence that keeps the plain frequencies.
    """

    theta: float
    factor: float
    original_len: int

    def frequencies(self, lengths: torch.Tensor, width: int) -> torch.Tensor:
        """Return [N, width / 2] fp32 for [N, 1] lengths of at least `original_len`, in transformers' own arithmetic."""
        stretch = self.factor * lengths / self.original_len - (self.factor - 1)
        theta = self.theta * stretch ** (width / (width - 2))
        exponents = torch.arange(0, width, 2, device=lengths.device).float() / width
        return 1.0 / theta**exponents


@dataclass(frozen=True, slots=True)
class LongRope:
    """A second set of frequencies, for sequences longer than `original_len`.

    Args:
        inv_freq: [R / 2] fp32.
        original_len: the longest sequence that has the first set.
    """

    inv_freq: torch.Tensor
    original_len: int

    def frequencies(self, lengths: torch.Tensor, width: int) -> torch.Tensor:
        """Return [width / 2] fp32, whatever the lengths."""
        return self.inv_freq


@dataclass(frozen=True, slots=True)
class Rotary:
    """The rotation of one kind of layers.

    Args:
        inv_freq: [R / 2] fp32, frequencies within the original length.
        scale: factor on cos and sin.
        beyond: the frequencies beyond it, where they differ.
    """

    inv_freq: torch.Tensor
    scale: float
    beyond: DynamicNTK | LongRope | None = None

    @property
    def width(self) -> int:
        """R, the dimensions of a head that turn."""
        return 2 * len(self.inv_freq)

    @property
    def original_len(self) -> int | None:
        """The longest sequence whose frequencies don't depend on its length; None where they never do."""
        return None if self.beyond is None else self.beyond.original_len

    def frequencies(self, positions: torch.Tensor) -> torch.Tensor:
        """Return [R / 2] or [N, R / 2] fp32, the frequencies of tokens at [N] int64 positions."""
        if self.beyond is None:
            return self.inv_freq
        lengths = positions[:, None] + 1
        longer = self.beyond.frequencies(lengths.clamp(min=self.beyond.original_len), self.width)
        return torch.where(lengths > self.beyond.original_len, longer, self.inv_freq)

    def cos_sin(self, positions: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cos and sin [N, R] in `dtype` of [N] int64 positions, sin with its first half negated.

        Angles are taken in fp32, as transformers does. `rope_write` wants the negated half.
        """
        angle = positions[:, None].float() * self.frequencies(positions)  # [N, R / 2]
        cos, sin = angle.cos() * self.scale, angle.sin() * self.scale
        return torch.cat([cos, cos], -1).to(dtype), torch.cat([-sin, sin], -1).to(dtype)


def read_rotary(module: Any, config: Any, layer_type: str | None = None) -> Rotary:
    """Read the rotation of a loaded model.

    Args:
        module: the model's rotary embedding.
        config: the model's config.
        layer_type: which of the module's rotations, where it has one for each type of layer.

    Raises:
        UnsupportedModel: the scaling is of another kind than `ROPE_TYPES`.
    """
    prefix = "" if layer_type is None else f"{layer_type}_"
    params = config.rope_parameters if layer_type is None else config.rope_parameters[layer_type]
    kind = params["rope_type"]
    if kind not in ROPE_TYPES:
        raise UnsupportedModel(f"rotary scaling {kind!r} is not supported; supported: {', '.join(ROPE_TYPES)}")
    inv_freq = getattr(module, f"{prefix}inv_freq").float()
    if kind not in ("dynamic", "longrope"):
        return Rotary(inv_freq, getattr(module, f"{prefix}attention_scaling"))

    def made(length: int | None) -> tuple[torch.Tensor, float]:  # the module's buffer is that of its last forward
        of_layer = {} if layer_type is None else {"layer_type": layer_type}
        frequencies, scale = ROPE_INIT_FUNCTIONS[kind](config, inv_freq.device, seq_len=length, **of_layer)
        return frequencies.float(), scale

    short, scale = made(None)
    if kind == "dynamic":
        return Rotary(short, scale, DynamicNTK(params["rope_theta"], params["factor"], config.max_position_embeddings))
    original = params["original_max_position_embeddings"]
    return Rotary(short, scale, LongRope(made(original + 1)[0], original))
