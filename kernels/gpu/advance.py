"""Appends the emitted tokens to each sequence's history, in Triton; reference and contract in `kernels/advance.py`."""

import triton
import triton.language as tl
from torch import Tensor

from specdec.kernels.advance import check_shapes
from specdec.kernels.gpu.launch import overlap, wait_for_inputs
from specdec.kernels.gpu.rows import block_of_nodes


@triton.jit(do_not_specialize=["capacity", "n", "emitted_row"])
def _advance_kernel(
    history_ptr,
    lengths_ptr,
    emitted_ptr,
    num_accepted_ptr,
    capacity,
    n,
    emitted_row,
    NODES: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_inputs(PDL)
    sequence = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, NODES)
    length = tl.load(lengths_ptr + sequence)
    num_accepted = tl.load(num_accepted_ptr + sequence)
    accepted = (index < num_accepted) & (index < n)
    tokens = tl.maximum(tl.load(emitted_ptr + sequence * emitted_row + index, mask=accepted, other=0), 0)
    end = history_ptr + sequence * capacity + length
    tl.store(end + index, tokens.to(tl.int32), mask=accepted & (length + index < capacity))
    tl.store(lengths_ptr + sequence, tl.minimum(length + num_accepted, capacity))


def advance(history: Tensor, lengths: Tensor, emitted: Tensor, num_accepted: Tensor) -> None:
    """Write each sequence's emitted tokens behind its last one and count them, both in place.

    One program a sequence. A history that is full keeps what it holds: the tokens that don't fit are dropped, and
    `lengths` stops at L. A -1 (no choice) is stored as 0: the host raises it one step later, and until then the root
    must be a token id.

    Args:
        history: [B, L] int32, tokens of each sequence; written in place.
        lengths: [B] int64, tokens known, at most L; changed in place.
        emitted: [B, n] int64, tokens to append; only the first `num_accepted` of a row are read. Rows may be strided.
        num_accepted: [B] int32; sequences with 0 stay untouched.

    Raises:
        ValueError: the shapes don't fit each other, or a tensor changed in place isn't contiguous.
    """
    check_shapes(history, lengths, emitted, num_accepted)
    num_sequences, num_columns = emitted.shape
    emitted = emitted if emitted.stride(1) == 1 else emitted.contiguous()
    _advance_kernel[(num_sequences,)](
        history,
        lengths,
        emitted,
        num_accepted,
        history.shape[1],
        num_columns,
        emitted.stride(0),
        block_of_nodes(num_columns),
        num_warps=1,
        **overlap(history.device),
    )
