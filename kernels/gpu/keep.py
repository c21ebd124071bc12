"""Keeps each sequence's last hidden state, in Triton; reference and contract in `kernels/keep.py`."""

import triton
import triton.language as tl
from torch import Tensor

from specdec.kernels.gpu.launch import overlap, wait_for_inputs
from specdec.kernels.keep import check_shapes

_BLOCK = 1024


@triton.jit(do_not_specialize=["n"])
def _keep_kernel(
    hidden_ptr, path_ptr, num_accepted_ptr, kept_ptr, known_ptr, n,
    H: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(PDL)
    sequence = tl.program_id(0).to(tl.int64)
    num_accepted = tl.load(num_accepted_ptr + sequence)
    if num_accepted > 0:
        col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        last = tl.load(path_ptr + sequence * n + num_accepted - 1)
        row = tl.load(hidden_ptr + (sequence * n + last) * H + col, mask=col < H)
        tl.store(kept_ptr + sequence * H + col, row, mask=col < H)
        tl.store(known_ptr + sequence, 1)


def keep(hidden: Tensor, path: Tensor, num_accepted: Tensor, kept: Tensor, known: Tensor) -> None:
    """Keep hidden states for the next step's drafts, in place, in one launch.

    Args:
        hidden: [B, n, H] of a step's nodes.
        path: [B, n] int64, accepted nodes, padded with -1.
        num_accepted: [B] int32, nodes on each path; sequences with 0 stay untouched.
        kept: [B, H] of hidden's dtype, changed in place.
        known: [B] bool, changed in place: whether a row of `kept` holds anything.

    Raises:
        ValueError: the shapes don't fit each other, or a tensor changed in place isn't contiguous.
    """
    check_shapes(hidden, path, num_accepted, kept, known)
    (num_sequences, num_nodes), size = path.shape, hidden.shape[2]
    block = min(_BLOCK, triton.next_power_of_2(size))
    _keep_kernel[(num_sequences, triton.cdiv(size, block))](
        hidden.contiguous(), path.contiguous(), num_accepted, kept, known, num_nodes, size, block,
        **overlap(path.device),
    )  # fmt: skip
