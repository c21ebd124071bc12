"""Where captured drafts begin, in Triton; reference and contract in `kernels/roots.py`."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.kernels.roots import Roots, check_shapes


@triton.jit(do_not_specialize=["capacity", "num_nodes", "width"])
def _roots_kernel(
    history_ptr, lengths_ptr, prompt_lens_ptr, has_hidden_ptr, found_ptr, positions_ptr, sizes_ptr,
    capacity, num_nodes, width,
):  # fmt: skip
    sequence = tl.program_id(0).to(tl.int64)
    length, prompt_len = tl.load(lengths_ptr + sequence), tl.load(prompt_lens_ptr + sequence)
    root = tl.load(history_ptr + sequence * capacity + tl.maximum(length - 1, 0))
    whole = tl.where(tl.load(has_hidden_ptr + sequence), num_nodes, 1)
    tl.store(found_ptr + sequence * width, root.to(tl.int64))
    tl.store(positions_ptr + sequence, tl.maximum(length - prompt_len, 0))
    tl.store(sizes_ptr + sequence, tl.where(length > 0, whole, 0))


def roots(
    history: Tensor, lengths: Tensor, prompt_lens: Tensor, has_hidden: Tensor, num_nodes: int, width: int
) -> Roots:
    """Begin the trees of heads, which have a root alone where no hidden state is known.

    One program a sequence.

    Args:
        history: [S, L] int32 contiguous, tokens of each sequence.
        lengths: [S] int64, tokens known; the last one is the root. 0: the sequence is inactive.
        prompt_lens: [S] int64.
        has_hidden: [S] bool, whether the hidden state that yielded the root is known.
        num_nodes: n, nodes of a whole tree.
        width: M, columns of `found`.

    Returns:
        found: [S, M] int64, the root in the first column, which is any token of inactive sequences; the others hold
            anything.
        positions: [S] int64, output position of the root's children; any for inactive sequences.
        sizes: [S] int32: n, 1 where no hidden state is known, 0 where the sequence is inactive.

    Raises:
        ValueError: the sizes differ, or the history isn't contiguous.
    """
    check_shapes(history, lengths, prompt_lens, has_hidden)
    if not history.is_contiguous():
        raise ValueError(f"the history must be contiguous, not of strides {history.stride()}")
    found = torch.empty(len(history), width, dtype=torch.int64, device=history.device)
    positions, sizes = torch.empty_like(lengths), torch.empty_like(lengths, dtype=torch.int32)
    _roots_kernel[(len(history),)](
        history, lengths.contiguous(), prompt_lens.contiguous(), has_hidden.contiguous(), found, positions, sizes,
        history.shape[1], num_nodes, width, num_warps=1,
    )  # fmt: skip
    return found, positions, sizes
