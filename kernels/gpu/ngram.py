"""Prompt lookup over token histories, in Triton; reference and contract in `kernels/ngram.py`."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.kernels.gpu.rows import block_of_nodes
from specdec.kernels.ngram import Chains, check_bounds

_BLOCK = 1024  # positions a program: 128 programs search a history of 131,072 tokens


@triton.jit
def _search_kernel(
    history_ptr, lengths_ptr, key_ptr, capacity, LOOKUP_MAX: tl.constexpr, LOOKUP_MIN: tl.constexpr, BLOCK: tl.constexpr
):
    sequence = tl.program_id(0).to(tl.int64)
    length = tl.load(lengths_ptr + sequence)
    tokens = history_ptr + sequence * capacity
    position = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    best = tl.cast(0, tl.int64)
    if tl.program_id(1) * BLOCK < length:
        same = position < length
        run = tl.zeros([BLOCK], tl.int64)
        for back in tl.static_range(1, LOOKUP_MAX + 1):
            before = tl.load(tokens + position - back, mask=same & (position >= back), other=0)
            last = tl.load(tokens + length - back, mask=length >= back, other=0)
            same = same & (position >= back) & (before == last)
            run += same.to(tl.int64)
        # The longest match comes first, then the most recent one.
        best = tl.max(tl.where(run >= LOOKUP_MIN, run * capacity + position, 0), 0)
    tl.store(key_ptr + sequence * tl.num_programs(1) + tl.program_id(1), best)


@triton.jit(do_not_specialize=["n"])
def _chain_kernel(
    history_ptr,
    lengths_ptr,
    key_ptr,
    tokens_ptr,
    parents_ptr,
    num_nodes_ptr,
    match_ptr,
    capacity,
    num_blocks,
    n,
    BLOCKS: tl.constexpr,
    NODES: tl.constexpr,
):
    sequence = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, BLOCKS)
    key = tl.max(tl.load(key_ptr + sequence * num_blocks + block, mask=block < num_blocks, other=0), 0)
    match = (key // capacity).to(tl.int32)
    start = key % capacity
    length = tl.load(lengths_ptr + sequence)
    num_nodes = tl.where(length > 0, tl.where(match > 0, n, 1), 0)
    node = tl.arange(0, NODES)
    followed = start + tl.maximum(node - 1, 0) % tl.maximum(length - start, 1)
    source = tl.where(node > 0, followed, length - 1)
    tokens = tl.load(history_ptr + sequence * capacity + source, mask=node < num_nodes, other=0).to(tl.int64)
    tl.store(tokens_ptr + sequence * n + node, tokens, mask=node < n)
    tl.store(parents_ptr + sequence * n + node, node - 1, mask=node < n)
    tl.store(num_nodes_ptr + sequence, num_nodes)
    tl.store(match_ptr + sequence, match)


def ngram_chain(history: Tensor, lengths: Tensor, num_nodes_max: int, lookup_max: int, lookup_min: int) -> Chains:
    """Draft what followed the longest earlier occurrence of each sequence's last tokens, as a chain.

    Two launches: blocks of each history are searched side by side, those behind its end leave at once; then one
    program a sequence takes the best match. Of equally long matches the most recent counts. A continuation that runs
    into the end of the sequence goes on repeating itself from its start.

    Args:
        history: [S, L] int32, tokens of each sequence.
        lengths: [S] int64, tokens known, at most L; the last one is the root. 0: the sequence is inactive.
        num_nodes_max: n, nodes of a chain, root included; 1 to 64.
        lookup_max: longest match, 1 to 8.
        lookup_min: shortest match, 1 to `lookup_max`.

    Returns:
        tokens: [S, n] int64, root first; padded with 0.
        parents: [S, n] int64, -1, 0, 1, …, also where there is padding.
        num_nodes: [S] int32: n; 1 where nothing matches; 0 where inactive.
        match: [S] int32, tokens that matched, or 0.

    Raises:
        ValueError: an argument is out of bounds.
    """
    check_bounds(history, lengths, num_nodes_max, lookup_max, lookup_min)
    history = history.contiguous()
    num_sequences, capacity = history.shape
    num_blocks = triton.cdiv(capacity, _BLOCK)
    key = torch.empty(num_sequences, num_blocks, dtype=torch.int64, device=history.device)
    shape = num_sequences, num_nodes_max
    tokens, parents = (torch.empty(shape, dtype=torch.int64, device=history.device) for _ in range(2))
    num_nodes, match = (torch.empty(num_sequences, dtype=torch.int32, device=history.device) for _ in range(2))
    _search_kernel[(num_sequences, num_blocks)](history, lengths, key, capacity, lookup_max, lookup_min, _BLOCK)
    _chain_kernel[(num_sequences,)](
        history,
        lengths,
        key,
        tokens,
        parents,
        num_nodes,
        match,
        capacity,
        num_blocks,
        num_nodes_max,
        triton.next_power_of_2(num_blocks),
        block_of_nodes(num_nodes_max),
        num_warps=1,
    )
    return tokens, parents, num_nodes, match
