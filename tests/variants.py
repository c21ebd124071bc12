"""Compiles what one model's steps launch at many sizes of batches and trees, and counts the kernels.

For a process of its own, as `tests/hopper.py` is.
"""

import torch
from torch import Tensor

from specdec.kernels.gpu.accept import accept
from specdec.kernels.gpu.activation import act_mul
from specdec.kernels.gpu.advance import advance
from specdec.kernels.gpu.candidates import candidates
from specdec.kernels.gpu.cell import cell
from specdec.kernels.gpu.commit import kv_commit
from specdec.kernels.gpu.keep import keep
from specdec.kernels.gpu.linear import linear
from specdec.kernels.gpu.moves import moves
from specdec.kernels.gpu.ngram import ngram_chain
from specdec.kernels.gpu.norm import add_rmsnorm, rmsnorm
from specdec.kernels.gpu.rank import rank
from specdec.kernels.gpu.roots import roots
from specdec.kernels.gpu.rope import rope_write
from specdec.kernels.gpu.rows import tree_rows
from specdec.kernels.gpu.sample import choose
from specdec.kernels.gpu.write import kv_write
from tests.hopper import VARIANTS, attend, pages_of

SIZES = (1, 2, 3, 8, 16, 17, 33, 64)
HEADS, KV_HEADS, DIM, HIDDEN, VOCAB = 4, 2, 16, 64, 2048


def ints(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
    """Zeros."""
    return torch.zeros(shape, dtype=dtype)


def floats(*shape: int) -> Tensor:
    """Zeros of the weights' dtype."""
    return torch.zeros(shape, dtype=torch.bfloat16)


def rows(n: int) -> None:
    """Launch what a layer does to n rows, whose slots are the second of four parts of one tensor."""
    x, w, qkv = floats(n, HIDDEN), floats(HIDDEN), floats(n, HEADS + 2 * KV_HEADS, DIM)
    pages, slots = pages_of(None, KV_HEADS, DIM), ints(4, n)[1]
    rmsnorm(x, w, 1e-6)
    rmsnorm(qkv[:, : HEADS + KV_HEADS], floats(DIM), 1e-6)
    add_rmsnorm(x, x, w, 1e-6)
    act_mul(floats(n, 2 * HIDDEN), "silu")
    linear(x, floats(HIDDEN, HIDDEN))
    rope_write(qkv, floats(n, DIM), floats(n, DIM), *pages, slots, HEADS)
    kv_write(qkv[:, :KV_HEADS], qkv[:, KV_HEADS : 2 * KV_HEADS], *pages, slots)


def trees(batch: int, n: int) -> None:
    """Launch what a captured step does to the trees of a batch, of n nodes each, besides drafts and the model."""
    history, lengths = ints(batch, 256, dtype=torch.int32), ints(batch)
    counts, table = ints(batch, dtype=torch.int32), ints(batch, 16, dtype=torch.int32)
    tokens, parents, _, _ = ngram_chain(history, lengths, n, 3, 2)
    for shared in (parents, ints(n).expand(batch, n)):
        laid = tree_rows(shared, counts, counts, lengths, lengths, table, 16)
    temperature, at, out = torch.zeros(batch), laid.outputs.view(-1), ints(batch, n + 3)
    choices = choose(floats(batch * n, VOCAB), temperature, lengths, at, VOCAB, n).view(batch, n)
    path, accepted = accept(tokens, parents, counts, choices, out)
    kv_commit(floats(1, 2, 64, KV_HEADS, DIM), *moves(path, accepted, lengths, table, 16))
    keep(floats(batch, n, HIDDEN), path, accepted, floats(batch, HIDDEN), ints(batch, dtype=torch.bool))
    advance(history, lengths, out[:, :n], accepted)


def drafts(batch: int, paths: int, ranks: int) -> None:
    """Launch what a level of heads does: so many paths, of so many candidates, which are part of a wider tensor."""
    lengths, temperature = ints(batch), torch.zeros(batch)
    begun = ints(batch, 64, dtype=torch.int32), lengths, lengths, ints(batch, dtype=torch.bool)
    found, positions, _ = roots(*begun, 1 + paths * ranks, 2 + paths * ranks)
    weights = floats(HIDDEN, HIDDEN), floats(2 * HIDDEN, 2 * HIDDEN), floats(2 * HIDDEN)
    path = ints(paths)
    states = cell(floats(batch, 1, HIDDEN), path, found, path, *weights, floats(HIDDEN, 2 * HIDDEN), floats(HIDDEN))
    for first in (1, 2):
        out = found[:, first : first + paths * ranks].view(batch, paths, ranks)
        candidates(states, floats(VOCAB, HIDDEN), None, temperature, lengths, positions, out)
    rank(floats(batch * paths, VOCAB), temperature, lengths, ints(2, batch * paths)[1], ranks, paths)


def count() -> dict[str, int]:
    """Launch all of these at many sizes; by file and name, how often each kernel was compiled."""
    for size in SIZES:
        rows(size)
        trees(1, size)
        trees(size, 3)
        drafts(size, 1, 8)
        drafts(1, size, 1)
        drafts(2, 3, min(size, 16))
    for size in (129, 512):
        qkv, angles = floats(size, HEADS + 2 * KV_HEADS, DIM), floats(size, DIM)
        rope_write(qkv, angles, angles, *pages_of(None, KV_HEADS, DIM), ints(4, size)[1], HEADS)
    for size in (3, 17, 64, 65, 129):
        kv_commit(floats(1, 2, 64, KV_HEADS, DIM), *ints(2, size))
    for nodes in (1, 2, 3, 4):  # of which all grouped heads fit one tile
        attend(None, nodes, chains=True)
        attend(None, nodes, chains=False)
    return {name: len(compiled) for name, compiled in VARIANTS.items()}
