"""What one request asks for. Layer 0: knows nothing of models, engines or trees."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from specdec.errors import InvalidRequest

MAX_STOPS = 64
MAX_LOGPROBS = 20
MAX_SEED = 2**63 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to choose the tokens of one request, and when to stop. Checked when it is made.

    Args:
        max_new_tokens: most tokens to emit, the one that ends the request included; at least 1.
        temperature: 0 is greedy, else logits are divided by it.
        top_k: keep the k most likely tokens; 0 keeps all.
        top_p: keep the smallest set of tokens whose probability reaches top_p, in (0, 1].
        min_p: drop tokens less likely than min_p × the likeliest one, in [0, 1).
        seed: the same seed gives the same tokens, whatever else runs; None draws a fresh one per request.
        stop: strings that end the text (and are cut from it); a single string may be given.
        stop_token_ids: token ids that end the request, besides the model's own EOS tokens.
        ignore_eos: go on past the model's EOS tokens.
        logprobs: None for none, else how many alternatives to return beside each token's own log-probability.
        skip_special_tokens: leave special tokens out of the text.

    Raises:
        InvalidRequest: a value is out of bounds; the message names it.
    """

    max_new_tokens: int = 256
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        object.__setattr__(self, "stop", tuple(self.stop))
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        _check_int("max_new_tokens", self.max_new_tokens, low=1)
        _check_real("temperature", self.temperature, "at least 0", lambda x: x >= 0)
        _check_int("top_k", self.top_k, low=0)
        _check_real("top_p", self.top_p, "above 0 and at most 1", lambda x: 0 < x <= 1)
        _check_real("min_p", self.min_p, "at least 0 and below 1", lambda x: 0 <= x < 1)
        if self.seed is not None:
            _check_int("seed", self.seed, low=0, high=MAX_SEED)
        if len(self.stop) > MAX_STOPS:
            raise InvalidRequest(f"{len(self.stop)} stop strings were given; at most {MAX_STOPS} are allowed")
        if any(not isinstance(s, str) or not s for s in self.stop):
            raise InvalidRequest(f"stop must hold non-empty strings, not {list(self.stop)!r}")
        for token in self.stop_token_ids:
            _check_int("stop_token_ids", token, low=0)
        if self.logprobs is not None:
            _check_int("logprobs", self.logprobs, low=0, high=MAX_LOGPROBS)

    @property
    def greedy(self) -> bool:
        """Whether the choice is the most likely token."""
        return self.temperature == 0

    def with_seed(self, seed: int) -> "SamplingParams":
        """Return a copy that has this seed."""
        return replace(self, seed=seed)


def _check_int(name: str, value: Any, low: int, high: int | None = None) -> None:
    bounds = f"at least {low}" if high is None else f"between {low} and {high}"
    if isinstance(value, bool) or not isinstance(value, int) or value < low or (high is not None and value > high):
        raise InvalidRequest(f"{name} must be a whole number, {bounds}, not {value!r}")


def _check_real(name: str, value: Any, bounds: str, ok: Any) -> None:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not math.isfinite(value) or not ok(value):
        raise InvalidRequest(f"{name} must be a number {bounds}, not {value!r}")
