"""Processors: each means what transformers' own means, at every node of a tree, with that node's own prefix."""

import math
import random
from collections.abc import Callable, Sequence
from functools import lru_cache

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import LogitsProcessorList, PreTrainedModel
from transformers.generation.logits_process import (
    LogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
)

from specdec.drafters.ngram import NGramDrafter
from specdec.errors import InvalidRequest, SpecdecError
from specdec.params import MAX_BAD_WORDS, MAX_NGRAM_SIZE, MAX_TOKEN_IDS, SamplingParams
from specdec.verifier.nodes import NodeContext, VerifyQuery
from specdec.verifier.processors import process_logits
from specdec.verifier.rules import CoupledRule
from specdec.verifier.tree import TokenTree
from tests.conftest import OLD_TRANSFORMERS, VOCAB, tiny_llama
from tests.engines import drain, make_engine, outputs, run
from tests.scripted import AdversarialDrafter, OracleDrafter, RandomDrafter

V = 12
EOS = (3, 7)
PROMPT = [5, 6, 7, 8, 9, 5, 6, 7]
NUM_NEW = 16


# --- one processor against transformers' ----------------------------------------------------------------------


class Presence(LogitsProcessor):
    """OpenAI's formula, which transformers doesn't have, counted token by token."""

    def __init__(self, presence: float, frequency: float, prompt_len: int) -> None:
        self.presence, self.frequency, self.prompt_len = presence, frequency, prompt_len

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        output = input_ids[0, self.prompt_len :].tolist()
        penalties = [
            self.frequency * output.count(token) + self.presence * (token in output) for token in range(scores.shape[1])
        ]
        return scores - torch.tensor([penalties], dtype=scores.dtype)


class Recency(LogitsProcessor):
    """A user's own: reads its prefix, and writes into what it gets."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        for age, token in enumerate(input_ids[0].tolist()[::-1][:6]):
            scores[0, token] -= 3 / (1 + age)
        return scores


BAD_WORDS = [[2], [3], [1, 4], [4, 4], [0, 1, 2], [5, 3], [1, 2, 3, 4, 5]]  # [3] alone is an EOS: ignored
ALLOWED = [0, 1, 2, 3, 5, 8, 11]

SAME: dict[str, tuple[dict[str, object], Callable[[int], LogitsProcessor]]] = {
    "logit_bias": (
        {"logit_bias": {4: 2.5, 0: -3.0}},
        lambda prompt_len: SequenceBiasLogitsProcessor({(4,): 2.5, (0,): -3.0}),
    ),
    "repetition": ({"repetition_penalty": 1.7}, lambda prompt_len: RepetitionPenaltyLogitsProcessor(1.7)),
    "repetition below 1": ({"repetition_penalty": 0.6}, lambda prompt_len: RepetitionPenaltyLogitsProcessor(0.6)),
    "presence": ({"presence_penalty": 1.5}, lambda prompt_len: Presence(1.5, 0, prompt_len)),
    "frequency": ({"frequency_penalty": -0.5}, lambda prompt_len: Presence(0, -0.5, prompt_len)),
    "both": (
        {"presence_penalty": -1.0, "frequency_penalty": 0.75},
        lambda prompt_len: Presence(-1.0, 0.75, prompt_len),
    ),
    "no repeat 1": ({"no_repeat_ngram_size": 1}, lambda prompt_len: NoRepeatNGramLogitsProcessor(1)),
    "no repeat 2": ({"no_repeat_ngram_size": 2}, lambda prompt_len: NoRepeatNGramLogitsProcessor(2)),
    "no repeat 3": ({"no_repeat_ngram_size": 3}, lambda prompt_len: NoRepeatNGramLogitsProcessor(3)),
    "bad words": ({"bad_words_ids": BAD_WORDS}, lambda prompt_len: NoBadWordsLogitsProcessor(BAD_WORDS, list(EOS))),
    "min_new_tokens": (
        {"min_new_tokens": 6},
        lambda prompt_len: MinNewTokensLengthLogitsProcessor(prompt_len, 6, list(EOS)),
    ),
    "allowed": (
        {"allowed_token_ids": ALLOWED},
        lambda prompt_len: PrefixConstrainedLogitsProcessor(lambda batch, ids: ALLOWED, 1),
    ),
    "suppress": ({"suppress_tokens": [9, 1]}, lambda prompt_len: SuppressTokensLogitsProcessor([9, 1])),
    "own": ({"logits_processors": [Recency()]}, lambda prompt_len: Recency()),
}


def random_node(rng: random.Random, sequence: int = 0, **params: object) -> tuple[NodeContext, list[int], int]:
    """A node, its prefix, and how much of it is the prompt."""
    variety = rng.choice([2, 5, V])  # few different tokens, so that n-grams come again
    prefix = [rng.randrange(variety) for _ in range(rng.randint(1, 14))]
    prompt_len = rng.randint(1, len(prefix))
    root = rng.randint(prompt_len, len(prefix))
    asked = SamplingParams(**({"seed": 0} | params))  # type: ignore[arg-type]
    query = VerifyQuery(asked, prefix[:root], root - prompt_len, EOS)
    return NodeContext(sequence, query, tuple(prefix[root:])), prefix, prompt_len


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", [pytest.param(n, marks=OLD_TRANSFORMERS) if n == "bad words" else n for n in SAME])
def test_scores_are_those_of_transformers(name: str, dtype: torch.dtype) -> None:
    """Rows of many prefixes at once, among rows that ask for nothing."""
    rng, generator = random.Random(name), torch.Generator().manual_seed(0)
    params, make = SAME[name]
    cases = [random_node(rng, row, **(params if row % 3 else {})) for row in range(150)]
    logits = 3 * torch.randn(len(cases), V, generator=generator, dtype=dtype)
    before = logits.clone()
    scores = process_logits(logits, [node for node, _, _ in cases], V)
    assert torch.equal(logits, before)
    changed = 0
    for row, (node, prefix, prompt_len) in enumerate(cases):
        want = logits[row : row + 1]
        if row % 3:
            want = make(prompt_len)(torch.tensor([prefix]), want.clone())
        torch.testing.assert_close(scores[row : row + 1], want, rtol=0, atol=1e-6 if dtype == torch.float32 else 1e-12)
        assert torch.equal(process_logits(logits[row : row + 1], [node], V)[0], scores[row]), "neighbours matter"
        changed += not torch.equal(scores[row], logits[row])
    assert changed > 20, "the processor hardly did anything: this test shows nothing"


@OLD_TRANSFORMERS
def test_the_order_is_that_of_transformers() -> None:
    """All at once, where another order gives other scores."""
    rng = random.Random(1)
    everything = {
        "logit_bias": {4: 2.5, 0: -3.0},
        "repetition_penalty": 1.7,
        "no_repeat_ngram_size": 3,
        "bad_words_ids": BAD_WORDS,
        "min_new_tokens": 6,
        "suppress_tokens": [9, 1],
        "logits_processors": [Recency()],
        "temperature": 0.5,
        "top_k": 4,
    }
    for _ in range(60):
        node, prefix, prompt_len = random_node(rng, **everything)
        logits = 3 * torch.randn(1, V, dtype=torch.float32)
        chain = LogitsProcessorList(
            [
                SequenceBiasLogitsProcessor({(4,): 2.5, (0,): -3.0}),
                RepetitionPenaltyLogitsProcessor(1.7),
                NoRepeatNGramLogitsProcessor(3),
                NoBadWordsLogitsProcessor(BAD_WORDS, list(EOS)),
                MinNewTokensLengthLogitsProcessor(prompt_len, 6, list(EOS)),
                SuppressTokensLogitsProcessor([9, 1]),
                Recency(),
                TemperatureLogitsWarper(0.5),
                TopKLogitsWarper(4),
            ]
        )
        want = chain(torch.tensor([prefix]), logits.clone())
        torch.testing.assert_close(process_logits(logits, [node], V), want, rtol=1e-6, atol=1e-6)


def test_one_penalty_counts_each_token_of_prompt_output_and_path_and_the_other_only_output_and_path() -> None:
    query = VerifyQuery(SamplingParams(frequency_penalty=0.5, presence_penalty=1.0), [1, 1, 2, 3, 3], 3)
    scores = process_logits(torch.zeros(1, 6), [NodeContext(0, query, (3, 4))], 6)
    assert scores.tolist() == [[0, 0, -1.5, -2.5, -1.5, 0]]
    query = VerifyQuery(SamplingParams(repetition_penalty=2.0), [1, 1, 2, 3, 3], 3)
    scores = process_logits(torch.tensor([[1.0, 1, 1, -1, 1, 1]]), [NodeContext(0, query, (3, 4))], 6)
    assert scores.tolist() == [[1, 0.5, 0.5, -2, 0.5, 1]]


def test_the_floor_also_masks_stop_tokens_but_no_eos_that_is_ignored() -> None:
    def banned(position: int, **params: object) -> list[int]:
        query = VerifyQuery(SamplingParams(min_new_tokens=2, **params), [1] * (position + 1), position, (3, 99))  # type: ignore[arg-type]
        scores = process_logits(torch.zeros(1, 6), [NodeContext(0, query)], 6)
        return (scores[0] == -math.inf).nonzero().flatten().tolist()

    assert banned(1, stop_token_ids=[5]) == [3, 5]
    assert banned(1, stop_token_ids=[5], ignore_eos=True) == [5]
    assert banned(2, stop_token_ids=[5]) == []


def test_padding_ids_stay_dropped_whatever_a_processor_returns() -> None:
    query = VerifyQuery(SamplingParams(logits_processors=[lambda ids, scores: torch.ones_like(scores)]), [1], 0)
    scores = process_logits(torch.zeros(1, 6), [NodeContext(0, query)], 4)
    assert scores.tolist() == [[1, 1, 1, 1, -math.inf, -math.inf]]


def test_half_precision_is_penalised_in_float32() -> None:
    query = VerifyQuery(SamplingParams(repetition_penalty=1.1, logit_bias={0: 0.001}), [1], 0)
    scores = process_logits(torch.full((1, 4), 5.0).bfloat16(), [NodeContext(0, query)], 4)
    assert scores.dtype == torch.float32
    torch.testing.assert_close(scores, torch.tensor([[5.001, 5 / 1.1, 5, 5]]))


# --- speculative = plain --------------------------------------------------------------------------------------


BIAS = {token: 6.0 for token in range(0, VOCAB, 7)}
ASKED: dict[str, dict[str, object]] = {
    "logit_bias": {"logit_bias": BIAS},
    "repetition": {"repetition_penalty": 1.5},
    "presence": {"presence_penalty": 2.0, "allowed_token_ids": range(6)},  # few tokens, so that they come again
    "frequency": {"frequency_penalty": 1.0, "allowed_token_ids": range(6)},
    "no repeat": {"no_repeat_ngram_size": 2, "allowed_token_ids": range(8)},
    "bad words": {"bad_words_ids": [[a, b] for a in range(6) for b in range(3)], "allowed_token_ids": range(6)},
    "min_new_tokens": {"min_new_tokens": 9, "stop_token_ids": range(0, VOCAB, 2)},
    "suppress": {"suppress_tokens": range(40)},
    "allowed": {"allowed_token_ids": range(30)},
    "own": {"logits_processors": [Recency()], "logit_bias": {token: 8.0 for token in range(5)}},
}
DRAFTERS = {
    "oracle": lambda answers: OracleDrafter(answers, "wide"),
    "ragged": lambda answers: OracleDrafter(answers, "ragged"),
    "random": lambda answers: RandomDrafter(),
    "adversarial": lambda answers: AdversarialDrafter(answers, "chain"),
    "ngram": lambda answers: NGramDrafter(),
}
KINDS: dict[str, dict[str, object]] = {"greedy": {}, "sampled": {"temperature": 1.5, "top_p": 0.95}}


@lru_cache(maxsize=2)
def small(seed: int = 0) -> PreTrainedModel:
    return tiny_llama(seed, num_hidden_layers=1)


def answer(params: SamplingParams, eos: Sequence[int] = ()) -> list[int]:
    return outputs(run(make_engine(small(), eos_token_ids=eos), [PROMPT], [params]))[0]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ASKED)
def test_no_drafter_changes_a_token(name: str, kind: str) -> None:
    params = SamplingParams(max_new_tokens=NUM_NEW, seed=11, **(KINDS[kind] | ASKED[name]))  # type: ignore[arg-type]
    want = answer(params)
    assert want != answer(SamplingParams(max_new_tokens=NUM_NEW, seed=11, **KINDS[kind])), "the processor did nothing"  # type: ignore[arg-type]
    others = [
        SamplingParams(max_new_tokens=NUM_NEW, seed=5),
        SamplingParams(max_new_tokens=NUM_NEW, repetition_penalty=1.3),
    ]
    for drafter_name, make in DRAFTERS.items():
        drafter = make({tuple(PROMPT): want})
        request, *_ = run(make_engine(small(), drafter, max_nodes=24), [PROMPT, [3, 4], [8, 9]], [params, *others])
        assert outputs([request])[0] == want, drafter_name
        if drafter_name == "oracle":  # whole blocks were accepted, each node under its own prefix
            assert request.stats.mean_acceptance_length >= 4
        if drafter_name == "adversarial":
            assert request.stats.mean_acceptance_length == 1


def test_speculative_tokens_equal_transformers_generate(tiny: PreTrainedModel) -> None:
    asked = {"repetition_penalty": 1.4, "no_repeat_ngram_size": 2, "bad_words_ids": [[40], [1, 2]], "min_new_tokens": 7}
    free = outputs(run(make_engine(tiny), [PROMPT], [SamplingParams(max_new_tokens=NUM_NEW)]))[0]
    eos = free[3]
    ids = torch.tensor([PROMPT])
    hf = tiny.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=NUM_NEW,
        do_sample=False,
        eos_token_id=eos,
        pad_token_id=VOCAB - 1,
        suppress_tokens=[41, 42],
        logits_processor=LogitsProcessorList([Recency()]),
        return_dict_in_generate=True,
        output_scores=True,
        **asked,
    )
    want = hf.sequences[0, len(PROMPT) :].tolist()
    params = SamplingParams(
        max_new_tokens=NUM_NEW,
        suppress_tokens=[41, 42],
        logits_processors=[Recency()],
        **asked,  # type: ignore[arg-type]
    )
    for drafter in (None, OracleDrafter({tuple(PROMPT): want}, "wide"), RandomDrafter()):
        engine = make_engine(tiny, drafter, eos_token_ids=[eos])
        request = engine.add(PROMPT, params, keep_scores=True)
        drain(engine)
        assert outputs([request])[0] == want
        scores = torch.cat(request.scores)
        assert scores.shape == (len(want), VOCAB)  # transformers norms and rotates in float32
        torch.testing.assert_close(scores.float(), torch.cat(hf.scores), rtol=0, atol=1e-3)


token_ids = st.integers(0, 15)
COMBINATIONS = st.fixed_dictionaries(
    {},
    optional={
        "temperature": st.sampled_from([0.7, 1.0, 2.0]),
        "top_k": st.sampled_from([3, 10]),
        "top_p": st.sampled_from([0.5, 0.9]),
        "min_p": st.just(0.05),
        "min_new_tokens": st.integers(0, 16),
        "stop_token_ids": st.lists(token_ids, max_size=3),
        "ignore_eos": st.booleans(),
        "repetition_penalty": st.sampled_from([0.5, 1.2, 3.0]),
        "presence_penalty": st.sampled_from([-2.0, 0.5, 2.0]),
        "frequency_penalty": st.sampled_from([-0.5, 0.3, 2.0]),
        "logit_bias": st.dictionaries(token_ids, st.sampled_from([-20.0, 3.0, 8.0]), max_size=4),
        "no_repeat_ngram_size": st.integers(2, 4),
        "bad_words_ids": st.lists(st.lists(token_ids, min_size=1, max_size=3), max_size=3),
        "suppress_tokens": st.lists(token_ids, max_size=3),
        "allowed_token_ids": st.just(range(16)),
        "logits_processors": st.just([Recency()]),
    },
)


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(asked=COMBINATIONS, name=st.sampled_from(sorted(DRAFTERS)), eos=token_ids, max_nodes=st.integers(2, 24))
def test_combinations_speculate_unseen(asked: dict[str, object], name: str, eos: int, max_nodes: int) -> None:
    params = SamplingParams(max_new_tokens=16, seed=1, **asked)  # type: ignore[arg-type]
    plain = make_engine(small(), eos_token_ids=[eos])
    want = plain.add(PROMPT, params, keep_scores=True)
    drain(plain)
    tokens = want.tokens[len(PROMPT) :]
    engine = make_engine(small(), DRAFTERS[name]({tuple(PROMPT): tokens}), eos_token_ids=[eos], max_nodes=max_nodes)
    got = engine.add(PROMPT, params, keep_scores=True)
    drain(engine)
    assert (got.tokens, got.finish_reason, got.stop_reason) == (want.tokens, want.finish_reason, want.stop_reason)
    torch.testing.assert_close(torch.cat(got.scores), torch.cat(want.scores), rtol=0, atol=1e-9)
    assert len(torch.cat(got.scores)) == len(tokens)


# --- cases from the field -------------------------------------------------------------------------------------


@pytest.mark.parametrize("floor", range(10))
@pytest.mark.parametrize("make", [lambda a: None, lambda a: OracleDrafter(a), lambda a: RandomDrafter()])
def test_eos_is_masked_on_every_node_until_the_floor_and_no_later(floor: int, make: Callable) -> None:  # type: ignore[type-arg]
    """CASES b4: the target wants its EOS at every position."""
    eos = 17
    wanted = SamplingParams(max_new_tokens=NUM_NEW, min_new_tokens=floor, logit_bias={eos: 1000.0})
    want = answer(SamplingParams(max_new_tokens=max(floor, 1), suppress_tokens=[eos]))[:floor] + [eos]
    drafter = make({tuple(PROMPT): want})
    (request,) = run(make_engine(small(), drafter, eos_token_ids=[eos]), [PROMPT], [wanted])
    assert outputs([request])[0] == want
    assert request.finish_reason == "stop"
    if isinstance(drafter, OracleDrafter):
        assert request.stats.num_forwards == 1


def test_penalties_have_full_strength_at_every_depth_of_a_block() -> None:
    """CASES c1, and "penalties strength divided by the block length": the scores at depth d, computed by hand."""
    path = [4, 4, 2, 4]
    params = SamplingParams(frequency_penalty=0.5, presence_penalty=0.25)
    query = VerifyQuery(params, [9, 4], 1, keep_scores=True)  # 9 is the prompt, 4 the output
    logits = torch.zeros(5, V, dtype=torch.float64)
    for row, token in enumerate([*path, 0]):
        logits[row, token] = 10
    tree = TokenTree.build([[4, *path]], [[-1, 0, 1, 2, 3]])
    (accepted,) = CoupledRule()(tree, logits, [query], V)
    assert accepted.tokens == (*path, 0)
    assert accepted.scores is not None
    num_fours, num_twos = [1, 2, 3, 3, 4], [0, 0, 0, 1, 1]
    taken = logits - accepted.scores
    assert taken[:, 4].tolist() == [0.25 + 0.5 * n for n in num_fours]
    assert taken[:, 2].tolist() == [0.25 * (n > 0) + 0.5 * n for n in num_twos]
    assert taken[:, [0, 1, 9]].count_nonzero() == 0


def test_a_token_penalised_by_its_own_branch_alone() -> None:
    """CASES c1: a sibling that was not taken counts for nothing."""
    params = SamplingParams(presence_penalty=2.0)
    logits = torch.zeros(4, V)
    logits[0, 5] = 10  # the second child is taken
    logits[2, 6], logits[2, 5] = 1.5, 3  # 6 stands in the other branch: unpenalised; 5 is the path: 3 - 2
    tree = TokenTree.build([[1, 6, 5, 6]], [[-1, 0, 0, 1]])
    (accepted,) = CoupledRule()(tree, logits, [VerifyQuery(params, [0, 1], 1)], V)
    assert (accepted.path, accepted.tokens) == ((0, 2), (5, 6))


@pytest.mark.parametrize("kind", KINDS)
def test_an_own_processor_sees_each_nodes_prefix_once_in_order(kind: str) -> None:
    seen: list[list[int]] = []

    def watch(input_ids: Tensor, scores: Tensor) -> Tensor:
        assert (input_ids.dtype, input_ids.shape[0], scores.shape) == (torch.int64, 1, (1, VOCAB))
        seen.append(input_ids[0].tolist())
        input_ids.zero_()  # what it gets is its own
        return scores

    for make in DRAFTERS.values():
        want = answer(SamplingParams(max_new_tokens=NUM_NEW, seed=3, **KINDS[kind]))  # type: ignore[arg-type]
        seen.clear()
        drafter = make({tuple(PROMPT): want[:-1]})  # else the last block is one longer than asked for
        params = SamplingParams(max_new_tokens=NUM_NEW, seed=3, logits_processors=[watch], **KINDS[kind])  # type: ignore[arg-type]
        (request,) = run(make_engine(small(), drafter), [PROMPT], [params])
        assert outputs([request])[0] == want
        assert seen[:NUM_NEW] == [PROMPT + want[:n] for n in range(NUM_NEW)]


def test_rejected_nodes_are_not_processed() -> None:
    calls: list[int] = []

    def count(input_ids: Tensor, scores: Tensor) -> Tensor:
        calls.append(input_ids.shape[1])
        return scores

    tree = TokenTree.build([[1, 2, 3, 4, 5]], [[-1, 0, 0, 1, 2]])
    logits = torch.zeros(5, V)
    logits[0, 3] = logits[2, 9] = 1
    (accepted,) = CoupledRule()(tree, logits, [VerifyQuery(SamplingParams(logits_processors=[count]), [8, 1], 1)], V)
    assert accepted.tokens == (3, 9)
    assert calls == [2, 3]


def test_logprobs_are_the_targets_before_processing() -> None:
    asked = {"repetition_penalty": 2.0, "temperature": 0.5, "seed": 2, "max_new_tokens": 8, "logprobs": 2}
    (request,) = run(make_engine(small(), RandomDrafter()), [PROMPT], [SamplingParams(**asked)])  # type: ignore[arg-type]
    with torch.no_grad():
        logp = small()(torch.tensor([request.tokens])).logits[0, len(PROMPT) - 1 : -1].log_softmax(-1)
    tokens = torch.tensor(request.tokens[len(PROMPT) :])
    got = torch.tensor([entry.logprob for entry in request.logprobs], dtype=torch.float64)
    torch.testing.assert_close(got, logp.gather(1, tokens[:, None])[:, 0], rtol=0, atol=1e-4)


def test_scores_are_kept_only_for_the_tokens_delivered_and_only_if_asked() -> None:
    want = answer(SamplingParams(max_new_tokens=NUM_NEW))
    engine = make_engine(small(), OracleDrafter({tuple(PROMPT): want}), eos_token_ids=[want[5]])
    kept = engine.add(PROMPT, SamplingParams(max_new_tokens=NUM_NEW), keep_scores=True)
    dropped = engine.add(PROMPT, SamplingParams(max_new_tokens=NUM_NEW))
    drain(engine)
    end = want.index(want[5]) + 1
    assert torch.cat(kept.scores).argmax(-1).tolist() == want[:end]
    assert dropped.scores == []


# --- refused by name ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"min_new_tokens": -1}, "min_new_tokens must be a whole number, at least 0, not -1"),
        ({"min_new_tokens": 9, "max_new_tokens": 8}, r"min_new_tokens \(9\) must be at most max_new_tokens \(8\)"),
        ({"repetition_penalty": 0.0}, "repetition_penalty must be a number between 0.01 and 100, not 0.0"),
        ({"repetition_penalty": math.inf}, "repetition_penalty must be a number"),
        ({"presence_penalty": 2.1}, "presence_penalty must be a number between -2 and 2, not 2.1"),
        ({"frequency_penalty": math.nan}, "frequency_penalty must be a number between -2 and 2, not nan"),
        ({"logit_bias": [1, 2]}, r"logit_bias must map token ids to numbers, not be \[1, 2\]"),
        ({"logit_bias": {-1: 2.0}}, "logit_bias must be a whole number, at least 0, not -1"),
        ({"logit_bias": {"5": 2.0}}, "logit_bias must be a whole number, at least 0, not '5'"),
        ({"logit_bias": {5: 1e5}}, r"logit_bias\[5\] must be a number between -10000 and 10000, not 100000.0"),
        ({"logit_bias": dict.fromkeys(range(MAX_TOKEN_IDS + 1), 0.0)}, "logit_bias has 16385 entries; at most 16384"),
        ({"no_repeat_ngram_size": MAX_NGRAM_SIZE + 1}, "no_repeat_ngram_size must be a whole number, between 0 and 64"),
        ({"bad_words_ids": [[1], []]}, "bad_words_ids holds an empty word"),
        ({"bad_words_ids": [1, 2]}, "bad_words_ids must be a list, not 1"),
        ({"bad_words_ids": [[1]] * (MAX_BAD_WORDS + 1)}, "bad_words_ids has 1025 entries; at most 1024"),
        ({"bad_words_ids": [range(65)]}, "bad_words_ids has 65 entries; at most 64"),
        ({"suppress_tokens": range(10**12)}, "suppress_tokens has 1000000000000 entries; at most 16384 are allowed"),
        ({"suppress_tokens": "12"}, "suppress_tokens must be a list, not '12'"),
        ({"suppress_tokens": [1.5]}, "suppress_tokens must be a whole number, at least 0, not 1.5"),
        ({"stop_token_ids": range(10**6)}, "stop_token_ids has 1000000 entries; at most 16384 are allowed"),
        ({"allowed_token_ids": []}, "allowed_token_ids is empty"),
        ({"allowed_token_ids": [True]}, "allowed_token_ids must be a whole number, at least 0, not True"),
        ({"logits_processors": [3]}, r"logits_processors must hold callables of \(prefix, scores\), not \[3\]"),
        ({"logits_processors": Recency()}, "logits_processors must be a list"),
    ],
)
def test_values_out_of_bounds_are_refused_by_name(asked: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        SamplingParams(**asked)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"stop_token_ids": [97]}, "stop_token_ids holds token id 97, outside the vocabulary of 97 tokens"),
        ({"logit_bias": {10**6: 1.0}}, "logit_bias holds token id 1000000, outside the vocabulary of 97 tokens"),
        ({"suppress_tokens": [1, 97]}, "suppress_tokens holds token id 97"),
        ({"allowed_token_ids": [1, 98]}, "allowed_token_ids holds token id 98"),
        ({"bad_words_ids": [[1], [2, 99]]}, "bad_words_ids holds token id 99"),
        ({"allowed_token_ids": [4, 5], "suppress_tokens": [4], "bad_words_ids": [[5]]}, "leave no token to choose"),
        ({"allowed_token_ids": [17], "min_new_tokens": 1}, "leave no token to choose"),
        ({"suppress_tokens": range(97)}, "leave no token to choose"),
        ({"allowed_token_ids": [96]}, "leave no token to choose"),  # it pads the vocabulary
    ],
)
def test_parameters_that_do_not_fit_the_vocabulary_are_refused_before_any_work(
    asked: dict[str, object], message: str
) -> None:
    """CASES h1: and neighbours are unchanged."""
    engine = make_engine(small(), RandomDrafter(), eos_token_ids=[17], num_real_tokens=96)
    neighbour = engine.add(PROMPT, SamplingParams(max_new_tokens=4))
    with pytest.raises(InvalidRequest, match=message):
        engine.add(PROMPT, SamplingParams(**asked))  # type: ignore[arg-type]
    drain(engine)
    assert outputs([neighbour])[0] == answer(SamplingParams(max_new_tokens=4))


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"allowed_token_ids": [4], "no_repeat_ngram_size": 1}, "own parameters leave no token .* output position 1;"),
        ({"logits_processors": [lambda ids, scores: scores - math.inf]}, "own parameters leave no token"),
        ({"logits_processors": [lambda ids, scores: scores * math.nan]}, "own parameters leave no token"),
        (
            {"logits_processors": [lambda ids, scores: scores[0]]},
            r"float64 of shape \[97\]; it must return .* \[1, 97\]",
        ),
        ({"logits_processors": [lambda ids, scores: None]}, "returned None; it must return scores"),
        ({"logits_processors": [lambda ids, scores: scores > 0]}, "returned torch.bool of shape"),
    ],
)
def test_a_request_that_leaves_itself_no_choice_is_told_so(asked: dict[str, object], message: str) -> None:
    engine = make_engine(small(), RandomDrafter())
    request = engine.add([50, 51], SamplingParams(max_new_tokens=4, **asked))  # type: ignore[arg-type]
    drain(engine)
    with pytest.raises(InvalidRequest, match=message):
        request.check()


def test_a_fault_of_the_target_is_not_blamed_on_the_request() -> None:
    query = VerifyQuery(SamplingParams(repetition_penalty=1.2), [1], 0)
    (accepted,) = CoupledRule()(TokenTree.roots([1]), torch.full((1, V), math.nan), [query], V)
    assert isinstance(accepted.error, SpecdecError) and not isinstance(accepted.error, InvalidRequest)
    assert str(accepted.error) == "the target's logits for sequence 0, output position 0 hold NaN, or -inf alone"


def test_parameters_are_copied_compared_and_hashed_by_value() -> None:
    bias, words = {4: 1.0}, [[1, 2]]
    params = SamplingParams(logit_bias=bias, bad_words_ids=words, allowed_token_ids=[1, 2])
    bias[5], words[0][0] = 2.0, 9
    assert params == SamplingParams(logit_bias={4: 1.0}, bad_words_ids=((1, 2),), allowed_token_ids=(1, 2))
    assert len({params, params.with_seed(3), params.with_seed(3)}) == 2
