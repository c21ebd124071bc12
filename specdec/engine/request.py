"""One request: host integers only, but for scores that were asked for. Its keys and values are in the pages that its
block table names.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from specdec.engine.text import StopChecker
from specdec.outputs import Completion, SpeculationStats, TokenLogprob
from specdec.params import SamplingParams

ABORT = "abort"
ERROR = "error"
LENGTH = "length"
STOP = "stop"

Stopping = Callable[["Request"], bool]
"""Looks at a request after each token that it gets, and says whether it ends there."""


@dataclass(slots=True, eq=False)
class Request:
    """A prompt, its answer so far, and where its keys and values are.

    Args:
        id: unique in the engine.
        prompt_len: how many of `tokens` are the prompt.
        params: with `seed` set.
        stop: decides where the answer ends.
        tokens: prompt and output; the last one is the next root.
        block_table: the blocks that hold its keys and values.
        priority: lower ones go first.
        num_computed: leading tokens whose keys and values are committed; always fewer than the tokens.
        admitted: whether it has run before, be it that it waits again.
        proposers: for each output token, who proposed it.
        logprobs: for each output token, if asked for.
        stopping: called after each output token, the last one included, with the request as it stands then.
        keep_scores, keep_logits: whether `scores` and `logits` are filled.
        scores: for each output token the processed scores that it was chosen by, [1, V].
        logits: for each output token the target's raw logits, [1, V].
        text: certain text of the output.
        finish_reason, stop_reason: as in `Completion`, or "error"; None while it runs.
        error: what ended it, where `finish_reason` is "error".
        stats: how speculation went.
    """

    id: int
    prompt_len: int
    params: SamplingParams
    stop: StopChecker
    tokens: list[int]
    block_table: list[int] = field(default_factory=list)
    priority: int = 0
    num_computed: int = 0
    admitted: bool = False
    proposers: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    stopping: Stopping | None = None
    keep_scores: bool = False
    keep_logits: bool = False
    scores: list[torch.Tensor] = field(default_factory=list)
    logits: list[torch.Tensor] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: Exception | None = None
    stats: SpeculationStats = field(default_factory=SpeculationStats)

    @property
    def rank(self) -> tuple[int, int]:
        """Place among all requests: by priority, then first come, first served."""
        return self.priority, self.id

    @property
    def num_pending(self) -> int:
        """Tokens that the next forwards must run; the last of them is the root. At least 1."""
        return len(self.tokens) - self.num_computed

    @property
    def num_output(self) -> int:
        """Tokens delivered so far."""
        return len(self.tokens) - self.prompt_len

    def end(self, reason: str, error: Exception | None = None) -> None:
        """End the answer here, for a reason other than its last token."""
        self.finish_reason, self.error = reason, error
        self.text += self.stop.flush()

    def check(self) -> None:
        """Raise the error that ended the request, if one did."""
        if self.error is not None:
            raise self.error

    def completion(self) -> Completion:
        """Return the finished answer."""
        assert self.finish_reason is not None, f"request {self.id} has not finished"
        return Completion(
            request_id=self.id,
            prompt_token_ids=self.tokens[: self.prompt_len],
            token_ids=self.tokens[self.prompt_len :],
            text=self.text,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            proposers=list(self.proposers),
            logprobs=list(self.logprobs) if self.params.logprobs is not None else None,
            stats=self.stats,
        )
