"""The answers to one call, on their way from the engine's thread to the coroutine that waits for them."""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Self

from specdec.engine.request import Request
from specdec.engine.text import StopChecker
from specdec.outputs import SpeculationStats, TokenLogprob


@dataclass(frozen=True, slots=True)
class AnswerChunk:
    """What one or more steps added to one answer.

    Args:
        index: which of the call's answers: those to the first prompt come first.
        pieces: for each new token the text that became certain with it; what may be the start of a stop string, or is
            an unfinished character, is held back. An answer that is ended from outside has one piece more.
        token_ids: the new tokens.
        proposers: for each of them the drafter that proposed it, or "target".
        logprobs: for each of them, if they were asked for.
        finish_reason: as in `Completion`, on the answer's last chunk; else None.
        stop_reason: as in `Completion`.
        stats: how speculation went, on the last chunk; else None.
        error: what ended the answer, where `finish_reason` is "error".
    """

    index: int
    pieces: list[str]
    token_ids: list[int]
    proposers: list[str]
    logprobs: list[TokenLogprob]
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    stats: SpeculationStats | None = None
    error: Exception | None = None

    @property
    def text(self) -> str:
        """The new text."""
        return "".join(self.pieces)


@dataclass(frozen=True, slots=True)
class News:
    """What a request got since the engine's thread last looked, not yet text.

    Args:
        answer: whose.
        token_ids, proposers, logprobs, finish_reason, stop_reason, stats, error: as in `AnswerChunk`.
    """

    answer: "Answer"
    token_ids: list[int]
    proposers: list[str]
    logprobs: list[TokenLogprob]
    finish_reason: str | None
    stop_reason: int | str | None
    stats: SpeculationStats | None
    error: Exception | None

    def written(self) -> AnswerChunk:
        """Make the text. Called by one thread, in the order of the tokens."""
        stop = self.answer.stop
        pieces = [stop.push(token).text for token in self.token_ids]
        if self.finish_reason is not None and (rest := stop.flush()):  # empty if the answer ended by itself
            pieces.append(rest)
        return AnswerChunk(
            self.answer.index,
            pieces,
            self.token_ids,
            self.proposers,
            self.logprobs,
            self.finish_reason,
            self.stop_reason,
            self.stats,
            self.error,
        )


@dataclass(slots=True, eq=False)
class Answer:
    """One request and how much of it has been passed on. `take` is the engine's thread's, `stop` the text's.

    Args:
        answers: the call that it belongs to.
        index: which of the call's answers.
        request: the engine's request.
        stop: makes the text; it sees each token once, as the request's own does.
    """

    answers: "Answers"
    index: int
    request: Request
    stop: StopChecker
    num_taken: int = 0

    def take(self) -> News | None:
        """Return what the request got since the last call; None if that is nothing."""
        request, start = self.request, self.num_taken
        if request.num_output == start and request.finish_reason is None:
            return None
        self.num_taken = request.num_output
        return News(
            self,
            request.tokens[request.prompt_len + start :],
            request.proposers[start:],
            request.logprobs[start:],
            request.finish_reason,
            request.stop_reason,
            request.stats if request.finish_reason is not None else None,
            request.error,
        )


@dataclass(slots=True, eq=False)
class Answers:
    """An asynchronous iterator over the chunks of a call's answers; leaving it closes it.

    A reader that is slower than the engine finds what an answer got meanwhile in one chunk, so that it catches up.

    Once one of the answers has failed, the iteration raises what it failed with, after its last chunk.

    Args:
        num_answers: how many there are.
        on_close: ends those that still run.
    """

    num_answers: int
    on_close: Callable[["Answers"], None]
    num_open: int = field(init=False)
    closed: bool = False
    _error: Exception | None = None
    _chunks: asyncio.Queue[AnswerChunk | Exception] = field(default_factory=asyncio.Queue)
    _taken: deque[AnswerChunk | Exception] = field(default_factory=deque)

    def __post_init__(self) -> None:
        self.num_open = self.num_answers

    def put(self, chunk: AnswerChunk | Exception) -> None:
        """Hand over a chunk, or what ended all answers; called in the event loop."""
        self._chunks.put_nowait(chunk)

    def close(self) -> None:
        """End the answers that still run, within one step; their blocks are freed."""
        if not self.closed:
            self.closed = True
            self.on_close(self)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> AnswerChunk:
        if self._error is not None:
            raise self._error
        if not self.num_open:
            raise StopAsyncIteration
        if not self._taken:
            self._taken += self._joined(await self._chunks.get())
        chunk = self._taken.popleft()
        if isinstance(chunk, Exception):
            self._error = chunk  # nothing comes after it
            raise chunk
        self.num_open -= chunk.finish_reason is not None
        self._error = chunk.error
        return chunk

    def _joined(self, item: AnswerChunk | Exception) -> list[AnswerChunk | Exception]:
        """Return this and what came behind it, each answer's chunks as one; what ends the iteration is the last."""
        parts: dict[int, list[AnswerChunk]] = {}
        while not isinstance(item, Exception):
            own = parts.pop(item.index, [])
            own.append(item)
            parts[item.index] = own  # behind those of others that came before
            if item.error is not None or self._chunks.empty():
                return [joined(part) for part in parts.values()]
            item = self._chunks.get_nowait()
        return [*(joined(part) for part in parts.values()), item]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def joined(chunks: Sequence[AnswerChunk]) -> AnswerChunk:
    """Return one answer's chunks, from its first to its last, as one."""
    last = chunks[-1]
    if len(chunks) == 1:
        return last
    return AnswerChunk(
        last.index,
        [piece for chunk in chunks for piece in chunk.pieces],
        [token for chunk in chunks for token in chunk.token_ids],
        [proposer for chunk in chunks for proposer in chunk.proposers],
        [logprob for chunk in chunks for logprob in chunk.logprobs],
        last.finish_reason,
        last.stop_reason,
        last.stats,
        last.error,
    )
