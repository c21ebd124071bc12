"""Random traffic: requests that come, are aborted, fail and make room for each other at random times, in a small pool.

Whatever happens, each request's answer is the one that it gets alone by plain decoding: all of it, or its beginning
where it was aborted.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor
from transformers import PreTrainedModel

from specdec.engine.engine import Engine
from specdec.engine.request import Request
from specdec.params import SamplingParams
from tests.conftest import VOCAB
from tests.costs import TABLES
from tests.engines import Optimist, drain, make_engine
from tests.property import DRAFTERS, Answers, ready

EOS = (5, 17)
MAX_LEN = 96
TRAFFIC_DRAFTERS = (
    "none",
    "ngram",
    "medusa",
    "another model",
    "itself",
    "early exit, tree",
    "hybrid",
    "oracle ragged",
    "sometimes",
    "random",
    "adversarial",
)


class Refuses(Exception):  # noqa: N818
    """What a request's own logits processor raises."""


@dataclass(frozen=True)
class FailsAt:
    """A logits processor that raises once the prefix has a length."""

    length: int

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        if ids.shape[1] >= self.length:
            raise Refuses
        return scores


@dataclass(frozen=True)
class Asked:
    """A request that may come again and again, and what it gets alone."""

    prompt: list[int]
    params: SamplingParams
    tokens: list[int]
    finish_reason: str | None


@dataclass
class Counts:
    """What came of some traffic."""

    requests: int = 0
    wrong: int = 0
    lost_blocks: int = 0
    preemptions: int = 0
    aborts: int = 0
    errors: int = 0
    steps: int = 0
    cached_tokens: int = 0
    accepted_tokens: int = 0
    requests_by_drafter: dict[str, int] = field(default_factory=dict)


def draw_requests(model: PreTrainedModel, count: int, seed: int) -> list[Asked]:
    """Draw different requests and answer each alone, by plain decoding without reuse."""
    rng = random.Random(seed)
    engine = make_engine(
        ready(model), eos_token_ids=EOS, max_model_len=MAX_LEN, max_num_seqs=1, enable_prefix_caching=False
    )
    asked: dict[tuple[int, ...], Asked] = {}
    starts = [[rng.randrange(VOCAB) for _ in range(40)] for _ in range(4)]
    while len(asked) < count:
        prompt = [*rng.choice(starts)[: rng.choice([0, 0, 16, 33])], *rng.choices(range(VOCAB), k=rng.randint(1, 8))]
        prompt = prompt * rng.choice([1, 1, 1, 2]) if len(prompt) < 30 else prompt
        if tuple(prompt) not in asked:
            request = engine.add(prompt, _draw_params(rng, len(prompt)))
            drain(engine)
            asked[tuple(prompt)] = Asked(prompt, request.params, _output(request), request.finish_reason)
    return list(asked.values())


def run_traffic(model: PreTrainedModel, asked: Sequence[Asked], drafter: str, count: int, seed: int) -> Counts:
    """Send requests to one engine at random and compare what they get.

    Args:
        model: the target.
        asked: the requests to choose from.
        drafter: one of `TRAFFIC_DRAFTERS`.
        count: requests to send.
        seed: of everything that is random.
    """
    rng = random.Random(seed)
    answers: Answers = {tuple(a.prompt): a.tokens for a in asked}
    engine = make_engine(
        ready(model),
        None if drafter == "none" else DRAFTERS[drafter](model, answers),
        eos_token_ids=EOS,
        cost_table=TABLES[rng.choice(sorted(TABLES))],
        num_blocks=rng.choice([6, 8, 12, 20]),
        max_model_len=MAX_LEN,
        max_num_seqs=rng.choice([4, 8]),
        max_num_batched_tokens=rng.choice([24, 64, 512]),
        max_nodes=rng.choice([3, 8, 64]),
    )
    if rng.random() < 0.7:  # admits whoever fits now, so that others have to make room
        engine.scheduler.lengths = Optimist()
    sent = _send(engine, asked, count, rng)
    stats = [request.stats for _, request in sent]
    return Counts(
        requests=len(sent),
        wrong=sum(not _is_right(a, request) for a, request in sent),
        lost_blocks=engine.pool.num_blocks - engine.pool.num_free,
        preemptions=engine.scheduler.num_preemptions,
        aborts=sum(request.finish_reason == "abort" for _, request in sent),
        errors=sum(request.finish_reason == "error" for _, request in sent),
        steps=engine.num_steps,
        cached_tokens=sum(s.num_cached_tokens for s in stats),
        accepted_tokens=sum(s.num_accepted_tokens for s in stats),
        requests_by_drafter={drafter: len(sent)},
    )


def add_counts(total: Counts, more: Counts) -> None:
    """Add up two counts, into the first."""
    for name, value in vars(more).items():
        if isinstance(value, int):
            setattr(total, name, getattr(total, name) + value)
    for drafter, count in more.requests_by_drafter.items():
        total.requests_by_drafter[drafter] = total.requests_by_drafter.get(drafter, 0) + count


def _send(engine: Engine, asked: Sequence[Asked], count: int, rng: random.Random) -> list[tuple[Asked, Request]]:
    """Add requests and step until all have ended, checking the blocks after each step and each abort."""
    sent: list[tuple[Asked, Request]] = []
    live: list[Request] = []
    while len(sent) < count or engine.has_work:
        waiting = len(engine.scheduler.waiting)
        for _ in range(min(count - len(sent), rng.choice([0, 0, 1, 1, 2, 5]) if waiting < 12 else 0)):
            choice = rng.choice(asked)
            request = engine.add(choice.prompt, choice.params, priority=rng.choice([0, 0, 0, 1, -1]))
            sent.append((choice, request))
            live.append(request)
        if live and rng.random() < 0.03:
            engine.abort(rng.choice(live))
            engine.check_integrity()
        engine.step()
        engine.check_integrity()
        live = [request for request in live if request.finish_reason is None]
    return sent


def _is_right(asked: Asked, request: Request) -> bool:
    got = _output(request)
    if request.finish_reason == "abort":
        return got == asked.tokens[: len(got)]
    failed_alike = request.finish_reason != "error" or isinstance(request.error, Refuses)
    return (got, request.finish_reason) == (asked.tokens, asked.finish_reason) and failed_alike


def _output(request: Request) -> list[int]:
    return request.tokens[request.prompt_len :]


def _draw_params(rng: random.Random, prompt_len: int) -> SamplingParams:
    """Greedy or sampling; a third of the requests with some of the other parameters too."""
    asked: dict[str, object] = {"max_new_tokens": rng.choice([1, 4, 12, 24, 48]), "seed": rng.randrange(2**63)}
    if rng.random() < 0.5:
        asked |= {"temperature": rng.choice([0.7, 1.3])} | rng.choice([{}, {"top_k": 8}, {"top_p": 0.8, "min_p": 0.02}])
    if rng.random() < 0.3:
        asked |= rng.choice(
            [
                {"repetition_penalty": 1.3},
                {"presence_penalty": 1.0, "frequency_penalty": 0.5},
                {"logit_bias": {token: 3.0 for token in range(20, 30)}},
                {"no_repeat_ngram_size": 2},
                {"bad_words_ids": [[t] for t in range(6)] + [[40, 41]]},
                {"allowed_token_ids": range(5, 60)},
                {"ignore_eos": True},
                {"stop_token_ids": [50, 51, 52]},
                {"logits_processors": [FailsAt(prompt_len + rng.randint(0, 8))]},
            ]
        )
    return SamplingParams(**asked)  # type: ignore[arg-type]
