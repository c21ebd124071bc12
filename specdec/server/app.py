"""Puts the server together: what a request passes, top to bottom, and the endpoints."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware

from specdec import __version__
from specdec.llm import LLM
from specdec.server import completions, info
from specdec.server.config import ServerConfig
from specdec.server.errors import handle_errors
from specdec.server.gate import Gate
from specdec.server.logs import RequestLog
from specdec.server.service import Service


def make_app(llm: LLM, config: ServerConfig) -> FastAPI:
    """Return the ASGI application; its lifespan starts and ends the engine's threads.

    Args:
        llm: the model and its engine; not to be used otherwise from now on.
        config: the server's options.
    """
    service = Service(llm, config)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        service.engine.start()
        yield
        await service.engine.close()
        service.close()

    passed = [Middleware(RequestLog, responded=service.metrics.responded)]
    if config.cors_origins:
        origins = list(config.cors_origins)
        passed.append(Middleware(CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"]))
    passed.append(Middleware(Gate, config=config, check_room=service.engine.check_room))
    # The interactive documentation would load its scripts from elsewhere.
    app = FastAPI(
        title="specdec", version=__version__, lifespan=lifespan, middleware=passed, docs_url=None, redoc_url=None
    )
    app.state.service = service
    app.include_router(completions.router)
    app.include_router(info.router)
    handle_errors(app)
    return app
