"""The engine behind an event loop: same answers, aborts, a bounded queue, draining, failure."""

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from threading import current_thread
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from specdec.drafters.ngram import NGramDrafter
from specdec.engine.answers import AnswerChunk, Answers
from specdec.engine.async_engine import AsyncEngine
from specdec.engine.config import EngineConfig
from specdec.engine.engine import Engine
from specdec.errors import EngineDead, InvalidRequest, QueueFull, ShuttingDown, SpecdecError
from specdec.models.load import make_target
from specdec.params import SamplingParams
from specdec.verifier.rules import CoupledRule
from tests.conftest import tiny_llama
from tests.letters import letters


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_llama(vocab_size=96)


def make_engine(model: PreTrainedModel, drafter: Any = None, **config: int) -> Engine:
    sizes = EngineConfig(**({"num_blocks": 64, "max_model_len": 256, "max_num_seqs": 4} | config))
    return Engine(make_target(model), drafter or NGramDrafter(), CoupledRule(), sizes, tokenizer=letters(), seed=0)


@asynccontextmanager
async def running(engine: Engine, max_queue: int = 256) -> AsyncIterator[AsyncEngine]:
    served = AsyncEngine(engine, max_queue=max_queue)
    served.start()
    try:
        yield served
    finally:
        await served.close()
    assert not engine.has_work or served.dead
    if served.dead is None:
        engine.check_integrity()
        assert engine.pool.num_free == engine.pool.num_blocks and served.num_open == 0


def test_the_engines_thread_runs_on_the_models_gpu(monkeypatch: pytest.MonkeyPatch, model: PreTrainedModel) -> None:
    """Of its own a thread begins with the first GPU, and kernels are launched on the thread's current one."""
    chosen: list[tuple[str, object]] = []
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: chosen.append((current_thread().name, device)))
    engine = make_engine(model)

    async def main() -> None:
        engine.model.device = torch.device("cuda", 1)
        async with running(engine):
            pass

    run(main())
    assert chosen == [("engine", torch.device("cuda", 1))]


async def collect(served: AsyncEngine, prompt: Sequence[int], params: SamplingParams) -> list[AnswerChunk]:
    return [chunk async for chunk in served.generate(prompt, params)]


async def until(condition: Callable[[], bool], seconds: float = 5.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.002)


def run(main: Awaitable[Any]) -> Any:
    async def bounded() -> Any:
        return await asyncio.wait_for(main, 60)

    return asyncio.run(bounded())


def offline(model: PreTrainedModel, prompt: Sequence[int], params: SamplingParams) -> list[Any]:
    engine = make_engine(model)
    requests = engine.add_answers(prompt, params)
    while engine.has_work:
        engine.step()
    return [(r.tokens[r.prompt_len :], r.text, r.finish_reason, r.stop_reason, r.proposers) for r in requests]


def answers(chunks: Sequence[AnswerChunk], num_answers: int) -> list[Any]:
    """The same of chunks that came one by one."""
    result = []
    for index in range(num_answers):
        own = [chunk for chunk in chunks if chunk.index == index]
        assert [chunk.finish_reason is None for chunk in own] == [True] * (len(own) - 1) + [False]
        assert [chunk.stats is None for chunk in own] == [True] * (len(own) - 1) + [False]
        tokens = [token for chunk in own for token in chunk.token_ids]
        proposers = [name for chunk in own for name in chunk.proposers]
        text = "".join(chunk.text for chunk in own)
        assert own[-1].stats is not None and own[-1].stats.num_output_tokens == len(tokens)
        result.append((tokens, text, own[-1].finish_reason, own[-1].stop_reason, proposers))
    return result


def test_answers_equal_those_without_threads(model: PreTrainedModel) -> None:
    prompt = list(range(20, 40)) * 2
    plain = offline(model, prompt, SamplingParams(max_new_tokens=40))[0]
    params = [
        SamplingParams(max_new_tokens=40),
        SamplingParams(max_new_tokens=40, stop=[plain[1][9:12]]),
        SamplingParams(max_new_tokens=40, stop_token_ids=[plain[0][7]]),
        SamplingParams(max_new_tokens=30, temperature=1.2, seed=3, n=3),
        SamplingParams(max_new_tokens=10, logprobs=2, num_speculative_tokens=0),
    ]

    async def main() -> list[list[AnswerChunk]]:
        async with running(make_engine(model)) as served:
            return await asyncio.gather(*(collect(served, prompt, p) for p in params))

    results = run(main())
    for p, chunks in zip(params, results, strict=True):
        assert answers(chunks, p.n) == offline(model, prompt, p)
    assert [c.finish_reason for c in results[1] if c.finish_reason] == ["stop"]
    assert sum(len(chunk.logprobs) for chunk in results[4]) == 10
    assert {name for chunk in results[4] for name in chunk.proposers} == {"target"}
    assert results[4][-1].stats is not None and results[4][-1].stats.num_draft_tokens == 0


def test_each_token_has_its_piece_of_text(model: PreTrainedModel) -> None:
    async def main() -> list[AnswerChunk]:
        async with running(make_engine(model)) as served:
            return await collect(served, [1, 2, 3], SamplingParams(max_new_tokens=20))

    for chunk in run(main()):
        assert [letters().decode([token]) for token in chunk.token_ids] == chunk.pieces


def test_a_closed_call_ends_within_a_step_and_frees_its_blocks(model: PreTrainedModel) -> None:
    async def main() -> None:
        engine = make_engine(model)
        async with running(engine) as served:
            answers = served.submit([[1, 2, 3]], SamplingParams(max_new_tokens=250, n=2))
            await anext(answers)
            steps = engine.num_steps
            answers.close()
            await until(lambda: not engine.has_work)
            assert engine.num_steps <= steps + 3  # those that ran before the order came, and one
            await until(lambda: served.totals.finished["abort"] == 2)
            await served.submit([[5]], SamplingParams(max_new_tokens=2)).__anext__()

    run(main())


def test_cancelling_the_reader_ends_the_request(model: PreTrainedModel) -> None:
    async def main() -> None:
        engine = make_engine(model)
        async with running(engine) as served:
            task = asyncio.create_task(collect(served, [1, 2], SamplingParams(max_new_tokens=250)))
            await until(lambda: len(engine.scheduler.running) == 1)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await until(lambda: not engine.has_work)
            assert served.num_open == 0

    run(main())


def test_the_queue_is_bounded(model: PreTrainedModel) -> None:
    async def main() -> None:
        async with running(make_engine(model), max_queue=2) as served:
            calls = [served.submit([[1]], SamplingParams(max_new_tokens=200)) for _ in range(6)]
            with pytest.raises(QueueFull, match="6 of 6 places"):
                served.submit([[1]], SamplingParams())
            with pytest.raises(InvalidRequest, match="7 answers were asked for"):
                served.submit([[1]], SamplingParams(n=7))
            calls[0].close()
            with pytest.raises(QueueFull):
                served.submit([[1]], SamplingParams(n=2))
            served.submit([[1]], SamplingParams())

    run(main())


def test_what_cannot_be_run_is_refused_before_any_work(model: PreTrainedModel) -> None:
    async def main() -> None:
        engine = make_engine(model)
        async with running(engine) as served:
            for prompts, match in (([[1], [96]], "outside the vocabulary"), ([[]], "empty"), ([], "no prompt")):
                with pytest.raises(InvalidRequest, match=match):
                    served.submit(prompts, SamplingParams())
            assert served.num_open == 0 and engine.num_steps == 0

    run(main())


def test_draining_finishes_what_runs_and_ends_what_takes_too_long(model: PreTrainedModel) -> None:
    async def main() -> None:
        async with running(make_engine(model)) as served:
            short = asyncio.create_task(collect(served, [1], SamplingParams(max_new_tokens=5)))
            await asyncio.sleep(0)
            await served.drain(10)
            assert (await short)[-1].finish_reason == "length" and not served.ready
            with pytest.raises(ShuttingDown):
                served.submit([[1]], SamplingParams())
        async with running(make_engine(model)) as served:
            long = asyncio.create_task(collect(served, [1], SamplingParams(max_new_tokens=255)))
            await asyncio.sleep(0)
            await served.drain(0)
            assert (await long)[-1].finish_reason == "abort"

    run(main())


def test_closing_ends_those_who_read(model: PreTrainedModel) -> None:
    async def main() -> None:
        async with running(make_engine(model)) as served:
            reader = asyncio.create_task(collect(served, [1], SamplingParams(max_new_tokens=255)))
            await until(lambda: served.engine.num_steps > 2)
        chunks = await asyncio.wait_for(reader, 10)
        assert chunks[-1].finish_reason == "abort"

    run(main())


class BrokenRule(CoupledRule):
    """Fails at its third step."""

    num_calls = 0

    def __call__(self, *args: Any) -> Any:
        self.num_calls += 1
        if self.num_calls == 3:
            raise RuntimeError("a bug")
        return super().__call__(*args)


class FailsFor(NGramDrafter):
    """Fails for the request whose prompt begins with 7."""

    def propose(self, queries: Any) -> Any:
        if any(query.tokens[0] == 7 for query in queries):
            raise RuntimeError("no draft")
        return super().propose(queries)


def test_a_request_that_fails_ends_alone(model: PreTrainedModel) -> None:
    async def main() -> list[Any]:
        async with running(make_engine(model, FailsFor())) as served:
            calls = [collect(served, [first, 5], SamplingParams(max_new_tokens=9)) for first in (6, 7, 8)]
            results = await asyncio.gather(*calls, return_exceptions=True)
            assert served.ready and served.totals.finished == {"length": 2, "error": 1}
            return results

    before, failed, behind = run(main())
    assert isinstance(failed, SpecdecError) and "no draft" in str(failed)
    for first, chunks in ((6, before), (8, behind)):
        assert answers(chunks, 1)[0][0] == offline(model, [first, 5], SamplingParams(max_new_tokens=9))[0][0]


def test_a_failing_step_ends_all_requests_with_a_named_error(
    model: PreTrainedModel, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        engine = make_engine(model)
        engine.rule = BrokenRule()
        async with running(engine) as served:
            tasks = [collect(served, [i], SamplingParams(max_new_tokens=50)) for i in range(6)]
            results = await asyncio.gather(*tasks, return_exceptions=True)
            assert all(isinstance(error, EngineDead) and "a bug" in str(error) for error in results)
            assert not served.ready
            with pytest.raises(EngineDead, match="started again: a bug"):
                served.submit([[1]], SamplingParams())

    run(main())
    assert "the engine has failed" in caplog.text


def test_a_failing_tokenizer_ends_all_requests_too(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> None:
        raise RuntimeError("no text")

    async def main() -> None:
        async with running(make_engine(model)) as served:
            monkeypatch.setattr("specdec.engine.text.IncrementalDetokenizer.push", fail)
            with pytest.raises(EngineDead, match="no text"):
                await collect(served, [1], SamplingParams(max_new_tokens=50))

    run(main())


def test_a_random_mix_of_arrivals_and_aborts_changes_no_token(model: PreTrainedModel) -> None:
    rng = random.Random(0)
    prompts = [[rng.randrange(96) for _ in range(rng.randint(1, 40))] for _ in range(24)]
    params = [
        SamplingParams(max_new_tokens=rng.randint(1, 40), temperature=rng.choice([0, 1.0]), seed=i) for i in range(24)
    ]

    async def client(served: AsyncEngine, i: int) -> list[AnswerChunk] | None:
        await asyncio.sleep(rng.random() * 0.2)
        if i % 3:
            return await collect(served, prompts[i], params[i])
        with served.submit([prompts[i]], params[i]) as answers:
            await anext(answers)
        return None

    async def main() -> list[Any]:
        async with running(make_engine(model, num_blocks=18)) as served:  # few blocks: some are preempted
            return await asyncio.gather(*(client(served, i) for i in range(24)))

    for i, chunks in enumerate(run(main())):
        if chunks is not None:
            assert answers(chunks, 1)[0][:4] == offline(model, prompts[i], params[i])[0][:4]


def chunk_of(index: int, *token_ids: int, error: Exception | None = None) -> AnswerChunk:
    finish_reason = None if error is None else "error"
    names = ["target"] * len(token_ids)
    return AnswerChunk(index, [str(t) for t in token_ids], [*token_ids], names, [], finish_reason, error=error)


def test_a_slow_reader_finds_what_came_meanwhile_in_one_chunk() -> None:
    """Of each answer; and what ends the iteration comes behind all that was there before it."""
    failure, death = SpecdecError("it failed"), EngineDead("all failed")
    cases: list[tuple[list[AnswerChunk | Exception], list[tuple[int, list[int]]], Exception | None]] = [
        ([chunk_of(0, 1), chunk_of(0, 2, 3), chunk_of(0, 4)], [(0, [1, 2, 3, 4])], None),
        ([chunk_of(0, 1), chunk_of(1, 7), chunk_of(0, 2)], [(1, [7]), (0, [1, 2])], None),
        ([chunk_of(0, 1), chunk_of(1, 7), chunk_of(0, error=failure), chunk_of(1, 8)], [(1, [7]), (0, [1])], failure),
        ([chunk_of(0, 1), chunk_of(0, 2), death], [(0, [1, 2])], death),
        ([death], [], death),
    ]

    async def read(come: Sequence[AnswerChunk | Exception], count: int, error: Exception | None) -> list[AnswerChunk]:
        answers = Answers(2, lambda answers: None)
        for item in come:
            answers.put(item)
        found = [await anext(answers) for _ in range(count)]
        if error is None:
            answers.put(chunk_of(0, 9))
            assert (await anext(answers)).token_ids == [9], "a reader that waits has each at once"
        else:
            with pytest.raises(SpecdecError) as raised:
                await anext(answers)
            assert raised.value is error
        return found

    for come, want, error in cases:
        found = run(read(come, len(want), error))
        assert [(chunk.index, chunk.token_ids) for chunk in found] == want
        assert [chunk.text for chunk in found] == ["".join(map(str, tokens)) for _, tokens in want]
