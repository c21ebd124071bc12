"""Which slots the accepted nodes move from and to. The torch reference."""

import torch
from torch import Tensor

from specdec.kernels.rows import check_shapes, slots_of


def moves(
    path: Tensor, num_accepted: Tensor, lengths_before: Tensor, block_table: Tensor, block_size: int
) -> tuple[Tensor, Tensor]:
    """Return where the accepted nodes' keys and values lie, and where a plain decoder would have written them.

    Args:
        path: [B, n] int64, accepted nodes, root first; padded with -1.
        num_accepted: [B] int32, nodes on each path; 0 for inactive sequences.
        lengths_before: [B] int64, tokens known when the tree was laid out, root included.
        block_table: [B, M] int32, block ids of each sequence.
        block_size: slots a block.

    Returns:
        src: [B, n] int64, slot of key root + path[d]; -1 where node d stays where it is, and for padding.
        dst: [B, n] int64, slot of key root + d; -1 in the same places.

    Raises:
        ValueError: the shapes don't fit each other.
    """
    check_shapes(path, num_accepted, lengths_before, block_table)
    depth = torch.arange(path.shape[1], device=path.device)
    context = lengths_before.unsqueeze(1) - 1
    src = slots_of(block_table, context + path, (depth < num_accepted.unsqueeze(1)) & (path != depth), block_size)
    return src, slots_of(block_table, context + depth, src >= 0, block_size)
