"""`bench acceptance`: every system over every category and batch size. Keeps what is measured as it comes."""

import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel

from specdec.bench.counts import total
from specdec.bench.dataset import Prompt, load_prompts
from specdec.bench.environment import environment, memory_bytes, release_memory, reset_peak
from specdec.bench.results import (
    Cell,
    Divergence,
    Failure,
    Result,
    Settings,
    read_result,
    same_environment,
    same_settings,
    write_json,
)
from specdec.bench.summary import summarize
from specdec.bench.systems import (
    PLAIN,
    Answer,
    Room,
    System,
    check_system,
    expected_errors,
    fitting,
    load_target,
    open_system,
)
from specdec.errors import ConfigError
from specdec.hub.load import Loaded
from specdec.params import MAX_SEED, SamplingParams

SPLIT_PROMPTS = 3
"""Prompts of each category that are answered again, together, to see where the time goes; at the least batch size."""
Report = Callable[[Result, str], None]
"""Is told the result so far and what comes next."""


@dataclass(frozen=True, slots=True)
class _Case:
    """A system to open."""

    name: str
    max_nodes: int | None = None


@dataclass(frozen=True, slots=True)
class _Asked:
    """A prompt as tokens, and its parameters."""

    prompt: Prompt
    ids: list[int]
    params: SamplingParams


def run(settings: Settings, out: Path | None = None, *, resume: bool = False, report: Report | None = None) -> Result:
    """Measure everything that isn't in the file yet.

    Args:
        settings: what to measure.
        out: the file, written after each cell; None for none.
        resume: go on with what the file holds.
        report: called before each cell and at the end.

    Raises:
        ConfigError, DataError: settings, prompts or the file can't be used; nothing was run.
        ModelNotFound, UnsupportedModel, CheckpointError: the model can't be used.
    """
    for name in (settings.baseline, *settings.drafters, *settings.peers):
        check_system(name)
    prompts = load_prompts(settings.prompts, settings.categories, settings.num_prompts)
    before = _earlier(settings, out, resume)
    loaded = load_target(settings.model, settings.device, settings.dtype)
    here = environment(loaded.model.device, loaded.model.dtype)
    if before is not None and out is not None:
        same_environment(before.environment, here, out)
    result = before or Result(settings, here)
    runner = _Runner(settings, loaded, _ask(prompts, loaded, settings), result, out, report or (lambda *_: None))
    runner.run()
    return result


def _earlier(settings: Settings, out: Path | None, resume: bool) -> Result | None:
    if not resume:
        return None
    if out is None:
        raise ConfigError("--resume goes on with a file; name it with --json")
    if not out.exists():
        return None
    result = read_result(out)
    same_settings(result.settings, settings, out)
    result.failures.clear()  # what failed is tried again
    return result


def _ask(prompts: Sequence[Prompt], loaded: Loaded, settings: Settings) -> list[_Asked]:
    """A prompt's seed depends on its id alone, so that other prompts, batches and orders don't change its answer."""
    assert loaded.tokenizer is not None
    asked = []
    for prompt in prompts:
        seed = (settings.seed + zlib.crc32(prompt.id.encode())) % MAX_SEED
        params = SamplingParams(max_new_tokens=settings.max_new_tokens, temperature=settings.temperature, seed=seed)
        asked.append(_Asked(prompt, prompt.encode(loaded.tokenizer), params))
    return asked


@dataclass(frozen=True, slots=True)
class _Runner:
    settings: Settings
    loaded: Loaded
    asked: list[_Asked]
    result: Result
    out: Path | None
    report: Report

    def run(self) -> None:
        """Measure the baseline first, for the others are compared with it."""
        self._save()
        trees = self.settings.trees or (None,)
        cases = [_Case(self.settings.baseline)]
        cases += [_Case(name, size) for name in self.settings.drafters for size in trees]
        for case in [*cases, *map(_Case, self.settings.peers)]:
            missing = self._missing(case)
            if missing:
                self._run_case(case, missing)
                release_memory(self.loaded.model.device)
        self.report(self.result, "")

    def _missing(self, case: _Case) -> list[tuple[int, str]]:
        done = {cell.key for cell in self.result.cells}
        categories = dict.fromkeys(one.prompt.category for one in self.asked)
        cells = [(batch, category) for batch in sorted(self.settings.batch_sizes) for category in categories]
        return [(b, c) for b, c in cells if (case.name, case.max_nodes, c, b) not in done]

    def _run_case(self, case: _Case, missing: Sequence[tuple[int, str]]) -> None:
        self.report(self.result, f"{case.name}: starting")
        try:
            system = self._open(case)
        except expected_errors(case.name) as error:
            self._fail(case, None, None, error)
            return
        for batch_size, category in missing:
            self.report(self.result, f"{case.name}: {category}, batch {batch_size}")
            try:
                cell = self._measure(case, system, category, batch_size)
            except expected_errors(case.name) as error:
                self._fail(case, category, batch_size, error)
            else:
                self.result.cells.append(cell)
                self._save()

    def _open(self, case: _Case) -> System:
        longest = max(len(one.ids) for one in self.asked) + self.settings.max_new_tokens
        room = Room(max(self.settings.batch_sizes), fitting(self.loaded, longest), case.max_nodes)
        return open_system(case.name, self.loaded, room, deterministic=self.settings.deterministic)

    def _measure(self, case: _Case, system: System, category: str, batch_size: int) -> Cell:
        asked = self._asked_of(case, category, batch_size)
        groups = [asked[i : i + batch_size] for i in range(0, len(asked), batch_size)]
        device = self.loaded.model.device
        reset_peak(device)
        # A warm-up: the longest; where steps are captured, each, so that all sizes are captured before any is timed.
        longest = max(groups, key=lambda group: max(len(one.ids) for one in group))
        for group in groups if system.captures else [longest]:
            _answer(system, group)
        timed = [_timed(system, group) for group in groups]
        memory = memory_bytes(device)
        answers = [answer for group, _ in timed for answer in group]
        stats = [answer.stats for answer in answers if answer.stats is not None]
        some = asked[:SPLIT_PROMPTS] if batch_size == min(self.settings.batch_sizes) else []
        return Cell(
            case.name,
            system.drafter,
            case.max_nodes,
            category,
            batch_size,
            [one.prompt.id for one in asked],
            [seconds for _, seconds in timed],
            [sum(len(answer.token_ids) for answer in group) for group, _ in timed],
            total(stats) if stats else None,
            self._compare(case, system, asked, answers),
            system.split([one.ids for one in some], [one.params for one in some]) if some else None,
            memory,
        )

    def _asked_of(self, case: _Case, category: str, batch_size: int) -> list[_Asked]:
        """The category's prompts; of those for peers whole groups alone, so that they are the baseline's groups."""
        asked = [one for one in self.asked if one.prompt.category == category]
        most = self.settings.peer_prompts
        if most is None or case.name not in self.settings.peers:
            return asked
        return asked[: -(-most // batch_size) * batch_size]

    def _compare(
        self, case: _Case, system: System, asked: Sequence[_Asked], answers: Sequence[Answer]
    ) -> list[Divergence] | None:
        """Compare with the baseline's tokens, or put them down as the reference."""
        reference = self.result.reference
        if case.name == self.settings.baseline:
            for one, answer in zip(asked, answers, strict=True):
                reference.setdefault(one.prompt.id, answer.token_ids)
            return None
        if self.settings.temperature > 0 and not (system.exact and self.settings.baseline == PLAIN):
            return None
        if any(one.prompt.id not in reference for one in asked):
            return None  # the baseline failed on them
        pairs = [(one, reference[one.prompt.id], answer) for one, answer in zip(asked, answers, strict=True)]
        return [
            Divergence(one.prompt.id, at, logit_margin(self.loaded.model, one.ids + want[:at]))
            for one, want, answer in pairs
            if (at := first_difference(want, answer.token_ids)) is not None
        ]

    def _fail(self, case: _Case, category: str | None, batch_size: int | None, error: Exception) -> None:
        message = f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"
        self.result.failures.append(Failure(case.name, case.max_nodes, category, batch_size, message))
        self._save()

    def _save(self) -> None:
        if self.out is not None:
            write_json(self.out, self.result.as_json(summarize(self.result)))


def _answer(system: System, group: Sequence[_Asked]) -> list[Answer]:
    return system.answer([one.ids for one in group], [one.params for one in group])


def _timed(system: System, group: Sequence[_Asked]) -> tuple[list[Answer], float]:
    start = time.perf_counter()
    answers = _answer(system, group)
    return answers, time.perf_counter() - start


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """Return the first position where two answers differ, one being longer included; None if they are equal."""
    if list(one) == list(other):
        return None
    pairs: Iterator[tuple[int, int]] = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


@torch.inference_mode()
def logit_margin(model: PreTrainedModel, ids: Sequence[int]) -> float:
    """Return the distance of the two best logits behind some tokens, by the model's own forward."""
    best = model(torch.tensor([list(ids)], device=model.device)).logits[0, -1].float().topk(2).values
    return float(best[0] - best[1])
