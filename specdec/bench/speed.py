"""`bench latency` and `bench throughput`: our engine and peers offline, one request at a time or many at once."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from specdec.bench.dataset import Prompt
from specdec.bench.environment import release_memory
from specdec.bench.latencies import Timing, summarize_timings
from specdec.bench.systems import Room, expected_errors, fitting, make_llm, open_system
from specdec.hub.load import Loaded
from specdec.llm import LLM
from specdec.params import SamplingParams

Progress = Callable[[str], None]
"""Is told what comes next."""


@dataclass(frozen=True, slots=True)
class Work:
    """What every system answers, greedily.

    Args:
        loaded: the target.
        prompts: token ids of each.
        max_new_tokens: of each answer.
        ignore_eos: answers have full length; peers don't know it.
        deterministic: as for `LLM`.
    """

    loaded: Loaded
    prompts: list[list[int]]
    max_new_tokens: int
    ignore_eos: bool = False
    deterministic: bool = True

    @property
    def params(self) -> SamplingParams:
        """Of each request."""
        return SamplingParams(max_new_tokens=self.max_new_tokens, ignore_eos=self.ignore_eos, seed=0)

    def room(self, num_seqs: int) -> Room:
        """Room for so many of the longest requests, as far as the model has positions."""
        return Room(num_seqs, fitting(self.loaded, max(map(len, self.prompts)) + self.max_new_tokens))


def make_work(loaded: Loaded, prompts: Sequence[Prompt], max_new_tokens: int, **options: bool) -> Work:
    """Encode prompts."""
    assert loaded.tokenizer is not None, "checked when it was loaded"
    return Work(loaded, [prompt.encode(loaded.tokenizer) for prompt in prompts], max_new_tokens, **options)


def measure_latency(work: Work, drafters: Sequence[str], progress: Progress) -> list[dict[str, Any]]:
    """Stream each prompt alone and return a row for each drafter; the first prompt also warms up.

    Raises:
        SpecdecError: a drafter can't be used.
    """
    rows = []
    for drafter in drafters:
        progress(f"{drafter}: starting")
        llm = make_llm(work.loaded, drafter, work.room(1), deterministic=work.deterministic)
        _stream(llm, work.prompts[0], work.params)
        timings = []
        for n, ids in enumerate(work.prompts, 1):
            progress(f"{drafter}: {n} of {len(work.prompts)}")
            timings.append(_stream(llm, ids, work.params))
        tokens = sum(t.num_output_tokens for t in timings)
        rows.append({"system": drafter, "num_requests": len(timings), "output_tokens": tokens})
        rows[-1] |= summarize_timings(timings)
    return rows


def _stream(llm: LLM, ids: list[int], params: SamplingParams) -> Timing:
    timing = Timing(perf_counter(), num_prompt_tokens=len(ids))
    for chunk in llm.stream(ids, params):
        timing.chunks.append(perf_counter())
        timing.chunk_tokens.append(len(chunk.token_ids))
    timing.end = perf_counter()
    timing.num_output_tokens = sum(timing.chunk_tokens)
    return timing


def measure_throughput(
    work: Work, systems: Sequence[str], batch_sizes: Sequence[int], progress: Progress
) -> list[dict[str, Any]]:
    """Answer all prompts, at most so many at once, and return a row for each system and batch size.

    The first system is what the others are compared with. One that fails gets a row that says why.
    """
    rows: list[dict[str, Any]] = []
    base: dict[int, float] = {}
    for name in systems:
        for size in batch_sizes:
            progress(f"{name}: batch {size}")
            row: dict[str, Any] = {"system": name, "batch_size": size}
            try:
                row |= _throughput(work, name, size)
            except expected_errors(name) as error:
                row["error"] = f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"
            else:
                speed = row["output_tokens_per_second"]
                row["speedup"] = speed / base[size] if size in base else None
                if name == systems[0]:
                    base[size] = speed
            rows.append(row)
            release_memory(work.loaded.model.device)
    return rows


def _throughput(work: Work, name: str, size: int) -> dict[str, Any]:
    system = open_system(name, work.loaded, work.room(size), deterministic=work.deterministic)
    params = [work.params] * len(work.prompts)
    system.answer(work.prompts[:size], params[:size])  # a warm-up
    start = perf_counter()
    answers = system.answer(work.prompts, params)
    seconds = perf_counter() - start
    tokens = sum(len(answer.token_ids) for answer in answers)
    return {
        "num_requests": len(answers),
        "seconds": seconds,
        "output_tokens": tokens,
        "requests_per_second": len(answers) / seconds,
        "output_tokens_per_second": tokens / seconds,
        "total_tokens_per_second": (tokens + sum(map(len, work.prompts))) / seconds,
    }
