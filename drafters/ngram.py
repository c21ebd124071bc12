"""Prompt lookup: drafts what followed the sequence's last tokens where they stood before.

Knows token ids only. Costs no forward pass, a few microseconds a new token, and nothing once it keeps being wrong.
Source: Saxena, "Prompt Lookup Decoding" (2023), with a tree of several occurrences and a learned draft length.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from specdec.drafters.protocol import DeviceQuery, DraftQuery, Observation
from specdec.errors import ConfigError
from specdec.kernels.ngram import MAX_LOOKUP
from specdec.verifier.tree import MAX_NODES, TokenTree, merge_paths

MAX_OCCURRENCES = 8
"""How many earlier occurrences are looked at for distinct continuations."""
DEVICE_NODES = 16
"""Nodes of a chain that is drafted on the device, if the options don't ask for more."""
MIN_CHANCE = 0.125
"""Draft as deep as the chance that a token is reached and right stays at least this."""
LEARNING_RATE = 0.25
"""Weight of the newest token in the running hit rate."""

_FIRST_HIT_RATE = {1: 0.36, 2: 0.5}  # drafts 2 and 3 tokens
_FIRST_HIT_RATE_STRONG = 0.8  # drafts 9 tokens

Path = list[int]


class NGramIndex:
    """Where each n-gram of one growing sequence stood, for several n.

    The earlier positions of an n-gram are a chain through arrays, most recent first, so that adding a token is
    O(number of lengths) and so is finding a match.

    Args:
        lengths: the n to index, longest first.
    """

    def __init__(self, lengths: Sequence[int]) -> None:
        self._lengths = lengths
        self._last: dict[tuple[int, ...], int] = {}  # n-gram -> position of the token after its last occurrence
        self._previous: dict[int, list[int]] = {n: [] for n in lengths}  # n -> for each n-gram, the one before it

    def extend(self, tokens: Sequence[int]) -> None:
        """Add the n-grams that end before the last token and aren't in yet. `tokens` is the whole sequence."""
        end = len(tokens) - 1
        for n in self._lengths:
            previous = self._previous[n]
            first = len(previous)
            fresh = tokens[first:end]
            for position, ngram in enumerate(zip(*(fresh[i:] for i in range(n)), strict=False), first + n):
                previous.append(self._last.get(ngram, -1))
                self._last[ngram] = position

    def longest_match(self, tokens: Sequence[int]) -> int:
        """Return the largest indexed n whose last n tokens stood before, or 0."""
        for n in self._lengths:
            if n < len(tokens) and tuple(tokens[-n:]) in self._last:
                return n
        return 0

    def occurrences(self, tokens: Sequence[int], n: int) -> Iterator[int]:
        """Yield the positions that follow the earlier occurrences of the last n tokens, most recent first."""
        position = self._last.get(tuple(tokens[-n:]), -1)
        while position >= 0:
            yield position
            position = self._previous[n][position - n]


@dataclass(slots=True)
class _RequestState:
    index: NGramIndex
    hit_rates: dict[int, float]  # match length -> running chance that the next token of a continuation is right
    num_tokens: int = 0  # tokens seen at the last query
    match: int = 0  # match length of the last query
    guesses: list[Path] = field(default_factory=list)  # full continuations found then, drafted or not


class NGramDrafter:
    """Drafts continuations of earlier occurrences of the sequence's last tokens.

    The longest match of the last `prompt_lookup_max` down to `prompt_lookup_min` tokens counts. What followed its
    earlier occurrences, most recent first, is merged into a tree: half of the draft goes to the most recent
    continuation, then each other one adds its token where it turns off, then the rest lengthens the most recent one.
    A continuation that runs into the end of the sequence repeats itself from there.

    How many tokens are drafted: the drafter keeps, per request and match length, a running hit rate p (of the last
    few tokens that it guessed, the share that came true), and drafts to the depth where p^depth falls below
    1/8, at most `num_speculative_tokens`. p starts at 0.36, 0.5 and 0.8 for matches of 1, 2 and more tokens: 2, 3 and 9
    tokens. With p below 1/8 it drafts nothing, but goes on guessing and comparing, so that it returns once it
    would have been right.

    Args:
        num_speculative_tokens: most tokens drafted for a sequence in a step, all paths together; 1 to 63.
        prompt_lookup_min: shortest match; at least 1.
        prompt_lookup_max: longest match; at least `prompt_lookup_min`.
        max_paths: most continuations in a tree; 1 drafts chains.

    Raises:
        ConfigError: an option is out of bounds.
    """

    name = "ngram"
    reads_hidden = False
    chains_only = True

    def __init__(
        self,
        num_speculative_tokens: int = 7,
        prompt_lookup_min: int = 1,
        prompt_lookup_max: int = 4,
        max_paths: int = 3,
    ) -> None:
        _check("num_speculative_tokens", num_speculative_tokens, 1, MAX_NODES - 1)
        _check("prompt_lookup_min", prompt_lookup_min, 1, 64)
        _check("prompt_lookup_max", prompt_lookup_max, prompt_lookup_min, 64)
        _check("max_paths", max_paths, 1, MAX_NODES - 1)
        self._num_speculative_tokens = num_speculative_tokens
        self._lengths = tuple(range(prompt_lookup_max, prompt_lookup_min - 1, -1))
        self._max_paths = max_paths
        self._states: dict[int, _RequestState] = {}

    def propose(self, queries: Sequence[DraftQuery]) -> TokenTree:
        """Return one tree a query: the root alone where nothing matches or matches have kept misleading."""
        trees = [self._grow(query) for query in queries]
        return TokenTree.build([tokens for tokens, _ in trees], [parents for _, parents in trees])

    def observe(self, observation: Observation) -> None:
        """Nothing to note: the next query shows what was accepted."""

    def forget(self, request_ids: Collection[int]) -> None:
        """Drop the indexes of these requests."""
        for request_id in request_ids:
            self._states.pop(request_id, None)

    def max_device_nodes(self) -> int:
        """Return the most nodes of a chain, root included: on a device that drafts, rows cost next to nothing."""
        return max(DEVICE_NODES, self._num_speculative_tokens + 1)

    def draft_on_device(
        self, query: DeviceQuery, num_nodes: int, shortest: int = 1
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return a chain of what followed the longest, most recent match; see `DraftsOnDevice`.

        Args:
            query, num_nodes: as there.
            shortest: tokens of the shortest match, between `prompt_lookup_min` and `prompt_lookup_max`.
        """
        from specdec.kernels.gpu.ngram import ngram_chain

        longest = min(self._lengths[0], MAX_LOOKUP)
        shortest = min(max(shortest, self._lengths[-1]), longest)
        tokens, parents, drafted, _ = ngram_chain(query.history, query.lengths, num_nodes, longest, shortest)
        return tokens, parents, drafted

    def _grow(self, query: DraftQuery) -> tuple[list[int], list[int]]:
        tokens = query.tokens
        state = self._state(query)
        _learn(state, tokens)
        state.index.extend(tokens)
        state.num_tokens = len(tokens)
        state.match = state.index.longest_match(tokens)
        state.guesses = self._continuations(state.index, tokens, state.match) if state.match else []
        num_draft = min(self._draft_length(state), query.max_nodes - 1)
        if not state.guesses or num_draft < 1:
            return [tokens[-1]], [-1]
        return merge_paths(tokens[-1], _shares(state.guesses, num_draft), num_draft + 1)

    def _state(self, query: DraftQuery) -> _RequestState:
        """The request's state, made anew if its tokens became fewer (it can't be the same sequence)."""
        state = self._states.get(query.request_id)
        if state is None or len(query.tokens) < state.num_tokens:
            hit_rates = {n: _FIRST_HIT_RATE.get(n, _FIRST_HIT_RATE_STRONG) for n in self._lengths}
            state = self._states[query.request_id] = _RequestState(NGramIndex(self._lengths), hit_rates)
        return state

    def _continuations(self, index: NGramIndex, tokens: Sequence[int], n: int) -> list[Path]:
        """The first `max_paths` continuations of the match that turn off differently, of the full length each."""
        paths: list[Path] = []
        turns: set[tuple[int, ...]] = set()
        for count, position in enumerate(index.occurrences(tokens, n)):
            if count == MAX_OCCURRENCES or len(paths) == self._max_paths:
                break
            path = continuation(tokens, position, self._num_speculative_tokens)
            turn = tuple(path[: _shared(path, paths[0]) + 1] if paths else path)
            if turn not in turns:
                turns.add(turn)
                paths.append(path)
        return paths

    def _draft_length(self, state: _RequestState) -> int:
        hit_rate = state.hit_rates.get(state.match, 0.0)
        length, chance = 0, hit_rate
        while length < self._num_speculative_tokens and chance >= MIN_CHANCE:
            length += 1
            chance *= hit_rate
        return length


def continuation(tokens: Sequence[int], position: int, length: int) -> Path:
    """Return `length` tokens from `position` on; past the end the sequence goes on repeating itself from `position`."""
    path = list(tokens[position : position + length])
    period = len(path)  # below `length` only if the end was met: then path[i] = path[i - period]
    while len(path) < length:
        path.append(path[-period])
    return path


def _shares(paths: list[Path], num_draft: int) -> list[Path]:
    """The paths in the order in which they should fill a budget of `num_draft` nodes."""
    first, *others = paths
    half = (num_draft + 1) // 2
    return [first[:half], *(path[: _shared(path, first) + 1] for path in others), first]


def _shared(path: Path, other: Path) -> int:
    """How many leading tokens the two paths share."""
    for i, (a, b) in enumerate(zip(path, other, strict=False)):
        if a != b:
            return i
    return min(len(path), len(other))


def _learn(state: _RequestState, tokens: Sequence[int]) -> None:
    """Compare the last guesses with the tokens that followed, and move the hit rate of their match length."""
    followed = list(tokens[state.num_tokens :])
    if not state.guesses or not followed:
        return
    hits = max(_shared(path, followed) for path in state.guesses)
    seen = min(len(followed), len(state.guesses[0]))
    rate = state.hit_rates[state.match]
    for hit in [1.0] * hits + [0.0] * (hits < seen):
        rate += LEARNING_RATE * (hit - rate)
    state.hit_rates[state.match] = rate
    state.guesses = []


def _check(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ConfigError(f"{name} must be a whole number from {low} to {high}, not {value!r}")
