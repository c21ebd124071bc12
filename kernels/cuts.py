"""The cuts of rows that sample, by top-k, top-p and min-p: what the choice may still fall on.

`cut` is one fixed sequence of torch operations, whatever the rows ask for, so that a CUDA graph can hold it. The three
steps that it is made of serve `verifier.warpers` too, which sorts less.
"""

import torch
from torch import Tensor

from specdec.kernels.sample import MIN_TEMPERATURE

_ROWS = 64
"""Rows cut at a time: of 1,024 rows of 128,256 ids, what is made on the way would take several gigabytes."""


def cut(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    num_real_tokens: int,
    rows_per_sequence: int = 1,
) -> Tensor:
    """Return logits whose dropped tokens are -inf, for `kernels.sample.choose` to divide and choose from.

    What is dropped is what `verifier.processors.process_logits` drops for requests that set nothing but these four:
    by logits / temperature, first top-k, then top-p on what is left, then min-p on what is left. Nothing waits for
    the device, and no shape depends on the values.

    Args:
        logits: [R, V] float32, float16 or bfloat16; never changed.
        temperature: [R / rows_per_sequence] float32, at least 0; 0 is greedy: such rows are not cut.
        top_k: [R / rows_per_sequence] int64; 0, or V and more, keeps all.
        top_p: [R / rows_per_sequence] float64, or float32 if rounding p is no matter; 1 keeps all.
        min_p: [R / rows_per_sequence] float64 or float32; 0 keeps all.
        num_real_tokens: ids from here on pad the vocabulary and are dropped in every row; 1 to V.
        rows_per_sequence: rows that share their parameters; they stand behind each other.

    Returns:
        [R, V] float32, not divided by the temperature. A row that held a finite logit still holds one; NaN stays.

    Raises:
        ValueError: the sizes don't fit each other.
    """
    fields = (temperature, top_k, top_p, min_p)
    _check_sizes(logits, fields, num_real_tokens, rows_per_sequence)
    columns = [field.repeat_interleave(rows_per_sequence, output_size=len(logits)).unsqueeze(1) for field in fields]
    chunks = [slice(first, first + _ROWS) for first in range(0, len(logits), _ROWS)]
    return torch.cat([_cut(logits[rows], num_real_tokens, *(column[rows] for column in columns)) for rows in chunks])


def keep_top_k(scores: Tensor, best: Tensor, k: Tensor) -> Tensor:
    """Drop what scores below the k-th best; tokens tied with it stay.

    Args:
        scores: [R, V] floating point.
        best: [R, at least k] the best scores of each row, descending.
        k: [R, 1] int64, from 1 to the width of `best`.

    Returns:
        [R, V], dropped tokens -inf.
    """
    return scores.masked_fill(scores < best.gather(-1, k - 1), -torch.inf)


def keep_top_p(scores: Tensor, best: Tensor, reached: Tensor, p: Tensor) -> Tensor:
    """Keep the fewest best tokens whose probability reaches p; of tokens tied at the cut, the lowest ids stay.

    Transformers' unstable sort keeps as many of the tied ones, but any of them.

    Args:
        scores: [R, V] floating point.
        best: [R, W] the best scores of each row, descending; as many as are needed to reach p, or all.
        reached: [R, W] float64, the probability of each of them and all before it.
        p: [R, 1] float64; inf keeps all where W is V.

    Returns:
        [R, V], dropped tokens -inf.
    """
    num_kept = (reached[:, :-1] < p).sum(-1, keepdim=True) + 1  # the token that reaches p is kept
    last = best.gather(-1, num_kept - 1)
    tied = scores == last
    num_tied_kept = num_kept - (scores > last).sum(-1, keepdim=True)
    surplus = tied & (tied.cumsum(-1) > num_tied_kept)
    return scores.masked_fill((scores < last) | surplus, -torch.inf)


def keep_min_p(scores: Tensor, min_p: Tensor) -> Tensor:
    """Drop tokens less likely than min_p × the likeliest one.

    Args:
        scores: [R, V] float32 or float64.
        min_p: [R, 1] floating point, rounded to the scores' dtype; 0 keeps all.

    Returns:
        [R, V], dropped tokens -inf.
    """
    probs = scores.softmax(-1)
    return scores.masked_fill(probs < min_p.to(probs.dtype) * probs.amax(-1, keepdim=True), -torch.inf)


def _cut(
    logits: Tensor, num_real_tokens: int, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor
) -> Tensor:
    """`cut` of r rows [r, V] with parameters [r, 1] each."""
    vocab_size = logits.shape[1]
    logits = logits.float()
    if num_real_tokens < vocab_size:
        logits = logits.masked_fill(torch.arange(vocab_size, device=logits.device) >= num_real_tokens, -torch.inf)
    scores = logits / temperature.clamp(min=MIN_TEMPERATURE)
    best, ids = scores.sort(descending=True)
    k = top_k.where((top_k > 0) & (top_k < vocab_size), vocab_size)
    scores, best = keep_top_k(scores, best, k), keep_top_k(best, best, k)
    reached = scores.softmax(-1, dtype=torch.float64).gather(-1, ids).cumsum(-1)
    scores = keep_top_p(scores, best, reached, top_p.double().where(top_p < 1, torch.inf))
    dropped = keep_min_p(scores, min_p) == -torch.inf  # NaN is not: the choice must see it
    return logits.masked_fill(dropped & (temperature > 0), -torch.inf)


def _check_sizes(logits: Tensor, fields: tuple[Tensor, ...], num_real_tokens: int, rows_per_sequence: int) -> None:
    num_rows, vocab_size = logits.shape
    if any(len(field) * rows_per_sequence != num_rows for field in fields):
        raise ValueError(
            f"{num_rows} rows of logits don't fit temperature, top_k, top_p and min_p of "
            f"{', '.join(str(len(field)) for field in fields)} sequences of {rows_per_sequence} rows each"
        )
    if not 1 <= num_real_tokens <= vocab_size:
        raise ValueError(f"num_real_tokens must be from 1 to {vocab_size}, not {num_real_tokens}")
