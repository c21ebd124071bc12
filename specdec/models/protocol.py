"""A causal LM over packed batches, as the layers above see it."""

from typing import Protocol

import torch

from specdec.cache.pages import KVLayout, KVPages
from specdec.models.batch import Batch


class PackedModel(Protocol):
    """Packed rows in, hidden states out; keys and values go to pages.

    Args:
        vocab_size: V, columns of the logits.
        max_len: positions that the model was made for.
        device: where its tensors are.
        kv_layout: shape of its keys and values.
    """

    vocab_size: int
    max_len: int
    device: torch.device
    kv_layout: KVLayout

    def forward(self, batch: Batch, pages: KVPages) -> torch.Tensor:
        """Run the rows of a batch: [N, hidden_size], after the last norm."""
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Score the vocabulary: [R, hidden_size] → [R, vocab_size]."""
        ...
