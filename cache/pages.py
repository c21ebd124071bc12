"""The memory of the KV cache: one tensor for all layers, seen as pages of each."""

from dataclasses import dataclass

import torch

from specdec.kernels.ops import choose_ops


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Shape of a model's keys and values.

    Args:
        num_layers: attention layers.
        num_kv_heads: key heads a layer.
        head_dim: D.
        dtype: of the stored values.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one token's keys and values take in all layers."""
        return self.num_layers * 2 * self.num_kv_heads * self.head_dim * self.dtype.itemsize


class KVPages:
    """Keys and values of every layer, in blocks. `k[layer]` and `v[layer]` are views of one storage.

    Args:
        layout: shape of the model's keys and values.
        num_blocks: blocks in the pool.
        block_size: tokens a block.
        device: where the pages live.
    """

    def __init__(self, layout: KVLayout, num_blocks: int, block_size: int, device: torch.device) -> None:
        self.layout = layout
        self.num_blocks = num_blocks
        self.block_size = block_size
        shape = (layout.num_layers, 2, num_blocks, block_size, layout.num_kv_heads, layout.head_dim)
        self._storage = torch.empty(shape, dtype=layout.dtype, device=device)
        self._kv_commit = choose_ops(device, layout.dtype).kv_commit
        self.k = [layer[0] for layer in self._storage]  # each [num_blocks, block_size, num_kv_heads, D]
        self.v = [layer[1] for layer in self._storage]

    def commit(self, src: list[int], dst: list[int]) -> None:
        """Move slots to where the accepted tokens belong, in all layers, verbatim.

        Args:
            src: slots of accepted nodes.
            dst: the slots they move to; all sources are read before any is written.
        """
        if not src:
            return
        moves = torch.tensor([src, dst], device=self._storage.device)
        self.commit_slots(moves[0], moves[1])

    def commit_slots(self, src: torch.Tensor, dst: torch.Tensor) -> None:
        """Move slots as `commit` does, without asking the host.

        Args:
            src, dst: [M] or [B, n] int64; -1 moves nothing.
        """
        self._kv_commit(self._storage.flatten(2, 3), src, dst)
