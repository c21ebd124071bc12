"""Who runs, who waits and who makes room: priorities, admission by predicted length, preemption."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from torch import Tensor
from transformers import PreTrainedModel

from specdec.cache.blocks import BlockPool
from specdec.cache.pages import KVPages
from specdec.engine.budget import NodeBudget
from specdec.engine.config import EngineConfig
from specdec.engine.lengths import FIRST_GUESS, WINDOW, LengthPredictor, peak_blocks
from specdec.engine.request import Request
from specdec.engine.scheduler import Scheduler
from specdec.engine.text import StopChecker
from specdec.models.batch import Batch
from specdec.params import SamplingParams
from tests.engines import Optimist, drain, make_engine, outputs, run
from tests.scripted import AdversarialDrafter, RandomDrafter

BLOCK = 16


def make_request(number: int, prompt_len: int, asked: int, priority: int = 0) -> Request:
    params = SamplingParams(max_new_tokens=asked)
    return Request(number, prompt_len, params, StopChecker(params), [0] * prompt_len, priority=priority)


def make_scheduler(num_blocks: int, **sizes: int) -> Scheduler:
    return Scheduler(EngineConfig(**sizes), BlockPool(num_blocks), NodeBudget(None, 1))


@dataclass
class Run:
    """What a simulated run of a scheduler came to."""

    num_steps: int
    num_preemptions: int
    usage: float
    started: list[int]


def simulate(scheduler: Scheduler, requests: Sequence[Request], lengths: Sequence[int], per_step: float = 1e9) -> Run:
    """Run requests whose answers have known lengths: a token a step, without a model. They arrive at a steady rate."""
    pool, coming, started = scheduler.pool, list(requests), list[int]()
    usage, num_steps = [], 0
    while coming or scheduler.running or scheduler.waiting:
        while coming and requests.index(coming[0]) < per_step * (num_steps + 1):
            scheduler.add(coming.pop(0))
        plan = scheduler.schedule()
        num_steps += 1
        assert plan.items or not scheduler.waiting, "nobody runs, though somebody waits"
        usage += [1 - pool.num_free / pool.num_blocks] * bool(scheduler.waiting)
        for item in plan.items:
            request = item.request
            started += [request.id] * (request.num_computed == 0 and request.num_output == 0)
            request.num_computed += item.num_causal + bool(item.max_nodes)
            if item.max_nodes:
                request.tokens.append(0)
                if request.num_output == lengths[requests.index(request)]:
                    request.finish_reason = "stop"
                    scheduler.release(request)
        pool.check_integrity(r.block_table for r in scheduler.running)
    assert pool.num_free == pool.num_blocks
    return Run(num_steps, scheduler.num_preemptions, sum(usage) / max(1, len(usage)), started)


class Pessimist(LengthPredictor):
    """Expects every answer to be as long as it may be."""

    def remaining(self, num_output: int, max_tokens: int) -> int:
        return max(1, max_tokens - num_output)


def mix(seed: int) -> tuple[list[Request], list[int]]:
    """300 requests: most answers short, some long; all ask for 512 tokens, since users don't know."""
    rng = random.Random(seed)
    lengths = [rng.randint(120, 400) if rng.random() < 0.2 else rng.randint(5, 80) for _ in range(300)]
    return [make_request(i, rng.randint(4, 100), 512) for i in range(300)], lengths


@pytest.mark.parametrize("seed", range(3))
def test_predicted_lengths_save_preemptions_and_keep_the_pool_full(seed: int) -> None:
    runs = {}
    for kind in (LengthPredictor, Optimist, Pessimist):
        scheduler = make_scheduler(120, max_num_seqs=64, max_num_batched_tokens=512)
        scheduler.lengths = kind()
        runs[kind.__name__] = simulate(scheduler, *mix(seed))
    predicted, optimist, pessimist = runs["LengthPredictor"], runs["Optimist"], runs["Pessimist"]
    assert optimist.num_preemptions > 100 and pessimist.num_preemptions == 0
    assert predicted.num_preemptions < 0.2 * optimist.num_preemptions
    assert predicted.usage > 0.8 > 1.5 * pessimist.usage
    assert predicted.num_steps < 1.15 * optimist.num_steps and predicted.num_steps < 0.7 * pessimist.num_steps
    assert predicted.started == sorted(predicted.started), "somebody was overtaken"


@pytest.mark.parametrize("num_blocks", [4, 5])
def test_nobody_makes_room_for_another_ones_drafts(num_blocks: int, tiny: PreTrainedModel) -> None:
    """The first has drafts for all blocks that are free when the second needs one for its own token."""
    prompts = [[7 * i % 97 for i in range(17)], [5 * i % 97 for i in range(15)]]
    params = [SamplingParams(max_new_tokens=12)] * 2
    size = {"num_blocks": num_blocks, "max_model_len": 48, "enable_prefix_caching": False}
    plain = make_engine(tiny, **size)
    want = outputs(run(plain, prompts, params))
    assert plain.scheduler.num_preemptions == 0
    for drafter in (RandomDrafter(), AdversarialDrafter({tuple(p): a for p, a in zip(prompts, want, strict=True)})):
        engine = make_engine(tiny, drafter, **size)
        requests = run(engine, prompts, params)
        assert outputs(requests) == want and engine.scheduler.num_preemptions == 0
        assert all(r.stats.num_draft_tokens for r in requests), "nothing was drafted"


def test_a_request_alone_is_always_admitted() -> None:
    """Even one that is expected to fill the pool, and each in its turn."""
    scheduler = make_scheduler(8, max_num_seqs=8)
    for _ in range(WINDOW):
        scheduler.lengths.observe(1000)
    requests = [make_request(i, 100, 28) for i in range(5)]
    assert simulate(scheduler, requests, [28] * 5).num_preemptions == 0


def test_a_long_prompt_is_not_overtaken_by_short_ones() -> None:
    requests = [make_request(i, 100 if i == 3 else 2, 20) for i in range(40)]
    done = simulate(make_scheduler(8, max_num_seqs=8), requests, [20] * 40, per_step=0.5)
    assert done.started == sorted(done.started)


def test_lengths_are_a_quantile_of_those_still_possible() -> None:
    lengths = LengthPredictor()
    assert lengths.remaining(0, 10_000) == FIRST_GUESS and lengths.remaining(0, 30) == 30
    assert lengths.remaining(FIRST_GUESS, 10_000) == FIRST_GUESS, "twice what it has"
    for length in range(1, 101):
        lengths.observe(length)
    assert lengths.remaining(0, 10_000) == 51
    assert lengths.remaining(50, 10_000) == 26
    assert lengths.remaining(50, 60) == 10
    assert lengths.remaining(100, 10_000) == FIRST_GUESS - 100
    assert lengths.remaining(400, 10_000) == 400 and lengths.remaining(60, 60) == 1
    for _ in range(WINDOW):
        lengths.observe(7)
    assert lengths.remaining(0, 10_000) == 7, "what is long past still counts"
    assert len(lengths._sorted) == len(lengths._ended) == WINDOW


def test_the_peak_is_that_of_a_simulation() -> None:
    rng = random.Random(0)
    for _ in range(50):
        # full last blocks and whole blocks of growth, so that nothing has to be rounded
        sequences = [(rng.randint(1, 9), BLOCK * rng.randint(1, 9)) for _ in range(rng.randint(1, 6))]
        used = [
            sum(held + time / BLOCK for held, remaining in sequences if remaining >= time)
            for time in range(9 * BLOCK + 1)
        ]
        assert peak_blocks(sum(held for held, _ in sequences), sequences, BLOCK) == pytest.approx(max(used))


def test_lower_priorities_go_first_and_make_room_last() -> None:
    scheduler = make_scheduler(8, max_num_seqs=2)
    requests = [make_request(i, 4, 4, priority) for i, priority in enumerate((1, 0, 1, -1, 0))]
    assert simulate(scheduler, requests, [4] * 5).started == [3, 1, 4, 0, 2]
    scheduler = make_scheduler(4, max_num_seqs=3)
    scheduler.lengths = Optimist()
    low, high, middle = (make_request(i, 15, 40, priority) for i, priority in enumerate((2, 0, 1)))
    for request in (low, high, middle):
        scheduler.add(request)
    gone = []
    while len(gone) < 2:
        plan = scheduler.schedule()
        gone += plan.preempted
        for item in plan.items:
            item.request.num_computed = len(item.request.tokens)
            item.request.tokens.append(0)
    assert gone == [low, middle] and scheduler.waiting == [middle, low] and scheduler.running == [high]


@pytest.mark.parametrize("drafter", [None, RandomDrafter()])
def test_priorities_change_no_token(drafter: RandomDrafter | None, tiny: PreTrainedModel) -> None:
    prompts = [[i + 1] * 20 for i in range(6)]
    params = SamplingParams(max_new_tokens=30)
    want = [outputs(run(make_engine(tiny), [p], [params]))[0] for p in prompts]
    engine = make_engine(tiny, drafter, num_blocks=8, max_model_len=64, max_num_seqs=4)
    engine.scheduler.lengths = Optimist()
    requests = [engine.add(p, params, priority=-i) for i, p in enumerate(prompts)]
    ended = []
    while engine.has_work:
        engine.step()
        engine.check_integrity()
        ended += [r.id for r in requests if r.finish_reason and r.id not in ended]
    assert outputs(requests) == want and engine.scheduler.num_preemptions
    assert set(ended[:2]) == {4, 5} and ended[-1] == 0
    drain(engine)


def test_rows_of_a_step_hold_trees_and_prompt_chunks_together(
    tiny: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A long prompt runs in chunks beside a decoding request's trees, never beyond the budget of rows."""
    engine = make_engine(tiny, RandomDrafter(), max_num_batched_tokens=24, max_num_seqs=4, max_nodes=32)
    forward, rows = engine.model.forward, list[int]()

    def counting(batch: Batch, pages: KVPages) -> Tensor:
        rows.append(len(batch.input_ids))
        return forward(batch, pages)

    monkeypatch.setattr(engine.model, "forward", counting)
    first = engine.add([5, 6, 7], SamplingParams(max_new_tokens=40))
    engine.step()
    long = engine.add(list(range(90)), SamplingParams(max_new_tokens=5))
    together = 0
    while long.num_output == 0:
        before = first.stats.num_draft_tokens, long.num_computed
        engine.step()
        together += first.stats.num_draft_tokens > before[0] and long.num_computed > before[1]
    assert together >= 4 and 20 < max(rows) <= 24
    drain(engine)
