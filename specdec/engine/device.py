"""One decode step on the device, from draft to next root, without the host: what a CUDA graph captures.

Everything that changes from step to step is read from `DeviceState` when the step runs; the shapes are a `Bucket`'s.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from specdec.cache.pages import KVPages
from specdec.drafters.protocol import DraftsOnDevice
from specdec.engine.recorder import Recorder
from specdec.engine.state import DeviceState
from specdec.kernels.cuts import cut
from specdec.kernels.gpu.accept import accept
from specdec.kernels.gpu.advance import advance
from specdec.kernels.gpu.keep import keep
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
        self._chains = drafter.chains_only or bucket.num_nodes <= 2
        shape = (bucket.num_seqs, bucket.num_nodes + 3)
        self.out = torch.empty(shape, dtype=torch.int64, device=model.device)
        """[B, n + 3]: the emitted tokens, padded with -1; whether the path ended at a node without children; how many
        tokens they are; how many nodes the tree had."""
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
            bucket.max_context,
            self._chains,
        )
        """What doesn't change from step to step; each step puts in its own lengths, positions and ancestors."""

    @torch.inference_mode()
    def __call__(self) -> None:
        """Draft, run the target, accept, commit, and put down what was emitted."""
        b, n = self.bucket.num_seqs, self.bucket.num_nodes
        s = self._state
        lengths, table = s.lengths[:b], s.block_table[:b]
        tokens, parents, drafted = self._drafter.draft_on_device(s.query(b), n)
        rows = tree_rows(parents, drafted, s.max_nodes[:b], lengths, s.prompt_lens[:b], table, self._pages.block_size)
        work = replace(
            self._work,
            context_lens=rows.contexts,
            positions=rows.positions.view(-1),
            ancestors=rows.ancestors.view(-1),
        )
        hidden = self._model.forward(Batch(tokens.view(-1), rows.slots.view(-1), work), self._pages)
        at = rows.outputs.view(-1)
        logits, real = self._model.logits(hidden), self._num_real_tokens
        if self.bucket.cuts:
            logits = cut(logits, s.temperature[:b], s.top_k[:b], s.top_p[:b], s.min_p[:b], real, rows_per_sequence=n)
        choices = choose(logits, s.temperature[:b], s.seeds[:b], at, real, rows_per_sequence=n)
        path, num_accepted = accept(tokens, parents, rows.num_nodes, choices.view(b, n), self.out)
        if not self._chains:
            self._pages.commit_slots(*moves(path, num_accepted, lengths, table, self._pages.block_size))
        if s.hidden.shape[1]:
            keep(hidden.view(b, n, -1), path, num_accepted, s.hidden[:b], s.has_hidden[:b])
        advance(s.history[:b], lengths, self.out[:, :n], num_accepted)


@dataclass(frozen=True, slots=True)
class Captured:
    """A step that is ready to run again and again.

    Args:
        step: what was captured.
        run: replays its graph; the step itself where there is no GPU.
    """

    step: DeviceStep
    run: Callable[[], None]

    def replay(self) -> None:
        """Run the step once."""
        self.run()


def capture(step: DeviceStep, lengths: Tensor, graphs: Recorder) -> Captured:
    """Run a step once without any sequence, so that all kernels are compiled, and capture it.

    Args:
        step: captured on a GPU; elsewhere it isn't even run.
        lengths: [S] int64, those of its state; left as they are.
        graphs: what captures it.
    """
    if lengths.device.type != "cuda":
        return Captured(step, graphs.record(step))
    kept = lengths.clone()
    lengths.zero_()
    try:
        step()
        return Captured(step, graphs.record(step))
    finally:
        lengths.copy_(kept)
