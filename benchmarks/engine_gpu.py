"""The engine on a GPU: tokens a second, what nodes cost, prefill, bits, and the time to the first token.

    python benchmarks/engine_gpu.py throughput --model 8b --json benchmarks/results/throughput_8b_h100.json

`--model` is a shape with random weights (8b, smollm2) or anything that `specdec.LLM` opens. Speeds are of decoding
alone: the time from the first token of the last request to the end of the first one that ends.
"""

import json
import re
import shutil
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import astuple, replace
from functools import partial
from operator import itemgetter
from pathlib import Path
from unittest.mock import patch

import click
import torch
import transformers
import triton
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from specdec import LLM, SamplingParams
from specdec.cli.demo_prompts import PROMPTS
from specdec.engine.measure import NUM_NODES, CapturedStep, Grid, measure
from specdec.kernels.gpu import linear
from specdec.kernels.gpu.launch import on_hopper
from specdec.kernels.gpu.tiles import Tile, tile_of
from specdec.kernels.slabs import SLAB
from specdec.models.batch import Rows, pack_rows
from specdec.models.decoder import Decoder
from specdec.verifier.tree import MAX_NODES, TokenTree

SHAPES = {
    "8b": LlamaConfig(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8,
        vocab_size=128256, max_position_embeddings=16384, eos_token_id=None, bos_token_id=None,
    ),
    "smollm2": LlamaConfig(
        hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3,
        vocab_size=49152, max_position_embeddings=8192, tie_word_embeddings=True, eos_token_id=None, bos_token_id=None,
    ),
}  # fmt: skip

BETWEEN = (20, 40, 48)
"""Nodes that `nodes` measures beside those of cost tables: their products' last tile of rows isn't full."""


def open_model(name: str) -> str | PreTrainedModel:
    """A model of a known shape with random weights, or the name as it is."""
    if name not in SHAPES:
        return name
    torch.manual_seed(0)
    with torch.device("cuda"):
        return AutoModelForCausalLM.from_config(SHAPES[name], dtype=torch.bfloat16).eval()


def make_llm(model: str | PreTrainedModel, **options: object) -> LLM:
    """An LLM with room for 64 sequences."""
    sizes = {"max_num_seqs": 64, "max_num_batched_tokens": 8192, "max_model_len": 8192, "num_blocks": 4096}
    return LLM(model, seed=0, **(sizes | options))  # type: ignore[arg-type]


def _decoder(name: str, layers: int | None = None, prepack: bool | None = None) -> Decoder:
    """The model of such an LLM; with `layers`, a known shape has so many."""
    with patch.object(SHAPES[name], "num_hidden_layers", layers) if layers else nullcontext():
        target = make_llm(open_model(name), drafter="ngram", prepack=prepack).engine.model
    assert isinstance(target, Decoder)
    return target


def decode_speed(
    llm: LLM, prompts: list[list[int]], num_tokens: int, ignore_eos: bool = True
) -> tuple[float, list[list[int]]]:
    """Tokens a second while all requests decode, and their answers."""
    params = SamplingParams(max_new_tokens=num_tokens, ignore_eos=ignore_eos)
    requests = [llm.engine.add(prompt, params) for prompt in prompts]
    while any(r.num_output == 0 for r in requests):
        llm.engine.step()
    torch.cuda.synchronize()
    before, start = sum(r.num_output for r in requests), time.perf_counter()
    while all(r.finish_reason is None for r in requests):
        llm.engine.step()
    seconds = time.perf_counter() - start
    done = sum(r.num_output for r in requests) - before
    while any(r.finish_reason is None for r in requests):
        llm.engine.step()
    return done / seconds, [r.tokens[r.prompt_len :] for r in requests]


def random_prompts(count: int, length: int, vocab_size: int) -> list[list[int]]:
    """Prompts of random ids."""
    generator = torch.Generator().manual_seed(count)
    return torch.randint(0, vocab_size, (count, length), generator=generator).tolist()


def write(path: str | None, result: dict[str, object], script: str = "benchmarks/engine_gpu.py") -> None:
    """Print the result, and write it to a file if one is asked for."""
    arguments = [a for a in sys.argv[1:] if a != "--json" and a != path]
    facts = {
        "command": " ".join(["python", script, *arguments]),
        **_commit(),
        "card": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
        "torch": torch.__version__,
        "triton": triton.__version__,
        "transformers": transformers.__version__,
    }
    click.echo(json.dumps(result))
    if path:
        with open(path, "w", encoding="utf-8") as file:
            json.dump(facts | result, file, indent=1)
            file.write("\n")


def _commit() -> dict[str, str]:
    """The commit that is measured; nothing outside a repository."""
    command = ["git", "describe", "--always", "--dirty", "--exclude", "*"]
    try:
        found = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return {}
    return {"commit": found.stdout.strip()}


@click.group()
def main() -> None:
    """Measure the engine."""


@main.command()
@click.option("--model", default="8b")
@click.option("--tokens", default=128)
@click.option("--batches", default="1,8,64")
@click.option("--kv-cache-dtype", default="auto")
@click.option("--json", "path", type=click.Path(dir_okay=False))
def throughput(model: str, tokens: int, batches: str, kv_cache_dtype: str, path: str | None) -> None:
    """Plain decoding at several batch sizes, deterministic and not."""
    opened, rows = open_model(model), []
    for deterministic in (True, False):
        llm = make_llm(opened, drafter="none", deterministic=deterministic, kv_cache_dtype=kv_cache_dtype)
        for batch in map(int, batches.split(",")):
            prompts = random_prompts(batch, 96, llm.engine.model.vocab_size)
            speeds = [decode_speed(llm, prompts, tokens)[0] for _ in range(4)][1:]  # the first one captures
            row = {"batch": batch, "deterministic": deterministic, "tok_s": round(statistics.median(speeds), 1)}
            rows.append(row)
            click.echo(str(row))
        assert llm.engine.graphs is not None
        click.echo(str(llm.engine.graphs.stats))
        del llm
    write(path, {"model": model, "tokens": tokens, "prompt": 96, "rows": rows})


@main.command()
@click.option("--model", default="8b")
@click.option("--context", default=1024)
@click.option("--prepack/--no-prepack", default=None, help="As in `specdec tune`.")
@click.option("--json", "path", type=click.Path(dir_okay=False))
def nodes(model: str, context: int, prepack: bool | None, path: str | None) -> None:
    """The time of a captured step with n nodes against one node, batch 1, deterministic.

    Then what the driver says of the card while such steps go on: a card at its power limit has a lower clock.
    """
    target = _decoder(model, prepack=prepack)
    counts = sorted({*NUM_NODES, *BETWEEN})
    grid = Grid((1,), tuple(counts), (context,))
    step = CapturedStep(target, grid)
    (times,) = measure(step, grid, repeats=30)
    rows = [(n, seconds[0] * 1e6) for n, seconds in zip(counts, times, strict=True)]
    result = [
        {"nodes": n, "us": round(us, 1), "ratio": round(us / rows[0][1], 4), **_strain(partial(step, 1, n, context))}
        for n, us in rows
    ]
    write(path, {"model": model, "context": context, "prepacked": target.prepacked, "rows": result})


_SENSORS = {"sm_mhz": "clocks.sm", "watts": "power.draw.instant", "limit_watts": "enforced.power.limit"}


def _strain(run: Callable[[], object], seconds: float = 1.5) -> dict[str, float]:
    """Medians of what the driver says of the card while something runs again and again; nothing where it can't say.

    How much of the time power was the card's limit is in them, too, from 0 to 1.
    """
    if shutil.which("nvidia-smi") is None:
        return {}
    card = f"GPU-{torch.cuda.get_device_properties().uuid}"
    fields = ",".join([*_SENSORS.values(), "clocks_event_reasons.sw_power_cap"])
    command = ["nvidia-smi", f"--id={card}", f"--query-gpu={fields}", "--format=csv,noheader,nounits", "--loop-ms=50"]
    end = time.perf_counter() + seconds
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        while time.perf_counter() < end:
            run()
        process.terminate()
        told, _ = process.communicate()
    sample = ", ".join([r"([\d.]+)"] * len(_SENSORS) + ["(Active|Not Active)"])
    samples = re.findall(f"^{sample}$", told, re.MULTILINE)
    if not samples:
        click.echo(f"nvidia-smi says nothing of power and clocks: {told}", err=True)
        return {}
    *numbers, limited = zip(*samples[len(samples) // 3 :], strict=True)  # the first ones are of the beginning
    medians = [round(statistics.median(map(float, values)), 1) for values in numbers]
    return dict(zip(_SENSORS, medians, strict=True)) | {
        "at_power_limit": round(limited.count("Active") / len(limited), 2)
    }


@main.command()
@click.option("--layers", default=8, help="Of the 8b shape: fewer take less time, and are as far beyond the cache.")
@click.option("--nodes", "counts", default="1,16,32,64")
@click.option("--context", default=1024)
@click.option("--also", multiple=True, help="A tile to try as well, as ROWS,OUT,K,WARPS,STAGES; operands by TMA.")
@click.option("--json", "path", type=click.Path(dir_okay=False))
def tiles(layers: int, counts: str, context: int, also: tuple[str, ...], path: str | None) -> None:
    """Tiles of products beside those chosen, in a captured step: what a product takes longer than with the chosen one.

    By itself a product starts while another like it ends; in a step the others leave it more or less room.
    """
    others = [_tile_from(text) for text in also]
    target, rows = _decoder("8b", layers), []
    for num_nodes in map(int, counts.split(",")):
        grid, chosen = Grid((1,), (num_nodes,), (context,)), defaultdict[Product, list[Tile]](list)
        _step_us(target, grid, chosen=chosen)
        for product, found in chosen.items():
            row = {"nodes": num_nodes, "out": product[0], "k": product[1], "weights": product[2]}
            share = min(map(len, chosen.values())) / len(found)  # a step has one of the rarest
            slower = {
                str(astuple(tile)): round((_step_us(target, grid, product, tile) - _step_us(target, grid)) * share, 2)
                for tile in [*_tiles_beside(found[0], product), *(t for t in others if _fits(t, product))]
            }
            slower = dict(sorted(slower.items(), key=itemgetter(1)))
            rows.append(row | {"chosen": str(astuple(found[0])), "slower_by_us": slower})
            click.echo(str(rows[-1]))
    write(path, {"layers": layers, "context": context, "tile": "rows, out, k, warps, stages, by TMA", "rows": rows})


@main.command()
@click.option("--layers", default=8, help="Of the 8b shape, as for `tiles`.")
@click.option("--nodes", "counts", default="1,16,64")
@click.option("--context", default=1024)
@click.option("--json", "path", type=click.Path(dir_okay=False))
def parts(layers: int, counts: str, context: int, path: str | None) -> None:
    """What a captured step takes, and without one of its parts: the difference is what that part takes there."""
    target, rows = _decoder("8b", layers), []
    own = target.ops
    left_out = {"nothing": own} | {name: replace(own, **without) for name, without in _without(target).items()}
    for num_nodes in map(int, counts.split(",")):
        grid = Grid((1,), (num_nodes,), (context,))
        step_us = {}
        for name, ops in left_out.items():
            target.ops = ops
            step_us[name] = round(_step_us(target, grid), 1)
        rows.append({"nodes": num_nodes, "step_us_without": step_us})
        click.echo(str(rows[-1]))
    write(path, {"layers": layers, "context": context, "rows": rows})


def _without(target: Decoder) -> dict[str, dict[str, Callable[..., object]]]:
    """By the parts of a step, ops that leave them out and return what happens to be there."""
    room: dict[tuple[int, ...], torch.Tensor] = {}

    def anything(*shape: int) -> torch.Tensor:
        if shape not in room:  # as in the steps that come before a capture
            room[shape] = torch.zeros(*shape, dtype=target.dtype, device=target.device)
        return room[shape]

    def products_but(left_out: torch.Tensor) -> Callable[..., torch.Tensor]:
        def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
            same_kind = weight.shape == left_out.shape
            return anything(len(x), len(weight)) if same_kind else own.linear(x, weight, bias)

        return linear

    own, w = target.ops, target.weights
    layer, heads = w.layers[0], (w.num_heads, w.head_dim)
    matrices = {"qkv": layer.qkv, "o": layer.o, "down": layer.down, "head": w.head}
    return {
        "attention": {"tree_attention": lambda q, *args, **options: q},
        "gated product": {"gated_linear": lambda x, weight, *args: anything(len(x), len(weight) // 2)},
        **{name: {"linear": products_but(x)} for name, x in matrices.items() if isinstance(x, torch.Tensor)},
        "norms": {"add_rmsnorm": lambda delta, residual, *args: (delta, residual)},
        "rotation": {"rope_write": lambda qkv, *args: anything(len(qkv), *heads)},
    }


Product = tuple[int, int, int]
"""Outputs, inputs, number of weights."""


def _step_us(
    target: Decoder,
    grid: Grid,
    product: Product | None = None,
    tile: Tile | None = None,
    chosen: dict[Product, list[Tile]] | None = None,
) -> float:
    """Microseconds of the captured step that is the grid; one product may be cut by another tile. Notes tiles."""

    def choose(num_rows: int, out: int, k: int, num_weights: int, itemsize: int, tma: bool) -> Tile:
        own = tile_of(num_rows, out, k, num_weights, itemsize, tma)
        if chosen is not None:
            chosen[out, k, num_weights].append(own)
        return tile if tile is not None and product == (out, k, num_weights) else own

    with patch.object(linear, "tile_of", choose):
        return measure(CapturedStep(target, grid), grid, repeats=25, warmup=4)[0][0][0] * 1e6


def _tiles_beside(tile: Tile, product: Product) -> list[Tile]:
    """Tiles that differ in one size, twice as much or half, or in one or two stages, and fit in shared memory.

    Also those that other numbers of rows take, and on a Hopper GPU those whose operands are loaded in the other way.
    """
    sizes = [
        replace(tile, **{name: n})
        for name in ("out", "k", "warps")
        for n in (getattr(tile, name) * 2, getattr(tile, name) // 2)
    ]
    stages = [replace(tile, stages=tile.stages + more) for more in (-2, -1, 1, 2)]
    most = 256 if tile.tma else 1 << 30  # of a box
    fitting = [
        t for t in (*sizes, *stages) if 16 <= t.out <= most and t.k <= SLAB and t.stages >= 2 and _fits(t, product)
    ]
    ways = (False, True) if on_hopper(torch.device("cuda")) else (False,)
    others = [tile_of(n, *product, tma=way) for n in (1, 16, 32, 64) for way in ways]
    return [t for t in dict.fromkeys([*fitting, *others]) if t != tile]


def _fits(tile: Tile, product: Product) -> bool:
    return tile.num_bytes(product[2]) <= 225_000


def _tile_from(text: str) -> Tile:
    numbers = text.split(",")
    if len(numbers) != 5 or not all(x.isdecimal() for x in numbers):
        raise click.BadParameter(f"{text!r} is no tile: give rows, outputs, k, warps and stages, as 16,128,128,4,3")
    rows, out, k, warps, stages = map(int, numbers)
    return Tile(rows, out, k, warps, stages, tma=True)


@main.command()
@click.option("--model", default="8b")
@click.option("--batch", default=32)
@click.option("--nodes", "counts", default="1,16")
@click.option("--context", default=8192)
@click.option("--formats", default="auto,fp8,int8,int4", help="Values of kv_cache_dtype; the first is the baseline.")
@click.option("--json", "path", type=click.Path(dir_okay=False))
def cache(model: str, batch: int, counts: str, context: int, formats: str, path: str | None) -> None:
    """The time of a captured step with each cache format, against the first one."""
    target, rows = _decoder(model), []
    grid, baseline = Grid((batch,), tuple(map(int, counts.split(","))), (context,)), {}
    for name in formats.split(","):
        layout = target.kv_layout.stored_as(name)
        step = CapturedStep(target, grid, layout)
        (times,) = measure(step, grid, repeats=30)
        del step  # its cache makes room for the next one's
        for n, (seconds,) in zip(grid.num_nodes, times, strict=True):
            ratio = seconds / baseline.setdefault(n, seconds)
            row = {"kv_cache_dtype": name, "nodes": n, "us": round(seconds * 1e6, 1), "ratio": round(ratio, 4)}
            rows.append(row | {"bytes_per_token": layout.bytes_per_token})
            click.echo(str(rows[-1]))
    write(path, {"model": model, "batch": batch, "context": context, "rows": rows})


@main.command()
@click.option("--model", default="8b")
@click.option("--length", default=8192)
@click.option("--json", "path", type=click.Path(dir_okay=False))
def prefill(model: str, length: int, path: str | None) -> None:
    """Prefill of one long prompt, deterministic, against the same engine with cuBLAS products."""
    opened, rows = open_model(model), {}
    for deterministic in (True, False):
        sizes = {"max_model_len": length + 64, "prepack": None if deterministic else False}  # cuBLAS takes no slabs
        llm = make_llm(opened, drafter="none", deterministic=deterministic, **sizes)
        times = []
        for prompt in random_prompts(4, length, llm.engine.model.vocab_size):
            torch.cuda.synchronize()
            start = time.perf_counter()
            llm.generate(prompt, SamplingParams(max_new_tokens=1))
            times.append(time.perf_counter() - start)
        rows["deterministic" if deterministic else "cublas"] = round(length / statistics.median(times[1:]), 1)
        del llm
    rows["ratio"] = round(rows["deterministic"] / rows["cublas"], 3)
    write(path, {"model": model, "length": length, "tok_s": rows})


@main.command()
@click.option("--model", default="smollm2-135m")
@click.option("--tokens", default=256)
@click.option("--json", "path", type=click.Path(dir_okay=False))
def speculation(model: str, tokens: int, path: str | None) -> None:
    """The demo's prompts by plain decoding and with n-gram drafts: tokens a second, and whether tokens are equal."""
    rows = []
    plain, ngram = (make_llm(model, drafter=name) for name in ("none", "ngram"))
    for name, prompt in PROMPTS.items():
        ids = plain.encode_chat([{"role": "user", "content": prompt}])
        runs = [[decode_speed(llm, [ids], tokens, False) for _ in range(6)][1:] for llm in (plain, ngram)]
        a, b = (statistics.median(speed for speed, _ in part) for part in runs)
        equal = all(answer == runs[0][0][1] for part in runs for _, answer in part)
        row = {"prompt": name, "plain": round(a, 1), "ngram": round(b, 1), "ratio": round(b / a, 3), "equal": equal}
        rows.append(row)
        click.echo(str(row))
    write(path, {"model": model, "tokens": tokens, "rows": rows})


MORE_PROMPTS = [
    "Why is the sky blue?",
    "Write a Python function that reverses a linked list.",
    "Repeat this sentence three times: the quick brown fox jumps over the lazy dog.",
    "List the planets of the solar system with one fact each.",
    "Translate to French: good morning, how are you today?",
    "Write a haiku about the sea.",
    "Explain what a hash table is to a child.",
    "Give me a recipe for pancakes.",
    "What are the differences between TCP and UDP?",
    "Write a short letter that thanks a teacher.",
    "Count from one to thirty in words.",
    "Name ten animals and the sounds they make.",
    "Summarise the story of Romeo and Juliet.",
    "Write a SQL query that counts orders by customer.",
]


@main.command()
@click.option("--model", default="smollm2-135m")
@click.option("--tokens", default=256)
@click.option("--drafters", default="ngram,shipped", help="Drafters whose answers are compared with plain decoding's.")
@click.option("--json", "path", type=click.Path(dir_okay=False))
def exact(model: str, tokens: int, drafters: str, path: str | None) -> None:
    """Tokens of 20 prompts: plain and alone against speculative, batched, and both; and where bits may differ."""
    rows: list[dict[str, object]] = []
    result: dict[str, object] = {"model": model, "tokens": tokens}
    for deterministic in (True, False):
        names = drafters.split(",")
        plain, *speculative = (make_llm(model, drafter=d, deterministic=deterministic) for d in ("none", *names))
        result["logits" if deterministic else "logits_not_deterministic"] = _different_logits(plain)
        texts = [*PROMPTS.values(), *MORE_PROMPTS]
        prompts = [plain.encode_chat([{"role": "user", "content": text}]) for text in texts]
        want = [answers([prompt], plain, tokens)[0] for prompt in prompts]
        eager = make_llm(model, drafter=names[-1], deterministic=deterministic, cuda_graphs=False)
        ways = {"plain, batched": lambda llm=plain, ids=prompts: answers(ids, llm, tokens)}
        for name, llm in zip(names, speculative, strict=True):
            ways[f"{name}, alone"] = lambda llm=llm, ids=prompts: [answers([prompt], llm, tokens)[0] for prompt in ids]
            ways[f"{name}, batched"] = lambda llm=llm, ids=prompts: answers(ids, llm, tokens)
        ways[f"{names[-1]}, eager, batched"] = lambda llm=eager, ids=prompts: answers(ids, llm, tokens)
        for how, run in ways.items():
            at = [_first_difference(a, b) for a, b in zip(want, run(), strict=True)]
            margins = [
                _margin(plain, prompt + answer[:i])
                for prompt, answer, i in zip(prompts, want, at, strict=True)
                if i >= 0
            ]
            row = {"deterministic": deterministic, "how": how, "prompts": len(prompts), "different": len(margins)}
            rows.append(row | {"margins": [round(m, 4) for m in margins]})
            write(path, result | {"rows": rows})  # what is known so far


@torch.no_grad()
def _different_logits(llm: LLM) -> dict[str, int]:
    """How many of a text's last rows of logits differ in a bit from those of one prompt of all its tokens.

    The same rows as prompt chunks of several sizes behind a cached prefix, as chains and trees of draft nodes, and one
    by one. The text is the demo's prompts; sequences use the engine's first blocks, which nobody else does now.
    """
    model, pages = llm.engine.model, llm.engine.pages
    text = [token for prompt in PROMPTS.values() for token in llm.encode_chat([{"role": "user", "content": prompt}])]
    length = len(text)
    table = range(-(-(length + MAX_NODES) // pages.block_size))

    def logits(start: int, parents: list[int], tokens: list[int]) -> torch.Tensor:
        tree = TokenTree.build([tokens], [parents]) if parents else None
        shape = (tree.depth.tolist(), tree.ancestors.tolist()) if tree else ((), ())
        rows = Rows(table, start, tokens, start if tree else start + len(tokens), *shape)
        batch = pack_rows([rows], pages.block_size, model.device)
        return model.logits(model.forward(batch, pages))

    whole = logits(0, [], text)
    found = {}
    for count in (1, 7, 16, 64, 256):
        at = length - count
        found[f"chunk of {count}"] = _rows_that_differ(whole[at:], logits(at, [], text[at:]))
    for count in (2, 16, 64):
        at = length - count
        found[f"chain of {count}"] = _rows_that_differ(whole[at:], logits(at, [*range(-1, count - 1)], text[at:]))
    for depth in (7, 31):  # the true path behind a wrong one
        at = length - depth - 1
        parents = [*range(-1, depth), 0, *range(depth + 1, 2 * depth)]
        nodes = [text[at], *reversed(text[at + 1 :]), *text[at + 1 :]]
        found[f"tree of {len(nodes)}"] = _rows_that_differ(whole[at + 1 :], logits(at, parents, nodes)[depth + 1 :])
    logits(0, [], text)  # the cache holds the text again
    alone = torch.cat([logits(at, [-1], text[at : at + 1]) for at in range(length - 256, length)])
    return found | {"256 tokens one by one": _rows_that_differ(whole[-256:], alone)}


def _rows_that_differ(a: torch.Tensor, b: torch.Tensor) -> int:
    return int((a != b).any(1).sum())


def answers(prompts: list[list[int]], llm: LLM, tokens: int) -> list[list[int]]:
    """Greedy answers of so many tokens."""
    params = SamplingParams(max_new_tokens=tokens, ignore_eos=True)
    return [completion.token_ids for completion in llm.generate(prompts, params)]


def _first_difference(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), -1)


@torch.no_grad()
def _margin(llm: LLM, ids: list[int]) -> float:
    """Distance of the two best logits behind a prefix, by transformers' forward."""
    best = llm.hf_model(torch.tensor([ids], device="cuda")).logits[0, -1].float().topk(2).values
    return float(best[0] - best[1])


@main.command()
@click.option("--model", default="8b")
@click.option("--json", "path", type=click.Path(dir_okay=False))
def startup(model: str, path: str | None) -> None:
    """Seconds from a loaded model to the second token: kernels compiled, the step captured."""
    opened = open_model(model)
    torch.cuda.synchronize()
    start = time.perf_counter()
    llm = make_llm(opened, drafter="ngram")
    stream: Iterator[object] = llm.stream(list(range(5, 105)), SamplingParams(max_new_tokens=4))
    next(stream)
    first = time.perf_counter() - start
    for _ in stream:
        pass
    rest = time.perf_counter() - start
    write(path, {"model": model, "first_token_s": round(first, 2), "captured_and_four_tokens_s": round(rest, 2)})


if __name__ == "__main__":
    main()
