"""The default model in fp32: the tokens of Hugging Face's greedy generate, with every drafter and tree."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from specdec import LLM, SamplingParams
from specdec.cli.demo_prompts import PROMPTS
from specdec.drafters.ngram import NGramDrafter
from specdec.drafters.none import NoDrafter
from specdec.drafters.protocol import Drafter
from specdec.outputs import Completion
from tests.medusa import random_medusa
from tests.scripted import AdversarialDrafter, OracleDrafter, RandomDrafter

pytestmark = [pytest.mark.model, pytest.mark.xdist_group("real model")]  # loaded by one process only
NUM_NEW = 16
ALLOWED_MARGIN = 1e-4  # in fp32 a token may differ where the two best logits are closer than this


@pytest.fixture(scope="module")
def llm(real_model_path: Path) -> LLM:
    return LLM(real_model_path, drafter="none", dtype="float32", device="cpu", max_num_seqs=3, max_nodes=8)


@pytest.fixture(scope="module")
def prompts(llm: LLM) -> list[list[int]]:
    return [llm.encode_chat([{"role": "user", "content": text}]) for text in list(PROMPTS.values())[:3]]


@pytest.fixture(scope="module")
def hf_answers(llm: LLM, prompts: list[list[int]]) -> list[list[int]]:
    answers = []
    for ids in prompts:
        inputs = torch.tensor([ids])
        out = llm.hf_model.generate(
            inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=NUM_NEW, do_sample=False
        )
        answers.append(out[0, len(ids) :].tolist())
    return answers


@pytest.fixture
def use(llm: LLM) -> Iterator[object]:
    """Give the engine another drafter for one test."""
    before = llm.engine.drafter

    def swap(drafter: Drafter) -> None:
        llm.engine.drafter = drafter

    yield swap
    llm.engine.drafter = before


def assert_same(llm: LLM, prompt: list[int], got: list[int], want: list[int]) -> None:
    """Equal, or first different where the model itself is undecided; the margin is printed."""
    if got == want:
        return
    same = next(i for i, (a, b) in enumerate(zip(got, want, strict=False)) if a != b)
    with torch.inference_mode():
        best = llm.hf_model(torch.tensor([prompt + want[:same]])).logits[0, -1].topk(2).values
    margin = float(best[0] - best[1])
    print(f"differs at output token {same}, top-2 margin {margin:.2e}")
    assert margin < ALLOWED_MARGIN


def generate(llm: LLM, prompts: list[list[int]], **params: float) -> list[Completion]:
    return llm.generate(prompts, SamplingParams(max_new_tokens=NUM_NEW, **params))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["none", "ngram", "oracle chain", "oracle ragged", "adversarial", "random", "medusa"])
def test_greedy_equals_hugging_face(name, llm, prompts, hf_answers, use) -> None:  # type: ignore[no-untyped-def]
    answers = {tuple(p): a for p, a in zip(prompts, hf_answers, strict=True)}
    vocab = llm.engine.model.vocab_size
    made: dict[str, Drafter] = {
        "none": NoDrafter(),
        "ngram": NGramDrafter(),
        "oracle chain": OracleDrafter(answers, "chain", vocab),
        "oracle ragged": OracleDrafter(answers, "ragged", vocab),
        "adversarial": AdversarialDrafter(answers, "wide", vocab),
        "random": RandomDrafter(3, vocab),
    }
    use(random_medusa(llm.hf_model) if name == "medusa" else made[name])
    for prompt, want, got in zip(prompts, hf_answers, generate(llm, prompts), strict=True):
        assert_same(llm, prompt, got.token_ids, want)
        assert got.text == llm.tokenizer.decode(got.token_ids, skip_special_tokens=True)
    llm.engine.check_integrity()
    assert llm.engine.pool.num_free == llm.engine.pool.num_blocks


@pytest.mark.parametrize("temperature, top_p", [(1.0, 0.95)])
def test_sampled_tokens_do_not_depend_on_the_drafter(temperature, top_p, llm, prompts, use) -> None:  # type: ignore[no-untyped-def]
    params = [SamplingParams(max_new_tokens=8, temperature=temperature, top_p=top_p, seed=i) for i in range(3)]
    want = llm.generate(prompts[:3], params)
    vocab = llm.engine.model.vocab_size
    answers = {tuple(p): c.token_ids for p, c in zip(prompts, want, strict=False)}
    for drafter in (NGramDrafter(), OracleDrafter(answers, "wide", vocab), RandomDrafter(1, vocab)):
        use(drafter)
        for prompt, a, b in zip(prompts, want, llm.generate(prompts[:3], params), strict=False):
            # a draw flips only where two noisy scores nearly tie; the chance in this test is about 1 in 10,000
            assert a.token_ids == b.token_ids, llm.tokenizer.decode(prompt)


def test_stop_string_inside_an_accepted_block(llm, prompts, hf_answers, use) -> None:  # type: ignore[no-untyped-def]
    """CASES b3: a substring that the model really says, over several tokens."""
    prompt, answer = prompts[2], hf_answers[2]
    text = llm.tokenizer.decode(answer)
    for start, length in ((30, 3), (41, 17)):
        stop = text[start : start + length]
        results = []
        for drafter in (NoDrafter(), OracleDrafter({tuple(prompt): answer}, "chain", llm.engine.model.vocab_size)):
            use(drafter)
            results.append(llm.generate(prompt, SamplingParams(max_new_tokens=NUM_NEW, stop=[stop]))[0])
        plain, fast = results
        assert plain.text == fast.text == text[: text.index(stop)]
        assert plain.token_ids == fast.token_ids == answer[: len(plain.token_ids)]
        assert fast.stop_reason == plain.stop_reason == stop


def test_copying_needs_few_forwards(llm, prompts, use) -> None:  # type: ignore[no-untyped-def]
    use(NGramDrafter())
    (completion,) = llm.generate(prompts[2], SamplingParams(max_new_tokens=48))
    assert completion.stats.mean_acceptance_length > 2


def test_stream_and_chat_give_the_same_text(llm: LLM, use) -> None:  # type: ignore[no-untyped-def]
    use(NGramDrafter())
    messages = [{"role": "user", "content": "Count from one to ten in words."}]
    params = SamplingParams(max_new_tokens=24)
    (whole,) = llm.chat(messages, params)
    chunks = list(llm.stream(llm.encode_chat(messages), params))
    assert "".join(chunk.text for chunk in chunks) == whole.text
    assert [t for chunk in chunks for t in chunk.token_ids] == whole.token_ids
    assert [p for chunk in chunks for p in chunk.proposers] == whole.proposers
    assert [chunk.finish_reason for chunk in chunks][-1] == whole.finish_reason
