"""Forwards as CUDA graphs, for steps that the host plans: prompts, and what captured steps have no kernels for.

From Python a forward's launches take longer than a short prompt's rows do on the device. So a batch is padded to one of
few shapes, and a shape is captured when it comes for the second time.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from specdec.cache.pages import KVPages
from specdec.engine.recorder import Recorder
from specdec.kernels.attention import AttentionMetadata
from specdec.models.batch import Batch
from specdec.models.decoder import Decoder
from specdec.models.padded import PaddedBatch, PaddedShape, bound_of
from specdec.verifier.tree import MAX_NODES

ROWS = (32, 64, 128, 256, 384, 512, 768, 1024)
"""Rows that batches are padded to. Larger ones take longer on the device than their launches do."""
SEQUENCES = (1, 4, 16, 64, 256, 1024)
NODES = (1, 8, MAX_NODES)


class ForwardGraphs:
    """Runs a model over batches: padded and captured where that pays.

    Args:
        model: with Triton kernels.
        pages: its keys and values.
        max_model_len: most tokens of a sequence.
        recorder: captures the forwards.
    """

    def __init__(self, model: Decoder, pages: KVPages, max_model_len: int, recorder: Recorder) -> None:
        self._model, self._pages, self._max_model_len, self._recorder = model, pages, max_model_len, recorder
        self._came: set[PaddedShape] = set()
        self._ready: dict[PaddedShape, _PaddedForward] = {}

    def __call__(self, batch: Batch) -> Tensor:
        """Run the rows of a batch: [N, H], after the last norm. The next call may overwrite it."""
        shape = self._shape(batch)
        if shape is None or shape not in self._came:
            if shape is not None:
                self._came.add(shape)
            return self._model.forward(batch, self._pages)
        if shape not in self._ready:
            self._ready[shape] = _PaddedForward(self._model, self._pages, shape, self._max_model_len)
        return self._ready[shape](batch, self._recorder)

    def _shape(self, batch: Batch) -> PaddedShape | None:
        """The least shape that holds the batch; None if none does."""
        meta = batch.attention
        assert isinstance(meta, AttentionMetadata)
        cu = meta.cu_seqlens_q
        trees = (end - start - n for start, end, n in zip(cu, cu[1:], meta.num_causal, strict=False))
        rows, seqs, nodes = _least(ROWS, cu[-1] + 1), _least(SEQUENCES, len(cu) - 1), _least(NODES, max(trees))
        if rows is None or seqs is None or nodes is None:
            return None
        return PaddedShape(rows, seqs, nodes, bound_of(max(meta.context_lens), self._max_model_len))


class _PaddedForward:
    """The forward of one shape."""

    def __init__(self, model: Decoder, pages: KVPages, shape: PaddedShape, max_model_len: int) -> None:
        w = model.weights
        max_blocks = -(-max_model_len // pages.block_size) + 1
        group = w.num_heads // w.num_kv_heads
        self._model, self._pages = model, pages
        self._padded = PaddedBatch(shape, max_blocks, group, w.head_dim, model.device)
        self._hidden: Tensor
        self._replay: Callable[[], None] | None = None

    def __call__(self, batch: Batch, recorder: Recorder) -> Tensor:
        self._padded.fill(batch)
        if self._replay is None:
            self._run()
            hidden = self._hidden
            self._replay = recorder.record(self._run)
        else:
            self._replay()
            hidden = self._hidden
        return hidden[: len(batch.input_ids)]

    @torch.inference_mode()
    def _run(self) -> None:
        self._hidden = self._model.forward(self._padded.batch, self._pages)


def _least(sizes: tuple[int, ...], count: int) -> int | None:
    """The first size that is large enough."""
    return next((size for size in sizes if size >= count), None)
