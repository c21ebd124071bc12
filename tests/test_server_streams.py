"""Streams: characters, stops, clients that leave, and the end of the server."""

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx2
import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from specdec import LLM
from tests.conftest import tiny_llama
from tests.server import MODEL, Served, served, slowed, tiny_llm, until

TEXT = "né 👩‍👩‍👧‍👦, 漢字と🏳️‍🌈; naïve Ω~"


RUN = "from specdec.cli.main import main; main()"


def unequal_pieces(data: bytes) -> list[bytes]:
    """Cut bytes into pieces of 1 to 3, no two alike, wherever characters begin."""
    pieces: list[bytes] = []
    while data:
        length = next(n for n in (1, 2, 3, 4, 5) if data[:n] not in pieces)
        pieces.append(data[:length])
        data = data[length:]
    return pieces


def byte_tokenizer(pieces: Sequence[bytes]) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer whose token i is piece i; "?" is the last."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    shown = bytes_to_unicode()
    vocab = {"".join(shown[b] for b in piece): i for i, piece in enumerate(pieces)} | {"<?>": len(pieces)}
    core = Tokenizer(models.WordLevel(vocab=vocab, unk_token="<?>"))
    core.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=core)


def word_tokenizer(pieces: Sequence[str]) -> PreTrainedTokenizerFast:
    """A tokenizer as SentencePiece's, whose words begin with ▁."""
    core = Tokenizer(models.WordLevel(vocab={p: i for i, p in enumerate([*pieces, "<?>"])}, unk_token="<?>"))
    core.decoder = decoders.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=core)


def counting_llm(tokenizer: PreTrainedTokenizerFast) -> LLM:
    """A model that says token i + 1 after token i."""
    size = len(tokenizer)
    model = tiny_llama(vocab_size=size, hidden_size=size + -size % 4, num_hidden_layers=1)
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(torch.eye(size, model.config.hidden_size))
        model.model.layers[0].self_attn.o_proj.weight.zero_()
        model.model.layers[0].mlp.down_proj.weight.zero_()
        model.lm_head.weight.copy_(torch.eye(size, model.config.hidden_size).roll(1, 0))
    return LLM(model, tokenizer=tokenizer, num_blocks=64, max_model_len=256)


def deltas(server: Served, **fields: Any) -> tuple[list[str], str | None]:
    response = server.complete([0], stream=True, **fields)
    events = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")]
    return [e["choices"][0]["text"] for e in events], events[-1]["choices"][0]["finish_reason"]


def test_characters_that_span_tokens_come_whole() -> None:
    pieces = unequal_pieces(TEXT.encode())
    with served(counting_llm(byte_tokenizer(pieces))) as server:
        texts, _ = deltas(server, max_tokens=len(pieces) - 1)
        assert "\ufffd" not in "".join(texts) and "".join(texts) == TEXT[1:]  # the prompt is the first character
        assert any(not text for text in texts), "no character spans tokens: nothing was tested"
        whole = server.complete([0], max_tokens=len(pieces) - 1).json()
        assert whole["choices"][0]["text"] == TEXT[1:]


def test_events_are_lines_to_clients_with_more_ends_of_lines() -> None:
    text = "a\u2028b\x85c\u2029d\ne"
    pieces = unequal_pieces(text.encode())
    body = {"model": MODEL, "prompt": [0], "temperature": 0, "stream": True, "max_tokens": len(pieces) - 1}
    with (
        served(counting_llm(byte_tokenizer(pieces))) as server,
        server.http.stream("POST", "/v1/completions", json=body) as response,
    ):
        lines = [line for line in response.iter_lines() if line]
    assert all(line.startswith("data: ") for line in lines) and lines[-1] == "data: [DONE]"
    assert "".join(json.loads(line[6:])["choices"][0]["text"] for line in lines[:-1]) == text[1:]


def test_of_tokens_with_the_same_text_the_likelier_is_shown() -> None:
    """Parts of characters all show as U+FFFD."""
    pieces = unequal_pieces(TEXT.encode())
    with served(counting_llm(byte_tokenizer(pieces))) as server:
        choice = server.complete([0], max_tokens=len(pieces) - 1, logprobs=5).json()["choices"][0]["logprobs"]
        own = zip(choice["tokens"], choice["token_logprobs"], choice["top_logprobs"], strict=True)
        parts = [(logprob, top["\ufffd"]) for token, logprob, top in own if token == "\ufffd"]
        assert parts and all(best == logprob for logprob, best in parts)  # greedy: the token is the likeliest


@pytest.mark.parametrize("stop", ["漢字と", "字", "naïve!", "🏳️‍🌈; n", "Ω"])
def test_stops_hold_back_no_more_than_they_must(stop: str) -> None:
    pieces = unequal_pieces(TEXT.encode())
    with served(counting_llm(byte_tokenizer(pieces))) as server:
        texts, reason = deltas(server, max_tokens=len(pieces) - 1, stop=[stop, "漢!"])
        assert "".join(texts) == TEXT[1:].partition(stop)[0]
        assert reason == ("stop" if stop in TEXT else "length")


def test_spaces_of_sentencepiece_are_those_of_the_whole_text() -> None:
    pieces = ["▁Hello", "▁wor", "ld", "▁", "▁▁", "x", "▁a", "▁b", "c", ".", "▁End"]
    tokenizer = word_tokenizer(pieces)
    with served(counting_llm(tokenizer)) as server:
        texts, _ = deltas(server, max_tokens=len(pieces) - 1)
        whole = tokenizer.decode(range(len(pieces)))
        assert "Hello" + "".join(texts) == whole == "Hello world   x a bc. End"


async def leave(client: httpx2.AsyncClient, rng: random.Random) -> None:
    body = {
        "model": MODEL,
        "prompt": [rng.randrange(95) for _ in range(30)],
        "max_tokens": 200,
        "n": rng.choice([1, 2]),
    }
    body["stream"] = rng.random() < 0.7
    try:
        async with asyncio.timeout(rng.random() * 0.1):
            async with client.stream("POST", "/v1/completions", json=body) as response:
                async for _ in response.aiter_lines():
                    pass
    except TimeoutError:
        return


def check_disconnects(count: int) -> None:
    """Clients leave at random, and each time the blocks are free within a second."""
    with served(tiny_llm(max_num_seqs=8), max_queue=16) as server:

        async def main() -> None:
            async with httpx2.AsyncClient(base_url=server.url) as client:
                for i in range(0, count, 5):
                    await asyncio.gather(*(leave(client, random.Random(i + j)) for j in range(5)))
                    await asyncio.to_thread(server.until_idle, 1.0)

        asyncio.run(main())
        assert server.service.engine.totals.finished["abort"] >= count // 4
        assert server.complete(max_tokens=3).status_code == 200


def test_clients_that_leave_free_their_blocks() -> None:
    check_disconnects(20)


@pytest.mark.slow
def test_many_clients_that_leave_free_their_blocks() -> None:
    check_disconnects(500)


def test_a_client_that_leaves_the_queue_gives_up_its_place() -> None:
    with served(tiny_llm(max_num_seqs=1)) as server, slowed(server):
        body = {"model": MODEL, "prompt": "a", "max_tokens": 250, "stream": True}
        with server.http.stream("POST", "/v1/completions", json=body) as running:
            lines = running.iter_lines()  # closed with its last reference
            next(lines)
            waiting = httpx2.Client(base_url=server.url)
            with waiting.stream("POST", "/v1/completions", json=body):
                until(lambda: server.service.engine.num_open == 2)
            waiting.close()
            until(lambda: server.service.engine.num_open == 1, 1.0)


def test_sigterm_drains(folder: Path) -> None:
    """What runs is finished, what is new is refused, then the process ends well."""
    port = _free_port()
    command = [sys.executable, "-c", RUN, "serve", "--model", str(folder), "--port", str(port)]
    command += ["--served-model-name", MODEL, "--max-num-seqs", "2"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    http = httpx2.Client(base_url=f"http://127.0.0.1:{port}", timeout=30)
    try:
        until(lambda: _is_ready(http), 60)
        results: list[httpx2.Response] = []
        body = {"model": MODEL, "prompt": "a", "max_tokens": 600, "ignore_eos": True}
        running = threading.Thread(target=lambda: results.append(http.post("/v1/completions", json=body)))
        running.start()
        until(lambda: "specdec_num_requests_running 1.0" in http.get("/metrics").text)
        process.send_signal(signal.SIGTERM)
        until(lambda: http.get("/ready").status_code == 503)
        refused = http.post("/v1/completions", json=body)
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "5")
        assert http.get("/health").status_code == 200
        running.join()
        assert results[0].json()["usage"]["completion_tokens"] == 600
        _, errors = process.communicate(timeout=20)
        assert process.returncode == 0
        lines = [json.loads(line) for line in errors.splitlines() if line.startswith("{")]
        done = [line for line in lines if line["message"] == "request" and line["status"] == 200]
        assert any(line.get("completion_tokens") == 600 and line["path"] == "/v1/completions" for line in done)
    finally:
        process.kill()
        process.communicate()
        http.close()


def _free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _is_ready(http: httpx2.Client) -> bool:
    try:
        return http.get("/ready").status_code == 200
    except httpx2.ConnectError:
        time.sleep(0.1)
        return False
