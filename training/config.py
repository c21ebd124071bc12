"""What a training run is asked to do, checked. Knows no models."""

import math
from dataclasses import dataclass

from specdec.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """How heads are trained. The defaults follow Medusa's published recipe.

    Args:
        steps: optimizer steps, one batch each.
        batch_tokens: most tokens of a batch over all processes, padding included; no example may be longer.
        lr: the peak learning rate.
        decay: the loss of head k, from 0, counts decay ** k.
        warmup: steps of linear warm-up; a cosine to zero follows, at the last step or when the time is spent.
        weight_decay: AdamW's.
        clip: largest norm of the gradient; None leaves it alone.
        seed: of the order of the examples; `specdec train` makes the heads' first weights by it too.
        soft_labels: heads learn the base's whole distribution at each label, not the one token that stands there.
        eval_every: steps between evaluations on the held-out examples; the last step is always followed by one.
        save_every: steps between checkpoints; the last step is always followed by one.

    Raises:
        ConfigError: a value is out of bounds.
    """

    steps: int = 1000
    batch_tokens: int = 8192
    lr: float = 1e-3
    decay: float = 0.8
    warmup: int = 40
    weight_decay: float = 0.0
    clip: float | None = 1.0
    seed: int = 0
    soft_labels: bool = True
    eval_every: int = 100
    save_every: int = 100

    def __post_init__(self) -> None:
        least = {"steps": 1, "batch_tokens": 2, "warmup": 0, "seed": 0, "eval_every": 1, "save_every": 1}
        for name, low in least.items():
            value = getattr(self, name)
            if type(value) is not int or not low <= value < 1 << 62:
                raise ConfigError(f"{name} must be a whole number of at least {low}, not {value!r}")
        for name, most in (("lr", 10.0), ("decay", 1.0), ("clip", math.inf)):
            value = getattr(self, name)
            if not (name == "clip" and value is None) and not (_is_number(value) and 0 < value <= most):
                raise ConfigError(f"{name} must be above 0 and at most {most}, not {value!r}")
        if type(self.soft_labels) is not bool:
            raise ConfigError(f"soft_labels must be True or False, not {self.soft_labels!r}")
        if not (_is_number(self.weight_decay) and 0 <= self.weight_decay < 1):
            raise ConfigError(f"weight_decay must be from 0 to below 1, not {self.weight_decay!r}")

    def lr_at(self, step: int, spent: float = 0.0) -> float:
        """Return the learning rate of a step.

        Args:
            step: from 0.
            spent: share of the time that is spent, where time is limited: the rate falls by it or by the steps,
                whichever is further.
        """
        rate = self.lr * min(1.0, (step + 1) / max(1, self.warmup))
        done = max(spent, (step - self.warmup) / max(1, self.steps - self.warmup))
        return rate * 0.5 * (1 + math.cos(math.pi * max(0.0, done)))


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and not math.isnan(value)
