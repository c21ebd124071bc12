"""Requests that begin alike, at rising rates, with and without prefix reuse: throughput, latency, time to first token.

    python -m benchmarks.prefix --rates 0.5,1,2,4 --json benchmarks/results/prefix_cpu.json
    python -m benchmarks.prefix --model 8b --rates 10,20,40,80 --requests 400 --max-num-seqs 64

Every prompt is one shared prefix and tokens of its own, all random. Requests arrive at random times, the same for both
engines, which share the model's weights; each rate begins with an empty cache and a new prefix. Times are counted from
when a request was due, so waiting in the queue is part of them.
"""

import json
import platform
import random
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from itertools import accumulate

import click
import torch
import transformers

from benchmarks.engine_gpu import open_model
from specdec import LLM, SamplingParams
from specdec.engine.engine import Engine
from specdec.engine.request import Request


@dataclass(frozen=True, slots=True)
class Served:
    """How a load was served: new tokens a second from the first arrival to the last token, and means in seconds."""

    tokens_per_s: float
    latency_s: float
    first_token_s: float
    reused: float
    """Share of the prompts' tokens that was found in the cache."""


def serve(engine: Engine, prompts: list[list[int]], due: list[float], num_new: int) -> Served:
    """Add each request when it is due, run until all have ended.

    Args:
        engine: idle.
        prompts: token ids.
        due: seconds after the start, ascending.
        num_new: tokens of each answer.
    """
    params = SamplingParams(max_new_tokens=num_new, ignore_eos=True)
    requests: list[Request] = []
    first, last = [0.0] * len(due), [0.0] * len(due)
    live: list[int] = []
    start = time.perf_counter()
    while len(requests) < len(due) or live:
        now = time.perf_counter() - start
        while len(requests) < len(due) and due[len(requests)] <= now:
            live.append(len(requests))
            requests.append(engine.add(prompts[len(requests)], params))
        if not live:
            time.sleep(due[len(requests)] - now)
            continue
        engine.step()
        now = time.perf_counter() - start
        for i in live:
            first[i] = first[i] or (now - due[i] if requests[i].num_output else 0.0)
            last[i] = now - due[i]
        live = [i for i in live if requests[i].finish_reason is None]
    seconds = time.perf_counter() - start - due[0]
    cached = sum(r.stats.num_cached_tokens for r in requests) / sum(map(len, prompts))
    return Served(len(due) * num_new / seconds, statistics.mean(last), statistics.mean(first), cached)


def warm_up(engine: Engine, length: int) -> None:
    """Compile and capture what the load will use: on a GPU for every size of batch."""
    rng = random.Random(0)
    most = engine.config.max_num_seqs if engine.model.device.type == "cuda" else 1
    for power in range(most.bit_length()):
        prompts = [rng.choices(range(engine.model.vocab_size), k=length) for _ in range(1 << power)]
        serve(engine, prompts, [0.0] * len(prompts), 8)


@dataclass(frozen=True, slots=True)
class Load:
    """How long prompts and answers are, in tokens, and how many requests come at each rate."""

    shared: int
    own: int
    num_new: int
    num_requests: int


def compare(engines: dict[str, Engine], load: Load, rate: float) -> dict[str, object]:
    """Serve the same load by each engine, "off" and "on", at so many requests a second; print and return how."""
    rng, vocab = random.Random(rate), range(engines["on"].model.vocab_size)
    prefix = rng.choices(vocab, k=load.shared)
    prompts = [prefix + rng.choices(vocab, k=load.own) for _ in range(load.num_requests)]
    due = list(accumulate((rng.expovariate(rate) for _ in prompts[1:]), initial=0.0))
    engines["on"].reset_prefix_cache()
    served = {name: asdict(serve(engine, prompts, due, load.num_new)) for name, engine in engines.items()}
    ratios = {name: value / served["off"][name] for name, value in served["on"].items() if name != "reused"}
    row = {"rate": rate, **served, "on_over_off": ratios}
    for name, figures in (*served.items(), ("on/off", ratios)):
        click.echo(f"{rate:g}/s {name:6} " + ", ".join(f"{key} {value:.3f}" for key, value in figures.items()))
    return row


@click.command()
@click.option("--model", default="smollm2-135m", help="A model, or a shape with random weights on a GPU: 8b, smollm2.")
@click.option("--drafter", default="none", show_default=True)
@click.option("--shared", default=200, show_default=True, help="Tokens of the shared prefix.")
@click.option("--own", default=30, show_default=True, help="Tokens of each prompt's own.")
@click.option("--new", "num_new", default=50, show_default=True, help="Tokens of each answer.")
@click.option("--rates", default="0.5,1,2,4", show_default=True, help="Requests a second.")
@click.option("--requests", "num_requests", default=24, show_default=True, help="At each rate.")
@click.option("--max-num-seqs", default=16, show_default=True)
@click.option("--json", "path", type=click.Path(dir_okay=False), help="Also write the figures to this file.")
def main(model: str, drafter: str, rates: str, max_num_seqs: int, path: str | None, **load: int) -> None:
    """Serve the same load with and without prefix reuse at each rate."""
    tokens = Load(**load)
    length = tokens.shared + tokens.own
    sizes = {"max_num_seqs": max_num_seqs, "max_model_len": length + tokens.num_new + 64}
    on = LLM(open_model(model), drafter, seed=0, **sizes)
    off = LLM(on.hf_model, drafter, tokenizer=on.tokenizer, seed=0, enable_prefix_caching=False, **sizes)
    engines = {"off": off.engine, "on": on.engine}
    for engine in engines.values():
        warm_up(engine, length)
    for rate in rates.split(","):  # a first time, for what the loads make a GPU compile and capture
        compare(engines, tokens, float(rate))
    rows = []
    for rate in rates.split(","):
        rows.append(compare(engines, tokens, float(rate)))
        if path:  # what is known so far
            with open(path, "w", encoding="utf-8") as file:
                json.dump({**_facts(model, on.engine), "rows": rows}, file, indent=1)
                file.write("\n")


def _facts(model: str, engine: Engine) -> dict[str, object]:
    device = engine.model.device
    return {
        "command": " ".join(["python -m benchmarks.prefix", *sys.argv[1:]]),
        "model": model,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine(),
        "threads": torch.get_num_threads(),
        "dtype": str(engine.model.dtype),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


if __name__ == "__main__":
    main()
