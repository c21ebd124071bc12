"""A drafter's candidates from its states, in Triton; reference and contract in `kernels/candidates.py`.

Two launches, and no logits in memory: the best columns of each block of the vocabulary, then the best of these. Score
and column are one number, so that one maximum finds both and ties go to the lowest column.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.kernels.candidates import check_sizes
from specdec.kernels.gpu.launch import overlap, shared_memory, wait_for_inputs
from specdec.kernels.gpu.sample import noise_at
from specdec.kernels.gpu.tiles import Tile, tile_at
from specdec.kernels.sample import MIN_TEMPERATURE

_FEW = 256  # blocks; a vocabulary of fewer takes the same kernel
_NOTHING = tl.constexpr(-(2**63))
"""Less than the key of any column, one of -inf included."""


@triton.jit
def _keys_of(scores, columns):
    """int64 that order as the scores do, the lowest column first where they are equal; NaN counts as -inf."""
    scores = tl.where(scores == scores, scores, float("-inf"))
    bits = tl.where(scores == 0, 0.0, scores).to(tl.int32, bitcast=True)
    order = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # negative numbers have their order turned round
    return (order.to(tl.int64) << 32) | (0x7FFFFFFF - columns).to(tl.int64)


@triton.jit(do_not_specialize=["num_rows", "num_blocks", "num_ranks", "rows_per_sequence", "ahead", "step"])
def _block_kernel(
    states_ptr, w_ptr, bias_ptr, temperature_ptr, seeds_ptr, positions_ptr, token_ids_ptr, keys_ptr,
    num_rows, num_blocks, num_ranks, rows_per_sequence, ahead, step,
    V: tl.constexpr, K: tl.constexpr, BIAS: tl.constexpr, MAPPED: tl.constexpr, MIN_TEMPERATURE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_OUT: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row_tile, block = tile_at(num_rows, V, BLOCK_ROWS, BLOCK_OUT)
    row = row_tile * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    col = block * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    at = tl.arange(0, BLOCK_K)
    sequence = row % num_rows // rows_per_sequence
    x_at = states_ptr + row.to(tl.int64)[:, None] * K + at[None, :]
    w_at = w_ptr + (col % V).to(tl.int64)[None, :] * K + at[:, None]
    token = tl.load(token_ids_ptr + col % V) if MAPPED else col
    wait_for_inputs(PDL)
    scores = tl.zeros([BLOCK_ROWS, BLOCK_OUT], tl.float32)
    for k in range(0, K, BLOCK_K):
        inside = at < K - k
        x = tl.load(x_at + k, mask=(row < num_rows)[:, None] & inside[None, :], other=0.0)
        w = tl.load(w_at + k, mask=inside[:, None], other=0.0)
        scores = tl.dot(x, w, scores, input_precision="ieee")
    if BIAS:
        scores += tl.load(bias_ptr + col % V)[None, :].to(tl.float32)
    temperature = tl.load(temperature_ptr + sequence)[:, None]
    if tl.max(tl.max(temperature, 1), 0) > 0:
        seed, position = tl.load(seeds_ptr + sequence), tl.load(positions_ptr + sequence)
        position += ahead + step * (row % num_rows % rows_per_sequence)
        noise = noise_at(
            tl.broadcast_to(seed[:, None], (BLOCK_ROWS, BLOCK_OUT)),
            tl.broadcast_to(position[:, None], (BLOCK_ROWS, BLOCK_OUT)),
            tl.broadcast_to(token[None, :], (BLOCK_ROWS, BLOCK_OUT)),
        )
        divisor = tl.broadcast_to(tl.maximum(temperature, MIN_TEMPERATURE), (BLOCK_ROWS, BLOCK_OUT))
        scores = tl.where(temperature > 0, tl.div_rn(scores, divisor) + noise, scores)
    keys = tl.where((col < V)[None, :], _keys_of(scores, col[None, :]), _NOTHING)
    out = keys_ptr + (row.to(tl.int64) * num_blocks + block) * num_ranks
    for rank in range(num_ranks):
        best = tl.max(keys, 1)
        tl.store(out + rank, best, mask=row < num_rows)
        keys = tl.where(keys == best[:, None], _NOTHING, keys)


@triton.jit(
    do_not_specialize=["num_blocks", "num_ranks", "rows_per_sequence", "out_sequence", "out_row"],
    do_not_specialize_on_alignment=["out_ptr"],  # a level's columns of a tensor
)
def _row_kernel(
    keys_ptr, token_ids_ptr, out_ptr, num_blocks, num_ranks, rows_per_sequence, out_sequence, out_row,
    MAPPED: tl.constexpr, BLOCKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, BLOCKS)
    inside = block < num_blocks
    at = keys_ptr + (row * num_blocks + block) * num_ranks
    out = out_ptr + row // rows_per_sequence * out_sequence + row % rows_per_sequence * out_row
    wait_for_inputs(PDL)
    keys, taken = tl.load(at, mask=inside, other=_NOTHING), tl.zeros([BLOCKS], tl.int32)
    for rank in range(num_ranks):  # each block's own are in order: the best is the first of one
        best = tl.max(keys, 0)
        token = 0x7FFFFFFF - (best & 0xFFFFFFFF)
        if MAPPED:
            token = tl.load(token_ids_ptr + token)
        tl.store(out + rank, token)
        won = keys == best
        taken += won.to(tl.int32)
        after = tl.load(at + taken, mask=won & inside & (taken < num_ranks), other=_NOTHING)
        keys = tl.where(won, after, keys)


def candidates(
    states: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    temperature: Tensor,
    seeds: Tensor,
    positions: Tensor,
    out: Tensor,
    *,
    ahead: int = 0,
    step: int = 0,
    token_ids: Tensor | None = None,
    tile: Tile | None = None,
) -> None:
    """Write the k tokens with the best scores of each row of states: those that `rank` finds in its logits.

    The logits are those of the states as they are, not rounded to their dtype.

    Args:
        states: [S, P, H] contiguous, of P rows in each of S sequences; fp32, fp16 or bf16.
        weight: [V, H] contiguous, the projection, of the states' dtype.
        bias: [V] contiguous, or None.
        temperature: [S] float32, at least 0; 0 is greedy.
        seeds: [S] int64.
        positions: [S] int64, output positions to count from.
        out: [S, P, k] int64, k from 1 to V, its last dimension dense; written in place: token ids, best first. NaN
            counts as -inf; ranks behind the last finite score hold any ids.
        ahead: how many positions behind that a sequence's first row predicts.
        step: how many positions each row is behind the one before it.
        token_ids: [V] int64, the token of each column, ascending; None if column i is token i.
        tile: how to cut the product; None chooses by the numbers of rows and columns.

    Raises:
        ValueError: the sizes don't fit each other, or a tensor isn't dense or of another dtype.
    """
    check_sizes(states, weight, bias, temperature, seeds, positions, out, token_ids)
    dense = (states, weight, *(() if bias is None else (bias,)))
    if any(t.dtype != states.dtype or not t.is_contiguous() for t in dense) or out.stride(2) != 1:
        raise ValueError(f"states and projection must be contiguous and {states.dtype}, and the rows of out dense")
    (num_sequences, num_paths, size), num_ranks = states.shape, out.shape[2]
    num_rows, num_columns = num_sequences * num_paths, len(weight)
    mapped, early = token_ids is not None, overlap(states.device)
    itemsize = states.element_size()
    t = tile or _tile(num_rows, num_columns, itemsize).fitting(shared_memory(states.device), 1, itemsize)
    num_blocks = triton.cdiv(num_columns, t.out)
    keys = torch.empty(num_rows, num_blocks * num_ranks, dtype=torch.int64, device=states.device)
    _block_kernel[(triton.cdiv(num_rows, t.rows) * num_blocks,)](
        states, weight, bias, temperature, seeds, positions, token_ids, keys,
        num_rows, num_blocks, num_ranks, num_paths, ahead, step,
        num_columns, size, bias is not None, mapped, MIN_TEMPERATURE,
        t.rows, t.out, t.k, num_warps=t.warps, num_stages=t.stages, **early,
    )  # fmt: skip
    width = max(_FEW, triton.next_power_of_2(num_blocks))
    _row_kernel[(num_rows,)](
        keys, token_ids, out, num_blocks, num_ranks, num_paths, out.stride(0), out.stride(1),
        mapped, width, num_warps=max(1, width // 512), **early,
    )  # fmt: skip


def _tile(num_rows: int, num_columns: int, itemsize: int) -> Tile:
    """Few columns come from all over the device; many in wide blocks, of which few are left to merge."""
    if num_columns <= 16384:  # the fastest of many on an H200 with 6 and 20 rows
        rows, out, warps, stages = 16, 128, 4, 4
    else:
        rows = 16 if num_rows <= 16 else 64
        out, warps, stages = 128 if num_columns <= 65536 or rows == 64 else 256, 8, 3
    return Tile(rows, out, 64 if itemsize <= 2 else 32, warps, stages)
