"""`bench serve` against a server whose times are known."""

import json
import re
from collections import Counter
from pathlib import Path
from statistics import mean, median

import pytest
from click.testing import CliRunner, Result

from specdec.bench.dataset import load_prompts
from specdec.bench.latencies import Timing, num_good, parse_limits, summarize_timings
from specdec.bench.serve import ServeSettings, _note, arrivals, draw, measure_server
from specdec.cli.bench.serve import _agreement
from specdec.cli.main import main
from specdec.errors import ConfigError
from tests.fake_openai import CHUNK_TOKENS, FakeServer
from tests.server import served, tiny_llm

USAGE = {"prompt_tokens": 3, "completion_tokens": 4}


def bench(server: FakeServer, *args: str) -> Result:
    given = ["--base-url", server.url, "--num-prompts", "4"]
    return CliRunner().invoke(main, ["bench", "serve", *given, *args])


def test_times_follow_from_when_pieces_came() -> None:
    t = Timing(start=10.0, chunks=[10.5, 10.7, 11.3], chunk_tokens=[1, 2, 3], end=11.5, num_output_tokens=6)
    assert (t.ttft, t.e2el) == (0.5, 1.5)
    assert t.tpot == pytest.approx((1.5 - 0.5) / 5)
    assert t.between_chunks == pytest.approx([0.2, 0.6])
    assert t.between_tokens == pytest.approx([0.1, 0.1, 0.2, 0.2, 0.2])
    one = Timing(start=0.0, end=2.0, num_output_tokens=1)
    assert (one.ttft, one.tpot, one.between_tokens) == (2.0, None, [])
    assert num_good([t, one], {"ttft": 600}) == 1 and num_good([t, one], {"tpot": 1}) == 1
    assert num_good([t, one], {"ttft": 600, "e2el": 1400}) == 0
    summary = summarize_timings([t, one])
    assert summary["ttft_ms"] == pytest.approx({"mean": 1250, "median": 1250, "p99": 500 + 0.99 * 1500})
    assert summarize_timings([one])["inter_token_ms"] is None


def test_tokens_without_text_are_a_piece_where_the_server_tells_them() -> None:
    timing = Timing(start=0.0)
    opening = {"choices": [{"delta": {"role": "assistant", "content": ""}}]}
    half = {"choices": [{"delta": {"content": ""}, "trace": [{}]}]}  # of a character
    whole = {"choices": [{"delta": {"content": "é"}, "trace": [{}, {}]}]}
    for now, event in enumerate((opening, half, whole, {"choices": [], "usage": USAGE})):
        _note(timing, event, float(now))
    assert (timing.chunks, timing.chunk_tokens, timing.num_output_tokens) == ([1.0, 2.0], [1, 2], 4)


def test_pauses_are_poisson_or_come_in_bursts() -> None:
    times = arrivals(4000, 8.0, 1.0, seed=0)
    pauses = [b - a for a, b in zip(times, times[1:], strict=False)]
    assert times[0] == 0 and mean(pauses) == pytest.approx(1 / 8, rel=0.05)
    assert median(pauses) == pytest.approx(0.693 / 8, rel=0.1)  # of an exponential distribution
    bursts = arrivals(4000, 8.0, 0.1, seed=0)
    pauses = [b - a for a, b in zip(bursts, bursts[1:], strict=False)]
    assert mean(pauses) == pytest.approx(1 / 8, rel=0.15) and median(pauses) < 0.002
    assert arrivals(3, float("inf"), 1.0, 0) == [0, 0, 0]
    assert arrivals(9, 2.0, 1.0, 3) == arrivals(9, 2.0, 1.0, 3) != arrivals(9, 2.0, 1.0, 4)


def test_prompts_are_drawn_before_any_comes_again() -> None:
    prompts = load_prompts("builtin", ["chat"])
    drawn = draw(prompts, 45, seed=1)
    assert len({p.id for p in drawn[:20]}) == 20 and len({p.id for p in drawn[20:40]}) == 20
    assert drawn == draw(prompts, 45, seed=1) != draw(prompts, 45, seed=2)


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_the_numbers_are_the_servers_own(endpoint: str, tmp_path: Path) -> None:
    """On a busy machine pieces wait for the client; so wrong numbers are wrong each time, right ones are right once."""
    out = tmp_path / "out.json"
    args = ["--endpoint", endpoint, "--json", str(out), "--goodput", "ttft:29", "--category", "chat", "--seed", "3"]
    for _ in range(6):
        with FakeServer().running() as server:
            result = bench(server, *args)
        assert result.exit_code == 0, result.output
        value = json.loads(out.read_text())
        (run,) = value["runs"]
        own = [
            mean(1e3 * (times[i] - at) for times, at in zip(server.sent, server.arrived, strict=True)) for i in (0, -1)
        ]
        pause = (own[1] - own[0]) / 3
        want = [pytest.approx(ms, rel=0.02, abs=25) for ms in own] + [pytest.approx(pause, rel=0.02, abs=5)]
        got = [run[name]["mean"] for name in ("ttft_ms", "e2el_ms", "inter_chunk_ms")]
        if got == want:  # what the connection takes comes on top
            break
    assert got == want
    assert (value["format"], run["completed"], run["failed"], run["request_rate"]) == ("specdec-serve", 4, 0, None)
    assert (run["total_input_tokens"], run["total_output_tokens"]) == (20, 4 * sum(CHUNK_TOKENS))
    assert run["request_goodput"] == 0  # the server waits 30 ms
    assert run["inter_token_ms"]["mean"] == pytest.approx(run["inter_chunk_ms"]["mean"] * 3 / 9)  # 3 pauses, 9 tokens
    tpot = (run["e2el_ms"]["mean"] - run["ttft_ms"]["mean"]) / (sum(CHUNK_TOKENS) - 1)
    assert run["tpot_ms"]["mean"] == pytest.approx(tpot)
    assert run["output_throughput"] == pytest.approx(40 / run["duration"])
    body = server.bodies[0]
    assert (body["model"], body["max_tokens"], body["seed"], body["stream"]) == ("fake", 128, 3, True)
    assert ("messages" in body, "prompt" in body) == (endpoint == "chat", endpoint == "completions")
    assert "between tokens" in result.stdout and "4 completed, 0 failed" in result.stdout


def test_tokens_that_nobody_counted_have_no_times_of_their_own() -> None:
    with FakeServer(counts=False).running() as server:
        settings = ServeSettings(base_url=server.url, num_prompts=1)
        (run,) = measure_server(settings, load_prompts("builtin", ["chat"]), lambda rate, done: None)
    assert run["inter_token_ms"] is None and run["inter_chunk_ms"] is not None


def test_a_key_is_sent_and_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sesame")
    with FakeServer().running() as server:
        assert bench(server, "--json", str(tmp_path / "out.json")).exit_code == 0
    asked = [head.split()[1] for head in server.heads]
    assert Counter(asked) == {"/v1/models": 1, "/v1/chat/completions": 4, "/metrics": 2}
    assert all("authorization: bearer sesame" in head.lower() for head in server.heads)
    assert "sesame" not in (tmp_path / "out.json").read_text()


def test_rates_and_concurrency_are_kept(tmp_path: Path) -> None:
    with FakeServer().running() as server:
        args = ["--request-rate", "50,inf", "--max-concurrency", "2", "--html", str(tmp_path / "x.html")]
        args += ["--save-result", "--result-dir", str(tmp_path), "--model", "org/x"]
        result = bench(server, *args, "--extra-body", '{"top_k": 1}', "--ignore-eos")
    assert result.exit_code == 0, result.output
    assert server.most_at_once == 2 and len(server.bodies) == 8
    assert [b["top_k"] for b in server.bodies] == [1] * 8 and server.bodies[0]["ignore_eos"] is True
    (path,) = tmp_path.glob("serve-org--x-*.json")
    value = json.loads(path.read_text())
    shown = (tmp_path / "x.html").read_text()
    assert "50 requests a second" in shown and "all at once" in shown and "Latency against load" in shown
    assert "<svg" in shown and not re.search(r"<script|<link|src=|url\(http|@import", shown)
    assert [run["request_rate"] for run in value["runs"]] == value["settings"]["request_rates"] == [50, None]
    first = server.arrived[:4]
    assert first == sorted(first) and {json.dumps(b) for b in server.bodies[:4]} == {
        json.dumps(b) for b in server.bodies[4:]
    }


@pytest.mark.parametrize(
    "fault, message",
    [
        ("status", "HTTP 429"),
        ("stream", "error in the stream: out of memory"),
        ("usage", "stream_options.include_usage"),
        ("models", "names no model"),
        ("cut", "JSONDecodeError"),
    ],
)
def test_a_server_that_answers_nothing_is_named(fault: str, message: str) -> None:
    with FakeServer(fault=fault).running() as server:
        result = bench(server)
    assert (result.exit_code, message in result.stderr) == (1, True), result.output


def test_an_absent_server_is_named() -> None:
    result = CliRunner().invoke(main, ["bench", "serve", "--base-url", "http://127.0.0.1:9"])
    assert (result.exit_code, "http://127.0.0.1:9 can't be asked" in result.stderr) == (1, True)


@pytest.mark.parametrize(
    "args, message",
    [
        (["--base-url", "localhost:8000"], "must begin with http://"),
        (["--request-rate", "fast"], "--request-rate takes numbers or inf"),
        (["--request-rate", "0"], "request rates must be above 0"),
        (["--burstiness", "0"], "burstiness must be above 0"),
        (["--goodput", "itl:5"], "goodput takes a name and ms"),
        (["--goodput", "ttft:x"], "goodput takes a name and ms"),
        (["--dataset-name", "sharegpt"], "--dataset-path names the file"),
        (["--dataset-name", "custom", "--dataset-path", "/nowhere"], "/nowhere"),
        (["--category", "cht"], "did you mean 'chat'"),
        (["--extra-body", "["], "--extra-body: isn't JSON"),
    ],
)
def test_bad_input_exits_with_2(args: list[str], message: str) -> None:
    result = CliRunner().invoke(main, ["bench", "serve", *args])
    assert (result.exit_code, message in result.stderr) == (2, True), result.output


def test_limits_are_read() -> None:
    assert parse_limits(["ttft:200", "e2el:1e3"]) == {"ttft": 200, "e2el": 1000}
    with pytest.raises(ConfigError):
        parse_limits(["ttft:-1"])


def test_the_servers_own_metrics_stand_beside_ours() -> None:
    with served(tiny_llm(num_blocks=256)) as server:
        server.chat()  # what was asked before doesn't count
        settings = ServeSettings(
            base_url=server.url, num_prompts=4, max_new_tokens=9, extra_body={"speculation": {"trace": True}}
        )
        (run,) = measure_server(settings, load_prompts("builtin", ["chat"]), lambda rate, done: None)
    names = ("completed", "total_input_tokens", "total_output_tokens")
    assert [run["server"][name] for name in names] == [run[name] for name in names] and run["completed"] == 4
    assert [run["against_server"][name] for name in names] == [1, 1, 1]
    for name in ("ttft_ms", "inter_token_ms", "e2el_ms"):
        assert run["against_server"][name] == run[name]["mean"] / run["server"][name]
    assert run["against_server"]["ttft_ms"] > 1 < run["against_server"]["e2el_ms"]  # the way to the server comes on top
    assert "divided by the server's own metrics: completed 1.000" in _agreement(run)
    assert "counted 5 answers" in _agreement(run | {"server": run["server"] | {"completed": 5}})


def test_other_servers_have_no_metrics_of_ours() -> None:
    with FakeServer().running() as server:
        (run,) = measure_server(
            ServeSettings(base_url=server.url, num_prompts=1), load_prompts("builtin"), lambda rate, done: None
        )
    assert run["server"] is None and run["against_server"] is None
