"""Limits, stops inside a block, counters, and what the engine refuses."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from specdec.cache.pages import KVLayout
from specdec.drafters.ngram import NGramDrafter
from specdec.drafters.none import NoDrafter
from specdec.drafters.protocol import DraftQuery
from specdec.engine.config import EngineConfig, resolve_limits
from specdec.errors import ConfigError, InvalidRequest, SpecdecError
from specdec.outputs import TARGET, SpeculationStats
from specdec.params import SamplingParams
from specdec.verifier.tree import TokenTree, chain_parents
from tests.conftest import VOCAB, tiny_llama
from tests.engines import Optimist, drain, make_engine, outputs, run
from tests.scripted import AdversarialDrafter, OracleDrafter, RandomDrafter

PROMPT = [5, 6, 7, 8, 9]


@pytest.fixture(scope="module")
def answer(tiny: PreTrainedModel) -> list[int]:
    return outputs(run(make_engine(tiny), [PROMPT], [SamplingParams(max_new_tokens=32)]))[0]


def oracle(answer: list[int]) -> OracleDrafter:
    return OracleDrafter({tuple(PROMPT): answer})


@pytest.mark.parametrize("budget", range(1, 9))
def test_exact_length_when_whole_blocks_are_accepted(budget: int, tiny: PreTrainedModel, answer: list[int]) -> None:
    """CASES b2: budgets 1 to k + 2 with k = 6."""
    engine = make_engine(tiny, oracle(answer), max_nodes=7)
    (request,) = run(engine, [PROMPT], [SamplingParams(max_new_tokens=budget)])
    assert outputs([request])[0] == answer[:budget]
    assert request.finish_reason == "length"
    assert request.stats.num_output_tokens == budget


@pytest.mark.parametrize("where", range(9))
@pytest.mark.parametrize("num_eos", [1, 3])
def test_ends_at_an_eos_inside_the_block(where: int, num_eos: int, tiny: PreTrainedModel, answer: list[int]) -> None:
    """CASES b1: a token that plain decoding really gives is declared an EOS."""
    eos = answer[where]
    end = answer.index(eos) + 1
    others = [t for t in range(VOCAB) if t not in answer][: num_eos - 1]
    engine = make_engine(tiny, oracle(answer), eos_token_ids=[*others, eos])
    (request,) = run(engine, [PROMPT], [SamplingParams(max_new_tokens=32)])
    assert outputs([request])[0] == answer[:end]
    assert (request.finish_reason, request.stop_reason) == ("stop", None)
    assert len(request.proposers) == end
    ignoring = make_engine(tiny, oracle(answer), eos_token_ids=[eos])
    assert outputs(run(ignoring, [PROMPT], [SamplingParams(max_new_tokens=32, ignore_eos=True)]))[0] == answer


def test_stop_token_is_named(tiny: PreTrainedModel, answer: list[int]) -> None:
    stop = answer[4]
    engine = make_engine(tiny, oracle(answer))
    (request,) = run(engine, [PROMPT], [SamplingParams(max_new_tokens=32, stop_token_ids=[stop])])
    assert (request.finish_reason, request.stop_reason) == ("stop", stop)
    assert outputs([request])[0] == answer[: answer.index(stop) + 1]


def test_the_context_limit_ends_the_answer(tiny: PreTrainedModel, answer: list[int]) -> None:
    for drafter in (None, oracle(answer)):
        engine = make_engine(tiny, drafter, max_model_len=20, num_blocks=2)
        (request,) = run(engine, [PROMPT], [SamplingParams(max_new_tokens=32)])
        assert outputs([request])[0] == answer[:15]
        assert request.finish_reason == "length"


def test_draft_tails_give_their_blocks_back_at_every_step(tiny: PreTrainedModel, answer: list[int]) -> None:
    """CASES d1: rejected drafts of 63 tokens leave nothing behind."""
    engine = make_engine(tiny, AdversarialDrafter({tuple(PROMPT): answer}))
    request = engine.add(PROMPT, SamplingParams(max_new_tokens=32))
    while engine.has_work:
        engine.step()
        engine.check_integrity()
        used = engine.pool.num_blocks - engine.pool.num_free
        assert used == (-(-request.num_computed // 16) if request.finish_reason is None else 0)


def test_unused_slots_may_hold_nan(tiny: PreTrainedModel, answer: list[int]) -> None:
    engine = make_engine(tiny, AdversarialDrafter({tuple(PROMPT): answer}))
    for pages in (*engine.pages.k, *engine.pages.v):
        pages.fill_(torch.nan)
    assert outputs(run(engine, [PROMPT], [SamplingParams(max_new_tokens=32)]))[0] == answer


def test_logprobs_equal_one_plain_forward(tiny: PreTrainedModel, answer: list[int]) -> None:
    """CASES c3, with whole blocks accepted."""
    (request,) = run(make_engine(tiny, oracle(answer)), [PROMPT], [SamplingParams(max_new_tokens=20, logprobs=3)])
    ids = torch.tensor([PROMPT + answer[:20]])
    with torch.inference_mode():
        want = tiny(ids).logits[0, len(PROMPT) - 1 : -1].log_softmax(-1)
    got = request.completion().logprobs
    assert got is not None and len(got) == 20
    for row, entry in zip(want, got, strict=True):
        assert math.isclose(entry.logprob, float(row[entry.token_id]), abs_tol=1e-4)
        values, tokens = row.topk(3)
        assert list(entry.top) == tokens.tolist()
        assert all(math.isclose(a, float(b), abs_tol=1e-4) for a, b in zip(entry.top.values(), values, strict=True))


def test_proposers_and_counters_of_an_oracle(tiny: PreTrainedModel, answer: list[int]) -> None:
    (request,) = run(make_engine(tiny, oracle(answer), max_nodes=4), [PROMPT], [SamplingParams(max_new_tokens=10)])
    assert request.proposers == (["oracle-chain"] * 3 + [TARGET]) * 2 + ["oracle-chain"] * 2
    stats = request.completion().stats
    assert (stats.num_forwards, stats.num_output_tokens, stats.num_accepted_tokens) == (3, 10, 8)
    assert (stats.tried_by_depth, stats.accepted_by_depth) == ([3, 3, 2], [3, 3, 2])
    assert stats.mean_acceptance_length == pytest.approx(10 / 3)


@pytest.mark.parametrize("limit", [0, 1, 5])
def test_a_request_may_limit_its_own_drafts(limit: int, tiny: PreTrainedModel, answer: list[int]) -> None:
    params = [SamplingParams(max_new_tokens=24, num_speculative_tokens=k) for k in (limit, None)]
    limited, free = run(make_engine(tiny, OracleDrafter({tuple(PROMPT): answer})), [PROMPT, PROMPT], params)
    assert outputs([limited]) == outputs([free]) == [answer[:24]]
    assert len(limited.stats.accepted_by_depth) == limit < len(free.stats.accepted_by_depth)


def test_stats_add_up() -> None:
    total = SpeculationStats()
    for num_kept, depth in ((3, 2), (1, 1), (5, 4)):
        own = SpeculationStats()
        own.count(num_kept, depth, True, 4)
        total.add(own)
    assert (total.num_forwards, total.num_output_tokens, total.num_draft_tokens) == (3, 9, 12)
    assert total.accepted_by_depth == [3, 2, 1, 1] and total.num_accepted_tokens == 7


def test_stats_count_what_was_delivered_only() -> None:
    stats = SpeculationStats()
    assert (stats.mean_acceptance_length, stats.draft_acceptance_rate) == (0, 0)
    stats.count(num_kept=1, path_depth=0, leaf_reached=True, num_draft_tokens=0)  # plain
    assert (stats.num_drafts, stats.tried_by_depth) == (0, [])
    stats.count(num_kept=3, path_depth=2, leaf_reached=False, num_draft_tokens=5)  # two accepted, the third refused
    stats.count(num_kept=1, path_depth=0, leaf_reached=False, num_draft_tokens=5)  # none accepted
    stats.count(num_kept=1, path_depth=4, leaf_reached=True, num_draft_tokens=5)  # a stop at the first of four
    assert (stats.tried_by_depth, stats.accepted_by_depth) == ([3, 1, 1], [2, 1, 0])
    assert stats.num_accepted_tokens == 3
    assert stats.acceptance_by_depth == [pytest.approx(2 / 3), 1, 0]
    assert stats.draft_acceptance_rate == 3 / 15


class Misbehaving(NoDrafter):
    """Proposes whatever it is told to."""

    def __init__(self, tokens: list[list[int]]) -> None:
        self.trees = tokens

    def propose(self, queries: Sequence[DraftQuery]) -> TokenTree:
        return TokenTree.build(self.trees, [chain_parents(len(t)) for t in self.trees])


@pytest.mark.parametrize(
    "trees, message",
    [
        ([], "0 trees for 1 sequences"),
        ([[8]], "a root that is not the request's last token"),
        ([[9, 1, 2, 3]], "4 nodes where the budget is 3"),
        ([[9, VOCAB]], "a token id outside the vocabulary"),
    ],
)
def test_a_faulty_drafter_is_named(trees: list[list[int]], message: str, tiny: PreTrainedModel) -> None:
    engine = make_engine(tiny, Misbehaving(trees), max_nodes=3)
    request = engine.add(PROMPT, SamplingParams())
    drain(engine)
    with pytest.raises(SpecdecError, match=f"'none' failed for request 0: it proposed {message}"):
        request.check()


class Tampering(NoDrafter):
    """Proposes chains, one of whose fields it changes."""

    def __init__(self, field: str, value: object) -> None:
        self.change = {field: value}

    def propose(self, queries: Sequence[DraftQuery]) -> TokenTree:
        tokens = [[query.tokens[-1], 1, 2] for query in queries]
        return replace(TokenTree.build(tokens, [[-1, 0, 1]] * len(tokens)), **self.change)


@pytest.mark.parametrize(
    "field, value, message",
    [
        ("parents", torch.tensor([-1, 0, 2]), "sequence 0, node 2: parent 2"),
        ("ancestors", torch.tensor([1, 3, 6]), "sequence 0: depth or ancestors don't follow"),
        ("depth", torch.tensor([0, 1, 1]), "sequence 0: depth or ancestors don't follow"),
        ("depth", torch.tensor([0, 1]), r"\(2,\)"),
        ("tokens", torch.tensor([9.0, 1.0, 2.0]), "must be .3. int64"),
        ("cu_nodes", (0, 0), "must be .0. int64"),
        ("proposers", ("a",), "1 proposers are given for 3 nodes"),
    ],
)
def test_a_tree_that_is_none_ends_its_request_alone(
    field: str, value: object, message: str, tiny: PreTrainedModel
) -> None:
    """Its fields would change tokens, or end the step for all."""
    engine = make_engine(tiny, Tampering(field, value), max_nodes=3)
    request = engine.add(PROMPT, SamplingParams())
    drain(engine)
    with pytest.raises(SpecdecError, match=f"'none' failed for request 0: ValueError: .*{message}"):
        request.check()


@pytest.mark.parametrize(
    "prompt, message",
    [
        ([], "the prompt is empty"),
        ([1, VOCAB], f"token id {VOCAB} is outside the vocabulary of {VOCAB}"),
        ([-1], "token id -1 is outside"),
        ([1] * 256, "the prompt has 256 tokens and the context limit is 256"),
    ],
)
def test_bad_prompts_are_refused(prompt: list[int], message: str, tiny: PreTrainedModel) -> None:
    engine = make_engine(tiny)
    with pytest.raises(InvalidRequest, match=message):
        engine.add(prompt, SamplingParams())
    assert not engine.has_work


def test_stop_strings_need_a_tokenizer(tiny: PreTrainedModel) -> None:
    with pytest.raises(InvalidRequest, match="stop strings need a tokenizer"):
        make_engine(tiny).add(PROMPT, SamplingParams(stop=["x"]))


@pytest.mark.parametrize(
    "bad",
    [
        {"max_new_tokens": 0},
        {"max_new_tokens": 1.5},
        {"temperature": -0.1},
        {"temperature": math.inf},
        {"temperature": "hot"},
        {"top_k": -1},
        {"top_p": 0},
        {"top_p": 1.1},
        {"min_p": 1.0},
        {"n": 0},
        {"n": 5_000_000},
        {"seed": -1},
        {"seed": 2**63},
        {"stop": [""]},
        {"stop": ["x"] * 500_000},
        {"stop_token_ids": [-1]},
        {"logprobs": 10**9},
        {"logprobs": True},
        {"num_speculative_tokens": 64},
        {"num_speculative_tokens": -1},
        {"stop": None},
        {"stop": 5},
        {"stop": iter("ab")},
        {"ignore_eos": "no"},
        {"skip_special_tokens": 1},
        {"detokenize": None},
    ],
)
def test_absurd_parameters_are_refused_by_name(bad: dict[str, object]) -> None:
    with pytest.raises(InvalidRequest, match=next(iter(bad)) if "stop" not in bad else "stop"):
        SamplingParams(**bad)  # type: ignore[arg-type]


def test_one_stop_string_may_be_given_bare() -> None:
    assert SamplingParams(stop="\n").stop == ("\n",)


@pytest.mark.parametrize(
    "bad",
    [
        {"block_size": 17},
        {"num_blocks": 0},
        {"max_nodes": 65},
        {"max_num_seqs": 0},
        {"max_num_batched_tokens": 3},
        {"max_model_len": True},
        {"block_size": 16.0},
        {"gpu_memory_utilization": [0.9]},
    ],
)
def test_absurd_sizes_are_refused_by_name(bad: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(bad))):
        EngineConfig(**bad)


def test_limits_follow_the_model_and_the_pool() -> None:
    layout = KVLayout(2, 2, 8, torch.float64)
    auto = resolve_limits(EngineConfig(), [layout], 100)
    assert auto.max_model_len == 100 and auto.num_blocks * 16 * layout.bytes_per_token <= 1 << 30
    big = resolve_limits(EngineConfig(), [KVLayout(80, 64, 128, torch.float64)], 8192)
    assert big.num_blocks == 512  # never less than one whole request
    assert resolve_limits(EngineConfig(num_blocks=3), [layout], 100).max_model_len == 48
    with pytest.raises(ConfigError, match="max_model_len 101 is beyond the model's 100"):
        resolve_limits(EngineConfig(max_model_len=101), [layout], 100)
    with pytest.raises(ConfigError, match="give at least 7 blocks"):
        resolve_limits(EngineConfig(max_model_len=100, num_blocks=3), [layout], 100)


def test_abort_frees_at_once_and_twice_is_harmless(tiny: PreTrainedModel) -> None:
    engine = make_engine(tiny)
    running, waiting = engine.add(PROMPT, SamplingParams()), engine.add(PROMPT, SamplingParams())
    engine.step()
    engine.add(PROMPT, SamplingParams(max_new_tokens=3))
    for request in (running, waiting, running):
        engine.abort(request)
    engine.check_integrity()
    assert engine.pool.num_free == engine.pool.num_blocks
    assert running.completion().finish_reason == "abort" and len(running.completion().token_ids) == 1
    drain(engine)


def test_an_idle_step_does_nothing(tiny: PreTrainedModel) -> None:
    engine = make_engine(tiny)
    engine.step()
    assert engine.num_steps == 0


def test_a_long_tree_does_not_starve_the_others(tiny: PreTrainedModel, answer: list[int]) -> None:
    """Every running request takes part in every step, however many nodes the drafter wants."""
    engine = make_engine(tiny, oracle(answer), max_num_seqs=4, max_num_batched_tokens=8)
    requests = [engine.add([token], SamplingParams(max_new_tokens=6)) for token in range(4)]
    while any(r.num_output == 0 for r in requests):
        engine.step()
    before = [r.num_output for r in requests]
    engine.step()
    assert all(r.num_output > n or r.finish_reason for r, n in zip(requests, before, strict=True))
    drain(engine)


def test_padded_vocabulary_ids_are_never_emitted() -> None:
    """CASES i3: the head is wider than the tokenizer, and its padding rows win every argmax."""
    model = tiny_llama(seed=3)
    with torch.no_grad():
        model.lm_head.weight[90:] *= 50
    engine = make_engine(model, num_real_tokens=90)
    hot = SamplingParams(max_new_tokens=40, temperature=2.0, seed=1)
    requests = run(engine, [PROMPT, PROMPT], [SamplingParams(max_new_tokens=40), hot])
    assert max(max(tokens) for tokens in outputs(requests)) < 90


@pytest.mark.parametrize("length", [1, 15, 16, 17, 40])
def test_n_answers_share_the_blocks_of_their_prompt(length: int, tiny: PreTrainedModel) -> None:
    """Each is the answer that its seed gives alone; the prompt's full blocks are there once."""
    prompt = [(7 * i) % VOCAB for i in range(length)]
    params = [SamplingParams(max_new_tokens=12, temperature=1.5, seed=seed) for seed in range(4)]
    want = [outputs(run(make_engine(tiny), [prompt], [p]))[0] for p in params]
    for drafter in (None, NGramDrafter(), RandomDrafter()):
        engine = make_engine(tiny, drafter)
        first = engine.add(prompt, params[0])
        requests = [first, *(engine.add(prompt, p) for p in params[1:])]
        for pages in (*engine.pages.k, *engine.pages.v):
            pages.fill_(torch.nan)
        while any(r.num_output == 0 for r in requests):
            engine.step()
            engine.check_integrity()
        full = (length - 1) // 16
        held = {block for r in requests if r.finish_reason is None for block in r.block_table[:full]}
        assert len(held) == full
        engine.abort(first)  # its blocks live on in the others
        drain(engine)
        assert outputs(requests)[1:] == want[1:]
        assert outputs([first])[0] == want[0][: first.num_output]


def test_n_answers_under_preemption(tiny: PreTrainedModel) -> None:
    prompt = list(range(40))
    params = [SamplingParams(max_new_tokens=40, temperature=1.5, seed=seed) for seed in range(4)]
    want = [outputs(run(make_engine(tiny), [prompt], [p]))[0] for p in params]
    engine = make_engine(tiny, RandomDrafter(), num_blocks=8, max_model_len=96)
    engine.scheduler.lengths = Optimist()
    first = engine.add(prompt, params[0])
    requests = [first, *(engine.add(prompt, p) for p in params[1:])]
    drain(engine)
    assert outputs(requests) == want
    assert engine.scheduler.num_preemptions
