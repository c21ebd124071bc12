"""What all endpoints share: the engine, the way in for texts, the server's options."""

import asyncio
import copy
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from starlette.exceptions import HTTPException
from starlette.requests import Request

from specdec.encode import Encoder
from specdec.engine.async_engine import AsyncEngine
from specdec.errors import ContextLengthExceeded
from specdec.llm import LLM
from specdec.server.config import ServerConfig
from specdec.server.metrics import Metrics
from specdec.server.texts import TokenTexts

T = TypeVar("T")


class Service:
    """One model, served.

    Args:
        llm: the model and its engine; not to be used otherwise from now on.
        config: the server's options.
    """

    def __init__(self, llm: LLM, config: ServerConfig) -> None:
        self.config, self.name = config, config.model_name or llm.name
        self.engine = AsyncEngine(llm.engine, max_queue=config.max_queue)
        self.drafter = llm.engine.drafter.name
        self.max_model_len = llm.engine.limits.max_model_len
        self.created = int(time.time())
        self.metrics = Metrics(self.engine)
        self.texts = TokenTexts(llm.tokenizer)
        # A copy: encoding may change a tokenizer's state, and the engine's threads decode with the other meanwhile.
        self._encoder = Encoder(copy.deepcopy(llm.tokenizer), llm.name)
        self._longest_token = max(map(len, llm.tokenizer.get_vocab()), default=1) if llm.tokenizer else 1
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="encode")

    async def encode(self, text: str) -> list[int]:
        """Return the token ids of a prompt; as `Encoder.text`, in a thread."""
        self._check_length(len(text))
        return await self._run(self._encoder.text, text)

    async def encode_chat(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """Return the token ids of a conversation; as `Encoder.chat`, in a thread."""
        self._check_length(sum(len(message["content"]) for message in messages))
        return await self._run(self._encoder.chat, messages)

    async def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens; as `Encoder.decode`, in a thread."""
        if len(tokens) > self.max_model_len:
            raise ContextLengthExceeded(f"{len(tokens)} tokens were given; the context limit is {self.max_model_len}")
        return await self._run(self._encoder.decode, tokens)

    def close(self) -> None:
        """End the thread that encodes."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _check_length(self, num_chars: int) -> None:
        """Refuse what can't fit, whatever its tokens are, before they are made."""
        if num_chars > self.max_model_len * self._longest_token:
            raise ContextLengthExceeded(
                f"the prompt has {num_chars} characters, more than the context limit of {self.max_model_len} tokens "
                "can hold; shorten the prompt"
            )

    async def _run(self, encode: Callable[[Any], T], what: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, encode, what)


def service_of(request: Request, model: str | None = None) -> Service:
    """Return the service behind a request.

    Args:
        request: any.
        model: the name that was asked for, if one was.

    Raises:
        HTTPException: another model is served.
    """
    service: Service = request.app.state.service
    if model is not None and model != service.name:
        raise HTTPException(404, f"model {model!r} does not exist; this server has {service.name!r}")
    return service
