"""What can be asked without work for the model: models, tokens, version, health, metrics, the playground's files."""

from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.responses import FileResponse, JSONResponse

from specdec import __version__
from specdec.server.protocol import DetokenizeRequest, TokenizeRequest
from specdec.server.service import Service, service_of

router = APIRouter()
_HERE = Path(__file__).parent
_PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; img-src 'self' data:; base-uri 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


@router.get("/v1/models")
async def models(request: Request) -> dict[str, Any]:
    """List the one model that is served."""
    return {"object": "list", "data": [_model(service_of(request))]}


@router.get("/v1/models/{model:path}")
async def model(model: str, request: Request) -> dict[str, Any]:
    """Describe the model."""
    return _model(service_of(request, model))


def _model(service: Service) -> dict[str, Any]:
    return {
        "id": service.name,
        "object": "model",
        "created": service.created,
        "owned_by": "specdec",
        "max_model_len": service.max_model_len,
        "drafter": service.drafter,
    }


@router.post("/tokenize")
async def tokenize(body: TokenizeRequest, request: Request) -> dict[str, Any]:
    """Return the token ids of a prompt or a conversation."""
    service = service_of(request, body.model)
    if body.messages is not None:
        tokens = await service.encode_chat([message.as_dict() for message in body.messages])
    else:
        tokens = await service.encode(body.prompt or "")
    return {"count": len(tokens), "max_model_len": service.max_model_len, "tokens": tokens}


@router.post("/detokenize")
async def detokenize(body: DetokenizeRequest, request: Request) -> dict[str, Any]:
    """Return the text of token ids."""
    return {"prompt": await service_of(request, body.model).decode(body.tokens)}


@router.get("/version")
async def version() -> dict[str, str]:
    """Return the server's version."""
    return {"version": __version__}


@router.get("/health")
async def health(request: Request) -> Response:
    """Say whether the process should go on: 503 once the engine has failed."""
    alive = service_of(request).engine.dead is None
    return JSONResponse({"status": "ok" if alive else "dead"}, 200 if alive else 503)


@router.get("/ready")
async def ready(request: Request) -> Response:
    """Say whether new requests are taken: 503 while the server shuts down, or once the engine has failed."""
    taking = service_of(request).engine.ready
    return JSONResponse({"status": "ready" if taking else "not ready"}, 200 if taking else 503)


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """Return the metrics in Prometheus' text format."""
    return Response(service_of(request).metrics.exposition(), media_type=CONTENT_TYPE_LATEST)


@router.get("/", include_in_schema=False)
async def playground() -> Response:
    """Return the playground."""
    return FileResponse(_HERE / "playground.html", headers=_PAGE_HEADERS)


@router.get("/playground.{kind}", include_in_schema=False)
async def playground_file(kind: str) -> Response:
    """Return one of the playground's files."""
    name = {"js": "playground.js", "css": "playground.css"}.get(kind)
    if name is None:
        raise HTTPException(404)
    return FileResponse(_HERE / name, headers=_PAGE_HEADERS)
