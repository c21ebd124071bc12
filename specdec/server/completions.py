"""`/v1/chat/completions` and `/v1/completions`."""

import time
from collections.abc import Sequence

from fastapi import APIRouter, Request, Response

from specdec.params import SamplingParams
from specdec.server.answering import answer
from specdec.server.calls import Call
from specdec.server.formats import ChatFormat, CompletionFormat, Format
from specdec.server.protocol import ChatRequest, CompletionRequest, SamplingRequest
from specdec.server.sampling import cache_salt, chat_params, completion_params
from specdec.server.service import Service, service_of

router = APIRouter()


@router.post("/v1/chat/completions")
async def chat(body: ChatRequest, request: Request) -> Response:
    """Answer a conversation."""
    start, service = time.perf_counter(), service_of(request, body.model)
    params = chat_params(body, service.max_model_len, cache_salt(request, service.config))
    service.engine.check_room(body.n)
    prompt = await service.encode_chat([message.as_dict() for message in body.messages])
    return await _answer(service, request, body, ChatFormat(service.texts, body.logprobs), [prompt], params, start)


@router.post("/v1/completions")
async def complete(body: CompletionRequest, request: Request) -> Response:
    """Continue one or several prompts."""
    start, service = time.perf_counter(), service_of(request, body.model)
    params = completion_params(body, service.max_model_len, cache_salt(request, service.config))
    given = body.prompts()
    service.engine.check_room(len(given) * body.n)
    prompts = [await service.encode(prompt) if isinstance(prompt, str) else prompt for prompt in given]
    format = CompletionFormat(service.texts, body.logprobs is not None)
    return await _answer(service, request, body, format, prompts, params, start)


async def _answer(
    service: Service,
    request: Request,
    body: SamplingRequest,
    format: Format,
    prompts: Sequence[list[int]],
    params: SamplingParams,
    start: float,
) -> Response:
    return await answer(Call(service, body, format, prompts, params, start, request.state.facts), request)
