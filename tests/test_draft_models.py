"""Drafters that run a model: tokens never change, catching up, standing down, trees, vocabularies, hybrids."""

from collections.abc import Callable

import pytest
import torch
from transformers import PreTrainedModel

from specdec import LLM, SamplingParams
from specdec.drafters.draft_model import DraftModelDrafter
from specdec.drafters.hybrid import HybridDrafter
from specdec.drafters.ngram import NGramDrafter
from specdec.drafters.protocol import Drafter, DraftQuery
from specdec.errors import ConfigError
from specdec.models.decoder import Decoder
from specdec.outputs import TARGET
from tests.conftest import VOCAB, tiny_llama
from tests.engines import Optimist, drain, make_engine, outputs, run
from tests.letters import letters
from tests.scripted import OracleDrafter, RandomDrafter

PROMPTS = [[5, 6, 7, 8, 9, 5, 6, 7], [3], [11, 12, 13] * 9, list(range(20, 60)), [1, 1, 1, 1, 2], [90, 4] * 3]


def asks(num_new: int = 16) -> list[SamplingParams]:
    """Greedy and sampled requests in turn."""
    return [
        SamplingParams(max_new_tokens=num_new, seed=i, temperature=0.0 if i % 2 else 1.2) for i in range(len(PROMPTS))
    ]


@pytest.fixture(scope="module")
def plain(tiny: PreTrainedModel) -> list[list[int]]:
    return outputs(run(make_engine(tiny), PROMPTS, asks()))


@pytest.fixture(scope="module")
def plain_long(tiny: PreTrainedModel) -> list[list[int]]:
    return outputs(run(make_engine(tiny), PROMPTS, asks(32)))


def perfect(model: PreTrainedModel, widths: tuple[int, ...]) -> DraftModelDrafter:
    """The target drafts for itself, with layers and pages of its own."""
    return DraftModelDrafter(Decoder(model), VOCAB, widths)


def early(model: PreTrainedModel, widths: tuple[int, ...], num_layers: int = 2) -> DraftModelDrafter:
    part = Decoder(model).first_layers(num_layers)
    return DraftModelDrafter(part, VOCAB, widths, own_pages=False, name="early_exit")


def other(model: PreTrainedModel, widths: tuple[int, ...]) -> DraftModelDrafter:
    return DraftModelDrafter(Decoder(tiny_llama(seed=9, num_hidden_layers=1)), VOCAB, widths)


MAKERS: dict[str, Callable[[PreTrainedModel], Drafter]] = {
    "itself, chain": lambda m: perfect(m, (1, 1, 1, 1)),
    "itself, tree": lambda m: perfect(m, (3, 5, 2)),
    "another model, chain": lambda m: other(m, (1,) * 6),
    "another model, tree": lambda m: other(m, (4, 8, 8)),
    "early exit, chain": lambda m: early(m, (1, 1, 1)),
    "early exit, tree": lambda m: early(m, (3, 6)),
    "ngram + early exit": lambda m: HybridDrafter(NGramDrafter(), early(m, (2, 2))),
    "ngram + itself, both": lambda m: HybridDrafter(NGramDrafter(), perfect(m, (1, 1, 1)), both=True),
    "random + itself, both": lambda m: HybridDrafter(RandomDrafter(), perfect(m, (2, 2)), both=True),
}


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("batch_size, max_nodes", [(1, 64), (6, 64), (3, 4)])
def test_tokens_never_change(name, batch_size, max_nodes, tiny, plain) -> None:  # type: ignore[no-untyped-def]
    engine = make_engine(tiny, MAKERS[name](tiny), max_num_seqs=batch_size, max_nodes=max_nodes)
    assert outputs(run(engine, PROMPTS, asks())) == plain


@pytest.mark.parametrize("name", MAKERS)
def test_tokens_never_change_under_preemption_and_chunked_prompts(name, tiny, plain_long) -> None:  # type: ignore[no-untyped-def]
    engine = make_engine(tiny, MAKERS[name](tiny), num_blocks=6, max_model_len=96, max_num_batched_tokens=24)
    engine.scheduler.lengths = Optimist()
    for pages in (*engine.pages.k, *engine.pages.v):
        pages.fill_(torch.nan)
    assert outputs(run(engine, PROMPTS, asks(32))) == plain_long
    assert engine.scheduler.num_preemptions


@pytest.mark.parametrize("batch_size", [1, 6])
def test_a_model_that_drafts_for_itself_is_always_right(batch_size, tiny, plain) -> None:  # type: ignore[no-untyped-def]
    """Only if its keys and values are right after every block: the first step on, greedy and sampled."""
    drafter = perfect(tiny, (1, 1, 1))
    for r in run(make_engine(tiny, drafter, max_num_seqs=batch_size), PROMPTS, asks()):
        assert r.stats.num_forwards == 4  # 16 tokens, 4 a forward
        assert r.proposers == (["draft_model"] * 3 + [TARGET]) * 4
    assert not drafter._cached


def test_a_tree_of_the_model_itself_nearly_always_holds_the_answer(tiny: PreTrainedModel) -> None:
    """A path may fall out of a level's width, so not always; its first level always holds it."""
    for r in run(make_engine(tiny, perfect(tiny, (3, 8, 8))), PROMPTS, asks()):
        assert r.stats.acceptance_by_depth[0] == 1
        assert r.stats.mean_acceptance_length >= 3


def test_it_catches_up_after_rejections(tiny: PreTrainedModel, plain: list[list[int]]) -> None:
    """Where another drafter's tokens were taken or refused between its own, it is still always right."""

    class Now:
        """Hands some steps to the model and others to random trees."""

        name, reads_hidden = "mixed", False

        def __init__(self) -> None:
            self.model, self.random, self.steps, self.log = perfect(tiny, (1, 1, 1)), RandomDrafter(), 0, []
            self.kv_layouts = self.model.kv_layouts

        def attach(self, pages, pool):  # type: ignore[no-untyped-def]
            self.model.attach(pages, pool)

        def propose(self, queries):  # type: ignore[no-untyped-def]
            self.steps += 1
            self.log.append(self.steps % 3 != 0)
            return (self.model if self.steps % 3 else self.random).propose(queries)

        def observe(self, observation):  # type: ignore[no-untyped-def]
            self.random.observe(observation)

        def forget(self, ids):  # type: ignore[no-untyped-def]
            self.model.forget(ids)
            self.random.forget(ids)

    for prompt, params, want in zip(PROMPTS, asks(), plain, strict=True):
        drafter = Now()
        engine = make_engine(tiny, drafter)  # type: ignore[arg-type]
        request = engine.add(prompt, params)
        while engine.has_work:
            before = request.num_output
            engine.step()
            if drafter.log[-1] and request.finish_reason is None:
                assert request.num_output - before == 4
        assert outputs([request])[0] == want


def test_it_stands_down_beyond_its_context(tiny: PreTrainedModel) -> None:
    """CASES b5: the draft model knows 32 positions; the answer goes on, neighbours still get drafts."""
    short = tiny_llama(max_position_embeddings=32)
    prompts, params = [[7] * 28, [7]], [SamplingParams(max_new_tokens=24, seed=0)] * 2
    want = outputs(run(make_engine(tiny), prompts, params))
    long_one, neighbour = run(make_engine(tiny, perfect(short, (1, 1, 1))), prompts, params)
    assert outputs([long_one, neighbour]) == want
    assert long_one.stats.num_drafts <= 2 < neighbour.stats.num_drafts


def test_a_smaller_vocabulary_stands_down_where_it_lacks_a_token(tiny: PreTrainedModel, plain: list[list[int]]) -> None:
    small = DraftModelDrafter(Decoder(tiny_llama(vocab_size=50)), VOCAB, (1, 1))
    assert outputs(run(make_engine(tiny, small), PROMPTS, asks())) == plain


def test_a_tree_has_the_widths_and_the_budget(tiny: PreTrainedModel) -> None:
    for max_nodes, want in ((64, 11), (6, 6), (2, 2)):
        engine = make_engine(tiny, perfect(tiny, (3, 5, 2)), max_nodes=max_nodes)
        request = engine.add(PROMPTS[0], SamplingParams(max_new_tokens=8))
        engine.step()
        assert request.stats.num_draft_tokens == want - 1
        drain(engine)


def prompt_of(query: DraftQuery) -> tuple[int, ...]:
    return tuple(query.tokens[: len(query.tokens) - query.num_output])


def test_hybrid_names_who_proposed_each_token(tiny: PreTrainedModel, plain: list[list[int]]) -> None:
    answers = {tuple(p): t for p, t in zip(PROMPTS, plain, strict=True)}
    first = OracleDrafter(answers, "chain")
    first._draw = lambda tree, query, rng: tree.add(0, answers[prompt_of(query)][query.num_output])  # one token only
    engine = make_engine(tiny, HybridDrafter(first, perfect(tiny, (1, 1, 1)), both=True))
    for r in run(engine, PROMPTS, asks()):
        assert r.proposers == (["oracle-chain", "draft_model", "draft_model", TARGET]) * 4
    assert engine.drafter.name == "oracle-chain+draft_model"
    only_first = make_engine(tiny, HybridDrafter(first, perfect(tiny, (1, 1, 1))))
    for r in run(only_first, PROMPTS, asks()):
        assert set(r.proposers) == {"oracle-chain", TARGET}


def test_by_name_by_model_and_what_is_refused(folder, tmp_path) -> None:  # type: ignore[no-untyped-def]
    params = SamplingParams(max_new_tokens=8)
    want = LLM(folder, drafter="none").generate("hello", params)[0].token_ids
    target = tiny_llama(vocab_size=96, dtype=torch.float32, max_position_embeddings=1024)
    for drafter in (f"draft_model:{folder}", "early_exit", "ngram+early_exit", f"ngram+draft_model:{folder}"):
        assert LLM(folder, drafter=drafter).generate("hello", params)[0].token_ids == want
    llm = LLM(target, drafter=tiny_llama(vocab_size=96, dtype=torch.float32), drafter_options={"widths": (2, 2)})
    assert llm.engine.drafter.name == "draft_model"
    bad = {
        "another tokenizer: 1 tokens differ": lambda: _other_tokenizer(folder, tmp_path),
        "has 40 tokens and the target 96": lambda: LLM(target, drafter=tiny_llama(vocab_size=40)),
        "num_layers must be from 1 to 2": lambda: LLM(target, "early_exit", drafter_options={"num_layers": 3}),
        "from 1 to 63, not 0": lambda: LLM(target, "early_exit", drafter_options={"num_speculative_tokens": 0}),
        "from 1 to 63, not 64": lambda: LLM(target, "early_exit", drafter_options={"num_speculative_tokens": 64}),
        "widths must be positive .* not 3": lambda: LLM(target, "early_exit", drafter_options={"widths": 3}),
        "widths must be positive": lambda: LLM(target, "early_exit", drafter_options={"widths": (60, 9)}),
        'write "draft_model:PATH"': lambda: LLM(target, "draft_model"),
        "unknown drafter 'nope'": lambda: LLM(target, "ngram+nope"),
    }
    for message, make in bad.items():
        with pytest.raises(ConfigError, match=message):
            make()


def _other_tokenizer(folder, tmp_path):  # type: ignore[no-untyped-def]
    """CASES i2: the same ids mean other tokens."""
    tiny_llama(vocab_size=97, dtype=torch.float32).save_pretrained(tmp_path)
    tokenizer = letters()
    tokenizer.add_tokens(["<new>"])
    tokenizer.save_pretrained(tmp_path)
    return LLM(folder, drafter=f"draft_model:{tmp_path}")


def test_vocabularies_that_differ_by_padding_are_fine(folder, tmp_path) -> None:  # type: ignore[no-untyped-def]
    """CASES i3."""
    tiny_llama(vocab_size=128, dtype=torch.float32).save_pretrained(tmp_path)
    letters().save_pretrained(tmp_path)
    params = SamplingParams(max_new_tokens=8)
    want = LLM(folder, drafter="none").generate("hello", params)[0].token_ids
    assert LLM(folder, drafter=f"draft_model:{tmp_path}").generate("hello", params)[0].token_ids == want
