"""The memory of the KV cache: one tensor for all layers, seen as pages of each."""

from dataclasses import dataclass, replace

import torch

from specdec.errors import ConfigError
from specdec.kernels.formats import FORMATS, SCALE_DTYPE, KVFormat, Pages, QuantizedPages, store
from specdec.kernels.ops import choose_ops


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Shape of a model's keys and values.

    Args:
        num_layers: attention layers.
        num_kv_heads: key heads a layer.
        head_dim: D.
        dtype: of the values.
        format: how they are stored; None: as they are, in native pages.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    format: KVFormat | None = None

    @property
    def bytes_per_head(self) -> int:
        """Bytes that a key or a value takes, scales included."""
        return self.head_dim * self.dtype.itemsize if self.format is None else self.format.bytes_per_head(self.head_dim)

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one token's keys and values take in all layers."""
        return self.num_layers * 2 * self.num_kv_heads * self.bytes_per_head

    def stored_as(self, name: str, group: int | None = None) -> "KVLayout":
        """Return the layout in another format.

        Args:
            name: of a format, or "auto" for native pages.
            group: values that share a scale; None chooses.

        Raises:
            ConfigError: the format or the group doesn't fit these heads.
        """
        return replace(self, format=None if name == "auto" else FORMATS[name].of_head_dim(self.head_dim, group))

    def like(self, other: "KVLayout") -> "KVLayout":
        """Return the layout in another one's format; a group size that doesn't fit these heads is chosen anew.

        Raises:
            ConfigError: no group size fits.
        """
        how = other.format
        if how is None:
            return replace(self, format=None)
        fits = how.group_sizes and self.head_dim % how.group == 0
        return self.stored_as(how.name, how.group if fits else None)


class KVPages:
    """Keys and values of every layer, in blocks. `k[layer]` and `v[layer]` are views of one storage.

    Args:
        layout: shape of the model's keys and values, and their format.
        num_blocks: blocks in the pool.
        block_size: tokens a block.
        device: where the pages live.

    Raises:
        ConfigError: the device has no room for them.
    """

    def __init__(self, layout: KVLayout, num_blocks: int, block_size: int, device: torch.device) -> None:
        self.layout = layout
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._device = device
        self._kv_commit = choose_ops(device, layout.dtype).kv_commit
        shape = (layout.num_layers, 2, num_blocks, block_size, layout.num_kv_heads)
        how, dim = layout.format, layout.head_dim
        widths = (
            {layout.dtype: dim} if how is None else {torch.uint8: how.code_width(dim), SCALE_DTYPE: how.num_scales(dim)}
        )
        try:
            self._storage = [torch.empty(*shape, width, dtype=dtype, device=device) for dtype, width in widths.items()]
        except RuntimeError as error:  # of which running out of memory is one
            raise ConfigError(
                f"the KV cache can't be allocated: {num_blocks} blocks of {block_size} tokens, "
                f"{num_blocks * block_size * layout.bytes_per_token / 2**30:.2f} GiB; give a smaller num_blocks, "
                "kv_cache_memory, gpu_memory_utilization or max_model_len"
            ) from error
        sides = [[_pages(how, [part[i, side] for part in self._storage]) for i in range(shape[0])] for side in (0, 1)]
        self.k, self.v = sides  # each layer's [num_blocks, block_size, num_kv_heads, D]

    def commit(self, src: list[int], dst: list[int]) -> None:
        """Move slots to where the accepted tokens belong, in all layers, verbatim.

        Args:
            src: slots of accepted nodes.
            dst: the slots they move to; all sources are read before any is written.
        """
        if not src:
            return
        moves = torch.tensor([src, dst], device=self._device)
        self.commit_slots(moves[0], moves[1])

    def commit_slots(self, src: torch.Tensor, dst: torch.Tensor) -> None:
        """Move slots as `commit` does, without asking the host.

        Args:
            src, dst: [M] or [B, n] int64; -1 moves nothing.
        """
        for part in self._storage:  # the values; or codes, then scales
            self._kv_commit(part.flatten(2, 3), src, dst)

    def randomize(self, generator: torch.Generator) -> None:
        """Put normal values into all slots: contexts for measurements, which nothing computed."""
        slots = torch.arange(self.num_blocks * self.block_size, device=self._device)
        for pages in (*self.k, *self.v):
            shape, dtype = (len(slots), *pages.shape[2:]), self.layout.dtype
            store(pages, slots, torch.randn(shape, dtype=dtype, device=self._device, generator=generator))


def _pages(how: KVFormat | None, parts: list[torch.Tensor]) -> Pages:
    """One layer's keys or values from its part of each storage."""
    return parts[0] if how is None else QuantizedPages(parts[0], parts[1], how)
