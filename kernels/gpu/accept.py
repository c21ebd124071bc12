"""Walks each sequence's tree along the target's choices, in Triton; reference and contract in `kernels/accept.py`."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.kernels.accept import Accepted, check_shapes
from specdec.kernels.gpu.launch import overlap, wait_for_inputs
from specdec.kernels.gpu.rows import block_of_nodes


@triton.jit(do_not_specialize=["n", "parents_row"], do_not_specialize_on_alignment=["tokens_ptr", "parents_ptr"])
def _accept_kernel(
    tokens_ptr,
    parents_ptr,
    num_nodes_ptr,
    choices_ptr,
    path_ptr,
    out_ptr,
    num_accepted_ptr,
    n,
    parents_row,
    NODES: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_inputs(PDL)
    sequence = tl.program_id(0).to(tl.int64)
    node = tl.arange(0, NODES)
    num_nodes = tl.minimum(tl.load(num_nodes_ptr + sequence), n)
    inside = node < num_nodes
    tokens = tl.load(tokens_ptr + sequence * n + node, mask=inside, other=-1)
    parents = tl.load(parents_ptr + sequence * parents_row + node, mask=inside, other=-1)
    path = tl.full([NODES], -1, tl.int64)
    emitted = tl.full([NODES], -1, tl.int64)
    num_accepted = tl.cast(0, tl.int32)
    has_child = tl.cast(0, tl.int32)
    current = tl.where(num_nodes > 0, 0, -1)
    while current >= 0:
        choice = tl.load(choices_ptr + sequence * n + current)
        path = tl.where(node == num_accepted, current.to(tl.int64), path)
        emitted = tl.where(node == num_accepted, choice, emitted)
        num_accepted += 1
        # Children stand behind their parent, so that no wrong tree can hold the walk in a circle.
        holds = inside & (node > current) & (parents == current) & (tokens == choice) & (choice >= 0)
        has_child = tl.max((inside & (parents == current)).to(tl.int32), 0)
        first = tl.min(tl.where(holds, node, NODES), 0)
        current = tl.where(first < NODES, first, -1)
    tl.store(path_ptr + sequence * n + node, path, mask=node < n)
    tl.store(num_accepted_ptr + sequence, num_accepted)
    out = out_ptr + sequence * (n + 3)
    tl.store(out + node, emitted, mask=node < n)
    tl.store(out + n, (1 - has_child).to(tl.int64))
    tl.store(out + n + 1, num_accepted.to(tl.int64))
    tl.store(out + n + 2, tl.load(num_nodes_ptr + sequence).to(tl.int64))


def accept(tokens: Tensor, parents: Tensor, num_nodes: Tensor, choices: Tensor, out: Tensor) -> Accepted:
    """Go from each root to the first child that holds the target's choice, until no child does.

    One program a sequence.

    Args:
        tokens: [B, n] int64, token of each node.
        parents: [B, n] int64, index of the parent, before its children; -1 for node 0. Rows may be strided, or one row
            for all.
        num_nodes: [B] int32; nodes from there on are padding, whatever they hold. 0: the sequence is inactive.
        choices: [B, n] int64, the target's choice at each node. -1: none; it is emitted and ends the walk.
        out: [B, n + 3] int64, what the host reads; written in place: the choice at each visited node, padded with -1;
            whether the last one has no children; how many they are; how many nodes the tree has.

    Returns:
        path: [B, n] int64, visited nodes, root first; padded with -1.
        num_accepted: [B] int32, how many there are; 0 for inactive sequences.

    Raises:
        ValueError: the shapes differ.
    """
    check_shapes(tokens, parents, num_nodes, choices, out)
    num_sequences, num_columns = tokens.shape
    parents = parents if parents.stride(1) == 1 else parents.contiguous()
    path = torch.empty(tokens.shape, dtype=torch.int64, device=tokens.device)
    num_accepted = torch.empty_like(num_nodes)
    _accept_kernel[(num_sequences,)](
        tokens.contiguous(),
        parents,
        num_nodes,
        choices.contiguous(),
        path,
        out,
        num_accepted,
        num_columns,
        parents.stride(0),
        block_of_nodes(num_columns),
        num_warps=1,
        **overlap(tokens.device),
    )
    return path, num_accepted
