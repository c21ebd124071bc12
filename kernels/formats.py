"""How keys and values are stored in less than their own dtype. This is the definition; Triton's twin is `gpu/pages.py`.

A group of values along head_dim shares a scale, and a zero point where the format has one. What is stored for a token
and head never depends on another token. A stored value is worth `code · scale + zero point`, taken in fp32 and rounded
to the dtype that is computed in.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from specdec.errors import ConfigError

SCALE_DTYPE = torch.bfloat16
"""A code has eight bits and so has a scale: their product is exact in fp32, and one bf16 multiplication rounds it as
well as fp32 would. To the codes it makes no difference that the scale was rounded first: they are of what it became."""
MAX_SCALE = torch.finfo(SCALE_DTYPE).max
"""Largest number of that dtype: scales and zero points of infinite values stop there."""


@dataclass(frozen=True, slots=True)
class KVFormat:
    """One way to store keys and values.

    Args:
        name: what `EngineConfig.kv_cache_dtype` calls it.
        code_dtype: of a value divided by its scale; uint8 where that is a float of 8 bits, see `fraction`.
        bits: of a code; two codes of 4 bits share a byte, the first in its lower half.
        lowest, largest: codes are between them.
        fraction: bits of a float code's fraction, its last ones; before them stand a sign and 7 − fraction bits of
            exponent, biased as IEEE does it, but without infinities. 0: codes are integers.
        zero_point: whether codes count from the group's least value; else from 0.
        spread: whether keys, and then queries, are spread over the channels of their head first (`kernels/spread.py`).
        group_sizes: values that may share a scale; () where all of a head do.
        group: values that share a scale here; 0 until `of_head_dim` decides.
    """

    name: str
    code_dtype: torch.dtype
    bits: int
    lowest: float
    largest: float
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
        KVFormat("fp8", torch.uint8, 8, -31, 31, fraction=4),
        KVFormat("fp8_e4m3", torch.uint8, 8, -256, 256, fraction=3),
        KVFormat("int8", torch.int8, 8, -127, 127, spread=True, group_sizes=(8, 16, 32, 64, 128)),
        KVFormat("int4", torch.uint8, 4, 0, 15, zero_point=True, spread=True, group_sizes=(32, 64, 128)),
    )
}


@dataclass(frozen=True, slots=True)
class QuantizedPages:
    """One layer's keys or values, quantized.

    Args:
        codes: [num_blocks, block_size, num_kv_heads, code width] uint8.
        scales: [num_blocks, block_size, num_kv_heads, S] bf16: a scale a group, then a zero point a group.
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
        codes [..., code width] uint8 and scales [..., S] bf16, as in `QuantizedPages`.
    """
    x = _in_groups(x.float().contiguous(), how)
    zero = x.amin(-1, keepdim=True).clamp(-MAX_SCALE, MAX_SCALE).to(SCALE_DTYPE) if how.zero_point else None
    if zero is not None:
        x = x - zero.float()
    span = (x if how.zero_point else x.abs()).amax(-1, keepdim=True)
    scale = (span * (1.0 / how.largest)).clamp(0, MAX_SCALE).to(SCALE_DTYPE)
    codes = x / torch.where(scale == 0, 1.0, scale.float())
    codes = codes.clamp(how.lowest, how.largest).flatten(-2)
    codes = _to_float8(codes, how) if how.fraction else codes.round().to(how.code_dtype).view(torch.uint8)
    if how.bits == 4:
        codes = codes[..., ::2] | codes[..., 1::2] << 4
    return codes, torch.cat([scale] if zero is None else [scale, zero], -2).squeeze(-1)


def dequantize(codes: Tensor, scales: Tensor, how: KVFormat, dtype: torch.dtype) -> Tensor:
    """Return what codes [..., code width] and scales [..., S] are worth: [..., D] in the dtype that is computed in."""
    if how.bits == 4:
        codes = torch.stack([codes & 15, codes >> 4], -1).flatten(-2)
    x = _in_groups(_from_float8(codes, how) if how.fraction else codes.view(how.code_dtype).float(), how)
    num_groups = x.shape[-2]
    x = x * scales[..., :num_groups, None].float()
    if how.zero_point:
        x = x + scales[..., num_groups:, None].float()
    return x.to(dtype).flatten(-2)


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
