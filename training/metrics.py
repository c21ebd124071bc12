"""What a run reports: accuracies by head and rank, `metrics.jsonl`, the plot. Knows heads and batches."""

import importlib.util
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specdec.drafters.medusa_heads import HeadsConfig
from specdec.errors import CheckpointError
from specdec.hub.cache import replace_file
from specdec.training.accuracies import label_ranks
from specdec.training.batches import IGNORE
from specdec.training.loss import HeadsLoss, Inputs, chunks

RANKS = 10
METRICS_FILE = "metrics.jsonl"
ACCURACIES_FILE = "accuracies.json"
PLOT_FILE = "metrics.png"


@dataclass(frozen=True, slots=True)
class Evaluation:
    """How heads do on held-out examples.

    Args:
        losses: [K] mean cross-entropy of each head.
        accuracies: [K][ranks], the share of labels that are a head's candidate of that rank, as a drafter ranks them.
        num_labels: [K] labels of each head.
    """

    losses: list[float]
    accuracies: list[list[float]]
    num_labels: list[int]

    def top(self, count: int) -> list[float]:
        """Return for each head how often the label is among its first `count` candidates."""
        return [sum(head[:count]) for head in self.accuracies]


def empty_ranks(config: HeadsConfig, device: torch.device) -> Tensor:
    """Return the sums of no examples: zeros [K, 2 + ranks] float64."""
    return torch.zeros(config.num_heads, 2 + min(RANKS, config.num_columns), dtype=torch.float64, device=device)


@torch.no_grad()
def count_ranks(loss: HeadsLoss, inputs: Inputs) -> Tensor:
    """Return sums from which `summarize` makes an evaluation.

    Args:
        loss: with the heads.
        inputs: of a batch; its labels count, whatever the loss is taken against.

    Returns:
        [K, 2 + ranks] float64: labels, their summed cross-entropy, and how many stand at each rank.
    """
    sums = empty_ranks(loss.heads.config, inputs.hidden.device)
    num_ranks = sums.shape[1] - 2
    states = loss.states(inputs)
    for rows in chunks(len(states), loss.chunk_rows):
        logits, targets = loss.logits(states[rows]), inputs.labels[rows]  # [R, K, V], [R, K]
        found = label_ranks(loss.heads, logits, targets, num_ranks)
        hits = found[..., None] == torch.arange(num_ranks, device=found.device)  # [R, K, ranks]
        parts = ((targets != IGNORE)[..., None], loss.losses(logits, targets)[..., None], hits)
        sums += torch.cat([part.double() for part in parts], -1).sum(0)
    return sums


def summarize(sums: Tensor) -> Evaluation:
    """Turn the sums of `count_ranks`, [K, 2 + ranks], into means; a head without labels has accuracy 0."""
    means = (sums[:, 1:] / sums[:, :1].clamp(min=1)).tolist()
    counts = [int(count) for count in sums[:, 0].tolist()]
    return Evaluation([row[0] for row in means], [row[1:] for row in means], counts)


class MetricsLog:
    """`metrics.jsonl`: one JSON object a line, never half a line.

    Args:
        out: the run's folder.
        last_step: lines of later steps are dropped: the run goes on from here and writes them again.
    """

    def __init__(self, out: Path, last_step: int) -> None:
        self._path = out / METRICS_FILE
        kept = [line for line in read_metrics(out) if line["step"] <= last_step]
        text = "".join(json.dumps(line) + "\n" for line in kept)
        replace_file(self._path, lambda file: file.write_text(text, encoding="utf-8"))

    def append(self, line: Mapping[str, Any]) -> None:
        """Add a line; a write that fails leaves the file as it was."""
        data = (json.dumps(line) + "\n").encode()
        with self._path.open("ab", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            try:
                if file.write(data) != len(data):
                    raise OSError(f"{self._path}: the disk is full")
            except OSError:
                file.truncate(size)
                raise


def read_metrics(out: Path) -> list[dict[str, Any]]:
    """Return the lines of `metrics.jsonl`, without one that a kill cut short; none if there is no file.

    Raises:
        CheckpointError: a line is damaged.
    """
    path = out / METRICS_FILE
    if not path.exists():
        return []
    whole, _, _ = path.read_bytes().rpartition(b"\n")
    lines: list[dict[str, Any]] = []
    for number, line in enumerate(whole.splitlines(), 1):
        try:
            lines.append(json.loads(line))
            int(lines[-1]["step"])
        except (ValueError, TypeError, KeyError) as error:
            raise CheckpointError(
                f"{path}:{number}: is damaged ({error!r}); take the line out, or remove the file: nothing but the plot "
                "is made of it"
            ) from error
    return lines


def save_accuracies(out: Path, evaluation: Evaluation, step: int) -> None:
    """Write `accuracies.json`: accuracies [K][ranks] on the held-out examples, their labels, and the step."""
    text = json.dumps({"step": step, "accuracies": evaluation.accuracies, "num_labels": evaluation.num_labels})
    replace_file(out / ACCURACIES_FILE, lambda file: file.write_text(text + "\n", encoding="utf-8"))


def can_plot() -> bool:
    """Whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def save_plot(out: Path) -> None:
    """Draw loss and accuracies over the steps of `metrics.jsonl` into `metrics.png`; needs matplotlib."""
    from matplotlib.figure import Figure

    lines = read_metrics(out)
    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    _curve(left, [line for line in lines if "loss" in line], lambda line: line["loss"], "training")
    measured = [line for line in lines if "top1" in line]
    for k in range(len(measured[0]["top1"]) if measured else 0):
        _curve(right, measured, lambda line, k=k: line["top1"][k], f"head {k}, top 1", "o-", f"C{k}")
        _curve(right, measured, lambda line, k=k: line["top5"][k], f"head {k}, top 5", "o--", f"C{k}")
    left.set(xlabel="step", ylabel="loss", yscale="log")
    right.set(xlabel="step", ylabel="accuracy on held-out answers", ylim=(0, 1))
    for axes in (left, right):
        if axes.lines:
            axes.legend()
    replace_file(out / PLOT_FILE, lambda file: figure.savefig(file, format="png", dpi=120))


def _curve(
    axes: Any, lines: Sequence[Mapping[str, Any]], value: Any, label: str, style: str = "-", color: str | None = None
) -> None:
    axes.plot([line["step"] for line in lines], [value(line) for line in lines], style, label=label, color=color)
