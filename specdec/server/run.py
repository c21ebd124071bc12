"""Runs the server: uvicorn, with a drain before it stops listening."""

import asyncio
import logging
import os
import signal
import socket
from types import FrameType

import uvicorn
from fastapi import FastAPI

from specdec.errors import ConfigError
from specdec.server.config import ServerConfig
from specdec.server.service import Service

logger = logging.getLogger("specdec.server")


def check_address(config: ServerConfig) -> None:
    """Refuse an address that can't be listened on, before a model is loaded for it.

    Raises:
        ConfigError: the host has no such address here, or the port is taken.
    """
    where = f"{config.host}:{config.port}"
    try:
        found = socket.getaddrinfo(config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, kind, protocol, _, address in found:
            with socket.socket(family, kind, protocol) as tried:
                # As asyncio's servers do: what just ended doesn't hold the port, nor do those of the other protocol.
                if os.name == "posix":
                    tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    tried.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                tried.bind(address)
    except OSError as error:
        raise ConfigError(f"can't listen on {where}: {error.strerror}; give another --host or --port") from error


class DrainingServer(uvicorn.Server):
    """Keeps listening while running requests end, so that new ones and /ready get an answer.

    The first SIGTERM or SIGINT begins the drain, a second one ends the server at once.

    Args:
        app: as `make_app` returns it.
        config: the server's options.
    """

    def __init__(self, app: FastAPI, config: ServerConfig) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                host=config.host,
                port=config.port,
                http="h11",  # its limit on headers, and nothing more to install
                ws="none",
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_keep_alive=30,
                timeout_graceful_shutdown=5,
                h11_max_incomplete_event_size=max(64 << 10, 2 * config.max_header_bytes),
            )
        )
        self._service: Service = app.state.service
        self._drain_seconds = config.drain_seconds
        self._drain: asyncio.Task[None] | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin the drain; called by the signal."""
        if self._drain is not None or not self.started:
            super().handle_exit(sig, frame)
            return
        logger.info("draining", extra={"signal": signal.Signals(sig).name, "seconds": self._drain_seconds})
        self._drain = asyncio.get_event_loop().create_task(self._drain_then_exit())

    async def _drain_then_exit(self) -> None:
        await self._service.engine.drain(self._drain_seconds)
        self.should_exit = True
