"""Forwards as CUDA graphs, for steps that the host plans: prompts, and what captured steps have no kernels for.

From Python a forward's launches take longer than a short prompt's rows do on the device. So a batch is padded to one of
few shapes, and a shape is captured when it comes for the second time.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from specdec.cache.pages import KVPages
from specdec.engine.recorder import Recorder
from specdec.kernels.attention import AttentionMetadata
from specdec.models.batch import Batch
from specdec.models.decoder import Decoder
from specdec.models.padded import PaddedBatch, PaddedShape, bound_of
from specdec.verifier.tree import MAX_NODES

ROWS = (32, 64, 128, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096)
"""Rows that batches are padded to."""
WORK = 4e12
"""Products of a weight and a value up to which a forward is captured: about those of the time that the launches of 30
layers take from Python. A larger one takes longer on the device, padding too, and gains nothing."""
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
        matrices = [m for layer in model.weights.layers for m in (layer.qkv, layer.o, layer.gate_up, layer.down)]
        num_weights = sum(matrix.numel() for matrix in matrices if isinstance(matrix, Tensor))
        self._rows = [rows for rows in ROWS if rows * num_weights <= WORK]
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
        rows, seqs, nodes = _least(self._rows, cu[-1] + 1), _least(SEQUENCES, len(cu) - 1), _least(NODES, max(trees))
        if rows is None or seqs is None or nodes is None:
            return None
        return PaddedShape(rows, seqs, nodes, bound_of(max(meta.context_lens), self._max_model_len))


class _PaddedForward:
    """The forward of one shape."""

    def __init__(self, model: Decoder, pages: KVPages, shape: PaddedShape, max_model_len: int) -> None:
        w = model.weights
        max_blocks = -(-(max_model_len + MAX_NODES) // pages.block_size)
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


def _least(sizes: Sequence[int], count: int) -> int | None:
    """The first size that is large enough."""
    return next((size for size in sizes if size >= count), None)
