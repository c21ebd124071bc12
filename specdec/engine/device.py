"""One decode step on the device, from draft to next root, without the host: what a CUDA graph captures.

Everything that changes from step to step is read from `DeviceState` when the step runs; the shapes are a `Bucket`'s.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from specdec.cache.pages import KVPages
from specdec.drafters.protocol import DraftsOnDevice
from specdec.engine.request import Request
from specdec.kernels.cuts import cut
from specdec.kernels.gpu.accept import accept
from specdec.kernels.gpu.advance import advance
from specdec.kernels.gpu.moves import moves
from specdec.kernels.gpu.rows import tree_rows
from specdec.kernels.gpu.sample import choose
from specdec.kernels.work import uniform_work
from specdec.models.batch import Batch
from specdec.models.decoder import Decoder


@dataclass(frozen=True, slots=True)
class Bucket:
    """Shapes of a captured step.

    Args:
        num_seqs: B sequences; some may be inactive.
        num_nodes: n nodes of each tree, root included; some may be padding.
        max_context: no context is longer.
        cuts: whether a sequence may sample with top_k, top_p or min_p; if not, the state's are never read.
    """

    num_seqs: int
    num_nodes: int
    max_context: int
    cuts: bool = False


@dataclass(frozen=True, slots=True)
class DeviceState:
    """What the device knows of S sequences. A sequence of length 0 is inactive.

    Args:
        history: [S, L] int32, prompt and output.
        lengths: [S] int64, tokens known, the root included.
        prompt_lens: [S] int64.
        seeds: [S] int64.
        temperature: [S] float32.
        top_k: [S] int64.
        top_p: [S] float64, in which probabilities add up.
        min_p: [S] float64.
        block_table: [S, M] int32.
    """

    history: Tensor
    lengths: Tensor
    prompt_lens: Tensor
    seeds: Tensor
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    block_table: Tensor

    @classmethod
    def make(cls, num_seqs: int, max_len: int, num_blocks: int, device: torch.device) -> "DeviceState":
        """Make the state of inactive sequences of up to `max_len` tokens in up to `num_blocks` blocks."""

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        return cls(
            history=zeros(num_seqs, max_len, dtype=torch.int32),
            lengths=zeros(num_seqs),
            prompt_lens=zeros(num_seqs),
            seeds=zeros(num_seqs),
            temperature=zeros(num_seqs, dtype=torch.float32),
            top_k=zeros(num_seqs),
            top_p=zeros(num_seqs, dtype=torch.float64),
            min_p=zeros(num_seqs, dtype=torch.float64),
            block_table=zeros(num_seqs, num_blocks, dtype=torch.int32),
        )

    def load(self, requests: Sequence[Request]) -> None:
        """Put requests into the first places, and nothing into the others. Block tables are loaded apart."""
        count, width = len(requests), max(len(r.tokens) for r in requests)
        tokens = torch.tensor([r.tokens + [0] * (width - len(r.tokens)) for r in requests], dtype=torch.int32)
        self.history[:count, :width] = tokens.to(self.history.device)
        self.lengths.zero_()
        columns = [[len(r.tokens), r.prompt_len, _seed(r), min(r.params.top_k, _INT64_MAX)] for r in requests]
        _fill((self.lengths, self.prompt_lens, self.seeds, self.top_k), torch.tensor(columns))
        rates = [[r.params.temperature, r.params.top_p, r.params.min_p] for r in requests]
        _fill((self.temperature, self.top_p, self.min_p), torch.tensor(rates, dtype=torch.float64))


_INT64_MAX = torch.iinfo(torch.int64).max


def _fill(fields: Sequence[Tensor], values: Tensor) -> None:
    """Put each column of values [count, fields] into the first places of its field, in one copy to the device."""
    for field, column in zip(fields, values.to(fields[0].device).T, strict=True):
        field[: len(column)] = column


def _seed(request: Request) -> int:
    assert request.params.seed is not None, "the engine gives each request a seed"
    return request.params.seed


class DeviceStep:
    """The step of one bucket. Calling it runs or captures it; `out` holds its result.

    Args:
        bucket: the shapes.
        model: the target, with Triton kernels.
        pages: its keys and values.
        state: of at least `bucket.num_seqs` sequences; moved on by the step.
        drafter: drafts on the device.
        num_real_tokens: ids from here on pad the vocabulary and are never emitted.
    """

    def __init__(
        self,
        bucket: Bucket,
        model: Decoder,
        pages: KVPages,
        state: DeviceState,
        drafter: DraftsOnDevice,
        num_real_tokens: int,
    ) -> None:
        self.bucket = bucket
        self._model, self._pages, self._state, self._drafter = model, pages, state, drafter
        self._num_real_tokens = num_real_tokens
        shape = (bucket.num_seqs, bucket.num_nodes + 2)
        self.out = torch.empty(shape, dtype=torch.int64, device=model.device)
        """[B, n + 2]: the emitted tokens, padded with -1; how many they are; how many nodes the tree had."""
        empty = torch.zeros(bucket.num_seqs * bucket.num_nodes, dtype=torch.int64, device=model.device)
        w = model.weights
        self._work = uniform_work(
            bucket.num_seqs,
            bucket.num_nodes,
            state.block_table[: bucket.num_seqs],
            empty[: bucket.num_seqs].to(torch.int32),
            empty,
            empty,
            w.num_heads // w.num_kv_heads,
            w.num_kv_heads,
            w.head_dim,
            bucket.max_context,
            drafter.chains_only,
        )
        """What doesn't change from step to step; each step puts in its own lengths, positions and ancestors."""

    @torch.inference_mode()
    def __call__(self) -> None:
        """Draft, run the target, accept, commit, and put down what was emitted."""
        b, n = self.bucket.num_seqs, self.bucket.num_nodes
        s = self._state
        lengths, table = s.lengths[:b], s.block_table[:b]
        tokens, parents, num_nodes = self._drafter.draft_on_device(s.history[:b], lengths, n)
        positions, slots, ancestors = tree_rows(parents, num_nodes, lengths, table, self._pages.block_size)
        work = replace(
            self._work,
            context_lens=(lengths - 1).to(torch.int32),
            positions=positions.view(-1),
            ancestors=ancestors.view(-1),
        )
        hidden = self._model.forward(Batch(tokens.view(-1), slots.view(-1), work), self._pages)
        at = (positions + 1 - s.prompt_lens[:b, None]).view(-1)  # output position of the token chosen at each node
        logits, real = self._model.logits(hidden), self._num_real_tokens
        if self.bucket.cuts:
            logits = cut(logits, s.temperature[:b], s.top_k[:b], s.top_p[:b], s.min_p[:b], real, rows_per_sequence=n)
        choices = choose(logits, s.temperature[:b], s.seeds[:b], at, real, rows_per_sequence=n)
        path, emitted, num_accepted = accept(tokens, parents, num_nodes, choices.view(b, n))
        if not self._drafter.chains_only:
            self._pages.commit_slots(*moves(path, num_accepted, lengths, table, self._pages.block_size))
        advance(s.history[:b], lengths, emitted, num_accepted)
        torch.cat([emitted, num_accepted[:, None].long(), num_nodes[:, None].long()], 1, out=self.out)


@dataclass(frozen=True, slots=True)
class Captured:
    """A step that is ready to run again and again.

    Args:
        step: what was captured.
        graph: None where there is no GPU; the step runs as it is then.
        num_bytes: of the device's memory, taken when it was captured.
    """

    step: DeviceStep
    graph: torch.cuda.CUDAGraph | None = None
    num_bytes: int = 0

    def replay(self) -> None:
        """Run the step once."""
        if self.graph is None:
            self.step()
        else:
            self.graph.replay()


def capture(step: DeviceStep, lengths: Tensor, beside: Captured | None = None) -> Captured:
    """Run a step once without any sequence, so that all kernels are compiled, and capture it.

    Args:
        step: captured on a GPU; elsewhere it isn't even run.
        lengths: [S] int64, those of its state; left as they are.
        beside: a captured step that never runs at the same time: their intermediate tensors share memory.
    """
    if lengths.device.type != "cuda":
        return Captured(step)
    kept = lengths.clone()
    lengths.zero_()
    step()
    torch.cuda.empty_cache()  # a capture begins with it: what it frees is not the graph's
    before = torch.cuda.memory_reserved(lengths.device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=beside.graph.pool() if beside and beside.graph else None):
        step()
    lengths.copy_(kept)
    return Captured(step, graph, torch.cuda.memory_reserved(lengths.device) - before)
