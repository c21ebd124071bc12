"""The whole promise as one property: no mix of model, drafters, parameters, batch and pages shows in what is emitted.

`check` runs one case both ways: each request alone by plain decoding, and all of them together with a drafter. It must
hold for tokens, finish reasons, stop reasons and processed scores, in float64.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from hypothesis import strategies as st
from transformers import PreTrainedModel

from specdec.drafters.draft_model import DraftModelDrafter
from specdec.drafters.hybrid import HybridDrafter
from specdec.drafters.ngram import NGramDrafter
from specdec.drafters.protocol import Drafter
from specdec.engine.request import Request
from specdec.models.decoder import Decoder
from specdec.models.hf import HFModel
from specdec.models.load import make_target
from specdec.params import SamplingParams
from tests.conftest import VOCAB, tiny_llama
from tests.costs import TABLES
from tests.engines import Optimist, drain, make_engine
from tests.families import OWN, tiny_model
from tests.hydra import random_hydra, random_recurrent
from tests.medusa import random_medusa
from tests.own_forward import REQUIRED, tiny
from tests.scripted import AdversarialDrafter, OracleDrafter, RandomDrafter, SometimesDrafter

FAMILIES = sorted(OWN) + sorted(REQUIRED)
"""Those that the decoder knows, then those that run by their own forward."""
Answers = dict[int | tuple[int, ...], list[int]]


KV_FORMATS = {"auto": None, "fp8": None, "fp8_e4m3": None, "int8": 8, "int4": 32}
"""Formats of the pages, and the group size that each is run with."""


@cache
def model_of(family: str, kv_cache_dtype: str) -> PreTrainedModel:
    if family in REQUIRED:
        return tiny(REQUIRED[family]())
    if kv_cache_dtype != "int4":
        return tiny_model(family)
    wide = {"head_dim": 32} if "head_dim" in OWN[family] else {}
    return tiny_model(family, hidden_size=128, initializer_range=0.3, **wide)


@cache
def ready(model: PreTrainedModel) -> Decoder | HFModel:
    return make_target(model)


@cache
def another() -> Decoder:
    return Decoder(tiny_llama(seed=9, num_hidden_layers=1, head_dim=32))


def early(model: PreTrainedModel, widths: tuple[int, ...]) -> DraftModelDrafter:
    target = ready(model)
    assert isinstance(target, Decoder)
    return DraftModelDrafter(target.first_layers(1), VOCAB, widths, own_pages=False, name="early_exit")


DRAFTERS: dict[str, Callable[[PreTrainedModel, Answers], Drafter]] = {
    "ngram": lambda m, a: NGramDrafter(),
    "ngram, one path": lambda m, a: NGramDrafter(num_speculative_tokens=20, max_paths=1),
    "medusa": lambda m, a: random_medusa(m),
    "hydra": lambda m, a: random_hydra(m),
    "recurrent": lambda m, a: random_recurrent(m),
    "draft vocabulary": lambda m, a: random_hydra(m, draft_vocab=20),
    "itself": lambda m, a: DraftModelDrafter(ready(m), VOCAB, (2, 4, 4)),
    "another model": lambda m, a: DraftModelDrafter(another(), VOCAB, (1, 1, 1)),
    "early exit": lambda m, a: early(m, (1, 1, 1, 1)),
    "early exit, tree": lambda m, a: early(m, (3, 5)),
    "hybrid": lambda m, a: HybridDrafter(NGramDrafter(), early(m, (2, 2)), both=True),
    "oracle chain": lambda m, a: OracleDrafter(a, "chain"),
    "oracle wide": lambda m, a: OracleDrafter(a, "wide"),
    "oracle ragged": lambda m, a: OracleDrafter(a, "ragged"),
    "adversarial": lambda m, a: AdversarialDrafter(a, "wide"),
    "random": lambda m, a: RandomDrafter(),
    "sometimes": lambda m, a: SometimesDrafter(a, 0.7),
}
EARLY = {"early exit", "early exit, tree", "hybrid"}
"""The drafters that run some of the decoder's layers."""
token = st.integers(0, VOCAB - 1)
PARAMS = st.fixed_dictionaries(
    {"max_new_tokens": st.integers(1, 18), "seed": st.integers(0, 2**63 - 1)},
    optional={
        "temperature": st.sampled_from([0.5, 1.0, 2.0]),
        "top_k": st.sampled_from([3, 20]),
        "top_p": st.sampled_from([0.5, 0.9]),
        "min_p": st.sampled_from([0.02, 0.2]),
        "min_new_tokens": st.integers(0, 6),
        "stop_token_ids": st.lists(token, max_size=8),
        "ignore_eos": st.booleans(),
        "repetition_penalty": st.sampled_from([0.7, 1.3]),
        "presence_penalty": st.sampled_from([-1.0, 1.5]),
        "frequency_penalty": st.sampled_from([-0.5, 0.7]),
        "logit_bias": st.dictionaries(token, st.sampled_from([-9.0, 4.0]), max_size=4),
        "no_repeat_ngram_size": st.integers(2, 4),
        "bad_words_ids": st.lists(st.lists(token, min_size=1, max_size=3), max_size=3),
        "suppress_tokens": st.lists(token, max_size=5),
    },
)


@dataclass(frozen=True)
class Case:
    """One draw of everything."""

    family: str
    drafter: str
    prompts: list[list[int]]
    params: list[dict[str, object]]
    eos: list[int]
    max_nodes: int
    max_num_seqs: int
    max_num_batched_tokens: int
    num_blocks: int
    order: int
    costs: str = "none"
    kv_cache_dtype: str = "auto"


@st.composite
def cases(draw: st.DrawFn) -> Case:
    size = draw(st.integers(1, 4))
    prompt = st.one_of(
        st.lists(token, min_size=1, max_size=40),
        st.lists(token, min_size=1, max_size=4).map(lambda words: words * 8),  # what n-grams find
    )
    family = draw(st.sampled_from(FAMILIES))
    return Case(
        family=family,
        drafter=draw(st.sampled_from(sorted(DRAFTERS.keys() - (EARLY if family in REQUIRED else set())))),
        prompts=[draw(prompt) for _ in range(size)],
        params=[draw(PARAMS) for _ in range(size)],
        eos=draw(st.lists(token, max_size=6)),
        max_nodes=draw(st.integers(2, 64)),
        max_num_seqs=draw(st.integers(1, 4)),
        max_num_batched_tokens=draw(st.sampled_from([8, 40, 2048])),
        num_blocks=draw(st.sampled_from([5, 8, 64])),
        order=draw(st.integers(0, 99)),
        costs=draw(st.sampled_from(sorted(TABLES))),
        kv_cache_dtype=draw(st.sampled_from(["auto", "fp8", "int8"] if family in REQUIRED else list(KV_FORMATS))),
    )


def check(case: Case) -> None:
    """Run a case both ways and compare.

    Raises:
        AssertionError: speculation showed, or a block was lost.
    """
    model = model_of(case.family, case.kv_cache_dtype)
    pages = {"kv_cache_dtype": case.kv_cache_dtype, "kv_group_size": KV_FORMATS[case.kv_cache_dtype]}
    asked = [SamplingParams(**({"min_new_tokens": 0} | p)) for p in map(_consistent, case.params)]  # type: ignore[arg-type]
    plain: list[Request] = []
    for prompt, params in zip(case.prompts, asked, strict=True):
        engine = make_engine(ready(model), eos_token_ids=case.eos, max_model_len=80, **pages)
        plain.append(engine.add(prompt, params, keep_scores=True))
        drain(engine)
    answers: Answers = {tuple(r.tokens[: r.prompt_len]): r.tokens[r.prompt_len :] for r in plain}
    engine = make_engine(
        ready(model),
        DRAFTERS[case.drafter](model, answers),
        eos_token_ids=case.eos,
        max_model_len=80,
        max_nodes=case.max_nodes,
        max_num_seqs=case.max_num_seqs,
        max_num_batched_tokens=case.max_num_batched_tokens,
        num_blocks=case.num_blocks,
        cost_table=TABLES[case.costs],
        **pages,
    )
    if case.order % 2:  # admits whoever fits now, so that others have to make room later
        engine.scheduler.lengths = Optimist()
    rng = random.Random(case.order)
    together: list[Request] = []
    for prompt, params in zip(case.prompts, asked, strict=True):
        together.append(engine.add(prompt, params, keep_scores=True))
        for _ in range(rng.randrange(3)):  # later requests join while earlier ones run
            engine.step()
    drain(engine)
    for want, got in zip(plain, together, strict=True):
        assert (got.tokens, got.finish_reason, got.stop_reason) == (want.tokens, want.finish_reason, want.stop_reason)
        tolerance = 1e-5 if case.family in REQUIRED else 1e-8  # transformers' norms and routers round to fp32
        torch.testing.assert_close(torch.cat(got.scores), torch.cat(want.scores), rtol=0, atol=tolerance)


def _consistent(params: dict[str, object]) -> dict[str, object]:
    """A floor is never above the budget."""
    floor, budget = params.get("min_new_tokens", 0), params["max_new_tokens"]
    assert isinstance(floor, int) and isinstance(budget, int)
    return params | {"min_new_tokens": min(floor, budget)}
