"""What the engine gives back. Layer 0: plain data."""

from dataclasses import dataclass, field, fields
from itertools import zip_longest

TARGET = "target"
"""Stands beside tokens that the target itself chose (the bonus token of each forward)."""


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probability of one emitted token under the target, before any sampling parameter.

    Args:
        token_id: the token.
        logprob: natural logarithm of its probability.
        top: the likeliest tokens and their log-probabilities, as many as were asked for.
    """

    token_id: int
    logprob: float
    top: dict[int, float]


@dataclass(slots=True)
class SpeculationStats:
    """How speculation went for one request, counted over delivered tokens only.

    Args:
        num_forwards: target forwards that emitted tokens of this request.
        num_output_tokens: tokens delivered.
        num_drafts: forwards that had at least one draft token.
        num_draft_tokens: draft tokens that the target scored.
        num_accepted_tokens: delivered tokens that a drafter proposed.
        num_cached_tokens: prompt tokens whose keys and values were there before the request.
        tried_by_depth: entry d − 1 counts the forwards whose accepted path reached depth d − 1 at a node with children.
        accepted_by_depth: entry d − 1 counts those that went on to depth d.
    """

    num_forwards: int = 0
    num_output_tokens: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_cached_tokens: int = 0
    tried_by_depth: list[int] = field(default_factory=list)
    accepted_by_depth: list[int] = field(default_factory=list)

    @property
    def mean_acceptance_length(self) -> float:
        """τ: tokens delivered a target forward, bonus token included; 1 is plain decoding, 0 means no forward yet."""
        return self.num_output_tokens / self.num_forwards if self.num_forwards else 0.0

    @property
    def draft_acceptance_rate(self) -> float:
        """Share of the scored draft tokens that were delivered; 0 if there were none."""
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0

    @property
    def acceptance_by_depth(self) -> list[float]:
        """Conditional acceptance rate at depths 1, 2, …."""
        return [a / t if t else 0.0 for a, t in zip(self.accepted_by_depth, self.tried_by_depth, strict=True)]

    def add(self, other: "SpeculationStats") -> None:
        """Add the counts of another request."""
        for name in (f.name for f in fields(self)):
            mine, theirs = getattr(self, name), getattr(other, name)
            by_depth = isinstance(mine, list)
            both = [a + b for a, b in zip_longest(mine, theirs, fillvalue=0)] if by_depth else mine + theirs
            setattr(self, name, both)

    def count(self, num_kept: int, path_depth: int, leaf_reached: bool, num_draft_tokens: int) -> None:
        """Add one forward.

        Args:
            num_kept: tokens delivered by it; 0 only where nothing could be chosen.
            path_depth: depth of the accepted path.
            leaf_reached: whether the path ended at a node without children.
            num_draft_tokens: nodes of the tree, the root left out.
        """
        self.num_forwards += 1
        self.num_output_tokens += num_kept
        self.num_drafts += num_draft_tokens > 0
        self.num_draft_tokens += num_draft_tokens
        accepted = min(num_kept, path_depth)  # a stop inside the block keeps fewer
        self.num_accepted_tokens += accepted
        tried = accepted + (num_kept > path_depth and not leaf_reached)
        self.tried_by_depth.extend([0] * (tried - len(self.tried_by_depth)))
        self.accepted_by_depth.extend([0] * (len(self.tried_by_depth) - len(self.accepted_by_depth)))
        for d in range(tried):
            self.tried_by_depth[d] += 1
        for d in range(accepted):
            self.accepted_by_depth[d] += 1


@dataclass(frozen=True, slots=True)
class Completion:
    """One finished answer.

    Args:
        request_id: the engine's id.
        prompt_token_ids: the prompt.
        token_ids: every token delivered, the one that ended the answer included.
        text: their text, cut before a stop string; empty if there is no tokenizer.
        finish_reason: "stop" (EOS, stop token or stop string), "length", "abort" or "error".
        stop_reason: the token id or the string that stopped it, else None.
        proposers: for each token the drafter that proposed it, or "target".
        logprobs: for each token, if they were asked for.
        stats: how speculation went.
    """

    request_id: int
    prompt_token_ids: list[int]
    token_ids: list[int]
    text: str
    finish_reason: str
    stop_reason: int | str | None
    proposers: list[str]
    logprobs: list[TokenLogprob] | None
    stats: SpeculationStats


@dataclass(frozen=True, slots=True)
class StreamChunk:
    """What one or more steps added to an answer.

    Args:
        text: new text that is certain; a possible stop string or an incomplete character is held back.
        token_ids: new tokens.
        proposers: for each of them the drafter that proposed it, or "target".
        finish_reason: as in `Completion`, on the last chunk, or "error" if that is raised next; else None.
    """

    text: str
    token_ids: list[int]
    proposers: list[str]
    finish_reason: str | None
