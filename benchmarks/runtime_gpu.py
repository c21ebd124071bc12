"""The runtime on a GPU: random arrivals with and without drafts, continuous against static batches, packed prefill.

    python -m benchmarks.runtime_gpu --drafter shipped --json benchmarks/results/runtime_shipped_h100.json

Prompts and answers are as long as ShareGPT's: log-normal with the means that the vLLM paper gives (Kwon et al. 2023,
figure 11: 161.31 and 337.99 tokens), σ = 1 by our choice, both cut at 1,024. A prompt is built-in prompts, one below
another, cut to its length, in the chat template. An answer ends at its length or by itself, or with `--ignore-eos` at
its length alone. Both engines share the weights, know no prefixes and get the same requests at the same times.

batching: one of 8 requests asks 100 tokens, the others 10; 8 run at once. Static: 8 begin together, the next 8 when all
of them have ended. Plain decoding.

prefill: one token of each answer. Packed: as the engine does it, up to 8,192 rows a forward. Padded: by the same
engine, as many prompts in order of arrival as fit in 8,192 rows when each is padded to the longest of them; the padding
is run like tokens, and not counted.

arrivals: Poisson. `saturated`: 1.5 times as many requests a second as the faster engine ends when all come at once;
output tokens a second are counted from when the batch is first full until nobody waits any more. `low`: half a request
runs on average in plain decoding, pauses left out; tokens that came together share the time since those before them.
"""

import math
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import click
import numpy as np

from benchmarks.engine_gpu import write
from specdec import LLM, SamplingParams
from specdec.bench.dataset import Prompt, load_prompts
from specdec.bench.latencies import Timing
from specdec.engine.engine import Engine
from specdec.engine.request import Request

PROMPT_MEAN, ANSWER_MEAN, SIGMA, MOST = 161.31, 337.99, 1.0, 1024
ROWS = 8192
"""Rows of a forward."""
PARTS = ("batching", "prefill", "arrivals")


@dataclass(frozen=True, slots=True)
class Load:
    """Requests to serve: token ids, parameters, and when each is due, in seconds from the start, ascending."""

    prompts: list[list[int]]
    params: list[SamplingParams]
    due: list[float]


@dataclass(frozen=True, slots=True)
class Served:
    """How a load was served.

    Args:
        timings: of the requests, in order.
        seconds: from the first arrival to the last token.
        full_tokens_s: output tokens a second while the batch was full; None if it never was.
    """

    timings: list[Timing]
    seconds: float
    full_tokens_s: float | None


def lengths(rng: random.Random, mean: float, most: int, count: int) -> list[int]:
    """Draw lengths, log-normal with that mean before they are cut to 1 to `most`."""
    mu = math.log(mean) - SIGMA**2 / 2
    return [min(most, max(1, round(rng.lognormvariate(mu, SIGMA)))) for _ in range(count)]


def make_prompts(llm: LLM, rng: random.Random, count: int, most: int) -> list[list[int]]:
    """Prompts of built-in texts, as long as ShareGPT's."""
    assert llm.tokenizer is not None
    texts = ["\n\n".join(m["content"] for m in prompt.messages) or prompt.text for prompt in load_prompts("builtin")]
    template = len(_in_template(llm, ""))
    prompts = []
    for length in lengths(rng, PROMPT_MEAN, most, count):
        wanted, ids = max(4, length - template), list[int]()
        while len(ids) < wanted:
            ids += llm.tokenizer(rng.choice(texts) + "\n\n", add_special_tokens=False)["input_ids"]
        prompts.append(_in_template(llm, llm.tokenizer.decode(ids[:wanted]).strip())[:most])
    return prompts


def _in_template(llm: LLM, text: str) -> list[int]:
    assert llm.tokenizer is not None
    return Prompt("", "", [{"role": "user", "content": text}]).encode(llm.tokenizer)


def poisson(rng: random.Random, rate: float, count: int) -> list[float]:
    """Draw when requests are due, at so many a second."""
    return list(accumulate((rng.expovariate(rate) for _ in range(count - 1)), initial=0.0))


def serve(engine: Engine, load: Load) -> Served:
    """Add each request when it is due and run until all have ended; a pause in which nothing runs is left out."""
    timings = [Timing(due) for due in load.due]
    live: list[tuple[Request, Timing, int]] = []  # and the output tokens that were seen
    num_added = num_tokens = 0
    full: list[tuple[float, int]] = []  # when the batch was full, and the tokens so far
    start = time.perf_counter()
    while num_added < len(timings) or live:
        now = time.perf_counter() - start
        if not live and load.due[num_added] > now:
            start -= load.due[num_added] - now
            now = load.due[num_added]
        while num_added < len(timings) and load.due[num_added] <= now:
            request = engine.add(load.prompts[num_added], load.params[num_added], detokenize=False)
            live.append((request, timings[num_added], 0))
            num_added += 1
        engine.step()
        now, still = time.perf_counter() - start, []
        for request, timing, seen in live:
            if new := request.num_output - seen:
                timing.chunks.append(now)
                timing.chunk_tokens.append(new)
                num_tokens += new
            if request.finish_reason is None:
                still.append((request, timing, seen + new))
            else:
                timing.end, timing.num_output_tokens = now, request.num_output
        live = still
        if engine.scheduler.waiting and len(engine.scheduler.running) == engine.config.max_num_seqs:
            full.append((now, num_tokens))
    rate = None if len(full) < 2 else (full[-1][1] - full[0][1]) / (full[-1][0] - full[0][0])
    return Served(timings, time.perf_counter() - start - load.due[0], rate)


def median_of(runs: Sequence[float]) -> float:
    """The median, to four digits."""
    return float(f"{statistics.median(runs):.4g}")


def token_latency(served: Served) -> float:
    """The median seconds between two tokens of an answer."""
    return float(np.median([gap for timing in served.timings for gap in timing.between_tokens]))


@dataclass(frozen=True, slots=True)
class Arrivals:
    """Random arrivals at both engines, by turns.

    Args:
        engines: "plain" and "drafting".
        prompts, params: of the requests.
        how: sizes.
    """

    engines: dict[str, Engine]
    prompts: list[list[int]]
    params: list[SamplingParams]
    how: "Options"

    def saturated(self) -> dict[str, Any]:
        """More requests than can be answered."""
        rng, count = random.Random(2), len(self.prompts)
        at_once = Load(self.prompts, self.params, [0.0] * count)
        self._serve(at_once)  # compiles and captures
        rate = 1.5 * max(count / served.seconds for served in self._serve(at_once).values())
        before = self._captures()
        load = Load(self.prompts, self.params, poisson(rng, rate, count))
        runs = [self._serve(load) for _ in range(self.how.rounds)]
        speeds = {name: [run[name].full_tokens_s or 0.0 for run in runs] for name in self.engines}
        if not all(speed for found in speeds.values() for speed in found):
            raise click.ClickException(f"{count} requests don't keep the batch full; raise --requests")
        answers = {name: statistics.mean(t.num_output_tokens for t in run.timings) for name, run in runs[-1].items()}
        return {
            "requests_s": median_of([rate]),
            "answer_tokens_mean": {name: median_of([mean]) for name, mean in answers.items()},
            **{f"{name}_tok_s": median_of(found) for name, found in speeds.items()},
            "ratio": _ratio(speeds["drafting"], speeds["plain"]),
            "runs": {name: [median_of([speed]) for speed in found] for name, found in speeds.items()},
            "captures_before_and_after": [before, self._captures()],
        }

    def low(self) -> dict[str, Any]:
        """Hardly more than one request at a time."""
        few = min(self.how.few, len(self.prompts))
        prompts, params, plain = self.prompts[:few], self.params[:few], self.engines["plain"]
        alone = [serve(plain, Load([ids], [p], [0.0])).seconds for ids, p in zip(prompts, params, strict=True)]
        rate = 0.5 / statistics.mean(alone)
        load = Load(prompts, params, poisson(random.Random(3), rate, few))
        runs = [self._serve(load) for _ in range(self.how.rounds)]
        waits = {name: [1000 * token_latency(run[name]) for run in runs] for name in self.engines}
        return {
            "requests": few,
            "requests_s": median_of([rate]),
            **{f"{name}_p50_token_ms": median_of(found) for name, found in waits.items()},
            "ratio": _ratio(waits["drafting"], waits["plain"]),
            "runs": {name: [median_of([wait]) for wait in found] for name, found in waits.items()},
        }

    def _serve(self, load: Load) -> dict[str, Served]:
        return {name: serve(engine, load) for name, engine in self.engines.items()}

    def _captures(self) -> dict[str, list[float]]:
        """Graphs of each engine, and the seconds that their captures took."""
        made = {name: engine.graphs.stats for name, engine in self.engines.items() if engine.graphs is not None}
        return {name: [stats.num_graphs, round(stats.seconds, 2)] for name, stats in made.items()}


def batching(engine: Engine, prompts: list[list[int]], how: "Options") -> dict[str, Any]:
    """Answer the mix of one long and seven short answers, joining as others end, and in batches of 8."""
    count = len(prompts) // 8 * 8
    params = [SamplingParams(max_new_tokens=100 if i % 8 == 0 else 10, ignore_eos=True) for i in range(count)]
    zeros = [0.0] * count

    def continuous() -> float:
        return count / serve(engine, Load(prompts[:count], params, zeros)).seconds

    def static() -> float:
        parts = [slice(i, i + 8) for i in range(0, count, 8)]
        return count / sum(serve(engine, Load(prompts[p], params[p], zeros[p])).seconds for p in parts)

    facts = {"requests": count, "at_once": engine.config.max_num_seqs}
    return facts | _by_turns(how.rounds, {"continuous_requests_s": continuous, "static_requests_s": static})


def prefill(engine: Engine, prompts: list[list[int]], how: "Options") -> dict[str, Any]:
    """Compute all prompts, packed and padded."""
    counted = sum(map(len, prompts))
    rectangles = padded_batches(prompts, engine.config.max_num_batched_tokens, engine.config.max_num_seqs)

    def run(batch: list[list[int]]) -> float:
        params = [SamplingParams(max_new_tokens=1, ignore_eos=True)] * len(batch)
        return serve(engine, Load(batch, params, [0.0] * len(batch))).seconds

    runs = {
        "packed_prompt_tok_s": lambda: counted / run(prompts),
        "padded_prompt_tok_s": lambda: counted / sum(map(run, rectangles)),
    }
    facts = {"prompts": len(prompts), "longest": max(map(len, prompts)), "padded_batches": len(rectangles)}
    share = counted / sum(len(batch) * len(batch[0]) for batch in rectangles)
    return facts | {"share_of_padded_rows": median_of([share])} | _by_turns(how.rounds, runs)


def padded_batches(prompts: list[list[int]], rows: int, most: int) -> list[list[list[int]]]:
    """Prompts in order, in batches of at most `rows` and `most` prompts, each filled up to the longest of its batch."""
    batches: list[list[list[int]]] = [[]]
    for ids in prompts:
        longest = max(map(len, [*batches[-1], ids]))
        if len(batches[-1]) == most or longest * (len(batches[-1]) + 1) > rows:
            batches.append([])
        batches[-1].append(ids)
    filled = []
    for batch in batches:
        longest = max(map(len, batch))
        filled.append([(ids * longest)[:longest] for ids in batch])
    return filled


def _by_turns(rounds: int, runs: dict[str, Callable[[], float]]) -> dict[str, Any]:
    """Run all once to warm up, then by turns; medians, and the first over the second."""
    for run in runs.values():
        run()
    found = [{name: run() for name, run in runs.items()} for _ in range(rounds)]
    figures = {name: [round_[name] for round_ in found] for name in runs}
    first, second = figures.values()
    return {name: median_of(values) for name, values in figures.items()} | {"ratio": _ratio(first, second)}


def _ratio(over: Sequence[float], under: Sequence[float]) -> float:
    """The median of the ratios of runs that followed each other."""
    return median_of([a / b for a, b in zip(over, under, strict=True)])


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How much is measured; see the command."""

    num_requests: int
    few: int
    rounds: int
    most_prompt: int
    most_new: int
    ignore_eos: bool


@click.command()
@click.option("--model", default="smollm2-135m", show_default=True)
@click.option("--drafter", default="shipped", show_default=True, help="Of the engine that drafts.")
@click.option("--parts", default=",".join(PARTS), show_default=True)
@click.option("--requests", "num_requests", default=256, show_default=True, help="Of all but low load.")
@click.option("--few", default=16, show_default=True, help="Requests at low load.")
@click.option("--rounds", default=3, show_default=True, help="Runs of each; medians are reported.")
@click.option("--max-num-seqs", default=64, show_default=True, help="Requests that run at once.")
@click.option("--most-prompt", default=MOST, show_default=True, help="Prompts are cut here.")
@click.option("--most-new", default=MOST, show_default=True, help="Answers are cut here.")
@click.option("--ignore-eos", is_flag=True, help="Answers go on to their drawn lengths.")
@click.option("--json", "path", type=click.Path(dir_okay=False), help="Write the result to this file, as it grows.")
def main(model: str, drafter: str, parts: str, max_num_seqs: int, path: str | None, **options: Any) -> None:
    """Measure the runtime."""
    how = Options(**options)
    asked = parts.split(",")
    if unknown := set(asked) - set(PARTS):
        raise click.BadParameter(f"{sorted(unknown)} are unknown; known: {', '.join(PARTS)}", param_hint="--parts")
    longest = how.most_prompt + how.most_new
    sizes = {"max_num_seqs": max_num_seqs, "max_model_len": longest, "max_num_batched_tokens": ROWS}
    sizes["num_blocks"] = max_num_seqs * -(-(longest + 64) // 16)
    plain = LLM(model, "none", seed=0, enable_prefix_caching=False, **sizes)

    def beside(name: str, **other: int) -> Engine:
        shared = {"tokenizer": plain.tokenizer, "seed": 0, "enable_prefix_caching": False}
        return LLM(plain.hf_model, name, **(shared | sizes | other)).engine  # type: ignore[arg-type]

    prompts = make_prompts(plain, random.Random(0), how.num_requests, how.most_prompt)
    params = [
        SamplingParams(max_new_tokens=n, ignore_eos=how.ignore_eos, seed=0)
        for n in lengths(random.Random(1), ANSWER_MEAN, how.most_new, len(prompts))
    ]
    result: dict[str, Any] = {"model": model, "drafter": drafter, "dtype": str(plain.engine.model.dtype), **sizes}
    result["prompt_tokens_mean"] = median_of([statistics.mean(map(len, prompts))])
    started = time.perf_counter()

    def save() -> None:
        result["seconds"] = round(time.perf_counter() - started, 1)
        write(path, result, "-m benchmarks.runtime_gpu")  # what is known so far

    if "batching" in asked:
        result["batching"] = batching(beside("none", max_num_seqs=8), prompts, how)
        save()
    if "prefill" in asked:
        result["prefill"] = prefill(plain.engine, prompts, how)
        save()
    if "arrivals" in asked:
        both = Arrivals({"plain": plain.engine, "drafting": beside(drafter)}, prompts, params, how)
        result["arrivals"] = {"saturated": both.saturated()}
        save()
        result["arrivals"]["low"] = both.low()
        save()


if __name__ == "__main__":
    main()
