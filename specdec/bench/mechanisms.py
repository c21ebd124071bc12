"""What the rows of `bench seeds` share: what they measure on, and how both sides are run."""

import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch

from specdec.bench.speed import Work
from specdec.bench.systems import PLAIN, make_llm
from specdec.llm import LLM
from specdec.params import SamplingParams

BLOCK = 16
REPEATS = 3


@dataclass(frozen=True, slots=True)
class Row:
    """One mechanism.

    Args:
        name: what it is.
        on, off: the measured figure with it and without it; None where it isn't available.
        unit: of the figures; more is better.
        how: what was measured; or why it isn't available.
    """

    name: str
    on: float | None
    off: float | None
    unit: str
    how: str

    @property
    def ratio(self) -> float | None:
        """On against off; below 1 where the mechanism costs more than it gains here."""
        return None if self.on is None or self.off is None else self.on / self.off


@dataclass(frozen=True, slots=True)
class Bench:
    """What the rows share.

    Args:
        work: prompts of different lengths.
        num_seqs: requests that run at once.
        heads: a drafter with heads, such as "medusa:PATH".
    """

    work: Work
    num_seqs: int
    heads: str

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        device: torch.device = self.work.loaded.model.device
        return device

    @property
    def together(self) -> list[list[int]]:
        """As many prompts as run at once, from all parts of the list."""
        prompts = self.work.prompts
        step = max(1, len(prompts) // self.num_seqs)
        return prompts[::step][: self.num_seqs]

    @property
    def full_length(self) -> list[SamplingParams]:
        """For `together`: answers that are all as long as they may be."""
        params = SamplingParams(max_new_tokens=self.work.max_new_tokens, ignore_eos=True, seed=0)
        return [params] * len(self.together)

    def llm(self, drafter: str = PLAIN, num_seqs: int | None = None, **options: Any) -> LLM:
        """An LLM with room for `num_seqs` of the longest requests."""
        room = self.work.room(num_seqs or self.num_seqs)
        return make_llm(self.work.loaded, drafter, room, deterministic=self.work.deterministic, **options)

    def lengths(self) -> list[SamplingParams]:
        """Answers of very different lengths, as in traffic: from an eighth of the most on."""
        most, draw = self.work.max_new_tokens, random.Random(0)
        lengths = [draw.randint(max(1, most // 8), most) for _ in self.work.prompts]
        return [SamplingParams(max_new_tokens=n, ignore_eos=True, seed=0) for n in lengths]


def compare(name: str, unit: str, how: str, on: Callable[[], float], off: Callable[[], float]) -> Row:
    """Run both by turns, once to warm up, and take the medians."""
    on(), off()
    pairs = [(on(), off()) for _ in range(REPEATS)]
    with_it, without = (statistics.median(side) for side in zip(*pairs, strict=True))
    return Row(name, with_it, without, unit, how)


def missing(name: str, why: str) -> Row:
    """Return the row of a mechanism that isn't there."""
    return Row(name, None, None, "", f"not available: {why}")


def tokens_per_second(llm: LLM, prompts: list[list[int]], params: list[SamplingParams]) -> float:
    """Answer all prompts and return output tokens a second."""
    start = perf_counter()
    answers = llm.generate(prompts, params)
    return sum(len(a.token_ids) for a in answers) / (perf_counter() - start)


def prompt_tokens_per_second(llm: LLM, prompts: list[list[int]], counted: int) -> float:
    """Answer all prompts with one token each and return how many of the counted prompt tokens that is a second."""
    start = perf_counter()
    llm.generate(prompts, SamplingParams(max_new_tokens=1))
    return counted / (perf_counter() - start)
