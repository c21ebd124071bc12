"""What quantized keys and values do to a model, measured against native pages over the same tokens."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from specdec.cache.pages import KVLayout, KVPages
from specdec.kernels.formats import load
from specdec.models.batch import Rows, pack_rows
from specdec.models.protocol import PackedModel

TEXT = """\
The lighthouse keeper wrote down the weather four times a day. On 3 May 1911, at six in the morning, the wind came from
the north-west, the sea was rough, and the glass stood at 29.4 inches. He added one line: "A grey seal slept on the
rocks until noon, and I had no heart to wake it." When the supply boat came, it brought flour, oil, two letters and a
clock, which had stopped. He opened it on the kitchen table, found a hair between two wheels, and set it going again.

def mean(values):
    return sum(values) / len(values)

Question: which is heavier, a kilogram of iron or a kilogram of feathers? Answer: neither; both weigh the same. But the
feathers take up far more room, so their weight in air is a little less, by the weight of the air that they push aside.
"""
MAX_TOKENS = 256
MAX_OUTLIER = 250
"""Largest key channel over the median one up to which fp8 stores the median one no worse than fp8_e4m3."""
MAX_KL = 0.1
"""Nats a token beyond which a format is said to hurt: the next-token distributions differ visibly."""
_CHUNK, _BLOCK = 64, 16


@dataclass(frozen=True, slots=True)
class CacheReport:
    """How a model does with one format.

    Args:
        format: its name, and its group size.
        num_tokens: tokens that were run.
        kl: mean divergence of the next-token distribution from that with native pages, in nats a token.
        agreement: share of positions whose likeliest token is the same.
        key_outlier: the largest key of any channel over its head's median channel, the worst head's. Where it is large,
            the values that share a scale with such a channel lose their bits, or, in formats that spread keys, all
            values of the head.
        cut_off: whether keys or values are larger than the format stores (`KVFormat.max_value`).
    """

    format: str
    num_tokens: int
    kl: float
    agreement: float
    key_outlier: float
    cut_off: bool = False

    @property
    def hurts(self) -> bool:
        """Whether answers would suffer."""
        return self.cut_off or not self.kl <= MAX_KL

    @property
    def warning(self) -> str:
        """What to tell the user of a format that hurts."""
        better = "fp8" if self.key_outlier <= MAX_OUTLIER and not self.cut_off else "fp8_e4m3"
        return (
            f"quantized keys and values change what this model says: {self}; the limit is a KL of {MAX_KL:g}. "
            f'Try kv_cache_dtype="{better}", a smaller kv_group_size, or "auto", which stores them as they are'
        )

    def __str__(self) -> str:
        return (
            f"{self.format}: KL {self.kl:.2g} nats a token, {self.agreement:.1%} of the likeliest tokens unchanged "
            f"over {self.num_tokens} tokens; largest key channel {self.key_outlier:.1f}× the median"
            + ("; keys or values are larger than the format stores" if self.cut_off else "")
        )


def check_cache(model: PackedModel, layout: KVLayout, tokenizer: PreTrainedTokenizerBase | None = None) -> CacheReport:
    """Run a short text over native pages and over those of a format, and compare.

    Args:
        model: the target.
        layout: its layout in the format.
        tokenizer: for the text; without one, random tokens are run.
    """
    ids = _tokens(model, tokenizer)
    native = KVPages(model.kv_layout, -(-len(ids) // _BLOCK), _BLOCK, model.device)
    quantized = KVPages(layout, native.num_blocks, _BLOCK, model.device)
    kl, same = 0.0, 0
    for want, got in zip(score(model, ids, native), score(model, ids, quantized), strict=True):
        a, b = want.double().log_softmax(-1), got.double().log_softmax(-1)  # [n, V]
        kl += float((a.exp() * (a - b)).sum())
        same += int((a.argmax(-1) == b.argmax(-1)).sum())
    assert layout.format is not None, "native pages are what is compared with"
    name = f"{layout.format.name} g{layout.format.group}"
    outlier, cut_off = _key_outlier(native, len(ids)), _cut_off(quantized, len(ids), layout.format.max_value)
    return CacheReport(name, len(ids), kl / len(ids), same / len(ids), outlier, cut_off)


def score(model: PackedModel, ids: Sequence[int], pages: KVPages, chunk: int = _CHUNK) -> Iterator[Tensor]:
    """Run one sequence in chunks over pages that hold nothing else: logits [n, V] of each chunk."""
    table = range(pages.num_blocks)
    for start in range(0, len(ids), chunk):
        tokens = ids[start : start + chunk]
        rows = Rows(table, start, tokens, context=start + len(tokens))
        yield model.logits(model.forward(pack_rows([rows], pages.block_size, model.device), pages))


def _tokens(model: PackedModel, tokenizer: PreTrainedTokenizerBase | None) -> list[int]:
    limit = min(MAX_TOKENS, model.max_len)
    if tokenizer is not None:
        ids: list[int] = tokenizer(TEXT)["input_ids"][:limit]
        return ids
    return torch.randint(model.vocab_size, (limit,), generator=torch.Generator().manual_seed(0)).tolist()


def _key_outlier(pages: KVPages, num_tokens: int) -> float:
    worst = 0.0
    for keys in pages.k:
        top = load(keys, slice(num_tokens), torch.float32).abs().amax(0)  # [num_kv_heads, D]
        worst = max(worst, float((top.amax(-1) / top.median(-1).values.clamp(min=1e-12)).max()))
    return worst


def _cut_off(pages: KVPages, num_tokens: int, limit: float) -> bool:
    """Whether what is stored is as large as can be; a scale that was rounded is no reason to miss it."""
    return any(
        bool((load(side, slice(num_tokens), torch.float32).abs() > 0.98 * limit).any()) for side in pages.k + pages.v
    )
