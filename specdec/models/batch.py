"""The tensors of one step: the rows that the model runs and the slots they write."""

from dataclasses import dataclass

import torch

from specdec.kernels.attention import AttentionMetadata


@dataclass(frozen=True, slots=True)
class Batch:
    """A packed batch of N rows, no padding.

    Args:
        input_ids: [N] int64, the rows' tokens.
        slot_mapping: [N] int64, the slot that each row's keys and values go to.
        attention: who sees what, and the rows' positions.
    """

    input_ids: torch.Tensor
    slot_mapping: torch.Tensor
    attention: AttentionMetadata
