"""One decode step on the device, from draft to next root, without the host: what a CUDA graph captures.

Everything that changes from step to step is read from `DeviceState` when the step runs; the shapes are a `Bucket`'s.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.cache.pages import KVPages
from specdec.drafters.protocol import DraftsOnDevice
from specdec.engine.request import Request
from specdec.kernels.gpu.accept import accept
from specdec.kernels.gpu.advance import advance
from specdec.kernels.gpu.moves import moves
from specdec.kernels.gpu.rows import tree_rows
from specdec.kernels.gpu.sample import choose
from specdec.kernels.work import AttentionWork, tile_block
from specdec.models.batch import Batch
from specdec.models.decoder import Decoder


@dataclass(frozen=True, slots=True)
class Bucket:
    """Shapes of a captured step.

    Args:
        num_seqs: B sequences; some may be inactive.
        num_nodes: n nodes of each tree, root included; some may be padding.
        max_context: no context is longer.
    """

    num_seqs: int
    num_nodes: int
    max_context: int


@dataclass(frozen=True, slots=True)
class DeviceState:
    """What the device knows of S sequences. A sequence of length 0 is inactive.

    Args:
        history: [S, L] int32, prompt and output.
        lengths: [S] int64, tokens known, the root included.
        prompt_lens: [S] int64.
        seeds: [S] int64.
        temperature: [S] float32.
        block_table: [S, M] int32.
    """

    history: Tensor
    lengths: Tensor
    prompt_lens: Tensor
    seeds: Tensor
    temperature: Tensor
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
            block_table=zeros(num_seqs, num_blocks, dtype=torch.int32),
        )

    def load(self, requests: Sequence[Request]) -> None:
        """Put requests into the first places, and nothing into the others. Block tables are loaded apart."""
        count, width = len(requests), max(len(r.tokens) for r in requests)
        tokens = torch.tensor([r.tokens + [0] * (width - len(r.tokens)) for r in requests], dtype=torch.int32)
        self.history[:count, :width] = tokens.to(self.history.device)
        columns = [[len(r.tokens), r.prompt_len, _seed(r)] for r in requests]
        facts = torch.tensor(columns).to(self.lengths.device)  # [count, 3]
        self.lengths.zero_()
        for field, column in zip((self.lengths, self.prompt_lens, self.seeds), facts.T, strict=True):
            field[:count] = column
        temperature = torch.tensor([r.params.temperature for r in requests], dtype=torch.float32)
        self.temperature[:count] = temperature.to(self.temperature.device)


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
        group = model.weights.num_heads // model.weights.num_kv_heads
        self._tree_block = tile_block(bucket.num_nodes, group, model.max_attention_block)
        self._tiles, self._row_sequences, self._tree_rows = _layout(bucket, self._tree_block // group, model.device)

    @torch.inference_mode()
    def __call__(self) -> None:
        """Draft, run the target, accept, commit, and put down what was emitted."""
        b, n = self.bucket.num_seqs, self.bucket.num_nodes
        s = self._state
        lengths, table = s.lengths[:b], s.block_table[:b]
        tokens, parents, num_nodes = self._drafter.draft_on_device(s.history[:b], lengths, n)
        positions, slots, ancestors = tree_rows(parents, num_nodes, lengths, table, self._pages.block_size)
        work = AttentionWork(
            block_table=table,
            context_lens=(lengths - 1).to(torch.int32),
            positions=positions.view(-1),
            ancestors=ancestors.view(-1),
            row_sequences=self._row_sequences,
            tree_rows=self._tree_rows,
            tree_tiles=self._tiles,
            tree_block=self._tree_block,
            chunk_tiles=self._tiles[:0],
            chunk_block=self._tree_block,
            max_context=self.bucket.max_context,
        )
        hidden = self._model.forward(Batch(tokens.view(-1), slots.view(-1), work), self._pages)
        at = (positions + 1 - s.prompt_lens[:b, None]).view(-1)  # output position of the token chosen at each node
        choices = choose(
            self._model.logits(hidden), s.temperature[:b], s.seeds[:b], at, self._num_real_tokens, rows_per_sequence=n
        )
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
    before = torch.cuda.memory_reserved(lengths.device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=beside.graph.pool() if beside and beside.graph else None):
        step()
    lengths.copy_(kept)
    return Captured(step, graph, torch.cuda.memory_reserved(lengths.device) - before)


def _layout(bucket: Bucket, rows_per_tile: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Tiles [tiles, 3], sequence of each row [B n], and the rows [B n]; all int32."""
    b, n = bucket.num_seqs, bucket.num_nodes
    tiles = [(i, i * n + j, min(rows_per_tile, n - j)) for i in range(b) for j in range(0, n, rows_per_tile)]
    rows = torch.arange(b * n, dtype=torch.int32, device=device)
    return torch.tensor(tiles, dtype=torch.int32, device=device), rows // n, rows
