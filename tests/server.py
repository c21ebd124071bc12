"""A real server on a free port, in a thread, over a tiny model."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import httpx2
from openai import OpenAI

from specdec import LLM
from specdec.server.app import make_app
from specdec.server.config import ServerConfig
from specdec.server.run import DrainingServer
from specdec.server.service import Service
from tests.conftest import tiny_llama
from tests.letters import letters

MODEL = "tiny"
KEY = "unused"


def tiny_llm(**options: Any) -> LLM:
    """In float64, so that tokens don't depend on the batch."""
    sizes = {"num_blocks": 64, "max_num_seqs": 4, "max_model_len": 256, "seed": 0}
    return LLM(tiny_llama(vocab_size=96), tokenizer=letters(), **(sizes | options))


class Served:
    """A server that runs.

    Args:
        llm: what it serves.
        options: fields of `ServerConfig`.
    """

    def __init__(self, llm: LLM, **options: Any) -> None:
        config = ServerConfig(**({"port": 0, "model_name": MODEL, "drain_seconds": 5.0} | options))
        self.app = make_app(llm, config)
        self.service: Service = self.app.state.service
        self.engine = llm.engine
        self.server = DrainingServer(self.app, config)
        self._thread = threading.Thread(target=self.server.run, daemon=True)
        self._thread.start()
        until(lambda: self.server.started)
        self.port: int = self.server.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.http = httpx2.Client(base_url=self.url, timeout=30)
        self.openai = OpenAI(base_url=f"{self.url}/v1", api_key=KEY, max_retries=0, timeout=30)

    def post(self, path: str, body: Any, **options: Any) -> httpx2.Response:
        return self.http.post(path, json=body, **options)

    def chat(self, text: str = "hi", **fields: Any) -> httpx2.Response:
        messages = [{"role": "user", "content": text}]
        return self.post("/v1/chat/completions", {"model": MODEL, "messages": messages, "temperature": 0} | fields)

    def complete(self, prompt: str | Sequence[int] = "hi", **fields: Any) -> httpx2.Response:
        return self.post("/v1/completions", {"model": MODEL, "prompt": prompt, "temperature": 0} | fields)

    def until_idle(self, seconds: float = 1.0) -> None:
        """Wait until nothing runs and all blocks are free."""
        pool = self.engine.pool
        until(lambda: not self.service.engine.num_open and pool.num_free == pool.num_blocks, seconds)

    def close(self) -> None:
        self.http.close()
        self.openai.close()
        self.server.should_exit = True
        self._thread.join(20)
        assert not self._thread.is_alive(), "the server didn't end"
        if self.service.engine.dead is None:
            self.engine.check_integrity()
            assert self.engine.pool.num_free == self.engine.pool.num_blocks, "blocks were not given back"


@contextmanager
def served(llm: LLM | None = None, **options: Any) -> Iterator[Served]:
    running = Served(llm or tiny_llm(), **options)
    try:
        yield running
    finally:
        running.close()


@contextmanager
def slowed(server: Served, seconds: float = 0.02) -> Iterator[None]:
    """Let steps take longer, so that what runs is still there when a test has done what it does beside it."""
    step = server.engine.step

    def later() -> None:
        time.sleep(seconds)
        step()

    with patch.object(server.engine, "step", later):
        yield


def until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not so after {seconds} s"
        time.sleep(0.005)
