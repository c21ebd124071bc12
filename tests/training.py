"""Tiny training runs: examples, a base and heads. As a script: a run, and one that is killed again and again."""

import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import PreTrainedModel

from specdec.drafters.medusa_heads import MedusaHeads
from specdec.training.config import TrainConfig
from specdec.training.data import Example
from specdec.training.hidden import new_heads
from specdec.training.metrics import read_metrics
from specdec.training.trainer import Report, TrainResult, train
from tests.conftest import VOCAB, tiny_llama

CONFIG = TrainConfig(steps=6, batch_tokens=48, lr=1e-2, warmup=2, eval_every=3, save_every=3)
KILLED_CONFIG = TrainConfig(steps=40, batch_tokens=24, lr=1e-2, warmup=2, eval_every=7, save_every=1)


def examples(count: int = 12, seed: int = 0) -> list[Example]:
    """Random tokens of 6 to 16, the first three of which are no answer."""
    rng = random.Random(seed)
    lengths = [rng.randint(6, 16) for _ in range(count)]
    return [Example(tuple(rng.randrange(VOCAB) for _ in range(n)), (False,) * 3 + (True,) * (n - 3)) for n in lengths]


def base() -> PreTrainedModel:
    """A small base in fp32, as on a CPU."""
    return tiny_llama(dtype=torch.float32, num_hidden_layers=1)


def run(
    out: Path,
    config: TrainConfig = CONFIG,
    *,
    model: PreTrainedModel | None = None,
    heads: MedusaHeads | None = None,
    data: list[Example] | None = None,
    resume: bool = False,
    report: Report = lambda line: None,
    spent: Callable[[], float] | None = None,
) -> TrainResult:
    """Train two heads on the examples."""
    model = model or base()
    heads = heads or new_heads(model, 2, 1, "shared")
    held_out = examples(3, 1)
    return train(model, heads, data or examples(), held_out, config, out, resume=resume, report=report, spent=spent)


def run_under_fire(out: Path, kills: int, rng: random.Random) -> int:
    """Train in child processes, each killed at some moment a few steps on, then to the end; return how many were."""
    num_killed = 0
    for _ in range(kills):
        goal = len(read_metrics(out)) + rng.randint(0, 3)
        child = os.fork()
        if child == 0:
            run(out, KILLED_CONFIG, resume=True)
            os._exit(0)
        while len(read_metrics(out)) <= goal and os.waitpid(child, os.WNOHANG) == (0, 0):
            time.sleep(0.005)
        time.sleep(rng.uniform(0, 0.05))  # a step or a few, most of which is the save
        os.kill(child, signal.SIGKILL)
        num_killed += os.WIFSIGNALED(os.waitpid(child, 0)[1])
    run(out, KILLED_CONFIG, resume=True)
    return num_killed


if __name__ == "__main__" and sys.argv[1] == "--once":
    run(Path(sys.argv[2]))
elif __name__ == "__main__":
    run(Path(sys.argv[1]) / "whole", KILLED_CONFIG)  # first, so that no child has to import what training needs
    print(run_under_fire(Path(sys.argv[1]) / "killed", int(sys.argv[2]), random.Random(int(sys.argv[3]))))
