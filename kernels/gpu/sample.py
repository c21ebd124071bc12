"""The target's choice in each row of logits, in Triton; reference and contract in `kernels/sample.py`."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.kernels.gpu.launch import overlap, wait_for_inputs
from specdec.kernels.sample import MIN_TEMPERATURE, check_sizes

_BLOCK = 1024
"""Ids that a program looks at together; a maximum doesn't depend on how it is split."""
_PROGRAMS, _MOST_TURNS = 1024, 8
"""Programs that are enough: of more rows each takes several blocks, one after the other, up to so many."""


@triton.jit
def _noise(seed, position, first_token, BLOCK: tl.constexpr):
    """[BLOCK] float32: the noise of `kernels.gumbel`, four ids to a Philox counter."""
    group = first_token // 4 + tl.arange(0, BLOCK // 4)
    a, b, c, d = tl.philox(seed, group, position.to(tl.uint32), 0, 0)
    return _gumbel(tl.interleave(tl.interleave(a, c), tl.interleave(b, d)))  # a0 b0 c0 d0 a1 …


@triton.jit
def _gumbel(words):
    """-log(-log u) of u = (word + 0.5) / 2^32, as float32."""
    uniform = (words.to(tl.float64) + 0.5) * 2.3283064365386963e-10  # 2^-32
    return (-tl.log(-tl.log(uniform))).to(tl.float32)


@triton.jit
def noise_at(seed, position, token):
    """The noise of any token ids [BLOCK]: each takes its word of its own counter."""
    token = token.to(tl.int32)
    a, b, c, d = tl.philox(seed, token // 4, position.to(tl.uint32), 0, 0)
    word = token % 4
    words = tl.where(word < 2, tl.where(word == 0, a, b), tl.where(word == 2, c, d))
    return _gumbel(words)


@triton.jit
def scores_of(
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
    MAPPED: tl.constexpr,
    MIN_TEMPERATURE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """[BLOCK] float32: what a row's choice falls on, from column `first_token` on; -inf behind the last one.

    The columns are the tokens at `token_ids_ptr` if MAPPED, else column i is token i.
    """
    token = first_token + tl.arange(0, BLOCK)
    scores = tl.load(logits_ptr + row * row_stride + token, mask=token < num_tokens, other=float("-inf"))
    scores = scores.to(tl.float32)
    sequence = row.to(tl.int32) // rows_per_sequence
    temperature = tl.load(temperature_ptr + sequence)
    if temperature > 0:
        seed, position = tl.load(seeds_ptr + sequence), tl.load(positions_ptr + row)
        # `/` is not correctly rounded on float32, and a last bit can turn a decision.
        scores = tl.div_rn(scores, tl.maximum(temperature, MIN_TEMPERATURE))
        if MAPPED:
            scores += noise_at(seed, position, tl.load(token_ids_ptr + token, mask=token < num_tokens, other=0))
        else:
            scores += _noise(seed, position, first_token, BLOCK)
    return scores


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def best_of(scores):
    """The maximum of [N], NaN if one of them is, and its lowest index; N - 1 for NaN.

    The index is looked for once the maximum is known: to carry it along takes several times as many instructions.
    """
    N: tl.constexpr = scores.shape[0]
    best = tl.reduce(scores, 0, _larger)
    return best, tl.min(tl.where(scores == best, tl.arange(0, N), N - 1), 0)


@triton.jit(do_not_specialize=["rows_per_sequence", "turns"], do_not_specialize_on_alignment=["positions_ptr"])
def _block_kernel(
    logits_ptr,
    temperature_ptr,
    seeds_ptr,
    positions_ptr,
    best_ptr,
    token_ptr,
    row_stride,
    num_real_tokens,
    rows_per_sequence,
    turns,
    MIN_TEMPERATURE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """The best token of as many blocks of a row as there are `turns`. Each lane keeps its own best until the end."""
    wait_for_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    first_token = tl.program_id(1) * turns * BLOCK
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    turn_of_best = tl.zeros([BLOCK], tl.int32)
    for turn in range(0, turns):
        scores = scores_of(
            logits_ptr,
            temperature_ptr,
            seeds_ptr,
            positions_ptr,
            None,
            row,
            first_token + turn * BLOCK,
            row_stride,
            num_real_tokens,
            rows_per_sequence,
            False,
            MIN_TEMPERATURE,
            BLOCK,
        )
        turn_of_best = tl.where(scores > best, turn, turn_of_best)
        best = _larger(best, scores)
    largest = tl.reduce(best, 0, _larger)
    token = first_token + turn_of_best * BLOCK + tl.arange(0, BLOCK)
    out = row * tl.num_programs(1) + tl.program_id(1)
    tl.store(best_ptr + out, largest)
    tl.store(token_ptr + out, tl.min(tl.where(best == largest, token, num_real_tokens), 0))


@triton.jit
def _row_kernel(best_ptr, token_ptr, out_ptr, num_blocks, BLOCKS: tl.constexpr, PDL: tl.constexpr):
    wait_for_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, BLOCKS)
    partial = tl.load(best_ptr + row * num_blocks + block, mask=block < num_blocks, other=float("-inf"))
    best, where = best_of(partial)
    token = tl.load(token_ptr + row * num_blocks + tl.minimum(where, num_blocks - 1)).to(tl.int64)
    tl.store(out_ptr + row, tl.where(best > float("-inf"), token, -1))


def choose(
    logits: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    positions: Tensor,
    num_real_tokens: int,
    rows_per_sequence: int = 1,
) -> Tensor:
    """Return argmax(logits / temperature + gumbel(seed, position, token)) of each row, ties to the lowest id.

    Two launches: each row's blocks of the vocabulary, then each row. Blocks of greedy rows draw no noise. Of many rows
    a program takes several blocks: to start one takes time, whatever it does.

    Args:
        logits: [R, V] float32, float16 or bfloat16, rows contiguous.
        temperature: [R / rows_per_sequence] float32, at least 0; 0 is greedy.
        seeds: [R / rows_per_sequence] int64.
        positions: [R] int64, output position of the token to choose, in [0, 2^32).
        num_real_tokens: ids from here on pad the vocabulary and are never read; 1 to V.
        rows_per_sequence: rows that share a temperature and a seed; they stand behind each other.

    Returns:
        [R] int64 token ids; -1 for a row that holds NaN, or -inf alone.

    Raises:
        ValueError: the sizes don't fit each other, or the rows of logits aren't contiguous.
    """
    check_sizes(logits, temperature, seeds, positions, num_real_tokens, rows_per_sequence)
    if logits.stride(1) != 1:
        raise ValueError(f"rows of logits must be contiguous, not of stride {logits.stride(1)}")
    num_rows = len(logits)
    turns = min(_MOST_TURNS, max(1, num_rows * triton.cdiv(num_real_tokens, _BLOCK) // _PROGRAMS))
    num_blocks = triton.cdiv(num_real_tokens, turns * _BLOCK)
    best = torch.empty(num_rows, num_blocks, dtype=torch.float32, device=logits.device)
    token = torch.empty(num_rows, num_blocks, dtype=torch.int32, device=logits.device)
    out = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    _block_kernel[(num_rows, num_blocks)](
        logits,
        temperature.contiguous(),
        seeds.contiguous(),
        positions.contiguous(),
        best,
        token,
        logits.stride(0),
        num_real_tokens,
        rows_per_sequence,
        turns,
        MIN_TEMPERATURE,
        _BLOCK,
        **overlap(logits.device),
    )
    width = triton.next_power_of_2(num_blocks)
    _row_kernel[(num_rows,)](best, token, out, num_blocks, width, num_warps=1, **overlap(logits.device))
    return out
