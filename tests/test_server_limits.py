"""What the server refuses, how quickly, and that nobody beside it notices."""

import gc
import hmac
import http.client
import json
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from click.testing import CliRunner

from specdec.cli.main import main
from specdec.errors import ConfigError
from specdec.server.config import ServerConfig
from specdec.server.run import DrainingServer
from tests.server import MODEL, Served, served, slowed, tiny_llm, until

LONG = {"max_tokens": 240, "stream": True}


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served(tenant_header="X-Tenant", cors_origins=("https://good.example",)) as running:
        running.http.headers["X-Tenant"] = "me"
        yield running


def chat_body(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], **fields}


HOSTILE: dict[str, tuple[str, Any]] = {
    "top_logprobs": ("/v1/chat/completions", chat_body(logprobs=True, top_logprobs=10**9)),
    "top_logprobs without logprobs": ("/v1/chat/completions", chat_body(top_logprobs=3)),
    "n": ("/v1/chat/completions", chat_body(n=5_000_000)),
    "more answers than places": ("/v1/completions", {"model": MODEL, "prompt": ["a"] * 128, "n": 100}),
    "token outside the vocabulary": ("/v1/completions", {"model": MODEL, "prompt": [96]}),
    "huge token": ("/v1/completions", {"model": MODEL, "prompt": [2**40]}),
    "negative token": ("/v1/completions", {"model": MODEL, "prompt": [-1]}),
    "true as a token": ("/v1/completions", {"model": MODEL, "prompt": [True]}),
    "mixed prompt": ("/v1/completions", {"model": MODEL, "prompt": ["a", 1]}),
    "empty prompt": ("/v1/completions", {"model": MODEL, "prompt": ""}),
    "no prompt": ("/v1/completions", {"model": MODEL, "prompt": []}),
    "prompt of tokens too long": ("/v1/completions", {"model": MODEL, "prompt": [1] * 256}),
    "prompt of text too long": ("/v1/completions", {"model": MODEL, "prompt": "a" * 3_000_000}),
    "100,000 prompts": ("/v1/completions", {"model": MODEL, "prompt": ["a"] * 100_000}),
    "half a character": ("/v1/completions", {"model": MODEL, "prompt": "\ud800"}),
    "half a character as a field": ("/v1/completions", {"model": MODEL, "prompt": "a", "\ud800": 1}),
    "stop strings": ("/v1/chat/completions", chat_body(stop=["x"] * 500_000)),
    "stop numbers": ("/v1/chat/completions", chat_body(stop=[1] * 500_000)),
    "long stop string": ("/v1/chat/completions", chat_body(stop="x" * 1001)),
    "empty stop string": ("/v1/chat/completions", chat_body(stop=[""])),
    "temperature": ("/v1/chat/completions", chat_body(temperature=1e300)),
    "temperature NaN": ("/v1/chat/completions", chat_body(temperature=float("nan"))),
    "temperature as text": ("/v1/chat/completions", chat_body(temperature="0")),
    "top_p": ("/v1/chat/completions", chat_body(top_p=0)),
    "seed": ("/v1/chat/completions", chat_body(seed=2**64)),
    "max_tokens": ("/v1/chat/completions", chat_body(max_tokens=0)),
    "penalty": ("/v1/chat/completions", chat_body(presence_penalty=-2.1)),
    "bias of words": ("/v1/chat/completions", chat_body(logit_bias={"x": 1})),
    "bias of many": ("/v1/chat/completions", chat_body(logit_bias={str(i): 1 for i in range(100_000)})),
    "options of a stream that is none": ("/v1/chat/completions", chat_body(stream_options={"include_usage": True})),
    "two limits": ("/v1/chat/completions", chat_body(max_tokens=3, max_completion_tokens=4)),
    "bias outside the vocabulary": ("/v1/chat/completions", chat_body(logit_bias={"96": 1})),
    "all tokens banned at first": (
        "/v1/chat/completions",
        chat_body(min_tokens=3, stop_token_ids=list(range(64)), n=0),
    ),
    "min above max": ("/v1/chat/completions", chat_body(min_tokens=3, max_tokens=2)),
    "speculation": ("/v1/chat/completions", chat_body(speculation={"num_speculative_tokens": 64})),
    "unknown speculation": ("/v1/chat/completions", chat_body(speculation={"depth": 3})),
    "role": ("/v1/chat/completions", {"model": MODEL, "messages": [{"role": "root", "content": "x"}]}),
    "no messages": ("/v1/chat/completions", {"model": MODEL, "messages": []}),
    "picture": (
        "/v1/chat/completions",
        {"model": MODEL, "messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
    ),
    "refused by the template": (
        "/v1/chat/completions",
        {"model": MODEL, "messages": [{"role": "system", "content": "x"}]},
    ),
    "a list": ("/v1/chat/completions", [1, 2]),
    "null": ("/v1/chat/completions", None),
    "both": ("/tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "hi"}]}),
    "token to decode": ("/detokenize", {"tokens": [96]}),
    "many tokens to decode": ("/detokenize", {"tokens": [1] * 300}),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_absurd_requests_are_refused_before_any_work(case: str, server: Served) -> None:
    path, body = HOSTILE[case]
    content = json.dumps(body).encode()
    steps, start = server.engine.num_steps, time.perf_counter()
    response = server.http.post(path, content=content, headers={"content-type": "application/json"})
    assert time.perf_counter() - start < 1.0
    error = response.json()["error"]
    assert response.status_code == 400, response.text
    assert error["type"] == "invalid_request_error" and error["message"] and len(error["message"]) < 600
    assert "Traceback" not in response.text and ".py" not in response.text
    assert server.engine.num_steps == steps and server.service.engine.num_open == 0


@pytest.mark.parametrize(
    "body",
    [
        b"{",
        b"[" * 200_000,
        b"1" * 100_000,
        b'{"n": ' + b"9" * 5000 + b"}",
        b"\xff\xfe",
        b'{"model": 1e999}',
        b"",
        b'{"a":' * 100_000,
    ],
    ids=range(8),
)
def test_broken_bodies_are_refused(body: bytes, server: Served) -> None:
    response = server.http.post(
        "/v1/completions", content=body, headers={"content-type": "application/json", "x-request-id": "mine"}
    )
    assert response.status_code == 400 and response.json()["error"]["type"] == "invalid_request_error"
    assert response.headers["x-request-id"] == "mine"


def test_forms_of_foreign_pages_are_no_requests(server: Served) -> None:
    """A page may send a form or text anywhere without being asked; JSON it may not."""
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data"):
        content = json.dumps({"model": MODEL, "prompt": "a"}).encode()
        response = server.http.post("/v1/completions", content=content, headers={"content-type": kind})
        error = response.json()["error"]["message"]
        assert response.status_code == 400 and error.endswith("sent as JSON, with Content-Type: application/json")
    listed = server.http.post("/v1/completions", json=[]).json()["error"]
    assert listed["message"] == "the body must be a JSON object" and listed["param"] is None


PICTURE = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]
WRONG_FIELDS: list[tuple[dict[str, Any], str, str]] = [
    ({"messages": PICTURE}, "messages.0.content.0.type", "Input should be 'text'"),
    ({"messages": [{"role": "user"}]}, "messages.0.content", "Field required"),
    ({"stop": ["a", ""]}, "stop.1", "String should have at least 1 character"),
    ({"stop": {"a": 1}}, "stop", "Input should be a valid string; or: Input should be a valid list"),
    ({"logit_bias": {"x": 1}}, "logit_bias", "the keys must be token ids"),
    ({"stream_options": {"usage": True}}, "stream_options.usage", "Extra inputs are not permitted"),
    ({"top_logprobs": 3}, "top_logprobs", "top_logprobs needs logprobs to be true"),
]


@pytest.mark.parametrize("fields, param, message", WRONG_FIELDS, ids=[param for _, param, _ in WRONG_FIELDS])
def test_a_wrong_field_is_named_as_it_was_sent(
    fields: dict[str, Any], param: str, message: str, server: Served
) -> None:
    error = server.chat(**fields).json()["error"]
    assert error["param"] == param and error["message"].removeprefix(f"{param}: ") == message


def test_a_wrong_prompt_is_named_where_it_is_wrong(server: Served) -> None:
    for prompt, param in (([[1, "a"]], "prompt.0.1"), ({"a": 1}, "prompt"), ([[5], [-1]], "prompt.1.0")):
        assert server.post("/v1/completions", {"model": MODEL, "prompt": prompt}).json()["error"]["param"] == param


def test_what_is_too_long_has_the_code_that_clients_look_for(server: Served) -> None:
    for path, body in {
        "/v1/completions": {"model": MODEL, "prompt": [1] * 256},
        "/v1/chat/completions": chat_body(messages=[{"role": "user", "content": "a " * 10_000}]),
        "/detokenize": {"tokens": [1] * 300},
    }.items():
        response = server.post(path, body)
        assert (response.status_code, response.json()["error"]["code"]) == (400, "context_length_exceeded"), path


def test_neighbours_of_hostile_requests_get_their_tokens(server: Served) -> None:
    want = server.complete("victim", max_tokens=100).json()["choices"][0]["text"]
    with ThreadPoolExecutor(4) as pool:
        victims = [pool.submit(server.complete, "victim", max_tokens=100) for _ in range(4)]
        for path, body in HOSTILE.values():
            content = json.dumps(body).encode()
            server.http.post(path, content=content, headers={"content-type": "application/json"})
        assert {v.result().json()["choices"][0]["text"] for v in victims} == {want}


def test_sizes_are_checked_before_anything_is_read() -> None:
    with served(max_body_bytes=2000, max_header_bytes=4000, body_seconds=0.3) as server:
        large = server.complete("a" * 3000)
        assert (large.status_code, large.json()["error"]["code"]) == (413, "body_too_large")
        chunked = server.http.post("/v1/completions", content=iter([b"x" * 900] * 5))
        assert chunked.status_code == 413
        for headers, path in (({"x-long": "x" * 5000}, "/health"), ({}, "/health?" + "x" * 5000)):
            response = server.http.get(path, headers=headers)
            assert (response.status_code, response.json()["error"]["code"]) == (431, "headers_too_large")
        slow = http.client.HTTPConnection("127.0.0.1", server.port, timeout=5)
        slow.putrequest("POST", "/v1/completions")
        slow.putheader("Content-Length", "100")
        slow.endheaders(b"{")
        assert slow.getresponse().status == 408
        slow.close()
        assert server.complete(max_tokens=2).status_code == 200


def test_keys_are_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = []
    compare = hmac.compare_digest
    monkeypatch.setattr(hmac, "compare_digest", lambda a, b: compared.append((len(a), len(b))) or compare(a, b))
    with served(api_keys=("first", "second")) as server:
        for key in ("first", "second", "secon", "x" * 3000):
            compared.clear()
            response = server.http.get("/v1/models", headers={"authorization": f"Bearer {key}"})
            assert response.status_code == (200 if key in ("first", "second") else 401)
            assert compared == [(32, 32), (32, 32)], "a key's length or place shows in the time"
        missing = server.complete()
        assert missing.json()["error"]["code"] == "invalid_api_key" and missing.headers["www-authenticate"] == "Bearer"
        assert server.http.get("/v1/models", headers={"authorization": "Basic first"}).status_code == 401
        assert server.post("/tokenize", {"prompt": "a"}).status_code == 401
        for path in ("/health", "/ready", "/metrics", "/version", "/"):
            assert server.http.get(path).status_code == 200


def test_tenants_share_no_prefixes(server: Served) -> None:

    def ask(tenant: str | None) -> Any:
        headers = {} if tenant is None else {"X-Tenant": tenant}
        body = {"model": MODEL, "prompt": [5, 6] * 32, "max_tokens": 2}
        server.http.headers.pop("X-Tenant", None)
        try:
            return server.post("/v1/completions", body, headers=headers).json()
        finally:
            server.http.headers["X-Tenant"] = "me"

    counts = [ask(tenant)["usage"]["prompt_tokens_details"]["cached_tokens"] for tenant in ("a", "a", "b", "b", "a")]
    assert counts == [0, 48, 0, 48, 48]
    assert "X-Tenant" in ask(None)["error"]["message"]


def test_keys_share_no_prefixes_either() -> None:
    with served(api_keys=("one", "two")) as server:
        counts = []
        for key in ("one", "one", "two"):
            body = {"model": MODEL, "prompt": [5, 6] * 32, "max_tokens": 2}
            answer = server.post("/v1/completions", body, headers={"authorization": f"Bearer {key}"}).json()
            counts.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
        assert counts == [0, 48, 0]


def test_other_origins_are_let_in_by_name_only(server: Served) -> None:
    for origin, allowed in (("https://good.example", "https://good.example"), ("https://evil.example", None)):
        response = server.http.get("/v1/models", headers={"origin": origin})
        assert response.headers.get("access-control-allow-origin") == allowed
    with served() as closed:
        response = closed.http.get("/v1/models", headers={"origin": "https://good.example"})
        assert "access-control-allow-origin" not in response.headers


def test_a_full_queue_says_when_to_come_again() -> None:
    llm = tiny_llm(max_num_seqs=1)
    with served(llm, max_queue=1, api_keys=("key",)) as server, ThreadPoolExecutor(2) as pool:
        stranger = server.http.headers.copy()
        server.http.headers["authorization"] = "Bearer key"
        many = server.complete(n=3)
        assert many.status_code == 400  # it would never be taken
        with slowed(server):
            running = [pool.submit(server.complete, max_tokens=250) for _ in range(2)]
            until(lambda: server.service.engine.num_open == 2)
            for path, body in (("/v1/completions", b"no JSON"), ("/v1/chat/completions", b"{}")):  # neither is parsed
                refused = server.http.post(path, content=body)
                assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
                assert refused.json()["error"]["code"] == "queue_full"
            assert server.complete("a", n=2, stream=True).status_code == 429
            others = ("GET", "/v1/completions", 405), ("GET", "/v1/models", 200), ("GET", "/health", 200)
            for method, path, status in others:
                assert server.http.request(method, path).status_code == status
            server.http.headers = stranger  # to whom the queue's state is not told
            assert server.complete().status_code == 401
        assert [future.result().status_code for future in running] == [200, 200]


def test_more_answers_than_there_are_places_left_are_refused() -> None:
    with served(tiny_llm(max_num_seqs=1), max_queue=2) as server, ThreadPoolExecutor(1) as pool:
        with slowed(server):
            running = pool.submit(server.complete, max_tokens=250)
            until(lambda: server.service.engine.num_open == 1)
            assert server.complete("a", n=3, max_tokens=1).status_code == 429
        assert server.complete("a", n=2, max_tokens=1).status_code == 200
        assert running.result().status_code == 200


def test_a_client_may_let_others_go_first() -> None:
    with served(tiny_llm(max_num_seqs=1)) as server, ThreadPoolExecutor(3) as pool:
        order: list[str] = []

        def ask(name: str, **fields: Any) -> None:
            assert server.complete(ignore_eos=True, **fields).status_code == 200
            order.append(name)

        with slowed(server):
            calls = [pool.submit(ask, "running", max_tokens=200)]
            for i, (name, priority) in enumerate((("patient", 5), ("hasty", 0)), start=2):
                until(lambda i=i: server.service.engine.num_open == i - 1)
                calls.append(pool.submit(ask, name, max_tokens=20, priority=priority))
            until(lambda: server.service.engine.num_open == 3)
        for call in calls:
            call.result()
    assert order == ["running", "hasty", "patient"]


def test_a_dead_engine_fails_what_runs_and_is_neither_ready_nor_alive() -> None:
    with served() as server:

        def fail(*args: object) -> None:
            raise RuntimeError("secret detail")

        with server.http.stream("POST", "/v1/completions", json={"model": MODEL, "prompt": "a"} | LONG) as stream:
            lines = stream.iter_lines()
            next(lines)
            server.engine.rule = fail  # type: ignore[assignment]
            rest = "\n".join(lines)
        assert "engine_dead" in rest and "[DONE]" not in rest and "secret" not in rest
        response = server.complete()
        assert response.status_code == 503 and "secret" not in response.text and "retry-after" in response.headers
        assert [server.http.get(path).status_code for path in ("/ready", "/health")] == [503, 503]
        assert "specdec_ready 0.0" in server.http.get("/metrics").text


def test_a_failure_of_one_request_is_its_own(server: Served) -> None:
    propose = server.engine.drafter.propose

    def failing(queries: Any) -> Any:
        if any(query.tokens[0] == 64 for query in queries):
            raise RuntimeError("secret detail")
        return propose(queries)

    server.engine.drafter.propose = failing  # type: ignore[method-assign]
    try:
        failed, good = server.complete([64, 1]), server.complete([65, 1])
        streamed = server.complete([64, 1], stream=True)
    finally:
        server.engine.drafter.propose = propose  # type: ignore[method-assign]
    assert (failed.status_code, good.status_code) == (500, 200)
    assert failed.json()["error"]["type"] == "server_error" and "secret" not in failed.text
    assert "server_error" in streamed.text and "[DONE]" not in streamed.text


def test_unforeseen_failures_tell_nothing(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> None:
        raise RuntimeError("secret detail")

    monkeypatch.setattr(server.service.metrics, "exposition", fail)
    response = server.http.get("/metrics", headers={"x-request-id": "bad id!"})
    assert response.status_code == 500 and "secret" not in response.text
    assert response.json()["error"]["message"].startswith("the server failed")
    assert len(response.headers["x-request-id"]) == 32


def test_two_requests_with_one_client_id_are_both_right(server: Served) -> None:
    want = [server.complete(prompt, max_tokens=100).json()["choices"][0]["text"] for prompt in ("one", "two")]
    with ThreadPoolExecutor(2) as pool:
        body = {"model": MODEL, "max_tokens": 100, "temperature": 0}
        headers = {"x-request-id": "same"}
        calls = [
            pool.submit(server.post, "/v1/completions", body | {"prompt": p}, headers=headers) for p in ("one", "two")
        ]
        answers = [call.result() for call in calls]
    assert [a.json()["choices"][0]["text"] for a in answers] == want
    assert {a.headers["x-request-id"] for a in answers} == {"same"} and len({a.json()["id"] for a in answers}) == 2


@pytest.mark.parametrize(
    "bad",
    [{"port": -1}, {"port": 70_000}, {"max_queue": -1}, {"max_body_bytes": 5}, {"max_header_bytes": 5}]
    + [
        {"drain_seconds": -1.0},
        {"body_seconds": float("inf")},
        {"api_keys": (" ",)},
        {"api_keys": (" key",)},
        {"api_keys": ("ключ",)},
    ],
    ids=str,
)
def test_absurd_options_are_refused_by_name(bad: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="API key" if "api_keys" in bad else next(iter(bad))):
        ServerConfig(**bad)


def test_the_command_refuses_bad_options() -> None:
    result = CliRunner().invoke(main, ["serve", "--port", "99999"])
    assert result.exit_code == 2 and "port must be between" in result.output


def test_the_command_leaves_the_collector_little_to_walk_through(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr("specdec.llm.LLM", lambda *args, **options: tiny_llm())
    monkeypatch.setattr(DrainingServer, "run", lambda self: seen.append((gc.get_freeze_count(), len(gc.get_objects()))))
    interval = sys.getswitchinterval()
    try:
        result = CliRunner().invoke(main, ["serve", "--port", "0"])
        assert result.exit_code == 0, result.output
        assert sys.getswitchinterval() < interval
    finally:
        sys.setswitchinterval(interval)
        gc.unfreeze()
    ((frozen, watched),) = seen
    assert frozen > 50 * watched


def test_it_listens_on_this_machine_alone_by_default(server: Served) -> None:
    assert server.server.servers[0].sockets[0].getsockname()[0] == "127.0.0.1"
