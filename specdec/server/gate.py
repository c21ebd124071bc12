"""What a request must pass before anything is done for it: sizes, then the key, then its body, then the queue."""

import asyncio
import hmac
from collections.abc import Callable
from hashlib import sha256

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from specdec.errors import SpecdecError
from specdec.server.config import ServerConfig
from specdec.server.errors import Problem, problem_of

OPEN_PATHS = frozenset({"/", "/playground.js", "/playground.css", "/health", "/ready", "/version", "/metrics"})
"""Paths that need no key: they tell nothing of anybody's requests, and cost no work of the model."""
ANSWER_PATHS = frozenset({"/v1/chat/completions", "/v1/completions"})
"""Paths whose requests take places in the queue."""


class Gate:
    """Lets through requests that are small enough, have a key and can be taken now, with their whole body.

    Under overload most requests end here: their bodies are read, which keeps the connection usable, but never parsed.

    Args:
        app: what stands behind it.
        config: limits and keys.
        check_room: raises if no answer at all can be taken now, as `AsyncEngine.check_room` does.
    """

    def __init__(self, app: ASGIApp, config: ServerConfig, check_room: Callable[[], None]) -> None:
        self._app, self._config, self._check_room = app, config, check_room
        self._keys = [sha256(key.encode()).digest() for key in config.api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer it with what is wrong."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        body = self._refuse_early(scope) or await self._read_body(receive)
        if body is None:  # the client has left
            return
        problem = body if isinstance(body, Problem) else self._refuse_full(scope)
        if problem is not None:
            await problem.response()(scope, receive, send)
            return
        assert isinstance(body, bytes)
        if scope["method"] == "HEAD":  # as GET; the HTTP server leaves the body out
            scope = {**scope, "method": "GET"}
        await self._app(scope, _replay(body, receive), send)

    def _refuse_early(self, scope: Scope) -> Problem | None:
        """What is wrong with the request as far as its headers tell."""
        config, headers = self._config, Headers(scope=scope)
        size = (
            len(scope.get("raw_path", b""))
            + len(scope["query_string"])
            + sum(len(k) + len(v) + 4 for k, v in headers.raw)
        )
        if size > config.max_header_bytes:
            message = f"the request line and headers have {size} bytes; at most {config.max_header_bytes} are taken"
            return Problem(431, message, code="headers_too_large")
        if self._keys and scope["path"] not in OPEN_PATHS and not self._has_key(headers):
            challenge = {"WWW-Authenticate": "Bearer"}
            return Problem(401, "the API key is missing or wrong", code="invalid_api_key", headers=challenge)
        length = headers.get("content-length", "0")
        if length.isdecimal() and int(length[:20]) > config.max_body_bytes:
            return self._too_large()
        return None

    def _has_key(self, headers: Headers) -> bool:
        """Whether the bearer token is one of the keys, in a time that doesn't depend on it."""
        scheme, _, token = headers.get("authorization", "").partition(" ")
        given = sha256(token.strip().encode()).digest()  # of one length, whatever was sent
        matches = [hmac.compare_digest(given, key) for key in self._keys]  # all of them: no early end
        return scheme.lower() == "bearer" and any(matches)

    def _refuse_full(self, scope: Scope) -> Problem | None:
        """That there is no place for any answer, if that is so."""
        if scope["method"] != "POST" or scope["path"] not in ANSWER_PATHS:
            return None
        try:
            self._check_room()
        except SpecdecError as error:
            return problem_of(error)
        return None

    async def _read_body(self, receive: Receive) -> bytes | Problem | None:
        """The body; what is wrong with it; or None if the client has left."""
        body = bytearray()
        try:
            async with asyncio.timeout(self._config.body_seconds):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return None
                    body += message.get("body", b"")
                    if len(body) > self._config.max_body_bytes:
                        return self._too_large()
                    if not message.get("more_body", False):
                        return bytes(body)
        except TimeoutError:
            late = f"the body had not arrived after {self._config.body_seconds:g} seconds"
            return Problem(408, late, code="body_timeout", headers={"Connection": "close"})

    def _too_large(self) -> Problem:
        limit = self._config.max_body_bytes
        headers = {"Connection": "close"}  # the rest of the body must not be read as a request
        return Problem(413, f"the body has more than {limit} bytes", code="body_too_large", headers=headers)


def _replay(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that gives the body once, then what comes after it: that the client leaves."""
    sent = False

    async def replay() -> Message:
        nonlocal sent
        if sent:
            return await receive()
        sent = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replay
