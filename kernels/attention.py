"""Attention of a packed batch over paged keys and values: causal chunks and token trees in one call."""

from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812

from specdec.kernels.formats import Pages, load
from specdec.kernels.work import AttentionWork, make_work

PART_ROWS = 128
"""Rows that attend together: keys behind the last of them aren't read, which saves half of a long prompt's work."""


class Part(NamedTuple):
    """Some rows of a sequence and the keys that they see.

    Args:
        rows: which rows of the batch.
        keys: all keys that any of them sees, counted from the sequence's first.
        mask: [rows · group, keys] bool, True where a row sees a key; None where every row sees all of them.
    """

    rows: slice
    keys: slice
    mask: torch.Tensor | None


@dataclass(frozen=True)
class AttentionMetadata:
    """Which keys each row of a packed batch sees. N rows of B sequences; keys are counted per sequence.

    A sequence's keys are its context (the cache and this step's causal rows) and then its tree nodes, one key a
    node, starting at key `context_lens[b]`. A causal row sees the keys up to itself; a tree row sees the whole
    context and its ancestors.

    Args:
        cu_seqlens_q: B + 1 offsets of each sequence's rows.
        context_lens: B counts: keys before the first tree node.
        seq_lens: B counts: all keys, this step's included; the last rows of a sequence own its last keys.
        block_table: [B, M] int64, block ids of each sequence; unused entries are 0.
        positions: [N] int64, position of each row (context + depth for tree rows); sliding windows count it.
        visible: [N] int64, leading keys that the row sees.
        ancestors: [N] int64 bitmask: bit j is the key at context_lens[b] + j. 0 for causal rows.
        block_size: slots a block.
    """

    cu_seqlens_q: tuple[int, ...]
    context_lens: tuple[int, ...]
    seq_lens: tuple[int, ...]
    block_table: torch.Tensor
    positions: torch.Tensor
    visible: torch.Tensor
    ancestors: torch.Tensor
    block_size: int
    _parts: dict[tuple[int, int | None, int], list[Part]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )  # not of `__init__`: what `replace` makes of this has its own
    _works: dict[tuple[int, int], AttentionWork] = field(default_factory=dict, init=False, repr=False, compare=False)

    def anew(self) -> "AttentionMetadata":
        """Itself: what it says of a batch stays as it is."""
        return self

    def work(self, group: int, max_block: int) -> AttentionWork:
        """How the Triton kernels divide the batch, for `group` query heads a key head. Made once a step."""
        if (group, max_block) not in self._works:
            self._works[group, max_block] = make_work(
                self.cu_seqlens_q,
                self.num_causal,
                self.context_lens,
                self.block_table,
                self.positions,
                self.ancestors,
                group,
                max_block,
            )
        return self._works[group, max_block]

    @cached_property
    def num_causal(self) -> list[int]:
        """How many of each sequence's rows stand before its nodes."""
        rows = [end - start for start, end in pairwise(self.cu_seqlens_q)]
        starts = [keys - n for keys, n in zip(self.seq_lens, rows, strict=True)]  # key of the first row
        return [max(0, min(n, c - at)) for n, c, at in zip(rows, self.context_lens, starts, strict=True)]

    @cached_property
    def slots(self) -> list[slice | torch.Tensor]:
        """Slots of each sequence's keys: a slice where its blocks are consecutive, else [keys] int64."""
        offsets = torch.arange(self.block_size, device=self.block_table.device)
        out: list[slice | torch.Tensor] = []
        for row, keys in zip(self.block_table, self.seq_lens, strict=True):
            blocks = row[: -(-keys // self.block_size)]
            first = int(blocks[0])
            if bool((blocks == torch.arange(first, first + len(blocks), device=blocks.device)).all()):
                out.append(slice(first * self.block_size, first * self.block_size + keys))
            else:
                out.append((blocks[:, None] * self.block_size + offsets).flatten()[:keys])
        return out

    def parts(self, b: int, window: int | None, group: int) -> list[Part]:
        """Divide the rows of sequence b. Made once a step.

        In the masks each row is repeated for the `group` query heads that share a key head.
        """
        key = (b, window, group)
        if key not in self._parts:
            begin, end = self.cu_seqlens_q[b : b + 2]
            self._parts[key] = [
                self._part(b, slice(first, min(first + PART_ROWS, end)), window, group)
                for first in range(begin, end, PART_ROWS)
            ]
        return self._parts[key]

    def _part(self, b: int, rows: slice, window: int | None, group: int) -> Part:
        keys = self._keys(b, rows, window)
        mask = self._mask(b, rows, keys, window).repeat_interleave(group, 0)
        return Part(rows, keys, None if bool(mask.all()) else mask)

    def _keys(self, b: int, rows: slice, window: int | None) -> slice:
        context, num_keys = self.context_lens[b], self.seq_lens[b]
        behind = num_keys - self.cu_seqlens_q[b + 1]  # from a causal row to its key
        first = 0 if window is None else max(0, min(rows.start + behind, context) + 1 - window)
        return slice(first, rows.stop + behind if rows.stop + behind <= context else num_keys)

    def _mask(self, b: int, rows: slice, keys: slice, window: int | None) -> torch.Tensor:
        context, num_keys = self.context_lens[b], self.seq_lens[b]
        key = torch.arange(keys.start, keys.stop, device=self.positions.device)
        mask = key < self.visible[rows, None]  # [rows, keys]
        if keys.stop > context:
            in_tree = (self.ancestors[rows, None] >> (key - context).clamp(0, 63)) & 1 == 1
            mask |= in_tree & (key >= context)
        if window is not None:
            own = self.positions[self.cu_seqlens_q[b] : self.cu_seqlens_q[b + 1]]
            position = torch.arange(num_keys, device=key.device)
            position[num_keys - len(own) :] = own
            mask &= self.positions[rows, None] - position[keys] < window
        return mask


def tree_attention(
    q: torch.Tensor,
    k_pages: Pages,
    v_pages: Pages,
    meta: AttentionMetadata,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """Attend each row to the keys that `meta` lets it see.

    Query heads that share a key head are folded into the rows, so that each key is read once.

    Args:
        q: [N, num_heads, D].
        k_pages, v_pages: [num_blocks, block_size, num_kv_heads, D], native or quantized. Slots outside a sequence
            are never read.
        meta: the batch.
        scale: factor on the scores.
        window: a row at position p sees keys at positions above p − window.
        softcap: scores become softcap · tanh(score / softcap) before masking.

    Returns:
        [N, num_heads, D], q's dtype.
    """
    num_kv_heads, head_dim = k_pages.shape[2:]
    group = q.shape[1] // num_kv_heads
    folded = q.view(-1, num_kv_heads, group, head_dim)
    out = torch.empty(folded.shape, dtype=q.dtype, device=q.device)
    for b, slots in enumerate(meta.slots):
        k, v = (load(pages, slots, q.dtype).transpose(0, 1) for pages in (k_pages, v_pages))  # [G, keys, D]
        for rows, keys, mask in meta.parts(b, window, group):
            part = folded[rows].transpose(0, 1).reshape(num_kv_heads, -1, head_dim)  # [G, rows · group, D]
            o = _attend(part, k[:, keys], v[:, keys], mask, scale, softcap)
            out[rows] = o.view(num_kv_heads, -1, group, head_dim).transpose(0, 1)
    return out.view(q.shape)


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, scale: float, softcap: float | None
) -> torch.Tensor:
    """Masked attention of [G, rows, D] queries to [G, keys, D] keys and values."""
    if softcap is None:
        return F.scaled_dot_product_attention(q[None], k[None], v[None], mask, scale=scale)[0]
    scores = torch.tanh(q @ k.transpose(1, 2) * (scale / softcap)) * softcap
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    probs = scores.softmax(-1, dtype=torch.promote_types(q.dtype, torch.float32))
    return probs.to(q.dtype) @ v
