"""Runs a call and writes its answers: one JSON object, or a stream of server-sent events."""

import asyncio
import json
from collections import defaultdict
from collections.abc import AsyncIterator, Coroutine
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from specdec.engine.answers import AnswerChunk, Answers, joined
from specdec.errors import SpecdecError
from specdec.server.calls import Call
from specdec.server.errors import problem_of

T = TypeVar("T")
_LINE_ENDS = {ord(end): f"\\u{ord(end):04x}" for end in "\x85\u2028\u2029"}
"""Ends of lines to some clients, though not in server-sent events; in JSON they can only stand in strings."""
CLIENT_HAS_LEFT = 499
"""Status in the log of requests whose client didn't wait; nobody receives it."""


async def answer(call: Call, request: Request) -> Response:
    """Answer a call, as long as its client is there.

    Args:
        call: what was asked for.
        request: whose client may leave.

    Raises:
        InvalidRequest, QueueFull, ShuttingDown, EngineDead: see `AsyncEngine.submit`.
    """
    answers = call.service.engine.submit(call.prompts, call.params, priority=call.body.priority)
    if call.body.stream:
        return EventStream(_events(call, answers), answers)
    with answers:
        response = await unless_gone(request.receive, _whole(call, answers))
    return response or Response(status_code=CLIENT_HAS_LEFT)


class EventStream(StreamingResponse):
    """Server-sent events of answers, which end with the response, however that ends.

    Args:
        events: the events' text.
        answers: closed at the end.
    """

    def __init__(self, events: AsyncIterator[str], answers: Answers) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(events, media_type="text/event-stream", headers=headers)
        self._answers = answers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events until they end or the client leaves, whichever comes first."""
        with self._answers:
            try:
                await unless_gone(receive, self.stream_response(send))
            except OSError:  # the client left while an event was being sent
                return


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T | None:
    """Return what `work` returns; None, and `work` is cancelled, if the client leaves before."""
    working, gone = asyncio.ensure_future(work), asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait({working, gone}, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        working.cancel()
        gone.cancel()
        await asyncio.gather(working, gone, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _whole(call: Call, answers: Answers) -> Response:
    parts: dict[int, list[AnswerChunk]] = defaultdict(list)
    async for chunk in call.watch(answers):
        parts[chunk.index].append(chunk)
    choices = [call.choice(call.format.choice, joined(parts[index])) for index in sorted(parts)]
    return JSONResponse(call.head(call.format.whole) | {"choices": choices, "usage": call.usage()})


async def _events(call: Call, answers: Answers) -> AsyncIterator[str]:
    head = call.head(call.format.part)
    with_usage = call.body.stream_options.include_usage
    if with_usage:
        head["usage"] = None
    try:
        for choice in call.format.openings(answers.num_answers):
            yield _event(head | {"choices": [choice]})
        async for chunk in call.watch(answers):
            yield _event(head | {"choices": [call.choice(call.format.chunk, chunk)]})
    except SpecdecError as error:
        yield _event(problem_of(error).body())
        return
    if with_usage:
        yield _event(head | {"choices": [], "usage": call.usage()})
    yield "data: [DONE]\n\n"


def _event(data: dict[str, Any]) -> str:
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    return f"data: {text.translate(_LINE_ENDS)}\n\n"
