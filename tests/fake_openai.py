"""A tiny OpenAI-compatible server that streams at known times and notes when it did."""

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

CHUNK_TOKENS = (1, 3, 2, 4)
"""Tokens of each piece of every answer."""


@dataclass
class FakeServer:
    """Answers each request with four pieces of text.

    Args:
        first, between: seconds before the first piece and between one piece and the next.
        fault: "status", "stream", "usage", "models" or "cut" breaks every answer that way.
        counts: whether pieces carry their token ids.
    """

    first: float = 0.03
    between: float = 0.02
    fault: str = ""
    counts: bool = True
    url: str = ""
    heads: list[str] = field(default_factory=list)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    arrived: list[float] = field(default_factory=list)
    sent: list[list[float]] = field(default_factory=list)
    most_at_once: int = 0
    _at_once: int = 0

    @contextmanager
    def running(self) -> Iterator["FakeServer"]:
        loop = asyncio.new_event_loop()
        server = loop.run_until_complete(asyncio.start_server(self._connected, "127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        thread = threading.Thread(target=loop.run_forever)
        thread.start()
        try:
            yield self
        finally:
            asyncio.run_coroutine_threadsafe(self._close(server), loop).result(5)
            loop.call_soon_threadsafe(loop.stop)
            thread.join(5)
            loop.close()

    async def _close(self, server: asyncio.Server) -> None:
        server.close()
        others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            self.heads.append(head)
            length = next((int(x.split(":")[1]) for x in head.lower().split("\r\n") if "content-length" in x), 0)
            body = await reader.readexactly(length)
            if head.startswith("GET /v1/models"):
                names = [] if self.fault == "models" else [{"id": "fake"}]
                self._head(writer, "200 OK", "application/json")
                writer.write(json.dumps({"data": names}).encode())
            elif head.startswith("GET"):
                self._head(writer, "404 Not Found", "text/plain")
            else:
                await self._answer(json.loads(body), "chat" in head.split()[1], writer)
            await writer.drain()
        finally:
            writer.close()

    def _head(self, writer: asyncio.StreamWriter, status: str, kind: str) -> None:
        writer.write(f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nConnection: close\r\n\r\n".encode())

    async def _answer(self, body: dict[str, Any], chat: bool, writer: asyncio.StreamWriter) -> None:
        self.bodies.append(body)
        self.arrived.append(perf_counter())
        if self.fault == "status":
            self._head(writer, "429 Too Many Requests", "application/json")
            writer.write(b'{"error": {"message": "too many"}}')
            return
        self._at_once += 1
        self.most_at_once = max(self.most_at_once, self._at_once)
        self._head(writer, "200 OK", "text/event-stream")
        times: list[float] = []
        if chat:
            self._event(writer, {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
        for i, count in enumerate(CHUNK_TOKENS):
            await asyncio.sleep(self.between if i else self.first)
            choice: dict[str, Any] = {"index": 0} | ({"delta": {"content": "x"}} if chat else {"text": "x"})
            if self.counts:
                choice["token_ids"] = list(range(count))
            self._event(writer, {"error": "out of memory"} if self.fault == "stream" else {"choices": [choice]})
            await writer.drain()
            times.append(perf_counter())
        self.sent.append(times)
        self._at_once -= 1
        if self.fault == "cut":
            writer.write(b"data: {\n\n")
        elif self.fault != "usage":
            usage = {"prompt_tokens": 5, "completion_tokens": sum(CHUNK_TOKENS)}
            self._event(writer, {"choices": [], "usage": usage})
        writer.write(b"data: [DONE]\n\n")

    def _event(self, writer: asyncio.StreamWriter, value: dict[str, Any]) -> None:
        writer.write(f"data: {json.dumps(value)}\n\n".encode())
