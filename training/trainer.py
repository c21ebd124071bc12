"""The training loop: the base gives hidden states, the heads learn from them, everything is written whole.

Knows the base, the heads and lists of examples; not where those come from.
"""

import math
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file

from specdec.drafters.draft_heads import DraftHeads
from specdec.drafters.heads import save_heads
from specdec.errors import ConfigError, TrainingError
from specdec.hub.cache import replace_file
from specdec.training.batches import BatchOrder, ahead, fingerprint, make_batch
from specdec.training.checkpoint import RunIdentity, has_checkpoint, load_checkpoint, save_checkpoint, writing
from specdec.training.config import TrainConfig
from specdec.training.data import Example
from specdec.training.memory import peak_bytes, reset_peak
from specdec.training.metrics import Evaluation, MetricsLog, can_plot, save_accuracies, save_plot
from specdec.training.step import Prepared, Stepper

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Report = Callable[[Mapping[str, Any]], None]


@dataclass(frozen=True, slots=True)
class TrainResult:
    """How a run ended.

    Args:
        steps: how many were done in all.
        loss: of the last step; NaN if this call had none to do.
        evaluation: on the held-out examples; None if there are none.
        num_skipped: batches without a label.
        plotted: whether there is a plot; it needs matplotlib.
        peak_bytes: most memory held, as `specdec.training.memory.peak_bytes` counts it, on this process.
    """

    steps: int
    loss: float
    evaluation: Evaluation | None
    num_skipped: int
    plotted: bool
    peak_bytes: int


def prepare_out(out: Path, resume: bool) -> None:
    """Make the run's folder and see that it can be written, before anything expensive is done.

    Raises:
        ConfigError: a run is there already and isn't to be resumed.
        TrainingError: the folder can't be written.
    """
    with writing(out):
        if not resume and (has_checkpoint(out) or (out / "heads.safetensors").exists()):
            raise ConfigError(f"{out}: holds trained heads already; pass --resume to go on, or give another folder")
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out) as file:
            file.write(b"x")


def train(
    model: "PreTrainedModel",
    heads: DraftHeads,
    examples: list[Example],
    held_out: list[Example],
    config: TrainConfig,
    out: Path,
    *,
    resume: bool = False,
    dtype: torch.dtype = torch.float32,
    report: Report = lambda line: None,
    spent: Callable[[], float] | None = None,
) -> TrainResult:
    """Train heads and write them to a folder; the base stays as it is, bit for bit.

    Args:
        model: the base, in any precision, on its device.
        heads: fp32, on the same device; trained in place.
        examples: to train on.
        held_out: to measure on; may be empty.
        config: how to train.
        out: becomes a heads folder, with `metrics.jsonl`, `accuracies.json` and checkpoints beside.
        resume: go on from the last checkpoint in `out`; from the start if there is none.
        dtype: of the heads written at the end.
        report: is given every line of the metrics, on the main process.
        spent: says what share of the time is spent, from 0 to 1; at 1 the run ends, having decayed to nothing. A run
            that is resumed has spent its share already. None: the steps alone count.

    Raises:
        ConfigError: `out` holds another run, or one that isn't to be resumed.
        CheckpointError: a checkpoint is damaged.
        InvalidRequest: the examples can't be trained on.
        TrainingError: the loss isn't finite (the batch is saved), the base changed, or `out` can't be written.
    """
    prepare_out(out, resume)
    reset_peak(model.device)
    run = _Run(Stepper(model, heads, config), examples, held_out, config, out)
    run.stepper.evaluate(examples[:1])  # some quantizers repack their weights in the first forward
    before = run.stepper.base.checksum()
    loss = run.train(resume, report, spent)
    if run.stepper.base.checksum() != before:
        raise TrainingError("the base changed while the heads were trained; don't use either, and report this")
    evaluation = run.finish(dtype)
    return TrainResult(run.steps, loss, evaluation, run.num_skipped, can_plot(), peak_bytes(model.device))


class _Run:
    """One run: what `train` was given, how far it is, and the last evaluation."""

    def __init__(
        self, stepper: Stepper, examples: list[Example], held_out: list[Example], config: TrainConfig, out: Path
    ) -> None:
        self.stepper = stepper
        self.steps, self.num_skipped = 0, 0
        self._order = BatchOrder(examples, config)
        self._held_out, self._config, self._out = held_out, config, out
        self._evaluation: Evaluation | None = None  # of the weights as they are
        self._identity = RunIdentity(
            asdict(config),
            asdict(replace(stepper.heads.config, tree=None, chances=None)),
            fingerprint(examples, held_out),
            stepper.accelerator.num_processes,
        )

    def train(self, resume: bool, report: Report, clock: Callable[[], float] | None) -> float:
        """Do the steps that are left; return the last one's loss."""
        stepper, config, loss, before = self.stepper, self._config, math.nan, 0.0
        if resume:
            self.steps, before = load_checkpoint(self._out, stepper.heads, stepper.optimizer, self._identity)
        stepper.accelerator.wait_for_everyone()  # before the main process writes where others read
        is_main = stepper.accelerator.is_main_process
        with writing(self._out):
            log = MetricsLog(self._out, self.steps) if is_main else None
        spent = before
        batches = self._batches() if spent < 1 else iter(())
        for prepared, num_skipped in ahead(batches, self._prepare):
            start, lr = time.perf_counter(), config.lr_at(self.steps, spent)
            loss, head_losses = stepper.step(prepared, lr)
            self.steps, self.num_skipped = self.steps + 1, num_skipped
            num_tokens = sum(len(example.input_ids) for example in prepared.examples)
            line = {"step": self.steps, "loss": loss, "head_losses": head_losses, "lr": lr}
            line |= {"tokens_per_s": num_tokens / (time.perf_counter() - start), "skipped": num_skipped}
            line["peak_bytes"] = peak_bytes(stepper.base.device)
            if not math.isfinite(loss):
                self._stop(loss, prepared.examples)
            if clock is not None:
                spent = stepper.agreed(before + (1 - before) * clock())
            ended = self.steps == config.steps or spent >= 1
            line |= self._measure(ended)
            if log is not None:
                with writing(self._out):
                    log.append(line)
                report(line)
            if is_main and (ended or self.steps % config.save_every == 0):
                save_checkpoint(self._out, self.steps, stepper.heads, stepper.optimizer, self._identity, spent)
            if ended:
                break
        return loss

    def _batches(self) -> Iterator[tuple[list[Example], int]]:
        """The batches that are left, each with how many had been skipped by then."""
        for examples in islice(self._order, self.steps, self._config.steps):
            yield examples, self._order.num_skipped

    def _prepare(self, batch: tuple[list[Example], int]) -> tuple[Prepared, int]:
        return self.stepper.prepare(batch[0]), batch[1]

    def finish(self, dtype: torch.dtype) -> Evaluation | None:
        """Write what the run was for; the heads come last."""
        if self._evaluation is None and self._held_out:  # all steps were done before this call
            self._evaluation = self.stepper.evaluate(self._held_out)
        if self.stepper.accelerator.is_main_process:
            with writing(self._out):
                if self._evaluation is not None:
                    save_accuracies(self._out, self._evaluation, self.steps)
                if can_plot():
                    save_plot(self._out)
                save_heads(_copy(self.stepper.heads, dtype), self._out)
        self.stepper.accelerator.wait_for_everyone()
        return self._evaluation

    def _measure(self, ended: bool) -> dict[str, Any]:
        """What the metrics say of the held-out examples after a step; nothing if it isn't due."""
        self._evaluation = None
        if not self._held_out or not (ended or self.steps % self._config.eval_every == 0):
            return {}
        found = self._evaluation = self.stepper.evaluate(self._held_out)
        measured = {"held_out_losses": found.losses, "accuracies": found.accuracies}
        return measured | {"top1": found.top(1), "top5": found.top(5)}

    def _stop(self, loss: float, examples: list[Example]) -> None:
        """Save the batch of a step whose loss isn't finite, and say so."""
        path = self._out / f"nonfinite-step-{self.steps}.safetensors"
        batch = make_batch(examples, self.stepper.heads.config.num_heads)
        tensors = {
            name: getattr(batch, name).contiguous() for name in ("input_ids", "attention_mask", "rows", "labels")
        }
        if self.stepper.accelerator.is_main_process:
            with writing(self._out):
                replace_file(path, lambda file: save_file(tensors, file))
        raise TrainingError(
            f"the loss of step {self.steps} is {loss}; its batch is saved in {path}: look there for broken examples, "
            "or lower the learning rate"
        )


def _copy(heads: DraftHeads, dtype: torch.dtype) -> DraftHeads:
    """The same heads in another dtype."""
    copied = type(heads)(heads.config, device="meta")
    state = {name: tensor.detach() for name, tensor in heads.state_dict().items()}
    copied.load_state_dict(state, assign=True)
    return copied.to(dtype)
