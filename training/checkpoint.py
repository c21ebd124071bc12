"""Checkpoints of a training run: written whole or not at all, read strictly. Knows files; nothing of how one trains.

A checkpoint is a heads folder (`specdec.drafters.heads`, fp32) with `optimizer.safetensors` and `state.json` beside it.
"""

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from specdec.drafters.draft_heads import DraftHeads
from specdec.drafters.heads import load_heads, save_heads
from specdec.errors import CheckpointError, ConfigError, SpecdecError, TrainingError
from specdec.hub.cache import new_folder

FOLDER = "checkpoints"
KEPT = 2

_STATE_FILE = "state.json"
_OPTIMIZER_FILE = "optimizer.safetensors"
_RNG = "rng"


@dataclass(frozen=True, slots=True)
class RunIdentity:
    """What must be the same for a run to go on: the fields of the config, the heads' shape, data and base.

    Args:
        config: fields of the `TrainConfig`.
        heads: fields of the `HeadsConfig`.
        data: fingerprint of all examples.
        processes: how many processes share a batch: sums over them depend on it.
    """

    config: dict[str, Any]
    heads: dict[str, Any]
    data: str
    processes: int


@contextmanager
def writing(out: Path) -> Iterator[None]:
    """Turn a failed write into a TrainingError that names the folder."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise TrainingError(f"{out}: can't be written ({error}); free space or give another folder") from error


def save_checkpoint(
    out: Path,
    step: int,
    heads: DraftHeads,
    optimizer: torch.optim.Optimizer,
    identity: RunIdentity,
    spent: float = 0.0,
) -> None:
    """Write the checkpoint of a step, then drop all but the last two.

    Args:
        out: the run's folder.
        step: steps done.
        heads: with their training weights.
        optimizer: of the heads' parameters.
        identity: of the run.
        spent: share of the run's time, where that is limited.

    Raises:
        TrainingError: it can't be written; nothing of it is left.
    """
    folder = out / FOLDER
    with writing(out):
        with new_folder(folder / f"step-{step:08d}") as made:
            save_heads(heads, made)
            save_file(_optimizer_tensors(optimizer), made / _OPTIMIZER_FILE)
            (made / _STATE_FILE).write_text(
                json.dumps({"step": step, "spent": spent} | asdict(identity)), encoding="utf-8"
            )
        for old in _checkpoints(out)[:-KEPT]:
            gone = old.with_name(f".{old.name}.old")  # in one step: a kill in between leaves no half of a checkpoint
            os.replace(old, gone)
            shutil.rmtree(gone)


def has_checkpoint(out: Path) -> bool:
    """Whether a run can go on from here."""
    return bool(_checkpoints(out))


def load_checkpoint(
    out: Path, heads: DraftHeads, optimizer: torch.optim.Optimizer, identity: RunIdentity
) -> tuple[int, float]:
    """Restore the last checkpoint into heads, optimizer and torch's random state, and drop what killed saves left.

    Returns:
        Steps done, and the share of the time that was spent; zeros if there is no checkpoint: nothing was restored.

    Raises:
        ConfigError: the run there has another config, other heads, data or another number of processes.
        CheckpointError: a file is missing or damaged.
    """
    for rest in (out / FOLDER).glob(".step-*"):
        shutil.rmtree(rest, ignore_errors=True)
    if not has_checkpoint(out):
        return 0, 0.0
    folder = _checkpoints(out)[-1]
    try:
        state = json.loads((folder / _STATE_FILE).read_text(encoding="utf-8"))
        tensors = load_file(folder / _OPTIMIZER_FILE)
        step, spent = int(state.pop("step")), float(state.pop("spent", 0.0))
        _check_identity(folder, RunIdentity(**state), identity)
        heads.load_state_dict(load_heads(folder).state_dict())
        torch.set_rng_state(tensors.pop(_RNG))
        _restore_optimizer(optimizer, tensors, folder)
    except SpecdecError:
        raise
    except (OSError, KeyError, TypeError, AttributeError, ValueError, RuntimeError, SafetensorError) as error:
        raise CheckpointError(f"{folder}: is damaged ({error}); remove it to go on from the one before") from error
    return step, spent


def _checkpoints(out: Path) -> list[Path]:
    return sorted((out / FOLDER).glob("step-*"))


def _check_identity(folder: Path, saved: RunIdentity, ours: RunIdentity) -> None:
    for field in ("config", "heads"):
        theirs, wanted = getattr(saved, field), json.loads(json.dumps(getattr(ours, field)))  # tuples become lists
        for name in sorted({*theirs, *wanted}):
            if theirs.get(name) != wanted.get(name):
                raise ConfigError(
                    f"{folder}: this run was started with {name} {theirs.get(name)!r}, not {wanted.get(name)!r}; "
                    "resume it with the options that it was started with, or train into another folder"
                )
    if saved.data != ours.data:
        raise ConfigError(f"{folder}: this run was started on other examples; resume it on the same, or start anew")
    if saved.processes != ours.processes:
        raise ConfigError(f"{folder}: this run had {saved.processes} processes, not {ours.processes}; use as many")


def _optimizer_tensors(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    tensors = {_RNG: torch.get_rng_state()}
    for index, state in optimizer.state_dict()["state"].items():
        tensors |= {f"{index}.{name}": tensor.detach().cpu().contiguous() for name, tensor in state.items()}
    return tensors


def _restore_optimizer(optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor], folder: Path) -> None:
    states: dict[int, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        number, _, name = key.partition(".")
        states.setdefault(int(number), {})[name] = tensor
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for index, parameter in enumerate(parameters):
        shapes = {name: tensor.shape for name, tensor in states.get(index, {}).items()}
        if shapes != {"step": torch.Size(), "exp_avg": parameter.shape, "exp_avg_sq": parameter.shape}:
            raise CheckpointError(f"{folder / _OPTIMIZER_FILE}: doesn't fit weight {index} of the heads: {shapes}")
    optimizer.load_state_dict({"state": states, "param_groups": optimizer.state_dict()["param_groups"]})
