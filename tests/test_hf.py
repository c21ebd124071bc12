"""The drop-in: the accelerated model against the same model unaccelerated, result by result."""

import copy
import inspect
import random
import re
import warnings
from collections.abc import Callable, Iterator
from threading import Thread
from typing import Any

import pytest
import torch
from transformers import (
    DynamicCache,
    GenerationConfig,
    GenerationMixin,
    LlamaForCausalLM,
    LogitsProcessor,
    LogitsProcessorList,
    MaxLengthCriteria,
    PreTrainedModel,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteria,
    StoppingCriteriaList,
    T5Config,
    T5ForConditionalGeneration,
    TextIteratorStreamer,
    WatermarkingConfig,
)

import specdec
from specdec.errors import CheckpointError, ConfigError, UnsupportedModel
from specdec.hf import arguments
from specdec.hf.accelerate import Accelerated
from specdec.hf.fields import FOLLOWED, NOT_FOLLOWED, WITHOUT_EFFECT
from tests.conftest import OLD_TRANSFORMERS, tiny_llama
from tests.letters import letters
from tests.own_forward import REFUSED, tiny
from tests.scripted import AdversarialDrafter, OracleDrafter, RandomDrafter

VOCAB = 96
EOS, PAD = 95, 94
DRAFTERS = ("ngram", "oracle-ragged", "adversarial")
ONE = torch.tensor([[3, 4, 5, 6, 3, 4, 5]])
LEFT = torch.tensor([[PAD, PAD, 7, 8, 7, 8], [3, 4, 5, 6, 3, 4], [PAD, PAD, PAD, PAD, 2, 9]])
MASK = LEFT.ne(PAD).long()
BATCH = {"inputs": LEFT, "attention_mask": MASK, "pad_token_id": PAD}
REASON = "transformers' own generate runs this call: "


def make_model() -> PreTrainedModel:
    model = tiny_llama(vocab_size=VOCAB, seed=3)
    model.generation_config.pad_token_id = None
    return model


class Pair:
    """A model as it is, and the same one accelerated with one drafter, whose right answers may be told."""

    def __init__(self, drafter: str) -> None:
        self.answers: dict[tuple[int, ...], list[int]] = {}
        right = lambda query: self.right(query)  # noqa: E731
        made = {
            "oracle-chain": lambda: OracleDrafter(right, "chain", VOCAB),
            "oracle-ragged": lambda: OracleDrafter(right, "ragged", VOCAB),
            "adversarial": lambda: AdversarialDrafter(right, "chain", VOCAB),
            "random": lambda: RandomDrafter(0, VOCAB),
        }
        self.plain, self.fast = make_model(), make_model()
        self.accelerated = specdec.accelerate(
            self.fast, made.get(drafter, lambda: drafter)(), num_blocks=64, max_model_len=128, max_nodes=12
        )

    def right(self, query: Any) -> list[int]:
        prompt = tuple(query.tokens[: len(query.tokens) - query.num_output])
        return self.answers.get(prompt, [])[query.num_output :]

    def compare(self, plain: dict[str, Any], fast: dict[str, Any] | None = None) -> tuple[Any, Any]:
        """Run both, the oracle knowing what comes; check that the engine ran it and that the results are the same."""
        torch.manual_seed(0)
        expected = self.plain.generate(**plain)
        self._learn(plain, expected)
        self.accelerated.completions = []
        torch.manual_seed(0)
        got = self.fast.generate(**(fast or plain))
        assert self.accelerated.completions, "transformers ran it"
        self.accelerated.engine.check_integrity()
        assert self.accelerated.engine.pool.num_free == self.accelerated.engine.pool.num_blocks
        same(expected, got, [len(c.token_ids) for c in self.accelerated.completions])
        return expected, got

    def _learn(self, arguments: dict[str, Any], expected: Any) -> None:
        ids = arguments["inputs"]
        mask = arguments.get("attention_mask", torch.ones_like(ids)).bool()
        sequences = expected if isinstance(expected, torch.Tensor) else expected.sequences
        copies = len(sequences) // len(ids)
        for row in range(len(sequences)):
            prompt = tuple(ids[row // copies][mask[row // copies]].tolist())
            self.answers[prompt] = sequences[row, ids.shape[1] :].tolist()


def same(expected: Any, got: Any, lengths: list[int]) -> None:
    assert type(got) is type(expected)
    if isinstance(expected, torch.Tensor):
        assert got.dtype == expected.dtype and got.tolist() == expected.tolist()
        return
    assert got.sequences.tolist() == expected.sequences.tolist()
    for name in ("scores", "logits"):
        right, ours = getattr(expected, name), getattr(got, name)
        assert (ours is None) == (right is None), name
        for step, (a, b) in enumerate(zip(right or (), ours or (), strict=True)):
            assert a.shape == b.shape and a.dtype == b.dtype
            for row, length in enumerate(lengths):
                if step < length:
                    torch.testing.assert_close(b[row], a[row], atol=1e-4, rtol=1e-4)
                else:
                    assert b[row].exp().sum() == 1 and b[row, got.sequences[row, -1]] == 0  # padding with certainty
    assert got.attentions is None and got.hidden_states is None


@pytest.fixture(scope="module", params=DRAFTERS)
def pair(request: pytest.FixtureRequest) -> Pair:
    return Pair(request.param)


@pytest.fixture(scope="module")
def ngram() -> Pair:
    return Pair("ngram")


@pytest.fixture(scope="module")
def eos() -> int:
    """A token that comes early in every row of the batch's greedy answers but for one."""
    out = make_model().generate(**BATCH, max_new_tokens=30)[:, LEFT.shape[1] :].tolist()
    first = next(t for t in out[0][4:] if t not in out[0][:4] and t not in out[1])
    return int(first)


# --- every supported argument, greedy ---------------------------------------------------------------------------


class BanAfter(LogitsProcessor):
    """Bans what depends on the whole prefix, by writing into the scores."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        for row in range(len(scores)):
            scores[row, (input_ids[row, -1] * 7 + 1) % VOCAB] = -torch.inf
            scores[row, input_ids[row, -2:].sum() % VOCAB] += 5
        return scores


class StopAfter(StoppingCriteria):
    """Ends a row whose last two tokens are given."""

    def __init__(self, *pairs: tuple[int, int]) -> None:
        self.pairs = [list(pair) for pair in pairs]
        self.num_calls = 0

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.num_calls += 1
        return torch.tensor([row[-2:].tolist() in self.pairs for row in input_ids])


PARSED: dict[str, dict[str, Any]] = {
    "one token": {"max_new_tokens": 1},
    "max_new_tokens": {"max_new_tokens": 25},
    "max_length": {"max_length": 23},
    "both lengths": {"max_length": 9, "max_new_tokens": 17},
    "use_cache": {"max_new_tokens": 9, "use_cache": False},
    "synced_gpus": {"max_new_tokens": 9, "synced_gpus": False},
    "flags of sampling": {"max_new_tokens": 9, "temperature": 0.3, "top_k": 3, "top_p": 0.4, "min_p": 0.2},
    "bare dictionary": {"max_new_tokens": 12, "return_dict_in_generate": True},
    "scores without dictionary": {"max_new_tokens": 12, "output_scores": True},
}
"""What no draft can change."""
CHOSEN: dict[str, dict[str, Any]] = {
    "repetition_penalty": {"max_new_tokens": 25, "repetition_penalty": 1.7},
    "no_repeat_ngram_size": {"max_new_tokens": 25, "no_repeat_ngram_size": 2},
    "suppress_tokens": {"max_new_tokens": 20, "suppress_tokens": list(range(0, 90, 2))},
    "processor": {"max_new_tokens": 25, "logits_processor": LogitsProcessorList([BanAfter()])},
    "scores": {"max_new_tokens": 12, "return_dict_in_generate": True, "output_scores": True},
    "logits": {"max_new_tokens": 12, "return_dict_in_generate": True, "output_logits": True},
    "allowed tokens": {"max_new_tokens": 20, "prefix_allowed_tokens_fn": lambda row, ids: [row, 40, int(ids[-1]) // 2]},
}
"""What is decided or kept at each node of a draft."""


@pytest.mark.parametrize("options", PARSED.values(), ids=PARSED.keys())
def test_greedy(ngram: Pair, options: dict[str, Any]) -> None:
    ngram.compare({"inputs": ONE} | options)
    ngram.compare(BATCH | options)


@pytest.mark.parametrize("options", CHOSEN.values(), ids=CHOSEN.keys())
def test_greedy_with_right_and_wrong_drafts(pair: Pair, options: dict[str, Any]) -> None:
    pair.compare({"inputs": ONE} | options)
    pair.compare(BATCH | options)


def test_the_oracle_makes_blocks_and_the_adversary_none(ngram: Pair) -> None:
    for name, least, most in (("oracle-chain", 10, 31), ("adversarial", 1, 1)):
        pair = Pair(name)
        pair.compare({"inputs": ONE, "max_new_tokens": 30})
        tau = pair.accelerated.completions[0].stats.mean_acceptance_length
        assert least <= tau <= most, name


def test_input_ids_is_the_same_as_inputs(ngram: Pair) -> None:
    expected = ngram.plain.generate(ONE, max_new_tokens=8)
    assert ngram.fast.generate(ONE, max_new_tokens=8).tolist() == expected.tolist()
    assert ngram.fast.generate(input_ids=ONE.int(), max_new_tokens=8).tolist() == expected.tolist()
    assert not ngram.fast.generate(ONE, max_new_tokens=8).is_inference()


def test_default_length_warns_as_transformers_does(ngram: Pair) -> None:
    with pytest.warns(UserWarning, match="model-agnostic default `max_length`"):
        expected = ngram.plain.generate(ONE)
    with pytest.warns(UserWarning, match="model-agnostic default `max_length`") as caught:
        got = ngram.fast.generate(ONE)
    assert got.tolist() == expected.tolist() and got.shape[1] == ONE.shape[1] + 20 and len(caught) == 1


def test_no_room_is_transformers_own_error(ngram: Pair) -> None:
    for model in (ngram.plain, ngram.fast):
        with pytest.raises(ValueError, match="Input length of input_ids is 7, but `max_length` is set to 7"):
            model.generate(ONE, max_length=7)


def test_configs_merge_as_in_transformers(pair: Pair) -> None:
    """Keywords win over the call's config, which wins over the model's."""
    config = GenerationConfig(max_new_tokens=25, repetition_penalty=1.4, return_dict_in_generate=True)
    before = config.to_dict()
    pair.compare({"inputs": ONE, "generation_config": config})
    pair.compare({"inputs": ONE, "generation_config": config, "repetition_penalty": 2.5, "max_new_tokens": 11})
    assert config.to_dict() == before
    for model in (pair.plain, pair.fast):
        model.generation_config.no_repeat_ngram_size = 1
    try:
        expected, _ = pair.compare({"inputs": ONE, "generation_config": config})
        assert len(set(expected.sequences[0].tolist())) == ONE.unique().numel() + 25
    finally:
        for model in (pair.plain, pair.fast):
            model.generation_config.no_repeat_ngram_size = None


# --- ends -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pad", "min_new"),
    [(PAD, {}), (PAD, {"min_new_tokens": 8}), (PAD, {"min_length": 13}), (None, {}), (None, {"min_length": 3})],
)
def test_eos(pair: Pair, eos: int, pad: int | None, min_new: dict[str, int]) -> None:
    options = {"max_new_tokens": 16, "return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    for ids in (eos, [EOS, eos, 50]):
        arguments = BATCH | options | min_new | {"eos_token_id": ids, "pad_token_id": pad}
        expected, _ = pair.compare(arguments)
        if not min_new:
            assert eos in expected.sequences[0, LEFT.shape[1] :]
    pair.compare({"inputs": ONE, "eos_token_id": [eos, -1, 5000]} | options | min_new)  # ids that can't come


def test_model_wide_eos(pair: Pair, eos: int) -> None:
    for model in (pair.plain, pair.fast):
        model.generation_config.eos_token_id = eos
    try:
        expected, _ = pair.compare(BATCH | {"max_new_tokens": 30})
        assert expected[0, -1] == PAD
    finally:
        for model in (pair.plain, pair.fast):
            model.generation_config.eos_token_id = None


def test_bad_words(pair: Pair, eos: int) -> None:
    plain = pair.plain.generate(ONE, max_new_tokens=12)[0, ONE.shape[1] :].tolist()
    words = [[plain[2]], plain[4:6], [eos], plain[7:10]]
    pair.compare({"inputs": ONE, "max_new_tokens": 30, "bad_words_ids": words})
    pair.compare(BATCH | {"max_new_tokens": 30, "bad_words_ids": words, "eos_token_id": eos})


def test_stop_strings_end_where_transformers_ends(pair: Pair) -> None:
    tokenizer = letters()
    output = pair.plain.generate(ONE, max_new_tokens=20)[0].tolist()
    text = tokenizer.decode(output)
    start = ONE.shape[1]
    for stop in (text[start + 3], text[start + 4 : start + 7], text[start - 1 : start + 2], ["no such", text[10:12]]):
        expected, _ = pair.compare(
            {"inputs": ONE, "max_new_tokens": 20, "stop_strings": stop, "tokenizer": tokenizer, "eos_token_id": EOS}
        )
        assert expected.shape[1] < start + 20
    stops = {"stop_strings": [text[start + 3], "q"], "tokenizer": tokenizer, "eos_token_id": EOS}
    pair.compare(BATCH | stops | {"max_new_tokens": 25})


def test_tokenizer_of_accelerate_serves_stop_strings() -> None:
    plain, fast = make_model(), make_model()
    text = letters().decode(plain.generate(ONE, max_new_tokens=20)[0])
    expected = plain.generate(ONE, max_new_tokens=20, stop_strings=text[10:12], tokenizer=letters())
    with specdec.accelerate(fast, tokenizer=letters(), num_blocks=64):
        got = fast.generate(ONE, max_new_tokens=20, stop_strings=text[10:12])
    assert got.tolist() == expected.tolist() and expected.shape[1] < 27


def test_stopping_criteria_are_asked_at_every_token(pair: Pair) -> None:
    output = pair.plain.generate(**BATCH, max_new_tokens=30)[:, LEFT.shape[1] :].tolist()
    stop = StopAfter(*((row[i], row[i + 1]) for row, i in zip(output, (5, 9, 0), strict=True)))
    pair.compare(BATCH | {"max_new_tokens": 30, "eos_token_id": EOS, "stopping_criteria": StoppingCriteriaList([stop])})
    ours = StopAfter(tuple(output[1][9:11]))
    theirs = copy.deepcopy(ours)
    one = {"inputs": LEFT[1:2], "max_new_tokens": 30}
    pair.compare(one | {"stopping_criteria": [theirs]}, one | {"stopping_criteria": [ours]})
    assert ours.num_calls == theirs.num_calls == 11


def test_stopping_criteria_see_the_scores(pair: Pair) -> None:
    class Seen(StoppingCriteria):
        def __init__(self) -> None:
            self.seen: list[tuple[list[int], list[float]]] = []

        def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> bool:
            self.seen.append((input_ids[0].tolist(), [round(float(s.max()), 2) for s in scores]))
            return len(scores) == 9

    ours, theirs = Seen(), Seen()
    one = {"inputs": ONE, "max_new_tokens": 30, "return_dict_in_generate": True, "output_scores": True}
    expected, _ = pair.compare(one | {"stopping_criteria": [theirs]}, one | {"stopping_criteria": [ours]})
    assert ours.seen == theirs.seen and len(expected.scores) == 9


def test_max_time_ends_after_one_token(pair: Pair) -> None:
    expected, _ = pair.compare({"inputs": ONE, "max_new_tokens": 30, "max_time": 1e-9})
    assert expected.shape[1] == ONE.shape[1] + 1


# --- padding ----------------------------------------------------------------------------------------------------


def test_padding_is_told_from_the_pad_token_as_transformers_does(pair: Pair, eos: int) -> None:
    for options in ({"pad_token_id": PAD}, {"pad_token_id": PAD, "eos_token_id": eos}, {"eos_token_id": PAD}):
        pair.compare({"inputs": LEFT, "max_new_tokens": 12} | options)
    pair.compare({"inputs": LEFT, "max_new_tokens": 12})


def test_rows_padded_anywhere_are_run_as_if_alone(pair: Pair, eos: int) -> None:
    """Transformers itself warns that it is wrong for padding on the right."""
    ids = torch.tensor([[7, 8, 7, 8, PAD, PAD], [3, 4, 5, 6, 3, 4], [9, PAD, PAD, PAD, PAD, PAD]])
    options = {"max_new_tokens": 20, "eos_token_id": eos, "pad_token_id": PAD}
    got = pair.fast.generate(ids, attention_mask=ids.ne(PAD).long(), **options)
    assert got[:, :6].tolist() == ids.tolist()
    alone = [pair.plain.generate(row[row != PAD][None], **options)[0, row.ne(PAD).sum() :] for row in ids]
    longest = max(map(len, alone))
    assert got[:, 6:].tolist() == [[*row.tolist(), *[PAD] * (longest - len(row))] for row in alone]


# --- streamer ---------------------------------------------------------------------------------------------------


class Recorder:
    def __init__(self) -> None:
        self.heard: list[Any] = []

    def put(self, value: torch.Tensor) -> None:
        self.heard.append((value.tolist(), value.dtype))

    def end(self) -> None:
        self.heard.append("end")


def test_streamer_hears_the_same(pair: Pair, eos: int) -> None:
    ours, theirs = Recorder(), Recorder()
    one = {"inputs": LEFT[:1, 2:], "max_new_tokens": 30, "eos_token_id": eos}
    pair.compare(one | {"streamer": theirs}, one | {"streamer": ours})
    assert ours.heard == theirs.heard and ours.heard[-1] == "end" and len(ours.heard) > 5


def test_text_streamer_in_a_thread(ngram: Pair) -> None:
    texts = []
    for model in (ngram.plain, ngram.fast):
        streamer = TextIteratorStreamer(letters(), skip_prompt=True, timeout=30)
        thread = Thread(target=model.generate, args=(ONE,), kwargs={"max_new_tokens": 20, "streamer": streamer})
        thread.start()
        texts.append("".join(streamer))
        thread.join()
    assert texts[0] == texts[1] and len(texts[1]) == 20


def test_an_error_in_the_streamer_frees_the_blocks(ngram: Pair) -> None:
    class Closed(Recorder):
        def put(self, value: torch.Tensor) -> None:
            super().put(value)
            if len(self.heard) == 4:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ngram.fast.generate(ONE, max_new_tokens=30, streamer=Closed())
    assert ngram.accelerated.engine.pool.num_free == 64 and not ngram.accelerated.engine.has_work
    ngram.compare({"inputs": ONE, "max_new_tokens": 30})


# --- sampling ---------------------------------------------------------------------------------------------------


@OLD_TRANSFORMERS
def test_sampling_from_one_token_is_exact(pair: Pair, eos: int) -> None:
    options = {"do_sample": True, "top_k": 1, "max_new_tokens": 25, "temperature": 1.5}
    pair.compare(BATCH | options | {"num_return_sequences": 2, "eos_token_id": eos})
    pair.compare({"inputs": ONE} | options | {"num_return_sequences": 3, "logits_processor": [BanAfter()]})
    allowed = {"prefix_allowed_tokens_fn": lambda row, ids: [row, 40, int(ids[-1]) // 2]}
    pair.compare(BATCH | options | allowed | {"num_return_sequences": 2})


@pytest.mark.parametrize(
    "cuts",
    [{}, {"top_k": 0}, {"temperature": 0.4}, {"top_p": 0.6}, {"min_p": 0.1}, {"top_k": 7, "top_p": 0.9, "min_p": 0.05}],
)
def test_scores_that_are_sampled_by(ngram: Pair, cuts: dict[str, Any]) -> None:
    """Each step's processed scores are transformers' own for the tokens before it."""
    options = {"do_sample": True, "return_dict_in_generate": True, "output_scores": True} | cuts
    torch.manual_seed(1)
    got = ngram.fast.generate(ONE, max_new_tokens=6, repetition_penalty=1.3, **options)
    for step, scores in enumerate(got.scores):
        prefix = got.sequences[:, : ONE.shape[1] + step]
        expected = ngram.plain.generate(prefix, max_new_tokens=1, repetition_penalty=1.3, **options).scores[0]
        torch.testing.assert_close(scores, expected, atol=1e-4, rtol=1e-4)


def test_sampling_follows_the_distribution() -> None:
    """χ² of two tokens drawn 1,500 times from 16 pairs, half of them with each of two drafters.

    The bound fails 1 of 10,000 right samplers (seed fixed).
    """
    plain, fast = (tiny_llama(vocab_size=16, seed=5, initializer_range=0.25) for _ in range(2))
    prompt = torch.tensor([[1, 2, 3, 1, 2]])
    options = {"do_sample": True, "top_k": 4, "temperature": 1.2, "max_new_tokens": 2}
    exact = torch.zeros(16, 16, dtype=torch.float64)
    scored = {"return_dict_in_generate": True, "output_scores": True} | options | {"max_new_tokens": 1}
    first = plain.generate(prompt, **scored).scores[0][0].double().softmax(-1)
    for token in first.nonzero()[:, 0].tolist():
        longer = torch.cat([prompt, torch.tensor([[token]])], dim=1)
        exact[token] = first[token] * plain.generate(longer, **scored).scores[0][0].double().softmax(-1)
    torch.manual_seed(7)
    counts = torch.zeros(16, 16, dtype=torch.float64)
    for drafter in ("ngram", RandomDrafter(0, 16)):
        with specdec.accelerate(fast, drafter, num_blocks=128, max_num_seqs=64) as accelerated:
            pairs = fast.generate(prompt, num_return_sequences=750, **options)[:, -2:]
            assert len(accelerated.completions) == 750
        counts.index_put_(tuple(pairs.T), torch.ones(750, dtype=torch.float64), accumulate=True)
    possible = exact > 0
    assert possible.sum() == 16 and counts[~possible].sum() == 0
    expected = exact[possible] * 1500
    assert expected.min() > 5
    assert ((counts[possible] - expected) ** 2 / expected).sum() < 44.3  # 15 degrees of freedom, 1e-4


def test_manual_seed_makes_sampling_repeatable(ngram: Pair) -> None:
    def draw(seed: int, copies: int = 3) -> list[list[int]]:
        torch.manual_seed(seed)
        out = ngram.fast.generate(ONE, do_sample=True, max_new_tokens=12, num_return_sequences=copies)
        return out.tolist()

    first = draw(0)
    assert draw(0) == first != draw(1)
    assert len(set(map(tuple, first))) == 3


# --- combinations -----------------------------------------------------------------------------------------------


@OLD_TRANSFORMERS
def test_combinations(pair: Pair, eos: int) -> None:
    """Seven draws of everything together."""
    rng = random.Random(4)
    choices: dict[str, list[Any]] = {
        "min_new_tokens": [None, 3, 9],
        "eos_token_id": [eos, [eos, 33], EOS],
        "repetition_penalty": [None, 1.2, 0.8],
        "no_repeat_ngram_size": [None, 2, 3],
        "bad_words_ids": [None, [[12], [13, 14], [eos]]],
        "suppress_tokens": [None, [20, 21, 22]],
        "logits_processor": [None, [BanAfter()]],
        "stopping_criteria": [None, [StopAfter((40, 41), (12, 55))]],
        "output_scores": [True, False],
        "output_logits": [True, False],
        "return_dict_in_generate": [True, True, False],
        "do_sample": [False, True],
    }
    for _ in range(7):
        options = {name: rng.choice(values) for name, values in choices.items()}
        options |= {"max_new_tokens": rng.randint(9, 30), "top_k": 1 if options["do_sample"] else None}
        pair.compare((BATCH if rng.random() < 0.7 else {"inputs": ONE}) | options)


# --- what transformers does -------------------------------------------------------------------------------------


def cached(model: PreTrainedModel) -> dict[str, Any]:
    return {"past_key_values": DynamicCache(config=model.config)}


def first_token(model: Any, input_ids: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    return input_ids[:, :1]


FALLBACKS: list[tuple[str, Any]] = [
    ("num_beams=2", {"num_beams": 2}),
    ("penalty_alpha=0.6", {"penalty_alpha": 0.6, "top_k": 4}),
    ("dola_layers='low'", {"dola_layers": "low"}),
    ("force_words_ids=", {"force_words_ids": [[5]], "num_beams": 2}),
    ("past_key_values|cache", cached),
    ("output_attentions=True", {"output_attentions": True, "return_dict_in_generate": True}),
    ("output_hidden_states=True", {"output_hidden_states": True, "return_dict_in_generate": True}),
    ("inputs_embeds", lambda m: {"inputs": None, "inputs_embeds": m.get_input_embeddings()(ONE)}),
    ("typical_p=0.5", {"typical_p": 0.5, "do_sample": True}),
    ("epsilon_cutoff=0.02", {"epsilon_cutoff": 0.02, "do_sample": True}),
    ("eta_cutoff=0.02", {"eta_cutoff": 0.02, "do_sample": True}),
    ("top_h=0.4", {"top_h": 0.4, "do_sample": True}),
    ("guidance_scale=1.5", {"guidance_scale": 1.5}),
    ("watermarking_config=", {"watermarking_config": WatermarkingConfig()}),
    ("sequence_bias=", {"sequence_bias": [[[7], 4.0]]}),
    ("renormalize_logits=True", {"renormalize_logits": True, "return_dict_in_generate": True, "output_scores": True}),
    ("forced_eos_token_id=3", {"forced_eos_token_id": 3}),
    ("begin_suppress_tokens=", {"begin_suppress_tokens": [1, 2]}),
    ("exponential_decay_length_penalty", {"exponential_decay_length_penalty": (2, 1.5), "eos_token_id": 3}),
    ("custom_generate", {"custom_generate": first_token}),
    ("assistant_model", lambda m: {"assistant_model": make_model()}),
    ("cache_implementation='static'", {"cache_implementation": "static", "disable_compile": True}),
    ("position_ids", {"position_ids": torch.arange(7)[None] + 3}),
    ("made_up", {"made_up": 3}),
    ("no tensor of token ids", {"inputs": None, "bos_token_id": 4}),
    ("isn't 0 and 1", {"attention_mask": torch.ones(1, 7, 1)}),
    ("padding alone", {"attention_mask": torch.zeros(1, 7, dtype=torch.long)}),
    ("temperature=0.0", {"do_sample": True, "temperature": 0.0}),
    ("repetition_penalty must be", {"repetition_penalty": 500.0}),
    ("no_repeat_ngram_size must be", {"no_repeat_ngram_size": 99}),
    ("leave no token to choose", {"suppress_tokens": list(range(VOCAB))}),
    ("beyond max_model_len=128", {"max_new_tokens": 150}),
    ("stop_strings without a tokenizer", {"stop_strings": "x"}),
    ("MaxLengthCriteria", {"stopping_criteria": StoppingCriteriaList([MaxLengthCriteria(12)])}),
    (
        "RepetitionPenaltyLogitsProcessor",
        {"repetition_penalty": 1.2, "logits_processor": LogitsProcessorList([RepetitionPenaltyLogitsProcessor(2.0)])},
    ),
    (
        "prefix_allowed_tokens_fn together",
        {"prefix_allowed_tokens_fn": lambda row, ids: [1, 2], "suppress_tokens": [1]},
    ),
    ("a streamer for 3 rows", lambda m: BATCH | {"streamer": Recorder()}),
    ("without an EOS token", BATCH | {"stopping_criteria": StoppingCriteriaList([StopAfter((1, 2))])}),
    (
        "answers for the whole batch",
        BATCH | {"eos_token_id": EOS, "stopping_criteria": [lambda ids, scores, **_: ids.shape[1] > 9]},
    ),
]


def outcome(model: PreTrainedModel, arguments: Any) -> tuple[Any, list[str]]:
    """What a call returns or raises, and our warnings."""
    options = arguments(model) if callable(arguments) else arguments
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.manual_seed(2)
        try:
            result = model.generate(**({"inputs": ONE, "max_new_tokens": 9} | options))
        except Exception as error:
            return (type(error), str(error)), [str(w.message) for w in caught if REASON in str(w.message)]
    ours = [w for w in caught if REASON in str(w.message)]
    assert all(w.category is UserWarning and w.filename == __file__ for w in ours)
    return result, [str(w.message) for w in ours]


@pytest.mark.parametrize("reason, arguments", FALLBACKS, ids=[reason for reason, _ in FALLBACKS])
def test_what_only_transformers_does_goes_there_with_one_warning(ngram: Pair, reason: str, arguments: Any) -> None:
    expected, none = outcome(ngram.plain, arguments)
    got, ours = outcome(ngram.fast, arguments)
    assert ngram.accelerated.completions == []
    assert not none and len(ours) == 1, ours
    assert any(part in ours[0].removeprefix(REASON) for part in reason.split("|")), ours
    if isinstance(expected, tuple) and isinstance(expected[0], type):
        assert got == expected
    elif isinstance(expected, torch.Tensor):
        assert got.tolist() == expected.tolist()
    else:
        assert type(got) is type(expected) and got.keys() == expected.keys()
        assert got.sequences.tolist() == expected.sequences.tolist()


def test_a_field_that_nobody_knows_goes_to_transformers(ngram: Pair) -> None:
    ngram.fast.generation_config.chat_format = "raw"
    try:
        with pytest.warns(UserWarning, match=f"{REASON}chat_format='raw'"):
            ngram.fast.generate(ONE, max_new_tokens=3)
    finally:
        del ngram.fast.generation_config.chat_format


def test_every_field_of_this_transformers_is_in_one_table() -> None:
    known = [*FOLLOWED, *WITHOUT_EFFECT, *NOT_FOLLOWED]
    assert len(known) == len(set(known))
    assert {name for name in vars(GenerationConfig()) if not name.startswith("_")} <= set(known)


def test_prompt_lookup_is_left_to_the_drafter_with_one_warning(ngram: Pair) -> None:
    expected = ngram.plain.generate(ONE, max_new_tokens=20, prompt_lookup_num_tokens=4)
    with pytest.warns(UserWarning, match="prompt_lookup_num_tokens=4 changes nothing") as caught:
        got = ngram.fast.generate(ONE, max_new_tokens=20, prompt_lookup_num_tokens=4)
    assert got.tolist() == expected.tolist() and len(caught) == 1


@pytest.mark.parametrize(
    "change, reason",
    [
        (lambda m: m.train(), "the model is in training mode"),
        (lambda m: m.float(), "modules or weights were moved or replaced"),
        (lambda m: m.model.layers[1].register_forward_hook(lambda *_: None), "forward hooks are on the model"),
    ],
)
def test_a_changed_model_goes_to_transformers(change: Callable[[Any], object], reason: str) -> None:
    plain, fast = make_model(), make_model()
    with specdec.accelerate(fast, num_blocks=64):
        change(plain)
        change(fast)
        with pytest.warns(UserWarning, match=REASON + reason):
            got = fast.generate(ONE, max_new_tokens=9)
    assert got.tolist() == plain.generate(ONE, max_new_tokens=9).tolist()


# --- models that the engine can't run ---------------------------------------------------------------------------


class Headless(LlamaForCausalLM):
    def get_output_embeddings(self) -> None:
        return None


class Echo(LlamaForCausalLM):
    def generate(self, prompt: torch.Tensor, times: int, *, reverse: bool = False) -> list[int]:
        return prompt[0].tolist()[:: -1 if reverse else 1] * times


def t5() -> PreTrainedModel:
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2, "initializer_factor": 4.0}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = T5ForConditionalGeneration(T5Config(vocab_size=VOCAB, decoder_start_token_id=PAD, **sizes))
    model.generation_config.eos_token_id = None
    return model.eval()


def other_class(kind: type[LlamaForCausalLM]) -> PreTrainedModel:
    model = make_model()
    model.__class__ = kind
    return model


CANNOT_RUN: dict[str, tuple[Callable[[], PreTrainedModel], str]] = {
    "encoder-decoder": (t5, "T5ForConditionalGeneration .* can't be run: it is an encoder-decoder"),
    "attention": (lambda: tiny(REFUSED["bloom"][0]()), f"BloomForCausalLM .*: .*{REFUSED['bloom'][1]}"),
    "recurrent": (lambda: tiny(REFUSED["mamba"][0]()), "MambaForCausalLM .*: it keeps a recurrent state"),
    "headless": (lambda: other_class(Headless), "Headless .* no language modelling head"),
}


@pytest.mark.parametrize("make, reason", CANNOT_RUN.values(), ids=CANNOT_RUN.keys())
def test_a_model_that_the_engine_cannot_run_goes_to_transformers(make: Any, reason: str) -> None:
    plain, fast = make(), make()
    with specdec.accelerate(fast, num_blocks=64) as accelerated:
        assert accelerated.engine is None
        for options in ({}, {"do_sample": True}, {"num_beams": 2}):
            expected, _ = outcome(plain, options)
            got, (warning,) = outcome(fast, options)
            assert re.fullmatch(f"{REASON}.*{reason}.*", warning)
            assert got.tolist() == expected.tolist() and len(got[0].unique()) > 3
        with pytest.warns(UserWarning, match=reason):
            assert (
                accelerated.generate(ONE, max_new_tokens=9).tolist() == plain.generate(ONE, max_new_tokens=9).tolist()
            )
        assert accelerated.completions == []
        with pytest.raises(ConfigError, match="accelerated already"):
            specdec.accelerate(fast)
    assert "generate" not in vars(fast)


def test_a_generate_of_its_own_gets_its_own_arguments() -> None:
    model = other_class(Echo)
    with (
        specdec.accelerate(model),
        pytest.warns(UserWarning, match=f"{REASON}Echo has a generate of its own") as caught,
    ):
        assert model.generate(ONE[:, :2], 2, reverse=True) == [4, 3, 4, 3]
    assert len(caught) == 1 and caught[0].filename == __file__


def test_a_transformers_without_the_parts_that_prepare_a_call_runs_all_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arguments, "_PREPARING", ("_prepare_generation_config", "_prepare_dinner"))
    model = make_model()
    with specdec.accelerate(model), pytest.warns(UserWarning, match=f"{REASON}this version .* has no _prepare_dinner,"):
        assert model.generate(ONE, max_new_tokens=9).tolist() == make_model().generate(ONE, max_new_tokens=9).tolist()


def test_what_is_asked_for_wrongly_is_an_error_for_such_a_model_too() -> None:
    wrong = {
        "no option 'num_block'": {"num_block": 4},
        "unknown drafter 'engram'": {"drafter": "engram"},
        "no option 'width'": {"drafter": "ngram", "drafter_options": {"width": 3}},
    }
    model = t5()
    for message, options in wrong.items():
        with pytest.raises(ConfigError, match=message):
            specdec.accelerate(model, **options)
    assert "generate" not in vars(model)


# --- accelerate and restore -------------------------------------------------------------------------------------


@pytest.fixture
def fast() -> Iterator[PreTrainedModel]:
    model = make_model()
    with specdec.accelerate(model, num_blocks=64):
        yield model


def test_the_weights_are_shared_and_the_forward_still_works(fast: PreTrainedModel) -> None:
    plain = make_model()
    torch.testing.assert_close(fast(ONE).logits, plain(ONE).logits)
    for model in (plain, fast):
        with torch.no_grad():
            model.model.layers[0].self_attn.k_proj.weight.mul_(-3)
            model.model.norm.weight.mul_(0.5)
    assert fast.generate(ONE, max_new_tokens=20).tolist() == plain.generate(ONE, max_new_tokens=20).tolist()


def test_restore_gives_the_own_generate_back() -> None:
    model = make_model()
    accelerated = specdec.accelerate(model, num_blocks=64)
    assert isinstance(accelerated, Accelerated) and model.generate.__self__ is accelerated
    with pytest.raises(ConfigError, match=r"accelerated already; call specdec\.restore"):
        specdec.accelerate(model)
    with pytest.raises(ConfigError, match=r"can't be copied or pickled; call specdec\.restore"):
        copy.deepcopy(model)
    specdec.restore(model)
    assert "generate" not in vars(model) and model.generate.__func__ is type(model).generate
    with pytest.raises(ConfigError, match="isn't accelerated"):
        specdec.restore(model)
    with specdec.accelerate(model, num_blocks=64):
        specdec.restore(model)  # early, inside
    with specdec.accelerate(model, num_blocks=64):
        pass
    assert "generate" not in vars(model)
    wrapped = model.generate
    model.generate = wrapped
    with specdec.accelerate(model, num_blocks=64):
        pass
    assert vars(model)["generate"] is wrapped


def test_what_cannot_be_accelerated() -> None:
    with pytest.raises(ConfigError, match="accelerate takes a loaded model, not 'smollm2-135m'"):
        specdec.accelerate("smollm2-135m")
    with pytest.raises(UnsupportedModel, match="Linear is no transformers model"):
        specdec.accelerate(torch.nn.Linear(2, 2))
    with pytest.raises(UnsupportedModel, match="LlamaModel has no generate; load it with its head"):
        specdec.accelerate(make_model().model)
    with pytest.raises(ConfigError, match="accelerate has no option 'num_block'; did you mean 'num_blocks'"):
        specdec.accelerate(make_model(), num_block=4)
    with pytest.raises(ConfigError, match="unknown drafter 'engram'"):
        specdec.accelerate(make_model(), "engram")
    with pytest.raises(CheckpointError, match="no such file or folder"):
        specdec.accelerate(make_model(), "medusa:/no/such/folder")
    with pytest.raises(UnsupportedModel, match="T5ForConditionalGeneration .* an encoder-decoder"):
        specdec.accelerate(make_model(), t5())  # the drafter's fault, not the model's


def test_the_signature_is_transformers_own(fast: PreTrainedModel) -> None:
    theirs = inspect.signature(GenerationMixin.generate).parameters
    assert list(inspect.signature(fast.generate).parameters) == list(theirs)[1:]
    assert fast.generate(ONE, GenerationConfig(max_new_tokens=3)).shape[1] == ONE.shape[1] + 3
