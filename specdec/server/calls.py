"""One call of a client: what it asks for, and what its answers came to."""

import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from specdec.engine.answers import AnswerChunk, Answers
from specdec.outputs import SpeculationStats
from specdec.params import SamplingParams
from specdec.server.formats import Format, trace
from specdec.server.protocol import SamplingRequest
from specdec.server.service import Service


@dataclass(slots=True)
class Call:
    """One call of a client.

    Args:
        service: what serves it.
        body: what was sent.
        format: how its answers are written.
        prompts: token ids.
        params: for all of them.
        start: when it arrived, by `time.perf_counter`.
        facts: for the log; filled as answers end.
    """

    service: Service
    body: SamplingRequest
    format: Format
    prompts: Sequence[list[int]]
    params: SamplingParams
    start: float
    facts: dict[str, Any]
    _id: str = field(default_factory=lambda: uuid4().hex)
    _created: int = field(default_factory=lambda: int(time.time()))
    _num_cached_tokens: int = 0
    _stats: SpeculationStats = field(default_factory=SpeculationStats)

    def head(self, kind: str) -> dict[str, Any]:
        """Return what each object of the response begins with."""
        return {
            "id": self.format.prefix + self._id,
            "object": kind,
            "created": self._created,
            "model": self.service.name,
        }

    def choice(self, write: Callable[[AnswerChunk], dict[str, Any]], chunk: AnswerChunk) -> dict[str, Any]:
        """Return a chunk as the format writes it, with its trace if that was asked for."""
        choice = write(chunk)
        return choice | {"trace": trace(chunk)} if self.body.speculation.trace else choice

    async def watch(self, answers: Answers) -> AsyncIterator[AnswerChunk]:
        """Pass the answers' chunks on, measuring and counting."""
        self.facts |= {"prompt_tokens": self._num_prompt_tokens, "finish_reasons": []}
        async for chunk in self.service.metrics.watch(answers, self.start):
            if chunk.stats is not None:
                self._stats.add(chunk.stats)
                if chunk.index % self.params.n == 0:  # of each prompt's answers one
                    self._num_cached_tokens += chunk.stats.num_cached_tokens
                self.facts["finish_reasons"].append(chunk.finish_reason)
                self.facts["completion_tokens"] = self._stats.num_output_tokens
                self.facts["mean_acceptance_length"] = round(self._stats.mean_acceptance_length, 3)
            yield chunk

    def usage(self) -> dict[str, Any]:
        """Return what the ended answers came to."""
        stats, num_prompt = self._stats, self._num_prompt_tokens
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": stats.num_output_tokens,
            "total_tokens": num_prompt + stats.num_output_tokens,
            "prompt_tokens_details": {"cached_tokens": self._num_cached_tokens},
            "speculation": {
                "drafter": self.service.drafter,
                "mean_acceptance_length": stats.mean_acceptance_length,
                "draft_acceptance_rate": stats.draft_acceptance_rate,
                "acceptance_by_depth": stats.acceptance_by_depth,
                "accepted_by_depth": stats.accepted_by_depth,
                "num_forwards": stats.num_forwards,
                "num_drafts": stats.num_drafts,
                "num_draft_tokens": stats.num_draft_tokens,
                "num_accepted_tokens": stats.num_accepted_tokens,
            },
        }

    @property
    def _num_prompt_tokens(self) -> int:
        return sum(len(prompt) for prompt in self.prompts)
