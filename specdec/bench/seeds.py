"""`bench seeds`: each mechanism on and off in one run, everything else equal. One function a row.

A row whose mechanism this model or device lacks says why and has no figures.
"""

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from time import perf_counter

import torch

from specdec.bench.environment import release_memory
from specdec.bench.mechanisms import (
    BLOCK,
    Bench,
    Row,
    compare,
    missing,
    prompt_tokens_per_second,
    tokens_per_second,
)
from specdec.bench.systems import PLAIN, Room, fitting, make_llm
from specdec.build import build_engine
from specdec.engine.async_engine import AsyncEngine
from specdec.engine.engine import Engine
from specdec.errors import ConfigError, UnsupportedModel
from specdec.kernels.ops import TORCH_OPS
from specdec.models.decoder import Decoder
from specdec.models.hf import HFModel
from specdec.params import SamplingParams
from specdec.verifier.nodes import NodeContext, VerifyQuery
from specdec.verifier.processors import process_logits
from specdec.verifier.rules import choose

CHOICES = 20
"""Steps' choices that are timed together."""


def continuous_batching(bench: Bench) -> Row:
    """Requests join as others end, against batches that end together."""
    llm, prompts, params = bench.llm(), bench.work.prompts, bench.lengths()

    def off() -> float:
        start, tokens = perf_counter(), 0
        for i in range(0, len(prompts), bench.num_seqs):
            part = slice(i, i + bench.num_seqs)
            tokens += sum(len(a.token_ids) for a in llm.generate(prompts[part], params[part]))
        return tokens / (perf_counter() - start)

    how = f"answers of {min(p.max_new_tokens for p in params)} to {max(p.max_new_tokens for p in params)} tokens, "
    how += f"{bench.num_seqs} at once; off waits for the longest of each batch"
    return compare("continuous batching", "tok/s", how, partial(tokens_per_second, llm, prompts, params), off)


def packed_prefill(bench: Bench) -> Row:
    """Prompts of different lengths behind each other in one batch, against prompts padded to the longest."""
    llm, prompts = bench.llm(), bench.together
    counted, longest = sum(map(len, prompts)), max(map(len, prompts))
    padded = [(ids * longest)[:longest] for ids in prompts]
    how = f"{len(prompts)} prompts of {min(map(len, prompts))} to {longest} tokens; off runs the padding too"
    run = partial(prompt_tokens_per_second, llm, counted=counted)
    return compare("packed prefill", "prompt tok/s", how, partial(run, prompts), partial(run, padded))


def paged_pool(bench: Bench) -> Row:
    """Blocks as requests grow, against room reserved for the longest, in the same memory."""
    params = bench.lengths()
    room = bench.work.room(1)
    per_request = -(-(room.max_len + 64) // BLOCK)
    reserved = max(1, bench.num_seqs // 4)
    num_blocks = reserved * per_request
    paged, fixed = bench.llm(num_blocks=num_blocks), bench.llm(num_seqs=reserved, num_blocks=num_blocks)
    how = f"{num_blocks} blocks of {BLOCK} tokens: up to {bench.num_seqs} requests at once, against {reserved}, for "
    how += f"whose {room.max_len} tokens there is room"
    runs = (partial(tokens_per_second, llm, bench.work.prompts, params) for llm in (paged, fixed))
    return compare("paged pool", "tok/s", how, *runs)


def quantized_pages(bench: Bench) -> Row:
    """Keys and values in int8, against the model's own dtype, in the same memory, which limits how many run at once."""
    prompts = sorted(bench.work.prompts, key=len)[-2 * bench.num_seqs :]
    per_request = -(-(bench.work.room(1).max_len + 64) // BLOCK)
    held = max(1, bench.num_seqs // 2)
    plain = bench.llm(num_blocks=held * per_request)
    layout = plain.engine.pages.layout
    ratio = layout.bytes_per_token / layout.stored_as("int8").bytes_per_token
    small = bench.llm(kv_cache_dtype="int8", num_blocks=int(held * per_request * ratio))
    how = f"{len(prompts)} prompts of {len(prompts[0])} to {len(prompts[-1])} tokens in the memory of {held} of the "
    how += f"longest requests; int8 pages hold {ratio:.2f} times as many tokens there; at most {bench.num_seqs} at once"
    params = [bench.work.params] * len(prompts)
    runs = (partial(tokens_per_second, llm, prompts, params) for llm in (small, plain))
    return compare("quantized pages", "tok/s", how, *runs)


def prefix_reuse(bench: Bench) -> Row:
    """Requests that share a long beginning, against computing it for each."""
    shared = max(bench.work.prompts, key=len)
    prompts = [shared + ids for ids in bench.together]
    longest = max(map(len, prompts)) + bench.work.max_new_tokens
    room = Room(bench.num_seqs, fitting(bench.work.loaded, longest))
    prompts = [ids[: room.max_len - bench.work.max_new_tokens] for ids in prompts]
    on, off = (
        make_llm(bench.work.loaded, PLAIN, room, deterministic=bench.work.deterministic, enable_prefix_caching=flag)
        for flag in (True, False)
    )
    counted = sum(map(len, prompts))
    how = f"{len(prompts)} prompts whose first {len(shared)} tokens are the same, known from an earlier round"
    runs = (partial(prompt_tokens_per_second, llm, prompts, counted) for llm in (on, off))
    return compare("prefix reuse", "prompt tok/s", how, *runs)


def fused_operators(bench: Bench) -> Row:
    """The decoder, its projections merged and its operators fused, against the model's own forward; eager steps."""
    name, loaded = "fused operators", bench.work.loaded
    fast = bench.llm(cuda_graphs=False)
    if not isinstance(fast.engine.model, Decoder):
        return missing(name, "this model runs by its own forward")
    try:
        packed = HFModel(loaded.model)
    except UnsupportedModel as error:
        return missing(name, str(error))
    config = fast.engine.config
    slow = build_engine(loaded.model, "none", config, tokenizer=loaded.tokenizer, seed=0, packed=packed)
    prompts = bench.together

    def off() -> float:
        start = perf_counter()
        requests = [slow.add(ids, p) for ids, p in zip(prompts, params, strict=True)]
        while slow.has_work:
            slow.step()
        return sum(r.num_output for r in requests) / (perf_counter() - start)

    params = bench.full_length
    how = f"{fast.engine.model.ops.name} ops of our decoder against transformers' layers with our attention"
    return compare(name, "tok/s", how, partial(tokens_per_second, fast, prompts, params), off)


def captured_steps(bench: Bench) -> Row:
    """Decode steps as CUDA graphs, one ahead of the host, against eager steps with the same kernels."""
    name, on = "captured steps", bench.llm()
    if on.engine.why_no_graphs is not None:
        return missing(name, on.engine.why_no_graphs)
    off, prompts = bench.llm(cuda_graphs=False), bench.together
    params = bench.full_length
    runs = (partial(tokens_per_second, llm, prompts, params) for llm in (on, off))
    return compare(name, "tok/s", f"{len(prompts)} requests at once, without drafts", *runs)


def device_sampling(bench: Bench) -> Row:
    """The choice by a kernel, against copying the logits to the host and choosing there."""
    name, target = "sampling on the device", bench.llm().engine.model
    if not isinstance(target, Decoder) or target.ops is TORCH_OPS:
        return missing(name, "the model runs by torch ops; the kernel needs a GPU")
    from specdec.kernels.gpu.sample import choose as choose_on_device

    rows, vocab_size, device = bench.num_seqs, target.vocab_size, target.device
    logits = torch.randn(rows, vocab_size, device=device, dtype=target.dtype)
    temperature = torch.full((rows,), 0.8, device=device)
    seeds, positions = (torch.arange(rows, device=device) for _ in range(2))
    params = [SamplingParams(temperature=0.8, seed=i) for i in range(rows)]
    nodes = [NodeContext(i, VerifyQuery(p, [0], i, ()), ()) for i, p in enumerate(params)]

    def on() -> None:
        choose_on_device(logits, temperature, seeds, positions, vocab_size).tolist()

    def off() -> None:
        choose(process_logits(logits.cpu(), nodes, vocab_size), nodes).tolist()

    def rate(choice: Callable[[], None]) -> float:
        start = perf_counter()
        for _ in range(CHOICES):
            choice()
        return rows * CHOICES / (perf_counter() - start)

    how = f"{rows} rows of {vocab_size} logits at temperature 0.8, until the tokens are on the host"
    return compare(name, "rows/s", how, partial(rate, on), partial(rate, off))


def overlapped_tokenizing(bench: Bench) -> Row:
    """Text made by a thread of its own beside the steps, as the server does, against between the steps."""
    llm, prompts, params = bench.llm(), bench.together, bench.full_length
    how = f"{len(prompts)} requests at once; on is the server's engine, off the offline one; both make the whole text"
    off = partial(tokens_per_second, llm, prompts, params)
    return compare(
        "overlapped tokenizing", "tok/s", how, lambda: asyncio.run(_served(llm.engine, prompts, params)), off
    )


async def _served(engine: Engine, prompts: Sequence[list[int]], params: Sequence[SamplingParams]) -> float:
    """Answer all prompts by threads of their own for steps and text; return output tokens a second."""
    served = AsyncEngine(engine)
    served.start()
    start = perf_counter()
    calls = [served.submit([ids], one) for ids, one in zip(prompts, params, strict=True)]
    chunks = [chunk for answers in calls async for chunk in answers]
    seconds = perf_counter() - start
    await served.close()
    return sum(len(chunk.token_ids) for chunk in chunks) / seconds


def draft_heads(bench: Bench) -> Row:
    """Drafts of heads, against no drafts; one request at a time."""
    return _drafts(bench, "draft heads", bench.heads)


def ngram_drafts(bench: Bench) -> Row:
    """Drafts of n-grams, against no drafts; one request at a time."""
    return _drafts(bench, "n-gram drafts", "ngram")


def _drafts(bench: Bench, name: str, drafter: str) -> Row:
    try:
        on = bench.llm(drafter, num_seqs=1)
    except ConfigError as error:  # no heads were given, and none come with the package for this model
        return missing(name, str(error))
    off = bench.llm(num_seqs=1)
    prompts = bench.together
    params = [SamplingParams(max_new_tokens=bench.work.max_new_tokens, seed=0)] * len(prompts)
    runs = (partial(tokens_per_second, llm, prompts, params) for llm in (on, off))
    return compare(name, "tok/s", f"{drafter}, one request at a time", *runs)


ROWS: Mapping[str, Callable[[Bench], Row]] = {
    "continuous-batching": continuous_batching,
    "packed-prefill": packed_prefill,
    "paged-pool": paged_pool,
    "prefix-reuse": prefix_reuse,
    "fused-operators": fused_operators,
    "captured-steps": captured_steps,
    "device-sampling": device_sampling,
    "ngram-drafts": ngram_drafts,
    "draft-heads": draft_heads,
    "overlapped-tokenizing": overlapped_tokenizing,
    "quantized-pages": quantized_pages,
}
"""Name → what measures the row."""


def measure_rows(bench: Bench, names: tuple[str, ...], progress: Callable[[str], None]) -> Iterator[Row]:
    """Yield the rows of these names, or all."""
    for name in names or ROWS:
        progress(name)
        yield ROWS[name](bench)
        release_memory(bench.device)
