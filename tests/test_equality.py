"""Speculation is invisible: tokens never depend on the drafter, the tree, the batch or the order of events.

Float64, where near ties vanish, so equality is exact.
"""

import random
from collections.abc import Callable

import pytest
import torch
from transformers import PreTrainedModel

from specdec.drafters.ngram import NGramDrafter
from specdec.drafters.protocol import Drafter
from specdec.params import SamplingParams
from tests.conftest import VOCAB
from tests.engines import Optimist, make_engine, outputs, run
from tests.hydra import random_hydra, random_recurrent
from tests.medusa import SIZE, random_medusa, successor, walking_medusa, walking_model
from tests.scripted import AdversarialDrafter, OracleDrafter, RandomDrafter, SometimesDrafter

PROMPTS = [
    [5, 6, 7, 8, 9, 5, 6, 7],
    [3],
    [11, 12, 13] * 9,
    list(range(20, 60)),
    [1, 1, 1, 1, 2],
    [90, 4, 90, 4, 90],
    list(range(64, 96)),
    [42, 17],
]
NUM_NEW = 16


def greedy(seed: int = 0) -> SamplingParams:
    return SamplingParams(max_new_tokens=NUM_NEW, seed=seed)


def sampled(seed: int = 0) -> SamplingParams:
    """A different mix of parameters for every seed."""
    rng = random.Random(seed)
    return SamplingParams(
        max_new_tokens=NUM_NEW,
        temperature=rng.choice([0.5, 1.0, 2.0]),
        top_k=rng.choice([0, 0, 5, 40]),
        top_p=rng.choice([1.0, 0.9, 0.6]),
        min_p=rng.choice([0.0, 0.0, 0.05]),
        seed=1000 + seed,
    )


@pytest.fixture(scope="module")
def alone(tiny: PreTrainedModel) -> dict[str, list[list[int]]]:
    """What plain decoding gives each prompt when nothing else runs."""
    return {
        kind: [outputs(run(make_engine(tiny), [prompt], [make(i)]))[0] for i, prompt in enumerate(PROMPTS)]
        for kind, make in (("greedy", greedy), ("sampled", sampled))
    }


DRAFTERS: dict[str, Callable[[PreTrainedModel, dict[tuple[int, ...], list[int]]], Drafter]] = {
    "ngram": lambda model, answers: NGramDrafter(),
    "medusa": lambda model, answers: random_medusa(model),
    "hydra": lambda model, answers: random_hydra(model),
    "recurrent": lambda model, answers: random_recurrent(model),
    "oracle chain": lambda model, answers: OracleDrafter(answers, "chain"),
    "oracle wide": lambda model, answers: OracleDrafter(answers, "wide"),
    "oracle ragged": lambda model, answers: OracleDrafter(answers, "ragged"),
    "adversarial chain": lambda model, answers: AdversarialDrafter(answers, "chain"),
    "adversarial wide": lambda model, answers: AdversarialDrafter(answers, "wide"),
    "random": lambda model, answers: RandomDrafter(),
    "sometimes": lambda model, answers: SometimesDrafter(answers, 0.7),
}


@pytest.mark.parametrize("kind, make", [("greedy", greedy), ("sampled", sampled)])
@pytest.mark.parametrize("batch_size, max_nodes", [(1, 64), (3, 9), (8, 2)])
@pytest.mark.parametrize("name", DRAFTERS)
def test_drafter_tree_and_batch_change_no_token(name, max_nodes, batch_size, kind, make, tiny, alone) -> None:  # type: ignore[no-untyped-def]
    answers = {tuple(prompt): tokens for prompt, tokens in zip(PROMPTS, alone[kind], strict=True)}
    drafter = DRAFTERS[name](tiny, answers)
    engine = make_engine(tiny, drafter, max_nodes=max_nodes, max_num_seqs=batch_size)
    requests = run(engine, PROMPTS, [make(i) for i in range(len(PROMPTS))])
    assert outputs(requests) == alone[kind]
    assert not getattr(drafter, "known", None), "the drafter still holds state of ended requests"
    lengths = [r.stats.mean_acceptance_length for r in requests]
    if name == "oracle chain":  # whole blocks were accepted …
        assert min(lengths) >= min(max_nodes, NUM_NEW) * 0.8
    if name.startswith("adversarial"):  # … and none
        assert max(lengths) == 1


@pytest.mark.parametrize("kind, make", [("greedy", greedy), ("sampled", sampled)])
def test_preemption_and_chunked_prompts_change_no_token(kind, make, tiny, alone) -> None:  # type: ignore[no-untyped-def]
    """CASES e2: a pool that is too small for the batch, and prompts longer than a step's budget."""
    answers = {tuple(prompt): tokens for prompt, tokens in zip(PROMPTS, alone[kind], strict=True)}
    for seed in range(4):
        drafter = SometimesDrafter(answers, 0.3, seed=seed)
        engine = make_engine(tiny, drafter, num_blocks=6, max_model_len=96, max_num_batched_tokens=16)
        engine.scheduler.lengths = Optimist()
        assert outputs(run(engine, PROMPTS, [make(i) for i in range(len(PROMPTS))])) == alone[kind]
        assert engine.scheduler.num_preemptions, "the pool was roomy enough: this test shows nothing"


def test_arrivals_aborts_and_rejections_in_any_order(tiny: PreTrainedModel, alone: dict[str, list[list[int]]]) -> None:
    """Random admits, steps and aborts: what isn't aborted gets its solo answer, and no block is lost."""
    answers = {tuple(prompt): tokens for prompt, tokens in zip(PROMPTS, alone["sampled"], strict=True)}
    for seed in range(3):
        rng = random.Random(seed)
        engine = make_engine(tiny, SometimesDrafter(answers, 0.6), num_blocks=10, max_model_len=96, max_num_seqs=4)
        live = []
        for _ in range(120):
            roll = rng.random()
            if roll < 0.3:
                i = rng.randrange(len(PROMPTS))
                live.append((i, engine.add(PROMPTS[i], sampled(i))))
            elif roll < 0.4 and live:
                engine.abort(rng.choice(live)[1])
            else:
                engine.step()
            engine.check_integrity()
        while engine.has_work:
            engine.step()
            engine.check_integrity()
        assert engine.pool.num_free == 10
        for i, request in live:
            got = request.tokens[request.prompt_len :]
            assert got == alone["sampled"][i][: len(got)]
            assert request.finish_reason == "abort" or len(got) == NUM_NEW


def test_seed_repeats_alone_and_in_any_batch(tiny: PreTrainedModel) -> None:
    """CASES c2: temperature 2, the same seed, 20 times."""
    params = SamplingParams(max_new_tokens=8, temperature=2.0, seed=7)
    want = outputs(run(make_engine(tiny), [PROMPTS[0]], [params]))[0]
    rng = random.Random(0)
    for _ in range(20):
        mates = rng.sample(PROMPTS, rng.randrange(4))
        engine = make_engine(tiny, RandomDrafter(rng.randrange(100)))
        requests = run(engine, [*mates, PROMPTS[0]], [sampled(rng.randrange(99)) for _ in mates] + [params])
        assert outputs(requests)[-1] == want


def test_different_seeds_and_positions_differ(tiny: PreTrainedModel) -> None:
    hot = [SamplingParams(max_new_tokens=16, temperature=2.0, seed=seed) for seed in range(8)]
    results = outputs(run(make_engine(tiny), [PROMPTS[0]] * 8, hot))
    assert len({tuple(tokens) for tokens in results}) == 8
    assert all(len(set(tokens)) > 4 for tokens in results)


@pytest.mark.parametrize("k", range(1, 9))
def test_degenerate_repeated_prompt(k: int, tiny: PreTrainedModel) -> None:
    """CASES a1: one token 48 times, n-gram drafts of k tokens."""
    prompt = [33] * 48
    want = outputs(run(make_engine(tiny), [prompt], [greedy()]))
    drafter = NGramDrafter(num_speculative_tokens=k)
    assert outputs(run(make_engine(tiny, drafter), [prompt], [greedy()])) == want


def test_tokens_equal_hugging_face_generate(tiny: PreTrainedModel) -> None:
    engine = make_engine(tiny, NGramDrafter())
    for prompt, tokens in zip(PROMPTS, outputs(run(engine, PROMPTS, [greedy()] * 8)), strict=True):
        ids = torch.tensor([prompt])
        hf = tiny.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=NUM_NEW, do_sample=False, pad_token_id=VOCAB - 1
        )
        assert tokens == hf[0, len(prompt) :].tolist()


@pytest.mark.parametrize("batch_size", [1, 4])
def test_medusa_reads_the_hidden_state_of_the_last_committed_token(batch_size: int) -> None:
    """Heads that are right after some tokens only: every forward emits just what their knowledge allows."""
    model = walking_model()
    knows = {token for token in range(SIZE) if token % 3}.__contains__
    engine = make_engine(model, walking_medusa(model, knows), max_num_seqs=batch_size, max_num_batched_tokens=48)
    prompts = [[1, 2], [50], list(range(40)), [9] * 5]
    for request in run(engine, prompts, [SamplingParams(max_new_tokens=40, seed=0)] * 4):
        want, blocks = [request.tokens[request.prompt_len - 1]], 0
        while len(want) <= 40:
            last = want[-2] if blocks else None  # the last committed token stands before the root
            num = 4 if last is not None and knows(last) else 1
            for _ in range(num):
                want.append(successor(want[-1]))
            blocks += 1
        assert outputs([request])[0] == want[1:41]
        assert request.stats.num_forwards == blocks
