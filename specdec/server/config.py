"""The server's options, checked."""

from dataclasses import dataclass
from math import isfinite

from specdec.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """How the server listens and what it lets in.

    Args:
        host: address to listen on; the default is reached from this machine alone.
        port: 0 takes a free one.
        model_name: what clients call the model; by default its own name.
        api_keys: one of them must come with each request for work; none asks for no key.
        tenant_header: header that names the tenant; each has a prefix cache of its own. It must be set by a proxy that
            is trusted, and requests without it are refused.
        cors_origins: origins whose pages may read the answers; none by default.
        max_queue: answers that may wait beside those that run.
        max_body_bytes: longest body of a request.
        max_header_bytes: longest request line and headers of a request, together.
        body_seconds: a body must have arrived after that time.
        drain_seconds: how long running requests may go on after SIGTERM.

    Raises:
        ConfigError: a value is out of bounds; the message names it.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    model_name: str | None = None
    api_keys: tuple[str, ...] = ()
    tenant_header: str | None = None
    cors_origins: tuple[str, ...] = ()
    max_queue: int = 256
    max_body_bytes: int = 4 << 20
    max_header_bytes: int = 16 << 10
    body_seconds: float = 30.0
    drain_seconds: float = 30.0

    def __post_init__(self) -> None:
        for name, low, high in (("port", 0, 65535), ("max_queue", 0, 10**6), ("max_body_bytes", 1024, 1 << 30)):
            if not low <= getattr(self, name) <= high:
                raise ConfigError(f"{name} must be between {low} and {high}, not {getattr(self, name)!r}")
        if not 1024 <= self.max_header_bytes <= 1 << 20:
            raise ConfigError(f"max_header_bytes must be between 1024 and 1048576, not {self.max_header_bytes!r}")
        for name in ("body_seconds", "drain_seconds"):
            if not (isfinite(getattr(self, name)) and getattr(self, name) >= 0):
                raise ConfigError(f"{name} must be a number of at least 0, not {getattr(self, name)!r}")
        if any(not key.strip() for key in self.api_keys):
            raise ConfigError("an API key is empty; leave the option out to ask for no key")
        if not all(key.isascii() and key.isprintable() and " " not in key for key in self.api_keys):
            raise ConfigError("an API key has spaces or characters that no header carries; give plain ASCII")
