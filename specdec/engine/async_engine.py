"""The engine for asynchronous callers: one thread runs its steps, another makes text of the tokens.

Three places, each with its own data: the event loop knows calls (`Answers`), the engine's thread alone touches the
engine, and the text's thread detokenizes beside it. Orders go to the engine's thread between two steps; what a step
emitted goes to the text's thread and from there to the event loop, in one piece a step.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from queue import Empty, SimpleQueue
from threading import Thread

import torch

from specdec.engine.answers import Answer, AnswerChunk, Answers, News
from specdec.engine.engine import Engine
from specdec.errors import EngineDead, InvalidRequest, QueueFull, ShuttingDown
from specdec.outputs import SpeculationStats
from specdec.params import SamplingParams

logger = logging.getLogger(__name__)
_POLL_SECONDS = 0.02
_LAST_CHUNKS_SECONDS = 2.0
"""How long the readers of requests that a drain has ended may take for the last chunks."""


@dataclass(slots=True)
class Totals:
    """What all ended requests of an engine came to.

    Args:
        num_prompt_tokens: tokens of their prompts.
        finished: how many ended by which finish reason.
        stats: their output and how speculation went.
    """

    num_prompt_tokens: int = 0
    finished: Counter[str] = field(default_factory=Counter)
    stats: SpeculationStats = field(default_factory=SpeculationStats)


class AsyncEngine:
    """Runs an engine in a thread of its own. `start` and all other methods belong to one event loop.

    Args:
        engine: belongs to the thread from `start` on.
        max_queue: answers that may wait beside the `max_num_seqs` that run; further ones are refused.
    """

    def __init__(self, engine: Engine, *, max_queue: int = 256) -> None:
        self.engine = engine
        self.capacity = engine.config.max_num_seqs + max_queue
        self.totals = Totals()
        """Written by the engine's thread."""
        self.num_open = 0
        """Answers that run or wait."""
        self.dead: Exception | None = None
        """What a step failed with."""
        self.draining = False
        self._calls: set[Answers] = set()
        self._live: list[Answer] = []  # the engine's thread's
        self._orders: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._news: SimpleQueue[list[News] | None] = SimpleQueue()
        self._threads = [
            Thread(target=self._run, name="engine", daemon=True),
            Thread(target=self._write, name="text", daemon=True),
        ]

    @property
    def ready(self) -> bool:
        """Whether new requests are taken."""
        return self.dead is None and not self.draining

    def start(self) -> None:
        """Start the threads; called once, in the event loop."""
        self._loop = asyncio.get_running_loop()
        for thread in self._threads:
            thread.start()

    async def drain(self, seconds: float) -> None:
        """Take no new requests and wait until all have ended; those that haven't after that time are ended."""
        self.draining = True
        await self._until_idle(seconds)
        for answers in list(self._calls):
            self._orders.put(partial(self._end, answers))
        await self._until_idle(_LAST_CHUNKS_SECONDS)

    async def close(self) -> None:
        """End all requests and both threads."""
        self.draining = True
        for answers in list(self._calls):
            answers.close()
        self._orders.put(None)
        for thread in self._threads:
            await asyncio.to_thread(thread.join)

    def check_room(self, num_answers: int = 1) -> None:
        """Refuse answers that can't be taken now, before anything is done for them.

        Raises:
            QueueFull, ShuttingDown, EngineDead: see there.
            InvalidRequest: there are more than could ever be taken at once.
        """
        if self.dead is not None:
            raise EngineDead(f"the engine has failed and must be started again: {self.dead}") from self.dead
        if self.draining:
            raise ShuttingDown("the engine is shutting down and takes no new requests")
        if num_answers > self.capacity:
            raise InvalidRequest(f"{num_answers} answers were asked for; this engine takes {self.capacity} at once")
        if self.num_open + num_answers > self.capacity:
            raise QueueFull(f"{self.num_open} of {self.capacity} places are taken; try again later")

    def submit(self, prompts: Sequence[Sequence[int]], params: SamplingParams, *, priority: int = 0) -> Answers:
        """Queue `params.n` answers to each prompt: all of them, or none. Close what is returned, or leave it.

        Args:
            prompts: token ids.
            params: for all of them.
            priority: as for `Engine.add`.

        Raises:
            InvalidRequest: as in `Engine.add`; or no prompt was given.
            QueueFull, ShuttingDown, EngineDead: as in `check_room`.
        """
        if not prompts:
            raise InvalidRequest("no prompt was given")
        self.check_room(len(prompts) * params.n)
        for prompt in prompts:
            self.engine.check(prompt, params)
        answers = Answers(len(prompts) * params.n, self._close)
        self.num_open += answers.num_answers
        self._calls.add(answers)
        self._orders.put(partial(self._begin, answers, prompts, params, priority))
        return answers

    async def generate(self, prompt_token_ids: Sequence[int], params: SamplingParams) -> AsyncIterator[AnswerChunk]:
        """Answer one prompt; closing or cancelling the iteration ends its requests.

        Raises:
            InvalidRequest, QueueFull, ShuttingDown: as `submit`, at the first step of the iteration.
            EngineDead: at any step.
        """
        with self.submit([prompt_token_ids], params) as answers:
            async for chunk in answers:
                yield chunk

    async def _until_idle(self, seconds: float) -> None:
        deadline = self._loop.time() + seconds
        while self._calls and self._loop.time() < deadline:
            await asyncio.sleep(_POLL_SECONDS)

    def _close(self, answers: Answers) -> None:
        self.num_open -= answers.num_answers
        self._calls.discard(answers)
        if answers.num_open:
            self._orders.put(partial(self._end, answers))

    # The engine's thread.

    def _run(self) -> None:
        try:
            device = self.engine.model.device
            if device.type == "cuda":  # of its own a thread begins with the first GPU
                torch.cuda.set_device(device)
            while self._take_orders():
                if self.engine.has_work:
                    self.engine.step()
                self._collect()
            self._collect()  # of those that were ended just before
        except Exception as error:  # not to carry on: whoever waits must hear of it
            self._fail(error)
        self._news.put(None)

    def _take_orders(self) -> bool:
        """Carry out the orders; wait for one if there is nothing else to do. False once the engine is to end."""
        wait = not self.engine.has_work
        while True:
            try:
                order = self._orders.get(block=wait)
            except Empty:
                return True
            if order is None:
                return False
            order()
            wait = False

    def _begin(self, answers: Answers, prompts: Sequence[Sequence[int]], params: SamplingParams, priority: int) -> None:
        add = partial(self.engine.add_answers, params=params, priority=priority, detokenize=False)
        requests = [request for prompt in prompts for request in add(prompt)]
        for index, request in enumerate(requests):
            stop = self.engine.stop_checker(request.tokens, params)  # makes the text; the request's own needn't
            self._live.append(Answer(answers, index, request, stop))

    def _end(self, answers: Answers) -> None:
        for answer in self._live:
            if answer.answers is answers:
                self.engine.abort(answer.request)

    def _collect(self) -> None:
        """Pass on what the step emitted."""
        news = [item for answer in self._live if (item := answer.take()) is not None]
        for request in (item.answer.request for item in news if item.finish_reason is not None):
            self.totals.num_prompt_tokens += request.prompt_len
            self.totals.finished[str(request.finish_reason)] += 1
            self.totals.stats.add(request.stats)
        if news:
            self._live = [answer for answer in self._live if answer.request.finish_reason is None]
            self._news.put(news)

    # The text's thread.

    def _write(self) -> None:
        try:
            while (news := self._news.get()) is not None:
                chunks = [(item.answer.answers, item.written()) for item in news]
                self._loop.call_soon_threadsafe(self._hand_out, chunks)
        except Exception as error:  # as in `_run`
            self._fail(error)
            self._orders.put(None)

    # Back in the event loop.

    def _hand_out(self, chunks: Sequence[tuple[Answers, AnswerChunk]]) -> None:
        for answers, chunk in chunks:
            answers.put(chunk)

    def _fail(self, error: Exception) -> None:
        logger.critical("the engine has failed", exc_info=error)
        self._loop.call_soon_threadsafe(self._die, error)

    def _die(self, error: Exception) -> None:
        self.dead = error
        for answers in list(self._calls):
            dead = EngineDead(f"the engine failed while this request ran: {error}")
            dead.__cause__ = error
            answers.put(dead)
