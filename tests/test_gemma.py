"""Gemma-3-270M in fp32: the tokens of Hugging Face's greedy generate, past the sliding window, with every drafter."""

from pathlib import Path

import pytest
import torch

from specdec import LLM, SamplingParams
from specdec.drafters.ngram import NGramDrafter
from specdec.drafters.none import NoDrafter
from specdec.drafters.protocol import Drafter
from tests.families import hf_logits, packed_logits
from tests.scripted import OracleDrafter, RandomDrafter
from tests.test_real_model import assert_same

pytestmark = pytest.mark.gemma

SHORT = "The numbers from one to one thousand, one a line:\n1\n2\n3\n4\n5\n"  # counts on: every token is another
LONG = "".join(f"{i}. Line {i} says that {i} times {i} is {i * i}.\n" for i in range(1, 26))
NUM_NEW = {"short": 600, "long": 100}


@pytest.fixture(scope="module")
def llm(gemma_path: Path) -> LLM:
    return LLM(gemma_path, drafter="none", dtype="float32", device="cpu", max_model_len=1024, max_nodes=16)


@pytest.fixture(scope="module")
def prompts(llm: LLM) -> dict[str, list[int]]:
    made = {"short": llm.tokenizer(SHORT)["input_ids"], "long": llm.tokenizer(LONG)["input_ids"]}
    window = llm.hf_model.config.sliding_window
    assert len(made["short"]) < window < NUM_NEW["short"]  # the output passes the window
    assert len(made["long"]) > window  # the prompt does
    return made


@pytest.fixture(scope="module")
def hf_answers(llm: LLM, prompts: dict[str, list[int]]) -> dict[str, list[int]]:
    answers = {}
    for name, ids in prompts.items():
        inputs = torch.tensor([ids])
        out = llm.hf_model.generate(
            inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=NUM_NEW[name], do_sample=False
        )
        answers[name] = out[0, len(ids) :].tolist()
    assert len(answers["short"]) == NUM_NEW["short"], "the model ended its answer before the window"
    return answers


@pytest.mark.parametrize("name", ["none", "ngram", "oracle chain", "oracle ragged", "oracle wide", "random"])
def test_greedy_equals_hugging_face(name, llm, prompts, hf_answers) -> None:  # type: ignore[no-untyped-def]
    answers = {tuple(prompts[key]): hf_answers[key] for key in prompts}
    vocab = llm.engine.model.vocab_size
    made: dict[str, Drafter] = {
        "none": NoDrafter(),
        "ngram": NGramDrafter(),
        "oracle chain": OracleDrafter(answers, "chain", vocab),
        "oracle ragged": OracleDrafter(answers, "ragged", vocab),
        "oracle wide": OracleDrafter(answers, "wide", vocab),
        "random": RandomDrafter(3, vocab),
    }
    llm.engine.drafter = made[name]
    params = [SamplingParams(max_new_tokens=NUM_NEW[key]) for key in prompts]
    for key, got in zip(prompts, llm.generate(list(prompts.values()), params), strict=True):
        print(f"{name}, {key}: {got.stats.mean_acceptance_length:.2f} tokens a forward")
        assert_same(llm, prompts[key], got.token_ids, hf_answers[key])
    llm.engine.check_integrity()
    assert llm.engine.pool.num_free == llm.engine.pool.num_blocks


def test_logits_past_the_window_equal_hugging_face(llm, prompts) -> None:  # type: ignore[no-untyped-def]
    """A window longer or shorter by one token moves them by 0.07 or more; no greedy token shows that."""
    ids = torch.tensor(prompts["long"])
    got = packed_logits(llm.engine.model, ids, [300, 200, len(ids) - 500])
    torch.testing.assert_close(got, hf_logits(llm.hf_model, ids), atol=1e-3, rtol=0)
