"""The Python API over a tiny model with a real tokenizer."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from specdec import LLM, SamplingParams, accelerate
from specdec.drafters.ngram import NGramDrafter
from specdec.errors import CheckpointError, ConfigError, InvalidRequest, ModelNotFound, SpecdecError, UnsupportedModel
from specdec.llm import resolve_device, resolve_dtype
from specdec.verifier.rules import TypicalRule
from tests.conftest import tiny_llama
from tests.letters import letters

PARAMS = SamplingParams(max_new_tokens=12)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(tiny_llama(vocab_size=100, dtype=torch.float32), tokenizer=letters())


def test_one_prompt_and_several_give_the_same(llm: LLM) -> None:
    (one,) = llm.generate("hello", PARAMS)
    same, ids, other = llm.generate(["hello", llm.tokenizer("hello")["input_ids"], "world"], PARAMS)
    assert one.token_ids == same.token_ids == ids.token_ids != other.token_ids
    assert one.text == llm.tokenizer.decode(one.token_ids, skip_special_tokens=True)
    assert one.finish_reason == "length" and len(one.token_ids) == 12
    assert one.prompt_token_ids == llm.tokenizer("hello")["input_ids"]
    assert one.logprobs is None
    assert max(one.token_ids) < 96  # ids that no token has are never emitted


def test_greedy_is_the_default_and_params_may_differ(llm: LLM) -> None:
    short, long = llm.generate(["a", "a"], [SamplingParams(max_new_tokens=3), PARAMS])
    assert long.token_ids[:3] == short.token_ids
    assert len(llm.generate("a")[0].token_ids) <= 256
    with pytest.raises(InvalidRequest, match="2 SamplingParams were given for 1 prompts"):
        llm.generate(["a"], [PARAMS, PARAMS])
    assert llm.generate([], PARAMS) == []


def test_requests_without_a_seed_get_one_from_the_engine() -> None:
    model = tiny_llama(vocab_size=100, dtype=torch.float32)
    hot = SamplingParams(max_new_tokens=12, temperature=2.0)
    results = [LLM(model, tokenizer=letters(), seed=5).generate(["a", "a"], hot) for _ in range(2)]
    first, second = ([c.token_ids for c in completions] for completions in results)
    assert first == second and first[0] != first[1]


def test_n_answers_stand_together(llm: LLM) -> None:
    hot = SamplingParams(max_new_tokens=12, temperature=1.5, seed=4, n=3)
    a, b, c, other = llm.generate(["hello", "world"], [hot, PARAMS])
    for i, completion in enumerate((a, b, c)):
        alone = SamplingParams(max_new_tokens=12, temperature=1.5, seed=4 + i)
        assert completion.token_ids == llm.generate("hello", alone)[0].token_ids
    assert other.token_ids == llm.generate("world", PARAMS)[0].token_ids
    with pytest.raises(InvalidRequest, match="n is 3, use generate"):
        llm.stream("hello", hot)


def test_chat_goes_through_the_template(llm: LLM) -> None:
    messages = [{"role": "user", "content": "hi"}]
    assert llm.encode_chat(messages) == llm.tokenizer("<u>hi<a>")["input_ids"]
    assert llm.chat(messages, PARAMS)[0].token_ids == llm.generate("<u>hi<a>", PARAMS)[0].token_ids
    assert len(llm.chat([messages, messages], PARAMS)) == 2
    with pytest.raises(InvalidRequest, match="refuses these messages: bad role"):
        llm.chat([{"role": "wizard", "content": "hi"}])
    with pytest.raises(InvalidRequest, match="the conversation is empty"):
        llm.encode_chat([])


def test_without_a_template_or_a_tokenizer_the_fix_is_named() -> None:
    model = tiny_llama(vocab_size=100, dtype=torch.float32)
    with pytest.raises(InvalidRequest, match="has no chat template; use generate"):
        LLM(model, tokenizer=letters(None)).chat([{"role": "user", "content": "hi"}])
    bare = LLM(model)
    with pytest.raises(InvalidRequest, match="give the prompt as token ids"):
        bare.generate("hello")
    (completion,) = bare.generate([1, 2, 3], PARAMS)
    assert completion.text == "" and len(completion.token_ids) == 12


def test_a_bad_prompt_among_good_ones_runs_nothing(llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match="the prompt is empty"):
        llm.generate(["fine", []], PARAMS)
    assert not llm.engine.has_work
    assert llm.engine.pool.num_free == llm.engine.pool.num_blocks


def test_stream_adds_up_and_may_be_closed_early(llm: LLM) -> None:
    (whole,) = llm.generate("stream", PARAMS)
    chunks = list(llm.stream("stream", PARAMS))
    assert "".join(c.text for c in chunks) == whole.text
    assert [t for c in chunks for t in c.token_ids] == whole.token_ids
    assert [c.finish_reason for c in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].finish_reason == "length"
    stream = llm.stream("stream", PARAMS)
    next(stream)
    inside = llm.generate("stream", PARAMS)  # another request while the stream is open
    assert inside[0].token_ids == whole.token_ids
    stream.close()
    assert not llm.engine.has_work and llm.engine.pool.num_free == llm.engine.pool.num_blocks
    with pytest.raises(InvalidRequest, match="empty"):
        llm.stream([])


def test_a_stream_gets_what_the_steps_of_others_added(llm: LLM) -> None:
    (whole,) = llm.generate("stream", PARAMS)
    for num_others in (1, 5, 40):
        stream = llm.stream("stream", PARAMS)
        chunks = [next(stream)]
        llm.generate("other", SamplingParams(max_new_tokens=num_others))  # the last one also ends the stream's request
        chunks += stream
        assert [t for c in chunks for t in c.token_ids] == whole.token_ids
        assert "".join(c.text for c in chunks) == whole.text and chunks[-1].finish_reason == "length"
    stream = llm.stream("stream", PARAMS)
    chunks = [next(stream)]
    (request,) = llm.engine.scheduler.running
    llm.engine.abort(request)
    assert [(c.token_ids, c.finish_reason) for c in stream] == [([], "abort")]


def test_a_stream_that_nobody_reads_leaves_nothing(llm: LLM) -> None:
    llm.stream("stream", PARAMS).close()
    llm.stream("stream", PARAMS)
    assert not llm.engine.has_work


def test_token_ids_may_be_of_any_integer_kind(llm: LLM) -> None:
    (want,) = llm.generate([1, 2, 3], PARAMS)
    for ids in (
        np.array([1, 2, 3]),
        torch.tensor([1, 2, 3]),
        torch.tensor([[1, 2, 3]]),
        [np.int64(1), 2, 3],
        (1, 2, 3),
    ):
        (got,) = llm.generate(ids, PARAMS)  # type: ignore[arg-type]
        assert (got.token_ids, got.prompt_token_ids) == (want.token_ids, [1, 2, 3])
        assert {type(token) for token in got.prompt_token_ids} == {int}
    assert len(llm.generate(iter(["a", "b"]), PARAMS)) == 2  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "prompts",
    [{"prompt": "hi"}, [{"prompt_token_ids": [1]}], [1.5], [[1, 2.0]], [None], [[None]], b"hi", [["a"]], None, 5],
)
def test_what_is_no_prompt_is_refused_by_name(llm: LLM, prompts: Any) -> None:
    with pytest.raises(InvalidRequest, match="a prompt must be text or"):
        llm.generate(prompts, PARAMS)
    with pytest.raises(InvalidRequest, match="token ids must be whole numbers, not 1.5"):
        llm.engine.add([1, 1.5], PARAMS)  # type: ignore[list-item]


def test_what_are_no_params_is_refused_by_name(llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match="0 SamplingParams were given for 1 prompts"):
        llm.generate(["a"], [])
    for bad in ({"temperature": 1}, [None], 3):
        with pytest.raises(InvalidRequest, match="params must be SamplingParams"):
            llm.generate(["a"], bad)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="params must be SamplingParams"):
        llm.stream("a", {"n": 1})  # type: ignore[arg-type]


def test_eos_comes_from_the_model_or_its_tokenizer() -> None:
    model = tiny_llama(vocab_size=100, dtype=torch.float32)
    free = LLM(model, tokenizer=letters()).generate("hello", PARAMS)[0].token_ids
    model.generation_config.eos_token_id = [99, free[5]]
    assert LLM(model, tokenizer=letters()).generate("hello", PARAMS)[0].token_ids == free[: free.index(free[5]) + 1]
    model.generation_config.eos_token_id = free[2]
    completion = LLM(model, tokenizer=letters()).generate("hello", PARAMS)[0]
    assert completion.finish_reason == "stop"
    assert completion.text == letters().decode(free[: free.index(free[2])])


def test_loads_a_folder_and_takes_a_drafter_object(folder: Path) -> None:
    by_path = LLM(folder, drafter=NGramDrafter(2), dtype="float64", device="cpu", max_num_seqs=2)
    assert by_path.engine.model.dtype == torch.float64
    assert by_path.engine.config.max_num_seqs == 2
    assert len(by_path.generate("hello", PARAMS)[0].token_ids) == 12


def test_a_loaded_model_keeps_its_dtype_and_device() -> None:
    assert LLM(tiny_llama()).engine.model.dtype == torch.float64
    assert LLM(tiny_llama(), dtype="float32").engine.model.dtype == torch.float32


def test_rules_by_name_and_object() -> None:
    model = tiny_llama(vocab_size=100)
    assert LLM(model).engine.rule.lossless
    assert not LLM(model, rule="typical").engine.rule.lossless
    assert LLM(model, rule=TypicalRule(epsilon=0.2)).engine.rule == TypicalRule(epsilon=0.2)


@pytest.mark.parametrize(
    "options, error, message",
    [
        ({"drafter": "engram"}, ConfigError, "unknown drafter 'engram'; did you mean 'ngram'"),
        ({"drafter_options": {"k": 3}}, ConfigError, "drafter 'auto' has no option 'k'"),
        ({"drafter": "medusa"}, ConfigError, "medusa:PATH"),
        ({"drafter": "medusa:/nowhere"}, CheckpointError, "/nowhere"),
        ({"max_num_seq": 3}, ConfigError, "no option 'max_num_seq'; did you mean 'max_num_seqs'"),
        ({"foo": 3}, ConfigError, "no option 'foo'; known options: block_size"),
        ({"rule": "lucky"}, ConfigError, "unknown acceptance rule 'lucky'"),
        ({"dtype": "int8"}, ConfigError, "dtype 'int8' is unknown"),
        ({"dtype": "float33"}, ConfigError, "dtype 'float33' is unknown"),
        ({"dtype": "float8_e4m3fn"}, ConfigError, "dtype 'float8_e4m3fn' is unknown"),
        ({"device": "gpu0"}, ConfigError, "device 'gpu0' is unknown"),
        ({"device": None}, ConfigError, "device None is unknown"),
        ({"device": "meta"}, ConfigError, "'meta' is neither a CPU nor"),
        ({"max_model_len": 10**6}, ConfigError, "beyond the model's 256"),
    ],
)
def test_bad_options_are_named_errors(options: dict[str, object], error: type[SpecdecError], message: str) -> None:
    with pytest.raises(error, match=message):
        LLM(tiny_llama(), **options)  # type: ignore[arg-type]


def test_a_model_on_several_devices_is_refused_by_name() -> None:
    """The drop-in leaves it to transformers, whose hooks move what it computes."""
    model = tiny_llama()
    model.model.layers[1].to("meta")
    with pytest.raises(UnsupportedModel, match="the weights lie on cpu and meta; specdec runs a model on one device"):
        LLM(model)
    with accelerate(model) as accelerated:
        assert accelerated.engine is None


def test_an_unknown_model_is_named() -> None:
    with pytest.raises(ModelNotFound, match="no/such/folder"):
        LLM("no/such/folder")


def test_broken_heads_file_is_named(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="config.json"):
        LLM(folder, drafter=str(tmp_path))


def test_device_and_dtype_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert resolve_device("auto").type == "cuda"
    assert resolve_dtype("auto", torch.device("cuda")) == torch.bfloat16
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert resolve_device("auto").type == "cpu"
    assert resolve_dtype("auto", torch.device("cpu")) == torch.float32
    with pytest.raises(ConfigError, match="torch sees no GPU"):
        resolve_device("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert resolve_device("cuda:1").index == 1
    with pytest.raises(ConfigError, match="device 'cuda:2' was asked for, but torch sees 2 GPUs"):
        resolve_device("cuda:2")


def test_a_device_that_kernels_do_not_run_on_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are launched on the current GPU, wherever their tensors are."""
    for device in ("meta", "mps"):
        with pytest.raises(ConfigError, match=f"'{device}' is neither a CPU nor an NVIDIA GPU"):
            resolve_device(device)
    with pytest.raises(UnsupportedModel, match="'meta' is neither"):
        LLM(tiny_llama().to("meta"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert [resolve_device(name).index for name in ("cuda", "cuda:1")] == [None, 1]
    with pytest.raises(ConfigError, match="'cuda:0' isn't torch's current GPU, number 1.* CUDA_VISIBLE_DEVICES"):
        resolve_device("cuda:0")


def test_import_is_light_and_names_are_public() -> None:
    import specdec

    code = "import sys, specdec; print('torch' in sys.modules, set(specdec.__all__) <= set(dir(specdec)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False True\n"
    assert specdec.LLM is LLM and all(hasattr(specdec, name) for name in specdec.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = specdec.nothing


def test_an_answer_without_text_has_the_same_tokens(folder: Path) -> None:
    llm = LLM(folder, "none", device="cpu")
    with_text, without = (llm.generate("hi", SamplingParams(max_new_tokens=9, detokenize=x))[0] for x in (True, False))
    assert without.token_ids == with_text.token_ids and with_text.text and not without.text
    with pytest.raises(InvalidRequest, match="leave detokenize on"):
        SamplingParams(stop="x", detokenize=False)
    with pytest.raises(InvalidRequest, match="detokenize must be True or False"):
        SamplingParams(detokenize=1)  # type: ignore[arg-type]
