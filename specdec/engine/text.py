"""From token ids to text: incremental detokenizing, and where an output ends.

Knows a tokenizer and the sampling parameters of one request; knows nothing of batches, trees or drafters. Both
classes take tokens one at a time, so a block of accepted tokens ends where plain decoding would have ended.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from specdec.errors import InvalidRequest
from specdec.params import SamplingParams

_REPLACEMENT = "\ufffd"
_MAX_HELD = 3
"""U+FFFD that an unfinished character may show as: byte-level decoders write one, byte fallback one for each byte."""
_MAX_PENDING = 16
_MIN_WINDOW = 8
"""Tokens kept when a window is cut anywhere: 3 to find the next character's start, 3 of an unfinished one, 2 spare."""


class Detokenizing(Protocol):
    """A tokenizer as this module sees it; any Hugging Face tokenizer, fast or slow, is one."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool) -> Any:
        """Return the text of the tokens; bytes that are no character show as U+FFFD."""
        ...


def decoder_of(tokenizer: Detokenizing) -> Callable[[list[int], bool], str]:
    """Return what makes text of tokens, without clean-up: "a ." to "a." would rewrite text that is out already.

    A fast tokenizer's own `decode` spends most of its time on what tokens may be given as; where a class has not
    changed it, what it hands them to is asked, for the same text.

    Returns:
        A function of tokens and whether special ones are left out.
    """
    from transformers import PreTrainedTokenizerFast as fast  # noqa: N813, PLC0415  # slow to import, and loaded by now

    same = all(getattr(type(tokenizer), name, None) is getattr(fast, name, fast) for name in ("decode", "_decode"))
    if same and "decode" not in vars(tokenizer):
        decode = tokenizer.backend_tokenizer.decode  # type: ignore[attr-defined]
        return lambda token_ids, skip: str(decode(token_ids, skip_special_tokens=skip))
    return lambda token_ids, skip: str(
        tokenizer.decode(token_ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
    )


class IncrementalDetokenizer:
    """Turns the tokens of one request into text as they come.

    The deltas put together equal `tokenizer.decode(output_ids, skip_special_tokens=...,
    clean_up_tokenization_spaces=False)`; with `prompt_ids` they equal what the whole decode has after the prompt
    (where SentencePiece tokenizers keep the space before the first word). Text is held back only while its last
    character may be unfinished. A token costs two decodes of a window of some tokens, however long the output is.

    One exception: text that was returned is never taken back. A byte-fallback tokenizer decodes a whole run of byte
    tokens to U+FFFD if one is invalid or the last character is unfinished; here the characters before it stand.

    Args:
        tokenizer: any Hugging Face tokenizer, fast or slow.
        prompt_ids: the tokens before the output; only the last few are read. Their text is not returned.
        skip_special_tokens: leave special tokens out of the text.
    """

    # Not `tokenizers.decoders.DecodeStream`: it has no flush (an output that ends inside a character loses its tail),
    # holds back for ever, at quadratic cost, in a run of invalid bytes, raises "Invalid prefix" where a byte-fallback
    # run turns invalid, and needs a fast tokenizer.

    def __init__(self, tokenizer: Detokenizing, prompt_ids: Sequence[int] = (), skip_special_tokens: bool = True):
        self._decode_all = decoder_of(tokenizer)
        self._skip_special_tokens = skip_special_tokens
        self._context = self._prompt_tail(prompt_ids)  # tokens whose text is returned; they anchor the pending ones
        self._pending: list[int] = []  # tokens since the text last ended with a finished character
        self._text = self._decode(self._context)  # of context + pending
        self._returned = self._text  # the start of _text that is out already
        self._num_unread = 0  # last pending tokens of whose text nothing is out

    def push(self, token_id: int) -> str:
        """Take the next token and return the text that became certain with it; may be empty."""
        text = self._decode([*self._context, *self._pending, token_id])
        if text == self._text and self._is_skipped(token_id):
            return ""  # kept out of the window, lest it push out the token that anchors the next word's space
        # A real U+FFFD in byte fallback: its bytes, shown as one each, become one character.
        finished = not text.endswith(_REPLACEMENT) or len(text) < len(self._text)
        self._text = text
        self._pending.append(token_id)
        self._num_unread += 1
        delta = self._take(finished)
        if finished and (own := self._decode(self._pending)):
            self._context, self._pending = self._pending, []
            self._text = self._returned = own
        elif len(self._pending) > _MAX_PENDING:
            delta += self._cut_window()
        return delta

    def finish(self) -> str:
        """Return the text that was held back; what is unfinished shows as U+FFFD, as in the whole decode."""
        return self._take(finished=True)

    def _take(self, finished: bool) -> str:
        """Return what is certain and not out yet: all of it if `finished`, else up to the unfinished character."""
        if not self._text.startswith(self._returned):
            # Byte fallback: with the new bytes, the run of byte tokens that `_returned` ends with is no longer valid
            # as a whole, or not yet. What isn't out is decoded on its own; a byte needs no anchor.
            self._context, self._pending, self._returned = [], self._pending[-self._num_unread :], ""
            self._text = self._decode(self._pending)
        num_held = 0 if finished else len(self._text) - len(self._text.rstrip(_REPLACEMENT))
        if self._num_unread > _MAX_HELD:
            num_held = min(num_held, _MAX_HELD)
        delta = self._text[len(self._returned) : len(self._text) - num_held]
        self._returned += delta
        self._num_unread = min(self._num_unread, len(self._text) - len(self._returned))
        return delta

    def _cut_window(self) -> str:
        """Bound the window where no token ends with a character: invalid bytes, or tokens across characters.

        UTF-8 finds its way back after at most three bytes, so the cut may fall anywhere if the text still ends with
        what is held. In a long invalid run of byte fallback it may not; the held text, returned here, is certain.
        """
        held = self._text[len(self._returned) :]
        self._context, self._pending = [], self._pending[-_MIN_WINDOW:]
        self._text = self._decode(self._pending)
        if self._text.endswith(held):
            self._returned = self._text[: len(self._text) - len(held)]
            return ""
        self._returned, self._num_unread = self._text, 0
        return held

    def _prompt_tail(self, prompt_ids: Sequence[int]) -> list[int]:
        """Return the last few tokens of the prompt, from the start of a character on."""
        tail = list(prompt_ids[-_MIN_WINDOW:])
        for start in range(len(tail)):
            if not self._decode(tail[start:]).startswith(_REPLACEMENT):
                return tail[start:]
        return tail

    def _is_skipped(self, token_id: int) -> bool:
        return self._decode([token_id]) == "" != self._decode([token_id], skip_special_tokens=False)

    def _decode(self, token_ids: list[int], skip_special_tokens: bool = True) -> str:
        return self._decode_all(token_ids, skip_special_tokens and self._skip_special_tokens)


@dataclass(frozen=True, slots=True)
class Step:
    """What one token did to an output.

    Args:
        text: text that may be streamed now; never cut later.
        finish_reason: None to go on; "stop" at an EOS token, stop token or stop string; "length" at a token limit.
        stop_reason: the stop string or the stop token's id (of `SamplingParams.stop_token_ids`) that ended the
            output; None otherwise, also at the model's EOS.
    """

    text: str = ""
    finish_reason: Literal["stop", "length"] | None = None
    stop_reason: int | str | None = None


class StopChecker:
    """Decides, token by token, where the output of one request ends and which text may be streamed.

    An EOS or stop token stays in the token ids but not in the text. A stop string cuts the text just before the
    occurrence that ends first (the longest, if several end there); the token that completes it is the last one
    kept. A stop wins over a length limit that falls on the same token. Text is held back only while it may be the
    start of a stop string.

    Args:
        params: its `max_new_tokens`, `stop`, `stop_token_ids`, `ignore_eos`, `skip_special_tokens` and `detokenize` are
            read.
        eos_token_ids: the model's EOS tokens; a config may list several.
        tokenizer: makes the text; None for token-only use, where the text is empty.
        prompt_token_ids: the tokens before the output, as for `IncrementalDetokenizer`.
        limit: most output tokens that the context has room for; None for no limit besides `max_new_tokens`.

    Raises:
        InvalidRequest: stop strings without a tokenizer.
    """

    def __init__(
        self,
        params: SamplingParams,
        eos_token_ids: Collection[int] = frozenset(),
        tokenizer: Detokenizing | None = None,
        prompt_token_ids: Sequence[int] = (),
        limit: int | None = None,
    ):
        if params.stop and tokenizer is None:
            raise InvalidRequest(f"stop strings need a tokenizer; stop is {list(params.stop)!r}")
        self._eos_token_ids = frozenset() if params.ignore_eos else frozenset(eos_token_ids)
        self._stop_token_ids = frozenset(params.stop_token_ids)
        self.max_tokens = params.max_new_tokens if limit is None else min(limit, params.max_new_tokens)
        """Most output tokens, by what was asked for and what the context has room for."""
        self._detokenizer = None
        if tokenizer is not None and params.detokenize:
            self._detokenizer = IncrementalDetokenizer(tokenizer, prompt_token_ids, params.skip_special_tokens)
        self._matchers = [_Matcher(stop) for stop in params.stop]
        self._num_tokens = 0
        self._released: list[str] = []
        self._held = ""  # the longest end of the text that starts a stop string
        self._ended = False

    @property
    def text(self) -> str:
        """All text released so far; the final text once the output has ended."""
        return "".join(self._released)

    def push(self, token_id: int) -> Step:
        """Take the next token of an output that has not ended."""
        assert not self._ended, "the output has ended; tokens after its end must not be pushed"
        self._num_tokens += 1
        if token_id in self._eos_token_ids:
            return self._step("", "stop")
        if token_id in self._stop_token_ids:
            return self._step("", "stop", token_id)
        delta = self._detokenizer.push(token_id) if self._detokenizer else ""
        return self._step(delta, "length" if self._num_tokens >= self.max_tokens else None)

    def flush(self) -> str:
        """End the output from outside (an aborted request) and return the text that was held back."""
        return "" if self._ended else self._step("", "length").text

    def _step(self, delta: str, reason: Literal["stop", "length"] | None, stop_token: int | None = None) -> Step:
        if reason and self._detokenizer:
            delta += self._detokenizer.finish()
        text, stop = self._scan(delta)
        if reason and stop is None:
            text, self._held = text + self._held, ""
        self._released.append(text)
        self._ended = bool(reason) or stop is not None
        return Step(text, reason, stop_token) if stop is None else Step(text, "stop", stop)

    def _scan(self, delta: str) -> tuple[str, str | None]:
        """Return the text that no stop string can claim any more, and the stop string that is now complete."""
        if not self._matchers:
            return delta, None
        text = self._held + delta
        for end, char in enumerate(delta, start=len(self._held) + 1):
            completed = [matcher.stop for matcher in self._matchers if matcher.feed(char)]
            if completed:
                stop = max(completed, key=len)
                return text[: end - len(stop)], stop
        num_free = len(text) - max(matcher.num_matched for matcher in self._matchers)
        self._held = text[num_free:]
        return text[:num_free], None


class _Matcher:
    """One stop string, looked for character by character in constant time (Knuth, Morris and Pratt, 1977)."""

    __slots__ = ("_borders", "num_matched", "stop")

    def __init__(self, stop: str):
        self.stop = stop
        self.num_matched = 0  # length of the longest end of the text that starts the stop string
        self._borders = [0]  # [i]: length of the longest proper end of stop[: i + 1] that starts it
        for char in stop[1:]:
            self._borders.append(self._follow(self._borders[-1], char))

    def feed(self, char: str) -> bool:
        self.num_matched = self._follow(self.num_matched, char)
        return self.num_matched == len(self.stop)

    def _follow(self, num_matched: int, char: str) -> int:
        while num_matched and self.stop[num_matched] != char:
            num_matched = self._borders[num_matched - 1]
        return num_matched + (self.stop[num_matched] == char)
