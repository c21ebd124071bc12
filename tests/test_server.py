"""The server through OpenAI's own client: the same answers as without it."""

import json
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

from specdec import LLM, SamplingParams
from specdec.outputs import Completion
from tests.server import MODEL, Served, served, tiny_llm

HI = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def offline() -> LLM:
    return tiny_llm(num_blocks=256)


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served() as running:
        yield running


def chat(server: Served, **options: Any) -> Any:
    return server.openai.chat.completions.create(**({"model": MODEL, "messages": HI, "temperature": 0} | options))


def complete(server: Served, **options: Any) -> Any:
    return server.openai.completions.create(**({"model": MODEL, "prompt": "hi", "temperature": 0} | options))


def expected(offline: LLM, **options: Any) -> list[Completion]:
    return offline.chat(HI, SamplingParams(**({"max_new_tokens": 20} | options)))


def test_chat(server: Served, offline: LLM) -> None:
    (want,) = expected(offline)
    answer = chat(server, max_tokens=20)
    (choice,) = answer.choices
    assert (choice.message.content, choice.message.role) == (want.text, "assistant")
    assert choice.finish_reason == "length" and answer.object == "chat.completion" and answer.model == MODEL
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(want.prompt_token_ids), 20)
    assert answer.usage.total_tokens == len(want.prompt_token_ids) + 20
    assert answer.usage.speculation["mean_acceptance_length"] == want.stats.mean_acceptance_length
    assert answer.usage.speculation["accepted_by_depth"] == want.stats.accepted_by_depth
    assert answer.usage.speculation["drafter"] == "ngram"
    parts = [{"role": "user", "content": [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]}]
    assert chat(server, messages=parts, max_completion_tokens=20).choices[0].message.content == want.text
    longest = chat(server).choices[0]  # without a limit: as long as the context
    assert len(longest.message.content) == 256 - len(want.prompt_token_ids) and longest.finish_reason == "length"


def test_chat_streams_what_it_would_answer(server: Served, offline: LLM) -> None:
    (want,) = expected(offline)
    chunks = list(chat(server, max_tokens=20, stream=True, stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant" and chunks[0].choices[0].delta.content == ""
    assert "".join(c.choices[0].delta.content or "" for c in chunks[:-1]) == want.text
    assert [c.choices[0].finish_reason for c in chunks[:-1]] == [None] * (len(chunks) - 2) + ["length"]
    assert all(c.usage is None for c in chunks[:-1]) and chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 20 and chunks[-1].usage.speculation["drafter"] == "ngram"
    assert len({c.id for c in chunks}) == 1 and {c.object for c in chunks} == {"chat.completion.chunk"}
    without = list(chat(server, max_tokens=20, stream=True))
    assert "".join(c.choices[0].delta.content or "" for c in without) == want.text
    assert all(c.usage is None and len(c.choices) == 1 for c in without)


def test_the_stream_is_server_sent_events(server: Served) -> None:
    with server.http.stream(
        "POST", "/v1/completions", json={"model": MODEL, "prompt": "a", "stream": True}
    ) as response:
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        lines = response.read().decode().split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    assert all(json.loads(line.removeprefix("data: "))["object"] == "text_completion" for line in lines[:-2])


def test_completions_of_every_kind_of_prompt(server: Served, offline: LLM) -> None:
    ids = offline.tokenizer("hi")["input_ids"]
    want = [c.text for c in offline.generate(["hi", "yo"], SamplingParams(max_new_tokens=16))]
    assert complete(server).choices[0].text == want[0]  # OpenAI's default is 16 tokens
    assert complete(server, prompt=ids).choices[0].text == want[0]
    for prompts in (["hi", "yo"], [ids, offline.tokenizer("yo")["input_ids"]]):
        answer = complete(server, prompt=prompts)
        assert [(c.index, c.text) for c in answer.choices] == list(enumerate(want))
        assert answer.usage.prompt_tokens == 4 and answer.usage.completion_tokens == 32
        streamed = ["", ""]
        for chunk in complete(server, prompt=prompts, stream=True):
            streamed[chunk.choices[0].index] += chunk.choices[0].text
        assert streamed == want


def test_n_answers_have_the_seeds_that_they_have_offline(server: Served, offline: LLM) -> None:
    want = [c.text for c in expected(offline, temperature=1.5, seed=5, n=3)]
    options = {"temperature": 1.5, "seed": 5, "n": 3, "max_tokens": 20}
    for _ in range(3):
        assert [c.message.content for c in chat(server, **options).choices] == want
    assert len(set(want)) == 3
    streamed = [""] * 3
    for chunk in chat(server, **options, stream=True):
        streamed[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert streamed == want
    assert chat(server, temperature=1.5, seed=-3).choices[0].message.content  # OpenAI's seeds may be negative


def test_logprobs_of_a_chat(server: Served, offline: LLM) -> None:
    (want,) = expected(offline, logprobs=2)
    assert want.logprobs is not None
    answer = chat(server, max_tokens=20, logprobs=True, top_logprobs=2).choices[0]
    streamed = chat(server, max_tokens=20, logprobs=True, top_logprobs=2, stream=True)
    parts = [e for c in streamed if c.choices[0].logprobs for e in c.choices[0].logprobs.content]
    for entries in (answer.logprobs.content, parts):
        assert [e.logprob for e in entries] == [pytest.approx(e.logprob, abs=1e-9) for e in want.logprobs]
        assert "".join(e.token for e in entries) == want.text
        assert "".join(bytes(e.bytes).decode() for e in entries) == want.text
        tops = [{t.token: t.logprob for t in e.top_logprobs} for e in entries]
        decode = offline.tokenizer.decode
        assert tops == [pytest.approx({decode([t]): v for t, v in e.top.items()}, abs=1e-9) for e in want.logprobs]
    (bare,) = chat(server, max_tokens=3, logprobs=True).choices
    assert [e.top_logprobs for e in bare.logprobs.content] == [[]] * 3
    assert chat(server, max_tokens=3).choices[0].logprobs is None


def test_logprobs_of_a_completion(server: Served, offline: LLM) -> None:
    (want,) = offline.generate("hi", SamplingParams(max_new_tokens=16, logprobs=3))
    assert want.logprobs is not None
    whole = complete(server, logprobs=3).choices[0].logprobs
    assert "".join(whole.tokens) == want.text and whole.text_offset == list(range(16))
    assert whole.token_logprobs == [pytest.approx(e.logprob, abs=1e-9) for e in want.logprobs]
    assert [len(top) for top in whole.top_logprobs] == [3] * 16
    for number in (0, 1):  # beside the likeliest, the one that was drawn
        drawn = complete(server, logprobs=number, temperature=2, seed=1).choices[0].logprobs
        assert all(own in top for own, top in zip(drawn.tokens, drawn.top_logprobs, strict=True))
        assert max(map(len, drawn.top_logprobs)) == number + 1
    offsets = [o for c in complete(server, logprobs=3, stream=True) for o in c.choices[0].logprobs.text_offset]
    assert offsets == whole.text_offset


def test_stops(server: Served, offline: LLM) -> None:
    (want,) = expected(offline)
    stop = want.text[7:10]
    for given in (stop, ["never", stop]):
        choice = chat(server, max_tokens=20, stop=given).choices[0]
        assert (choice.message.content, choice.finish_reason) == (want.text[: want.text.index(stop)], "stop")
    streamed = list(chat(server, max_tokens=20, stop=stop, stream=True))
    assert "".join(c.choices[0].delta.content or "" for c in streamed) == want.text[: want.text.index(stop)]
    token = want.token_ids[5]
    choice = chat(server, max_tokens=20, extra_body={"stop_token_ids": [token]}).choices[0]
    assert choice.message.content == want.text[: want.token_ids.index(token)] and choice.finish_reason == "stop"


@pytest.mark.parametrize(
    ("sent", "params"),
    [
        ({"presence_penalty": 1.5, "frequency_penalty": -0.5}, {"presence_penalty": 1.5, "frequency_penalty": -0.5}),
        (
            {"logit_bias": {"7": 100, "9": -100}, "max_tokens": 5},
            {"logit_bias": {7: 100, 9: -100}, "max_new_tokens": 5},
        ),
        ({"temperature": 1.2, "top_p": 0.8, "seed": 3}, {"temperature": 1.2, "top_p": 0.8, "seed": 3}),
        ({"temperature": 2, "top_k": 5, "seed": 3}, {"temperature": 2.0, "top_k": 5, "seed": 3}),
        ({"temperature": 1, "min_p": 0.2, "seed": 3}, {"temperature": 1.0, "min_p": 0.2, "seed": 3}),
        ({"repetition_penalty": 1.4, "min_tokens": 3}, {"repetition_penalty": 1.4, "min_new_tokens": 3}),
    ],
    ids=lambda fields: "+".join(fields),
)
def test_parameters_mean_what_they_mean_offline(
    sent: dict[str, Any], params: dict[str, Any], server: Served, offline: LLM
) -> None:
    (want,) = expected(offline, **params)
    answer = server.chat(**({"max_tokens": 20} | sent)).json()
    assert answer["choices"][0]["message"]["content"] == want.text
    assert want.text != expected(offline)[0].text, "the parameter changes nothing: nothing was tested"


def test_a_request_may_set_its_speculation(server: Served, offline: LLM) -> None:
    (want,) = expected(offline, max_new_tokens=60)
    reports = []
    for speculation in ({"enabled": False}, {"num_speculative_tokens": 0}, {"num_speculative_tokens": 1}, {}):
        answer = chat(server, max_tokens=60, extra_body={"speculation": speculation})
        assert answer.choices[0].message.content == want.text
        reports.append(answer.usage.speculation)
    assert [len(report["accepted_by_depth"]) for report in reports[:3]] == [0, 0, 1]
    assert [report["num_draft_tokens"] for report in reports[:2]] == [0, 0] and reports[3]["num_draft_tokens"] > 0
    assert reports[0]["mean_acceptance_length"] == 1


def test_a_trace_says_who_proposed_each_token(server: Served, offline: LLM) -> None:
    (want,) = expected(offline, max_new_tokens=60)
    answer = chat(server, max_tokens=60, extra_body={"speculation": {"trace": True}}).choices[0]
    streamed = chat(server, max_tokens=60, stream=True, extra_body={"speculation": {"trace": True}})
    parts = [entry for c in streamed for entry in getattr(c.choices[0], "trace", None) or []]
    for entries in (answer.trace, parts):
        assert "".join(entry["text"] for entry in entries) == want.text
        assert [entry["token_id"] for entry in entries] == want.token_ids
        assert [entry["proposer"] for entry in entries] == want.proposers


def test_models_tokens_and_version(server: Served, offline: LLM) -> None:
    assert [m.id for m in server.openai.models.list()] == [MODEL]
    assert server.openai.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        chat(server, model="gpt-4")
    ids = offline.tokenizer("hello there")["input_ids"]
    tokenized = server.post("/tokenize", {"prompt": "hello there"}).json()
    assert tokenized == {"count": len(ids), "max_model_len": 256, "tokens": ids}
    assert server.post("/tokenize", {"messages": HI}).json()["tokens"] == offline.encode_chat(HI)
    assert server.post("/detokenize", {"tokens": ids}).json() == {"prompt": "hello there"}
    assert server.http.get("/version").json()["version"]
    assert server.http.get("/health").json() == {"status": "ok"}
    assert server.http.get("/ready").json() == {"status": "ready"}


def test_what_can_be_read_can_be_asked_for_by_head(server: Served) -> None:
    for path in ("/", "/playground.js", "/health", "/ready", "/version", "/metrics", "/v1/models"):
        head, got = server.http.head(path), server.http.get(path)
        assert (head.status_code, head.content) == (200, b"") and got.content
        assert head.headers["content-type"] == got.headers["content-type"]
    assert server.http.head("/v1/completions").status_code == 405
    assert server.http.get("/playground.exe").json()["error"]["code"] == "not_found"


def test_fields_of_openai_are_taken_or_refused_by_name(server: Served) -> None:
    harmless = {"user": "me", "metadata": {"a": "b"}, "store": False, "service_tier": "auto", "top_logprobs": None}
    assert server.chat(max_tokens=2, **harmless, response_format={"type": "text"}, tools=[]).status_code == 200
    for name, value in (
        ("tools", [{"type": "function"}]),
        ("response_format", {"type": "json_object"}),
        ("echo", True),
    ):
        response = server.chat(**{name: value})
        error = response.json()["error"]
        assert response.status_code == 400 and error["param"] == name
        assert (
            error["message"] == f"{name} is not supported by this server" and error["type"] == "invalid_request_error"
        )
    unknown = server.chat(max_tokenz=3)
    assert unknown.status_code == 400 and unknown.json()["error"]["param"] == "max_tokenz"


def test_a_random_mix_of_requests_gets_the_tokens_of_offline_runs(server: Served, offline: LLM) -> None:
    rng = random.Random(1)
    cases = []
    for i in range(40):
        prompt = [rng.randrange(95) for _ in range(rng.randint(1, 60))]
        fields = {"max_tokens": rng.randint(1, 50), "temperature": rng.choice([0, 0.8, 1.5]), "seed": i}
        cases.append((prompt, fields, rng.choice([True, False]), rng.random() < 0.25))

    def ask(case: Any) -> str | None:
        prompt, fields, stream, leaves = case
        if not stream:
            return str(complete(server, prompt=prompt, **fields).choices[0].text)
        chunks = complete(server, prompt=prompt, **fields, stream=True)
        if leaves:
            next(iter(chunks))
            chunks.close()
            return None
        return "".join(chunk.choices[0].text for chunk in chunks)

    with ThreadPoolExecutor(12) as pool:
        texts = list(pool.map(ask, cases))
    for (prompt, fields, _, _), text in zip(cases, texts, strict=True):
        params = SamplingParams(
            max_new_tokens=fields["max_tokens"], temperature=fields["temperature"], seed=fields["seed"]
        )
        assert text in (None, offline.generate(prompt, params)[0].text)
    assert sum(text is None for text in texts) >= 3
    server.until_idle()
