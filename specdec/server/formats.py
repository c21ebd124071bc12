"""The objects that OpenAI's clients read: chats and completions, whole and in chunks."""

from collections.abc import Sequence
from typing import Any, Protocol

from specdec.engine.answers import AnswerChunk
from specdec.outputs import TokenLogprob
from specdec.server.texts import TokenTexts


class Format(Protocol):
    """How one kind of completion is written. One for each call: it may remember what was written."""

    prefix: str
    """Of the ids."""
    whole: str
    """`object` of a whole response."""
    part: str
    """`object` of a chunk of a stream."""

    def openings(self, num_answers: int) -> list[dict[str, Any]]:
        """Return the choices that a stream opens with."""
        ...

    def chunk(self, chunk: AnswerChunk) -> dict[str, Any]:
        """Return the choice of a stream that says what a chunk adds."""
        ...

    def choice(self, answer: AnswerChunk) -> dict[str, Any]:
        """Return the choice of a whole response, from an answer in one piece."""
        ...


class ChatFormat:
    """Chat completions.

    Args:
        texts: of tokens.
        logprobs: whether they were asked for.
    """

    prefix, whole, part = "chatcmpl-", "chat.completion", "chat.completion.chunk"

    def __init__(self, texts: TokenTexts, logprobs: bool) -> None:
        self._texts, self._logprobs = texts, logprobs

    def openings(self, num_answers: int) -> list[dict[str, Any]]:
        """Return one empty delta an answer, which names the role."""
        delta = {"role": "assistant", "content": "", "refusal": None}
        return [{"index": i, "delta": delta, "logprobs": None, "finish_reason": None} for i in range(num_answers)]

    def chunk(self, chunk: AnswerChunk) -> dict[str, Any]:
        """Return a delta."""
        return {"index": chunk.index, "delta": {"content": chunk.text} if chunk.text else {}, **self._rest(chunk)}

    def choice(self, answer: AnswerChunk) -> dict[str, Any]:
        """Return a message."""
        message = {"role": "assistant", "content": answer.text, "refusal": None}
        return {"index": answer.index, "message": message, **self._rest(answer)}

    def _rest(self, chunk: AnswerChunk) -> dict[str, Any]:
        return {"logprobs": self._content(chunk.logprobs), "finish_reason": chunk.finish_reason}

    def _content(self, logprobs: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        if not self._logprobs:
            return None
        content = [
            self._one(entry.token_id, entry.logprob)
            | {"top_logprobs": [self._one(token, logprob) for token, logprob in entry.top.items()]}
            for entry in logprobs
        ]
        return {"content": content, "refusal": None}

    def _one(self, token_id: int, logprob: float) -> dict[str, Any]:
        return {"token": self._texts[token_id], "logprob": finite(logprob), "bytes": self._texts.utf8(token_id)}


class CompletionFormat:
    """Completions of plain prompts.

    Args:
        texts: of tokens.
        logprobs: whether they were asked for.
    """

    prefix, whole, part = "cmpl-", "text_completion", "text_completion"

    def __init__(self, texts: TokenTexts, logprobs: bool) -> None:
        self._texts, self._logprobs = texts, logprobs
        self._offsets: dict[int, int] = {}  # characters written of each answer

    def openings(self, num_answers: int) -> list[dict[str, Any]]:
        """Return nothing: the first text opens the stream."""
        return []

    def chunk(self, chunk: AnswerChunk) -> dict[str, Any]:
        """Return a piece of the text."""
        choice = {
            "index": chunk.index,
            "text": chunk.text,
            "logprobs": self._lists(chunk) if self._logprobs else None,
            "finish_reason": chunk.finish_reason,
        }
        self._offsets[chunk.index] = self._offsets.get(chunk.index, 0) + len(chunk.text)
        return choice

    choice = chunk

    def _lists(self, chunk: AnswerChunk) -> dict[str, Any]:
        offset, offsets = self._offsets.get(chunk.index, 0), []
        for piece in chunk.pieces[: len(chunk.token_ids)]:
            offsets.append(offset)
            offset += len(piece)
        return {
            "tokens": [self._texts[entry.token_id] for entry in chunk.logprobs],
            "token_logprobs": [finite(entry.logprob) for entry in chunk.logprobs],
            "top_logprobs": [self._top(entry) for entry in chunk.logprobs],
            "text_offset": offsets,
        }

    def _top(self, entry: TokenLogprob) -> dict[str, float]:
        """The likeliest tokens and the one that came; of parts of characters, which look alike, the likeliest."""
        top: dict[str, float] = {}
        for token, logprob in (*entry.top.items(), (entry.token_id, entry.logprob)):
            top.setdefault(self._texts[token], finite(logprob))
        return top


def finite(logprob: float) -> float:
    """Return a log-probability as JSON can hold it: OpenAI writes -9999 for what can't come."""
    return max(logprob, -9999.0)


def trace(chunk: AnswerChunk) -> list[dict[str, Any]]:
    """Return for each token of a chunk who proposed it, and the text that became certain with it."""
    return [
        {"text": piece, "token_id": token, "proposer": proposer}
        for piece, token, proposer in zip(chunk.pieces, chunk.token_ids, chunk.proposers, strict=False)
    ]
