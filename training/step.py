"""One step of training, and one evaluation, on this process's share. Knows the base, the heads and accelerate."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from accelerate import Accelerator

from specdec.drafters.draft_heads import DraftHeads
from specdec.training.batches import Batch, cut, label_counts, make_batch
from specdec.training.config import TrainConfig
from specdec.training.data import Example
from specdec.training.hidden import FrozenBase
from specdec.training.loss import HeadsLoss, Inputs, sees_following
from specdec.training.metrics import Evaluation, count_ranks, empty_ranks, summarize

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True, slots=True)
class Prepared:
    """What a step reads, on the CPU.

    Args:
        examples: the whole batch.
        share: those of this process, padded.
        counts: labels of each head in the whole batch.
    """

    examples: list[Example]
    share: Batch
    counts: list[int]


class Stepper:
    """The base, the heads in training and their optimizer, on one process or as one of several.

    Args:
        model: the base, on its device.
        heads: fp32, on the same device; changed in place.
        config: how to train.
    """

    def __init__(self, model: "PreTrainedModel", heads: DraftHeads, config: TrainConfig) -> None:
        self.base = FrozenBase(model)
        device = self.base.device.type
        precision = "bf16" if device == "cuda" else "no"
        self.accelerator = Accelerator(cpu=device == "cpu", mixed_precision=precision, device_placement=False)
        self.heads = heads.requires_grad_(True)
        self.optimizer = torch.optim.AdamW(heads.parameters(), lr=config.lr, weight_decay=config.weight_decay)
        self._config = config
        self._loss = HeadsLoss(heads, self.base.head_for(heads), config.decay)
        self._module = self.accelerator.prepare(self._loss)

    def prepare(self, examples: list[Example]) -> Prepared:
        """Pad this process's share of a batch and find its labels; any thread may."""
        num_heads = self.heads.config.num_heads
        return Prepared(examples, make_batch(self._share(examples), num_heads), label_counts(examples, num_heads))

    def step(self, prepared: Prepared, lr: float) -> tuple[float, list[float]]:
        """Take one step on a batch, of which each process has its share.

        Args:
            prepared: the batch.
            lr: the learning rate.

        Returns:
            The loss, and the mean cross-entropy of each head. If the loss isn't finite, the weights stay as they were.
        """
        inputs, counts = self._inputs(prepared.share), torch.tensor(prepared.counts, device=self.base.device)
        loss, means = self._module(inputs, counts)
        parts = self.accelerator.reduce(torch.cat([loss.detach()[None], means]), "sum")
        self.accelerator.backward(loss * self.accelerator.num_processes)  # gradients are averaged over the processes
        value, *head_losses = parts.tolist()
        if math.isfinite(value):
            if self._config.clip is not None:
                self.accelerator.clip_grad_norm_(self.heads.parameters(), self._config.clip)
            for group in self.optimizer.param_groups:
                group["lr"] = lr
            self.optimizer.step()
        self.optimizer.zero_grad()
        return value, head_losses

    def evaluate(self, examples: list[Example]) -> Evaluation:
        """Measure the heads on examples, of which each process has its share."""
        sums = empty_ranks(self.heads.config, self.base.device)
        share = sorted(self._share(examples), key=_length)
        for batch in cut(share, _length, self._config.batch_tokens):
            with self.accelerator.autocast():
                sums += count_ranks(self._loss, self._inputs(make_batch(batch, self.heads.config.num_heads)))
        return summarize(self.accelerator.reduce(sums, "sum"))

    def agreed(self, value: float) -> float:
        """Return the mean of what the processes say, the same on each."""
        if self.accelerator.num_processes == 1:
            return value
        return float(self.accelerator.reduce(torch.tensor(value, device=self.base.device), "mean"))

    def _inputs(self, batch: Batch) -> Inputs:
        batch = batch.to(self.base.device)
        hidden = self.base.hidden(batch)
        return Inputs(
            hidden[batch.rows],
            batch.labels,
            self.base.embed(batch.following) if sees_following(self.heads) else None,
            hidden[batch.sources] if self._config.soft_labels else None,
        )

    def _share(self, examples: list[Example]) -> list[Example]:
        return examples[self.accelerator.process_index :: self.accelerator.num_processes]


def _length(example: Example) -> int:
    return len(example.input_ids)
