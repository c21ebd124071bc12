"""What one request asks for. Layer 0: knows nothing of models, engines or trees."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from specdec.errors import InvalidRequest

if TYPE_CHECKING:
    from torch import Tensor

MAX_STOPS = 64
MAX_LOGPROBS = 20
MAX_SEED = 2**63 - 1
MAX_SAMPLES = 128
MAX_TOKEN_IDS = 16_384
MAX_BAD_WORDS = 1024
MAX_WORD_LEN = 64
MAX_NGRAM_SIZE = 64
MAX_LOGITS_PROCESSORS = 16
MAX_BIAS = 10_000
MAX_SPECULATIVE_TOKENS = 63
MAX_SALT_LEN = 256

LogitsProcessor = Callable[["Tensor", "Tensor"], "Tensor"]
"""Maps a prefix, [1, L] int64, and its scores, [1, V] float32 or float64, to the scores [1, V] to choose by.

Each object of transformers' `LogitsProcessor` classes is one.
"""


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
        n: answers to give to the prompt, 1 to 128; they share its cached prefix. Answer i uses seed + i.
        stop: strings that end the text (and are cut from it); a single string may be given.
        stop_token_ids: token ids that end the request, besides the model's own EOS tokens.
        ignore_eos: go on past the model's EOS tokens.
        logprobs: None for none, else how many alternatives to return beside each token's own log-probability.
        skip_special_tokens: leave special tokens out of the text.
        detokenize: make the text of the answer; without it the text is empty, and stop strings are refused.
        min_new_tokens: EOS and stop tokens can't be chosen before that many tokens; stop strings still end the text.
        repetition_penalty: scores of tokens in the prompt or the output are divided by it if positive, else multiplied
            (transformers' and vLLM's meaning); 1 is none, 0.01 to 100.
        presence_penalty: is taken off the score of each token in the output (OpenAI's meaning); -2 to 2.
        frequency_penalty: is taken off the score of a token as often as it is in the output; -2 to 2.
        logit_bias: token id → number to add to its score, at most 10,000 either way.
        no_repeat_ngram_size: n-grams of that size in prompt and output can't come again; 0 is none, at most 64.
        bad_words_ids: token sequences that can't come; one that is a lone EOS token is ignored, as in transformers.
        suppress_tokens: token ids that can't be chosen.
        allowed_token_ids: token ids that may be chosen; None allows all.
        logits_processors: called once for each position, in order, with the whole prefix and the scores, after all of
            the above and before temperature, top-k, top-p and min-p. A processor may be called for a few positions
            behind a stop, whose tokens are then dropped.
        num_speculative_tokens: most draft tokens of this request in a forward, 0 to 63; 0 decodes plainly, None leaves
            it to the engine. Never changes the answer.
        cache_salt: only requests with the same salt share cached prefixes; None is a salt of its own.

    Raises:
        InvalidRequest: a value is out of bounds; the message names it.
    """

    max_new_tokens: int = 256
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    n: int = 1
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    skip_special_tokens: bool = True
    detokenize: bool = True
    min_new_tokens: int = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    no_repeat_ngram_size: int = 0
    bad_words_ids: Sequence[Sequence[int]] = ()
    suppress_tokens: Sequence[int] = ()
    allowed_token_ids: Sequence[int] | None = None
    logits_processors: Sequence[LogitsProcessor] = ()
    num_speculative_tokens: int | None = None
    cache_salt: str | None = None

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        object.__setattr__(self, "stop", _bounded("stop", self.stop, MAX_STOPS))
        _check_int("max_new_tokens", self.max_new_tokens, low=1)
        _check_real("temperature", self.temperature, "at least 0", lambda x: x >= 0)
        _check_int("top_k", self.top_k, low=0)
        _check_real("top_p", self.top_p, "above 0 and at most 1", lambda x: 0 < x <= 1)
        _check_real("min_p", self.min_p, "at least 0 and below 1", lambda x: 0 <= x < 1)
        if self.seed is not None:
            _check_int("seed", self.seed, low=0, high=MAX_SEED)
        _check_int("n", self.n, low=1, high=MAX_SAMPLES)
        for name in ("ignore_eos", "skip_special_tokens", "detokenize"):
            if type(getattr(self, name)) is not bool:
                raise InvalidRequest(f"{name} must be True or False, not {getattr(self, name)!r}")
        if self.stop and not self.detokenize:
            raise InvalidRequest("stop strings are looked for in the text; leave detokenize on, or use stop_token_ids")
        if any(not isinstance(s, str) or not s for s in self.stop):
            raise InvalidRequest(f"stop must hold non-empty strings, not {list(self.stop)!r}")
        if self.logprobs is not None:
            _check_int("logprobs", self.logprobs, low=0, high=MAX_LOGPROBS)
        if self.num_speculative_tokens is not None:
            _check_int("num_speculative_tokens", self.num_speculative_tokens, low=0, high=MAX_SPECULATIVE_TOKENS)
        salt = self.cache_salt
        if salt is not None and not (isinstance(salt, str) and 0 < len(salt) <= MAX_SALT_LEN):
            raise InvalidRequest(f"cache_salt must be a string of 1 to {MAX_SALT_LEN} characters, not {salt!r:.80}")
        self._check_processors()

    def _check_processors(self) -> None:
        _check_int("min_new_tokens", self.min_new_tokens, low=0)
        if self.min_new_tokens > self.max_new_tokens:
            raise InvalidRequest(
                f"min_new_tokens ({self.min_new_tokens}) must be at most max_new_tokens ({self.max_new_tokens})"
            )
        _check_real("repetition_penalty", self.repetition_penalty, "between 0.01 and 100", lambda x: 0.01 <= x <= 100)
        _check_real("presence_penalty", self.presence_penalty, "between -2 and 2", lambda x: -2 <= x <= 2)
        _check_real("frequency_penalty", self.frequency_penalty, "between -2 and 2", lambda x: -2 <= x <= 2)
        _check_int("no_repeat_ngram_size", self.no_repeat_ngram_size, low=0, high=MAX_NGRAM_SIZE)
        for name in ("stop_token_ids", "suppress_tokens"):
            object.__setattr__(self, name, _token_ids(name, getattr(self, name)))
        if self.allowed_token_ids is not None:
            object.__setattr__(self, "allowed_token_ids", _token_ids("allowed_token_ids", self.allowed_token_ids))
            if not self.allowed_token_ids:
                raise InvalidRequest("allowed_token_ids is empty: nothing could be chosen; give ids, or None for all")
        words = _bounded("bad_words_ids", self.bad_words_ids, MAX_BAD_WORDS)
        object.__setattr__(self, "bad_words_ids", tuple(_token_ids("bad_words_ids", w, MAX_WORD_LEN) for w in words))
        if not all(self.bad_words_ids):
            raise InvalidRequest("bad_words_ids holds an empty word; give each word at least one token id")
        object.__setattr__(self, "logit_bias", _bias(self.logit_bias))
        processors = _bounded("logits_processors", self.logits_processors, MAX_LOGITS_PROCESSORS)
        object.__setattr__(self, "logits_processors", processors)
        if any(not callable(processor) for processor in processors):
            raise InvalidRequest(f"logits_processors must hold callables of (prefix, scores), not {list(processors)!r}")

    @property
    def greedy(self) -> bool:
        """Whether the choice is the most likely token."""
        return self.temperature == 0

    @property
    def cuts(self) -> bool:
        """Whether tokens are dropped by their rank or probability: the request samples with top_k, top_p or min_p."""
        return not self.greedy and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)

    @property
    def max_nodes(self) -> int:
        """Most nodes of a tree of this request, root included."""
        return 1 + (MAX_SPECULATIVE_TOKENS if self.num_speculative_tokens is None else self.num_speculative_tokens)

    def seeds(self) -> list[int]:
        """Return the seeds of the n answers; `seed` must be set."""
        assert self.seed is not None, "the engine sets it"
        return [(self.seed + i) % (MAX_SEED + 1) for i in range(self.n)]

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


def _bounded(name: str, values: Any, most: int) -> tuple[Any, ...]:
    """The values as a tuple; nothing is copied before their number is known to be small."""
    if isinstance(values, (str, bytes)) or not isinstance(values, Iterable) or not isinstance(values, Sized):
        raise InvalidRequest(f"{name} must be a list, not {values!r:.80}")
    if len(values) > most:
        raise InvalidRequest(f"{name} has {len(values)} entries; at most {most} are allowed")
    return tuple(values)


def _token_ids(name: str, values: Any, most: int = MAX_TOKEN_IDS) -> tuple[int, ...]:
    ids = _bounded(name, values, most)
    for token in ids:
        _check_int(name, token, low=0)
    return ids


def _bias(bias: Any) -> dict[int, float]:
    if not isinstance(bias, Mapping):
        raise InvalidRequest(f"logit_bias must map token ids to numbers, not be {bias!r}")
    bounds = f"between -{MAX_BIAS} and {MAX_BIAS}"
    for token, value in zip(_token_ids("logit_bias", bias), bias.values(), strict=True):
        _check_real(f"logit_bias[{token}]", value, bounds, lambda x: abs(x) <= MAX_BIAS)
    return dict(bias)
