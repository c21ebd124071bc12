"""Which slots the accepted nodes move from and to, in Triton; reference and contract in `kernels/moves.py`."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.kernels.gpu.launch import overlap, wait_for_inputs
from specdec.kernels.gpu.rows import block_of_nodes, slots_of
from specdec.kernels.rows import check_shapes


@triton.jit(do_not_specialize=["n", "num_blocks"])
def _moves_kernel(
    path_ptr,
    num_accepted_ptr,
    lengths_ptr,
    block_table_ptr,
    src_ptr,
    dst_ptr,
    n,
    num_blocks,
    BLOCK_SIZE: tl.constexpr,
    NODES: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_inputs(PDL)
    sequence = tl.program_id(0).to(tl.int64)
    depth = tl.arange(0, NODES)
    accepted = depth < tl.minimum(tl.load(num_accepted_ptr + sequence), n)
    path = tl.load(path_ptr + sequence * n + depth, mask=accepted, other=-1)
    context = tl.load(lengths_ptr + sequence) - 1
    table = block_table_ptr + sequence * num_blocks
    src = slots_of(table, context + path, accepted & (path != depth), num_blocks, BLOCK_SIZE)
    dst = slots_of(table, context + depth, src >= 0, num_blocks, BLOCK_SIZE)
    tl.store(src_ptr + sequence * n + depth, src, mask=depth < n)
    tl.store(dst_ptr + sequence * n + depth, dst, mask=depth < n)


def moves(
    path: Tensor, num_accepted: Tensor, lengths_before: Tensor, block_table: Tensor, block_size: int
) -> tuple[Tensor, Tensor]:
    """Return where the accepted nodes' keys and values lie, and where a plain decoder would have written them.

    One program a sequence.

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
    num_sequences, num_columns = path.shape
    src, dst = (torch.empty(path.shape, dtype=torch.int64, device=path.device) for _ in range(2))
    _moves_kernel[(num_sequences,)](
        path.contiguous(),
        num_accepted,
        lengths_before,
        block_table.contiguous(),
        src,
        dst,
        num_columns,
        block_table.shape[1],
        block_size,
        block_of_nodes(num_columns),
        num_warps=1,
        **overlap(path.device),
    )
    return src, dst
