"""How keys and values are stored in less than their own dtype. This is the definition; Triton's twin is `gpu/pages.py`.

A group of values along head_dim shares a scale, and a zero point where the format has one. What is stored for a token
and head never depends on another token. A stored value is worth `code · scale + zero point`, taken in fp32 and rounded
to the dtype that is computed in. Attention over quantized pages on a GPU is computed in fp16 where the model has bf16.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from specdec.errors import ConfigError

SCALE_DTYPE = torch.float16
"""To the codes it makes no difference that scales and zero points were rounded first: they are of what those became."""


@dataclass(frozen=True, slots=True)
class KVFormat:
    """One way to store keys and values.

    Args:
        name: what `EngineConfig.kv_cache_dtype` calls it.
        bits: of a code; two codes of 4 bits share a byte, the first in its lower half.
        lowest, largest: a value divided by its scale is between them.
        middle: what is stored for 0.
        scale_bits: significant bits of a scale; with fewer than fp16 has it is rounded up, so that no code is cut off.
        max_value: what is stored stops there, infinite values too: values are within fp16 then, and so is what their
            scale is multiplied by on the way (`kernels/gpu/unpack.py`).
        fraction: bits of a float code's fraction, its last ones; before them stand a sign and 7 − fraction bits of
            exponent, biased as IEEE does it, but without infinities. 0: codes are integers.
        zero_point: whether codes count from the group's least value; else from 0.
        spread: whether keys, and then queries, are spread over the channels of their head first (`kernels/spread.py`).
        group_sizes: values that may share a scale; () where all of a head do.
        group: values that share a scale here; 0 until `of_head_dim` decides.
    """

    name: str
    bits: int
    lowest: float
    largest: float
    middle: int = 0
    scale_bits: int = 11
    max_value: float = 7168
    fraction: int = 0
    zero_point: bool = False
    spread: bool = False
    group_sizes: tuple[int, ...] = ()
    group: int = 0

    def of_head_dim(self, head_dim: int, group: int | None = None) -> "KVFormat":
        """Return the format with its group size decided.

        Args:
            head_dim: D of the keys.
            group: what was asked for; None takes the largest that fits, up to 64.

        Raises:
            ConfigError: the group, or every group, doesn't fit; the message says what would.
        """
        if not self.group_sizes:
            if group is not None:
                raise ConfigError(f"{self.name} has one scale a head: kv_group_size is for int8 and int4; leave it out")
            return replace(self, group=head_dim)
        fitting = [size for size in self.group_sizes if head_dim % size == 0]
        if not fitting:
            sizes = ", ".join(map(str, self.group_sizes))
            raise ConfigError(
                f"{self.name} needs a head_dim that one of {sizes} divides, and the model's is {head_dim}; "
                'use kv_cache_dtype="fp8", which fits any'
            )
        if group is not None and group not in fitting:
            raise ConfigError(
                f"kv_group_size {group} doesn't fit {self.name} at head_dim {head_dim}; "
                f"use one of {', '.join(map(str, fitting))}"
            )
        return replace(self, group=group or max(size for size in fitting if size <= 64))

    @property
    def exponent_bias(self) -> int:
        """What the exponents of float codes are counted from."""
        return (1 << 6 - self.fraction) - 1

    def code_width(self, head_dim: int) -> int:
        """Bytes of the codes of a token and head."""
        return head_dim * self.bits // 8

    def num_scales(self, head_dim: int) -> int:
        """Scales of a token and head, and zero points behind them."""
        return head_dim // self.group * (2 if self.zero_point else 1)

    def bytes_per_head(self, head_dim: int) -> int:
        """Bytes that a key or a value takes, scales included."""
        return self.code_width(head_dim) + self.num_scales(head_dim) * SCALE_DTYPE.itemsize


# Integers have steps of one size, so one large channel of a key costs all others their bits: it is spread over all of
# them. Floats keep the small channels' bits, and would lose them to what is spread.
# Values that share a scale seldom differ by more than e3m4 reaches: its steps are half of e4m3's above a 128th of the
# largest, and larger only below a 256th. There e4m3 goes on, down to a 131,072th. It reaches 448, but over normal
# values the squared error is less where the largest is put on a power of 2.
FORMATS = {
    f.name: f
    for f in (
        KVFormat("fp8", 8, -31, 31, max_value=448, fraction=4),
        KVFormat("fp8_e4m3", 8, -256, 256, fraction=3),
        KVFormat(
            "int8",
            8,
            -127,
            127,
            middle=128,
            scale_bits=7,
            spread=True,
            group_sizes=(8, 16, 32, 64, 128),
        ),
        KVFormat("int4", 4, 0, 15, zero_point=True, spread=True, group_sizes=(32, 64, 128)),
    )
}


@dataclass(frozen=True, slots=True)
class QuantizedPages:
    """One layer's keys or values, quantized.

    Args:
        codes: [num_blocks, block_size, num_kv_heads, code width] uint8.
        scales: [num_blocks, block_size, num_kv_heads, S] fp16: a scale a group, then a zero point a group.
        format: how they are to be read.
    """

    codes: Tensor
    scales: Tensor
    format: KVFormat

    @property
    def shape(self) -> Sequence[int]:
        """[num_blocks, block_size, num_kv_heads, D], that of native pages."""
        return (*self.codes.shape[:3], self.codes.shape[3] * 8 // self.format.bits)

    def is_contiguous(self) -> bool:
        """Whether both tensors are dense."""
        return self.codes.is_contiguous() and self.scales.is_contiguous()


Pages = Tensor | QuantizedPages
"""One layer's keys or values: [num_blocks, block_size, num_kv_heads, D] as they are, or quantized."""


def spreads(pages: Pages) -> bool:
    """Whether keys are to be spread before they are stored here, and queries before they meet them."""
    return isinstance(pages, QuantizedPages) and pages.format.spread


def quantize(x: Tensor, how: KVFormat) -> tuple[Tensor, Tensor]:
    """Return codes and scales of values.

    Args:
        x: [..., D] of any floating dtype.
        how: the format, its group decided.

    Returns:
        codes [..., code width] uint8 and scales [..., S] fp16, as in `QuantizedPages`.
    """
    x = _in_groups(x.float().contiguous().clamp(-how.max_value, how.max_value), how)
    zero = x.amin(-1, keepdim=True).to(SCALE_DTYPE) if how.zero_point else None
    if zero is not None:
        x = x - zero.float()
    span = (x if how.zero_point else x.abs()).amax(-1, keepdim=True)
    scale = _to_scale(span.clamp(min=0) * (1.0 / how.largest), how)
    codes = x / torch.where(scale == 0, 1.0, scale.float())
    codes = codes.clamp(how.lowest, how.largest).flatten(-2)
    codes = _to_float8(codes, how) if how.fraction else (codes.round() + how.middle).to(torch.uint8)
    if how.bits == 4:
        codes = codes[..., ::2] | codes[..., 1::2] << 4
    return codes, torch.cat([scale] if zero is None else [scale, zero], -2).squeeze(-1)


def dequantize(codes: Tensor, scales: Tensor, how: KVFormat, dtype: torch.dtype) -> Tensor:
    """Return what codes [..., code width] and scales [..., S] are worth: [..., D] in the dtype that is computed in."""
    if how.bits == 4:
        codes = torch.stack([codes & 15, codes >> 4], -1).flatten(-2)
    x = _in_groups(_from_float8(codes, how) if how.fraction else codes.float() - how.middle, how)
    num_groups = x.shape[-2]
    x = x * scales[..., :num_groups, None].float()
    if how.zero_point:
        x = x + scales[..., num_groups:, None].float()
    return x.to(dtype).flatten(-2)


def _to_scale(x: Tensor, how: KVFormat) -> Tensor:
    """fp32 values as scales: the nearest fp16, or the next number of fewer bits above."""
    if how.scale_bits < 11:
        dropped = (1 << 24 - how.scale_bits) - 1
        x = (x.view(torch.int32) + dropped & ~dropped).view(torch.float32)
    return x.to(SCALE_DTYPE)


def _to_float8(x: Tensor, how: KVFormat) -> Tensor:
    """Codes of fp32 values, ties to even: uint8."""
    bits = x.view(torch.int32)
    size, dropped, bias = bits & 0x7FFFFFFF, 23 - how.fraction, how.exponent_bias
    normal = (size + (1 << dropped - 1) - 1 + (size >> dropped & 1) >> dropped) - (127 - bias << how.fraction)
    small = (x.abs() * 2.0 ** (how.fraction + bias - 1)).round().to(torch.int32)  # in steps below the least normal
    return (torch.where(size < 128 - bias << 23, small, normal) | bits >> 24 & 0x80).to(torch.uint8)


def _from_float8(codes: Tensor, how: KVFormat) -> Tensor:
    """fp32 values of codes: exponent and fraction stand as well in fp32, whose bias is larger."""
    wide = codes.to(torch.int32)
    bits = (wide & 0x7F) << 23 - how.fraction | wide >> 7 << 31
    return bits.view(torch.float32) * 2.0 ** (127 - how.exponent_bias)


def _in_groups(x: Tensor, how: KVFormat) -> Tensor:
    """[..., D] → [..., groups, group]."""
    return x.view(*x.shape[:-1], x.shape[-1] // how.group, how.group)


def store(pages: Pages, slots: Tensor, x: Tensor) -> None:
    """Put values [N, num_kv_heads, D] into slots [N]."""
    if isinstance(pages, Tensor):
        pages.view(-1, *pages.shape[2:]).index_copy_(0, slots, x.to(pages.dtype))
        return
    for part, new in zip((pages.codes, pages.scales), quantize(x, pages.format), strict=True):
        part.view(-1, *part.shape[2:]).index_copy_(0, slots, new)


def load(pages: Pages, slots: slice | Tensor, dtype: torch.dtype) -> Tensor:
    """Return the values of slots: [len(slots), num_kv_heads, D]."""
    if isinstance(pages, Tensor):
        return pages.view(-1, *pages.shape[2:])[slots].to(dtype)
    codes, scales = (part.view(-1, *part.shape[2:])[slots] for part in (pages.codes, pages.scales))
    return dequantize(codes, scales, pages.format, dtype)
