"""What is measured: our engine with some drafter, or a peer. Everything answers the same prompts in the same way."""

import difflib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from time import perf_counter
from typing import Any, Protocol

from specdec.bench.parts import watched
from specdec.bench.results import Split
from specdec.drafters.registry import DRAFTERS, check_drafter
from specdec.errors import ConfigError, SpecdecError
from specdec.hub.load import Loaded, load
from specdec.llm import LLM, resolve_device, resolve_dtype
from specdec.outputs import SpeculationStats
from specdec.params import SamplingParams

PLAIN = "plain"
"""Our own engine without a drafter."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The tokens of one answer, and the engine's counters where there are any."""

    token_ids: list[int]
    stats: SpeculationStats | None = None


class System(Protocol):
    """Answers prompts."""

    exact: bool
    """Whether a request's tokens are those that the engine gives for the same seed, also when it samples."""
    drafter: str | None
    """The name of the drafter that it turned out to use; None for a peer."""

    @property
    def captures(self) -> bool:
        """Whether steps of a size that comes for the first time are captured then, and take longer."""
        ...

    def answer(self, prompts: Sequence[list[int]], params: Sequence[SamplingParams]) -> list[Answer]:
        """Answer prompts together; `params` differ in their seeds alone."""
        ...

    def split(self, prompts: Sequence[list[int]], params: Sequence[SamplingParams]) -> Split | None:
        """Answer prompts and say where the time went; None if that can't be seen."""
        ...


@dataclass(frozen=True, slots=True)
class Room:
    """What a system must hold: so many sequences of so many tokens at once; trees of so many nodes, None for any."""

    num_seqs: int
    max_len: int
    max_nodes: int | None = None


class EngineSystem:
    """Our engine with a drafter.

    Args:
        loaded: the target.
        drafter: its name, "plain" for none.
        room: sizes.
        options: further fields of `EngineConfig`.
    """

    exact = True

    def __init__(self, loaded: Loaded, drafter: str, room: Room, **options: Any) -> None:
        self._make = partial(make_llm, loaded, drafter, room, **options)
        self.llm = self._make()
        self.drafter: str | None = self.llm.engine.drafter.name
        self._eager = self.llm if self.llm.engine.graphs is None else None

    @property
    def captures(self) -> bool:
        """Whether the engine captures."""
        return self.llm.engine.graphs is not None or self.llm.engine.forwards is not None

    def answer(self, prompts: Sequence[list[int]], params: Sequence[SamplingParams]) -> list[Answer]:
        """Answer prompts together."""
        return [Answer(c.token_ids, c.stats) for c in self.llm.generate(list(prompts), list(params))]

    def split(self, prompts: Sequence[list[int]], params: Sequence[SamplingParams]) -> Split:
        """Answer prompts step by step; an engine that captures steps gets a second one beside it that doesn't."""
        if self._eager is None:
            self._eager = self._make()
            self._eager.engine.graphs = None
        with watched(self._eager.engine) as parts:
            start = perf_counter()
            self._eager.generate(list(prompts), list(params))
            seconds = perf_counter() - start
        host = seconds - parts.draft - parts.forward - parts.accept
        tree = [(list(ranks), count, parts.accepted[ranks]) for ranks, count in sorted(parts.proposed.items())]
        return Split(parts.draft, parts.forward, parts.accept, host, len(prompts), tree)


def load_target(model: str, device: str, dtype: str) -> Loaded:
    """Load the model that is measured.

    Raises:
        ModelNotFound, UnsupportedModel, CheckpointError: it can't be used.
        ConfigError: it has no tokenizer, or device or dtype are unknown.
    """
    place = resolve_device(device)
    loaded = load(model, dtype=resolve_dtype(dtype, place), device=place)
    if loaded.tokenizer is None:
        raise ConfigError(f"model {loaded.name!r} has no tokenizer to read prompts with")
    return loaded


def fitting(loaded: Loaded, num_tokens: int) -> int:
    """Return that many tokens, or as many as the model has positions."""
    config: Any = loaded.model.config.get_text_config()
    return min(num_tokens, getattr(config, "max_position_embeddings", None) or num_tokens)


def make_llm(loaded: Loaded, drafter: str, room: Room, **options: Any) -> LLM:
    """Return an LLM that measures fairly: with room for the whole batch, and no prompt known from an earlier run.

    Args:
        loaded: the target.
        drafter: its name, "plain" for none.
        room: with `max_nodes`, trees are of that size; without, as large as the cost table finds worthwhile.
        options: further fields of `EngineConfig`.
    """
    block = 16
    sizes: dict[str, Any] = {
        "max_model_len": room.max_len,
        "max_num_seqs": room.num_seqs,
        "num_blocks": room.num_seqs * -(-(room.max_len + 64) // block),
        "max_num_batched_tokens": max(2048, room.num_seqs),
        "enable_prefix_caching": False,
    }
    if room.max_nodes is not None:
        sizes["max_nodes"] = room.max_nodes
    return LLM(
        loaded.model,
        "none" if drafter == PLAIN else drafter,
        tokenizer=loaded.tokenizer,
        seed=0,
        cost_table="auto" if room.max_nodes is None else None,
        **(sizes | options),
    )


def _lazy(name: str, module: str = "hf_peers") -> Callable[[], Callable[..., System]]:
    return lambda: getattr(import_module(f"specdec.bench.{module}"), name)


PEERS: dict[str, Callable[[], Callable[..., System]]] = {
    "hf": _lazy("HFGenerate"),
    "hf-compiled": _lazy("HFCompiled"),
    "hf-prompt-lookup": _lazy("HFPromptLookup"),
    "hf-assisted": _lazy("HFAssisted"),
    "vllm": _lazy("VLLM", "other_peers"),
    "vllm-ngram": _lazy("VLLMNgram", "other_peers"),
    "economize": _lazy("Economize", "other_peers"),
    "flashspec": _lazy("FlashSpec", "other_peers"),
}
"""Name → what imports the peer's adapter. Each is made of a `Loaded`, a path (or None) and a `Room`."""


def is_peer(name: str) -> bool:
    """Whether a system's name, "hf-assisted:PATH" for one, is a peer's."""
    return name.partition(":")[0] in PEERS


def expected_errors(name: str) -> tuple[type[Exception], ...]:
    """Return what ends a system alone: of a peer anything, for its faults aren't ours; else our named errors."""
    return (Exception,) if is_peer(name) else (SpecdecError,)


def check_system(name: str, peers: bool = True) -> None:
    """Check a system's name before anything is loaded.

    Args:
        name: "plain", a drafter's name or, with `peers`, a peer's.
        peers: whether peers can be measured here.

    Raises:
        ConfigError: it is none of these.
    """
    if name == PLAIN or (peers and is_peer(name)):
        return
    known = [PLAIN, *(PEERS if peers else ())]
    close = difflib.get_close_matches(name, known, n=1)
    if close and not difflib.get_close_matches(name, DRAFTERS, n=1):
        raise ConfigError(f"unknown system {name!r}; did you mean {close[0]!r}? known: {', '.join(known)}")
    try:
        check_drafter(name)
    except ConfigError as error:
        if name.partition(":")[0] in DRAFTERS:
            raise
        raise ConfigError(f"{error}; and, beside drafters, {', '.join(known)}") from error


def open_system(name: str, loaded: Loaded, room: Room, **options: Any) -> System:
    """Make the system of a name ready to answer.

    Args:
        name: "plain", a drafter, or a peer.
        loaded: the target.
        room: sizes.
        options: of the engine, for our own systems.

    Raises:
        SpecdecError: a drafter can't be used. What a peer raises is up to it.
    """
    if not is_peer(name):
        return EngineSystem(loaded, name, room, **options)
    kind, _, path = name.partition(":")
    return PEERS[kind]()(loaded, path or None, room)
