"""A drafter's candidates in each row of logits, best first, in Triton; reference and contract in `kernels/rank.py`."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.kernels.gpu.sample import best_of, scores_of
from specdec.kernels.rank import check_ranks
from specdec.kernels.sample import MIN_TEMPERATURE

_BLOCK = 1024  # ids a program
_FEW = 512  # candidates; a row of fewer takes the same kernel


@triton.jit(do_not_specialize=["num_ranks", "rows_per_sequence"], do_not_specialize_on_alignment=["positions_ptr"])
def _block_kernel(
    logits_ptr,
    temperature_ptr,
    seeds_ptr,
    positions_ptr,
    token_ids_ptr,
    best_ptr,
    token_ptr,
    row_stride,
    num_tokens,
    num_blocks,
    num_ranks,
    rows_per_sequence,
    MAPPED: tl.constexpr,
    MIN_TEMPERATURE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    first_token = tl.program_id(1) * BLOCK
    scores = scores_of(
        logits_ptr,
        temperature_ptr,
        seeds_ptr,
        positions_ptr,
        token_ids_ptr,
        row,
        first_token,
        row_stride,
        num_tokens,
        rows_per_sequence,
        MAPPED,
        MIN_TEMPERATURE,
        BLOCK,
    )
    index = tl.arange(0, BLOCK)
    scores = tl.where(scores == scores, scores, float("-inf"))
    out = (row * num_blocks + tl.program_id(1)) * num_ranks
    for rank in range(num_ranks):
        best, where = best_of(scores)
        tl.store(best_ptr + out + rank, best)
        tl.store(token_ptr + out + rank, first_token + where)
        scores = tl.where(index == where, float("-inf"), scores)


@triton.jit(do_not_specialize=["num_candidates", "num_ranks"])
def _row_kernel(
    best_ptr,
    token_ptr,
    token_ids_ptr,
    out_ptr,
    num_candidates,
    num_ranks,
    num_tokens,
    MAPPED: tl.constexpr,
    CANDIDATES: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, CANDIDATES)
    inside = index < num_candidates
    scores = tl.load(best_ptr + row * num_candidates + index, mask=inside, other=float("-inf"))
    for rank in range(num_ranks):
        _, where = best_of(scores)
        token = tl.load(token_ptr + row * num_candidates + tl.minimum(where, num_candidates - 1)).to(tl.int64)
        token = tl.minimum(token, num_tokens - 1)
        if MAPPED:
            token = tl.load(token_ids_ptr + token)
        tl.store(out_ptr + row * num_ranks + rank, token)
        scores = tl.where(index == where, float("-inf"), scores)


def rank(
    logits: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    positions: Tensor,
    num_ranks: int,
    rows_per_sequence: int = 1,
    token_ids: Tensor | None = None,
) -> Tensor:
    """Return the k tokens of each row with the best logits / temperature + gumbel(seed, position, token), best first.

    Two launches: the best of each row's blocks of the vocabulary, then the best of these. Greedy rows draw no noise.

    Args:
        logits: [R, V] float32, float16 or bfloat16, rows contiguous.
        temperature: [R / rows_per_sequence] float32, at least 0; 0 is greedy.
        seeds: [R / rows_per_sequence] int64.
        positions: [R] int64, output position that the row predicts, in [0, 2^32).
        num_ranks: k, from 1 to V.
        rows_per_sequence: rows that share a temperature and a seed; they stand behind each other.
        token_ids: [V] int64, the token of each column, ascending; None if column i is token i.

    Returns:
        [R, k] int64 token ids. NaN counts as -inf; ranks behind the last finite score hold any ids.

    Raises:
        ValueError: the sizes don't fit each other, or the rows of logits aren't contiguous.
    """
    check_ranks(logits, temperature, seeds, positions, num_ranks, rows_per_sequence, token_ids)
    mapped = token_ids is not None
    if logits.stride(1) != 1:
        raise ValueError(f"rows of logits must be contiguous, not of stride {logits.stride(1)}")
    num_rows, num_tokens = logits.shape
    num_blocks = triton.cdiv(num_tokens, _BLOCK)
    num_candidates = num_blocks * num_ranks
    best = torch.empty(num_rows, num_candidates, dtype=torch.float32, device=logits.device)
    token = torch.empty(num_rows, num_candidates, dtype=torch.int32, device=logits.device)
    out = torch.empty(num_rows, num_ranks, dtype=torch.int64, device=logits.device)
    _block_kernel[(num_rows, num_blocks)](
        logits,
        temperature.contiguous(),
        seeds.contiguous(),
        positions.contiguous(),
        token_ids,
        best,
        token,
        logits.stride(0),
        num_tokens,
        num_blocks,
        num_ranks,
        rows_per_sequence,
        mapped,
        MIN_TEMPERATURE,
        _BLOCK,
    )
    width = max(_FEW, triton.next_power_of_2(num_candidates))
    _row_kernel[(num_rows,)](best, token, token_ids, out, num_candidates, num_ranks, num_tokens, mapped, width)
    return out
