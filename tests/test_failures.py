"""A failure ends its own request alone: what it had stands, its blocks are free, nobody beside it notices."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from specdec import LLM, accelerate
from specdec.drafters.none import NoDrafter
from specdec.drafters.protocol import Drafter, DraftQuery
from specdec.engine.request import Request
from specdec.errors import InvalidRequest, SpecdecError
from specdec.params import SamplingParams
from specdec.verifier.tree import TokenTree
from tests.engines import drain, make_engine, outputs, run
from tests.scripted import AdversarialDrafter, OracleDrafter, RandomDrafter

PROMPTS = [[5, 6, 7], [11, 12], [3]]
LENGTH = 12


class MyError(Exception):
    """What a user's own code raises."""


class FailsAt:
    """A logits processor that fails, by raising or by NaN, once the prefix has a length; counts its calls."""

    def __init__(self, length: int, nan: bool = False) -> None:
        self.length, self.nan, self.seen = length, nan, list[int]()

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        self.seen.append(ids.shape[1])
        if ids.shape[1] < self.length:
            return scores
        if self.nan:
            return scores * torch.nan
        raise MyError


@pytest.fixture(scope="module")
def answers(tiny: PreTrainedModel) -> list[list[int]]:
    return outputs(run(make_engine(tiny), PROMPTS, [SamplingParams(max_new_tokens=LENGTH)] * 3))


def drafters(answers: list[list[int]]) -> list[Drafter]:
    known = {tuple(p): a for p, a in zip(PROMPTS, answers, strict=True)}
    shapes = [OracleDrafter(known, shape) for shape in ("chain", "wide", "ragged")]
    return [NoDrafter(), *shapes, AdversarialDrafter(known), RandomDrafter()]


@pytest.mark.parametrize("nan", [False, True])
@pytest.mark.parametrize("where", [0, 1, 5])
def test_a_failing_processor_ends_its_request_where_plain_decoding_would(
    where: int, nan: bool, tiny: PreTrainedModel, answers: list[list[int]]
) -> None:
    for drafter in drafters(answers):
        bad = SamplingParams(max_new_tokens=LENGTH, logprobs=0, logits_processors=[FailsAt(2 + where, nan)])
        good = SamplingParams(max_new_tokens=LENGTH)
        engine = make_engine(tiny, drafter)
        requests = [engine.add(p, bad if i == 1 else good) for i, p in enumerate(PROMPTS)]
        drain(engine)
        assert outputs(requests) == [answers[0], answers[1][:where], answers[2]], drafter.name
        assert [r.finish_reason for r in requests] == ["length", "error", "length"]
        assert len(requests[1].logprobs) == len(requests[1].proposers) == where
        assert requests[1].stats.num_output_tokens == where
        with pytest.raises(InvalidRequest if nan else MyError):
            requests[1].check()


def test_a_failure_behind_a_stop_is_not_the_answers(tiny: PreTrainedModel, answers: list[list[int]]) -> None:
    """The drafter makes the engine look behind the stop; plain decoding would not have looked."""
    stop = answers[0][3]
    end = answers[0].index(stop) + 1
    fails = FailsAt(len(PROMPTS[0]) + end)
    params = SamplingParams(max_new_tokens=LENGTH, stop_token_ids=[stop], logits_processors=[fails])
    (request,) = run(make_engine(tiny, OracleDrafter({tuple(PROMPTS[0]): answers[0]})), PROMPTS[:1], [params])
    assert (request.finish_reason, outputs([request])[0]) == ("stop", answers[0][:end])
    assert max(fails.seen) == fails.length, "nothing behind the stop was looked at"


@pytest.mark.parametrize("where", [1, 4, LENGTH])
def test_a_failing_callback_ends_its_request_at_its_token(
    where: int, tiny: PreTrainedModel, answers: list[list[int]]
) -> None:
    def stopping(request: Request) -> bool:
        if request.num_output == where:
            raise MyError
        return False

    for drafter in drafters(answers):
        engine = make_engine(tiny, drafter)
        params = SamplingParams(max_new_tokens=LENGTH)
        requests = [engine.add(p, params, stopping=stopping if i == 1 else None) for i, p in enumerate(PROMPTS)]
        drain(engine)
        assert outputs(requests) == [answers[0], answers[1][:where], answers[2]]
        assert requests[1].finish_reason == "error" and isinstance(requests[1].error, MyError)


class FailsFor(OracleDrafter):
    """Fails for one prompt from some output length on: by raising, or by a tree that was not asked for."""

    def __init__(self, answers: Any, prompt: list[int], length: int, how: str) -> None:
        super().__init__(answers)
        self._prompt, self._length, self._how = prompt, length, how

    def propose(self, queries: Sequence[DraftQuery]) -> TokenTree:
        tree = super().propose(queries)
        bad = [list(q.tokens[: len(self._prompt)]) == self._prompt and q.num_output >= self._length for q in queries]
        if self._how == "raises" and any(bad):
            raise MyError("no more ideas")
        if self._how == "too few" and any(bad):
            return TokenTree.build([], [])
        tokens = [[0] if b else tree.tokens_of(i) for i, b in enumerate(bad)]
        return TokenTree.build(tokens, [[-1] if b else tree.parents_of(i) for i, b in enumerate(bad)])


@pytest.mark.parametrize("how", ["raises", "too few", "wrong root"])
@pytest.mark.parametrize("length", [0, 4])
def test_a_failing_drafter_ends_the_request_that_it_fails_for(
    length: int, how: str, tiny: PreTrainedModel, answers: list[list[int]]
) -> None:
    known = {tuple(p): a for p, a in zip(PROMPTS, answers, strict=True)}
    drafter = FailsFor(known, PROMPTS[1], length, how)
    engine = make_engine(tiny, drafter, max_nodes=3)
    requests = [engine.add(p, SamplingParams(max_new_tokens=LENGTH)) for p in PROMPTS]
    drain(engine)
    assert [r.finish_reason for r in requests] == ["length", "error", "length"]
    assert [outputs(requests)[0], outputs(requests)[2]] == [answers[0], answers[2]]
    got = outputs(requests)[1]
    assert length <= len(got) < length + 3 and got == answers[1][: len(got)]
    assert requests[0].stats.mean_acceptance_length == 3, "neighbours lost their drafts"
    with pytest.raises(SpecdecError, match="drafter 'oracle-chain' failed for request 1: ") as caught:
        requests[1].check()
    assert how != "raises" or isinstance(caught.value.__cause__, MyError)
    assert not drafter.known


def test_a_drafter_that_fails_alone_leaves_an_idle_engine(tiny: PreTrainedModel, answers: list[list[int]]) -> None:
    engine = make_engine(tiny, FailsFor({}, PROMPTS[0], 0, "raises"))
    request = engine.add(PROMPTS[0], SamplingParams())
    drain(engine)
    assert request.finish_reason == "error" and engine.num_steps == 0
    assert outputs(run(engine, PROMPTS[1:2], [SamplingParams(max_new_tokens=LENGTH)]))[0] == answers[1]


def test_generate_raises_what_its_request_failed_by_and_goes_on_working(tiny: PreTrainedModel) -> None:
    llm = LLM(tiny, "none", num_blocks=32)
    bad = SamplingParams(max_new_tokens=LENGTH, logits_processors=[FailsAt(4)])
    good = SamplingParams(max_new_tokens=LENGTH)
    with pytest.raises(MyError):
        llm.generate(PROMPTS, [good, bad, good])
    assert not llm.engine.has_work and llm.engine.pool.num_free == 32
    chunks = []
    with pytest.raises(MyError):
        for chunk in llm.stream(PROMPTS[0], SamplingParams(max_new_tokens=9, logits_processors=[FailsAt(5)])):
            chunks.append(chunk)
    assert [len(chunk.token_ids) for chunk in chunks] == [1, 1, 0] and chunks[-1].finish_reason == "error"
    assert len(llm.generate(PROMPTS, good)) == 3


def test_a_stream_is_not_hurt_by_another(tiny: PreTrainedModel) -> None:
    llm = LLM(tiny, "none", num_blocks=32)
    (alone,) = llm.generate(PROMPTS[0], SamplingParams(max_new_tokens=LENGTH))
    good = llm.stream(PROMPTS[0], SamplingParams(max_new_tokens=LENGTH))
    tokens = list(next(good).token_ids)
    bad = llm.stream(PROMPTS[1], SamplingParams(max_new_tokens=9, logits_processors=[FailsAt(5)]))
    next(bad)
    for chunk in good:
        tokens += chunk.token_ids
    assert tokens == alone.token_ids
    with pytest.raises(MyError):
        next(bad), next(bad), next(bad)


PARTS = ["model.forward", "model.logits", "rule.__call__", "pages.commit", "drafter.observe", "drafter.propose"]


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("call", [1, 2, 3])
def test_a_step_that_breaks_off_is_as_if_it_had_not_been(
    part: str, call: int, tiny: PreTrainedModel, answers: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever it had done by then: the requests go on from the tokens that they have."""
    known = {tuple(p): a for p, a in zip(PROMPTS, answers, strict=True)}
    engine = make_engine(tiny, OracleDrafter(known, "wide"), max_nodes=8)
    requests = [engine.add(p, SamplingParams(max_new_tokens=LENGTH)) for p in PROMPTS]
    owner, name = part.split(".")
    kind, calls = type(getattr(engine, owner)), list[None]()
    real = getattr(kind, name)

    def breaks(*args: Any) -> Any:
        calls.append(None)
        if len(calls) == call:
            raise KeyboardInterrupt
        return real(*args)

    monkeypatch.setattr(kind, name, breaks)
    with pytest.raises(KeyboardInterrupt):
        drain(engine)
    engine.check_integrity()
    drain(engine)
    assert outputs(requests) == answers and [r.finish_reason for r in requests] == ["length"] * 3


@pytest.mark.parametrize("where", [1, 4])
def test_an_interrupted_delivery_takes_out_those_that_have_ended(
    where: int, tiny: PreTrainedModel, answers: list[list[int]]
) -> None:
    def stopping(request: Request) -> bool:
        if request.num_output == where:
            raise KeyboardInterrupt
        return False

    engine = make_engine(tiny)
    first, last = (
        engine.add(p, SamplingParams(max_new_tokens=n)) for p, n in zip(PROMPTS[::2], (where, LENGTH), strict=True)
    )
    middle = engine.add(PROMPTS[1], SamplingParams(max_new_tokens=LENGTH), stopping=stopping)
    with pytest.raises(KeyboardInterrupt):
        drain(engine)
    assert first.finish_reason == "length" and first not in engine.scheduler.running
    drain(engine)
    assert outputs([first, middle, last]) == [answers[0][:where], answers[1], answers[2]]


def test_a_failing_tokenizer_ends_the_request_that_it_fails_for(
    tiny: PreTrainedModel, answers: list[list[int]]
) -> None:
    class Fails:
        def decode(self, token_ids: list[int], **options: bool) -> str:
            if answers[1][3] in token_ids:
                raise MyError
            return "x" * len(token_ids)

    engine = make_engine(tiny)
    engine.tokenizer = Fails()  # type: ignore[assignment]
    requests = [engine.add(p, SamplingParams(max_new_tokens=LENGTH)) for p in PROMPTS[1::-1]]
    end = answers[1].index(answers[1][3])
    drain(engine)
    assert outputs(requests[:1])[0] == answers[1][:end] and isinstance(requests[0].error, MyError)
    assert len(requests[0].proposers) == len(requests[0].text) == requests[0].stats.num_output_tokens == end


@pytest.mark.parametrize("who", ["itself", "another", "one that waits"])
@pytest.mark.parametrize("how", ["callback", "processor"])
def test_a_request_may_be_aborted_in_the_middle_of_a_step(
    who: str, how: str, tiny: PreTrainedModel, answers: list[list[int]]
) -> None:
    known = {tuple(p): a for p, a in zip(PROMPTS, answers, strict=True)}
    engine = make_engine(tiny, OracleDrafter(known, "wide"), max_num_seqs=2, max_num_batched_tokens=64)
    requests: list[Request] = []

    def abort(*args: Any) -> bool:
        if requests[0].num_output >= 2:
            engine.abort(requests[["itself", "another", "one that waits"].index(who)])
        return False

    def process(ids: Tensor, scores: Tensor) -> Tensor:
        abort()
        return scores

    params = SamplingParams(max_new_tokens=LENGTH, logits_processors=[process] if how == "processor" else [])
    requests.append(engine.add(PROMPTS[0], params, stopping=abort if how == "callback" else None))
    requests += [engine.add(p, SamplingParams(max_new_tokens=LENGTH)) for p in PROMPTS[1:]]
    drain(engine)
    reasons = [r.finish_reason for r in requests]
    assert reasons.count("abort") == 1
    for request, answer, reason in zip(requests, answers, reasons, strict=True):
        got = outputs([request])[0]
        assert got == (answer[: len(got)] if reason == "abort" else answer)


def test_a_step_in_a_step_is_refused_and_ends_the_request_that_asked(tiny: PreTrainedModel) -> None:
    llm = LLM(tiny, "none", num_blocks=32)

    def generate(ids: Tensor, scores: Tensor) -> Tensor:
        llm.generate([1])
        return scores

    with pytest.raises(SpecdecError, match="a step of this engine is running; another thread, or a logits processor"):
        llm.generate(PROMPTS[0], SamplingParams(logits_processors=[generate]))
    assert not llm.engine.has_work and llm.engine.pool.num_free == 32
    assert len(llm.generate(PROMPTS)) == 3


def test_the_drop_in_raises_the_users_own_error(tiny: PreTrainedModel) -> None:
    def fail(ids: Tensor, scores: Tensor) -> Tensor:
        raise MyError

    ids = torch.tensor([PROMPTS[0]])
    with accelerate(tiny) as accelerated:
        with pytest.raises(MyError):
            tiny.generate(ids, max_new_tokens=4, logits_processor=[fail], pad_token_id=0)
        with pytest.raises(MyError):
            tiny.generate(ids, max_new_tokens=4, stopping_criteria=[fail], pad_token_id=0)
        assert accelerated.engine is not None and not accelerated.engine.has_work
