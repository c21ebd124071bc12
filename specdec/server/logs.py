"""Structured logs: one JSON object a line. Neither prompts nor answers are logged."""

import json
import logging
import re
import time
import traceback
from collections.abc import Callable
from typing import Any
from uuid import uuid4

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from specdec.server.errors import INTERNAL

logger = logging.getLogger("specdec.server")
_CLIENT_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
_QUIET_PATHS = frozenset({"/health", "/ready", "/metrics"})
_OWN_FIELDS = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "color_message"}


class JsonFormatter(logging.Formatter):
    """Writes a record, and what it was given as `extra`, as one line of JSON."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        line: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= {key: value for key, value in vars(record).items() if key not in _OWN_FIELDS}
        if record.exc_info and record.exc_info[1]:
            line["traceback"] = "".join(traceback.format_exception(record.exc_info[1]))
        return json.dumps(line, default=str)


def set_up_logs(level: str) -> None:
    """Send all logs of the process to standard error as JSON lines."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


class RequestLog:
    """Gives each request an id, logs how it ended, and answers for failures that nobody foresaw.

    The id is the client's own X-Request-Id where that is plain; two requests may have the same. It comes back in the
    response's header and stands in the log; nothing is looked up by it.

    Args:
        app: what stands behind it.
        responded: called with the status of each response.
    """

    def __init__(self, app: ASGIApp, responded: Callable[[int], None]) -> None:
        self._app, self._responded = app, responded

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if _CLIENT_ID.fullmatch(given) else uuid4().hex
        facts = scope.setdefault("state", {}).setdefault("facts", {})  # endpoints add what they know
        status, start = 0, time.perf_counter()

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["X-Request-Id"] = request_id
            await send(message)

        error: Exception | None = None
        try:
            await self._app(scope, receive, send_with_id)
        except Exception as e:  # the server's last line: the client gets an answer, the log the trace
            error = e
            if not status:
                await INTERNAL.response()(scope, receive, send_with_id)
        if status:  # else the client left before there was one
            self._responded(status)
        level = logging.ERROR if error else logging.DEBUG if scope["path"] in _QUIET_PATHS else logging.INFO
        extra = {"request_id": request_id, "method": scope["method"], "path": scope["path"][:200], "status": status}
        extra["seconds"] = round(time.perf_counter() - start, 4)
        logger.log(level, "request", extra=extra | facts, exc_info=error)
