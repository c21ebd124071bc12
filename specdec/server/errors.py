"""Errors as OpenAI's clients expect them. No message tells more than its reader sent or may know."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

from specdec.errors import ContextLengthExceeded, EngineDead, InvalidRequest, QueueFull, ShuttingDown, SpecdecError

logger = logging.getLogger("specdec.server")
MAX_MESSAGE = 500
"""Characters of a message: some hold a value that came with the request."""
RETRY_SECONDS = {QueueFull: 1, ShuttingDown: 5, EngineDead: 10}


@dataclass(frozen=True, slots=True)
class Problem:
    """One error, ready to be sent.

    Args:
        status: HTTP status.
        message: for people.
        type: OpenAI's kind of error.
        code: for programs.
        param: the field at fault.
        headers: of the response.
    """

    status: int
    message: str
    type: str = "invalid_request_error"
    code: str | None = None
    param: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    def body(self) -> dict[str, Any]:
        """Return the JSON object."""
        param = None if self.param is None else _sendable(self.param)
        return {"error": {"message": _sendable(self.message), "type": self.type, "param": param, "code": self.code}}

    def response(self) -> JSONResponse:
        """Return the response."""
        return JSONResponse(self.body(), self.status, dict(self.headers))


def _sendable(text: str) -> str:
    """The text without halves of surrogate pairs, which UTF-8 hasn't, and not too long."""
    whole = text.encode(errors="replace").decode()
    return whole if len(whole) <= MAX_MESSAGE else whole[:MAX_MESSAGE] + " …"


NO_JSON = Problem(400, "the body is not valid JSON", code="invalid_json")
INTERNAL = Problem(500, "the server failed; its log says why, under this response's X-Request-Id", "server_error")


def problem_of(error: SpecdecError) -> Problem:
    """Return how one of our errors is sent: the user's own mistakes with their message."""
    if isinstance(error, InvalidRequest):
        too_long = isinstance(error, ContextLengthExceeded)
        return Problem(400, str(error), code="context_length_exceeded" if too_long else "invalid_value")
    retry = {"Retry-After": str(RETRY_SECONDS[type(error)])} if type(error) in RETRY_SECONDS else {}
    match error:
        case QueueFull():
            return Problem(429, str(error), "rate_limit_error", "queue_full", headers=retry)
        case ShuttingDown():
            return Problem(503, str(error), "server_error", "shutting_down", headers=retry)
        case EngineDead():
            return Problem(
                503, "the engine has failed and must be started again", "server_error", "engine_dead", None, retry
            )
    logger.error("a request failed", exc_info=error)
    return INTERNAL


def handle_errors(app: FastAPI) -> None:
    """Send our own and the framework's errors in OpenAI's shape."""

    @app.exception_handler(SpecdecError)
    async def _(request: Request, error: SpecdecError) -> JSONResponse:
        return problem_of(error).response()

    @app.exception_handler(RequestValidationError)
    async def _(request: Request, error: RequestValidationError) -> JSONResponse:
        if error.errors()[0]["type"] == "json_invalid":  # its place is a number of characters
            return NO_JSON.response()
        return _of_fields(error, request.headers.get("content-type", "")).response()

    @app.exception_handler(HTTPException)
    async def _(request: Request, error: HTTPException) -> JSONResponse:
        if error.status_code == 400:  # the body can't be parsed, for another reason than its grammar
            return NO_JSON.response()
        code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code)
        return Problem(error.status_code, str(error.detail), code=code, headers=error.headers or {}).response()


def _of_fields(error: RequestValidationError, content_type: str) -> Problem:
    """Say what is wrong where the check came furthest: one of a union's kinds tells more than that others don't fit."""
    places = [(_place(found, error.body), found) for found in error.errors()]
    where = max((place for place, _ in places), key=len)
    if not where and not isinstance(error.body, dict):
        sent = (
            "a JSON object" if "json" in content_type.lower() else "sent as JSON, with Content-Type: application/json"
        )
        return Problem(400, f"the body must be {sent}", code="invalid_value")
    found = [one for place, one in places if place == where]
    name = ".".join(where)[:100]
    message = "; or: ".join(dict.fromkeys(one["msg"].removeprefix("Value error, ") for one in found))
    param = found[0].get("ctx", {}).get("param", name) or None
    return Problem(400, f"{name}: {message}" if name else message, code="invalid_value", param=param)


def _place(error: Mapping[str, Any], body: Any) -> tuple[str, ...]:
    """Where an error is in a body: its `loc` without the names of a union's kinds, which nobody sent."""
    place = []
    for part in error["loc"][1:]:
        if isinstance(body, dict) and (part in body or error["type"] == "missing"):
            body = body.get(part)
        elif isinstance(body, list) and isinstance(part, int) and part < len(body):
            body = body[part]
        else:
            continue
        place.append(str(part))
    return tuple(place)
