"""Times the drafts that heads make in captured steps on a GPU, and counts their kernels.

    python -m benchmarks.draft_gpu trees --json benchmarks/results/draft_h100.json
    python -m benchmarks.draft_gpu tiles --rows 1,10,80

The heads are those that come with the package, or others; the base is random weights of its shape with one layer, which
changes what is drafted and not how long it takes. Weights come from memory, as they do in a step whose target's own
weights went through the cache. `composed` takes the heads' projection and embeddings as functions that kernels can't
take apart: products and gathers of their own, and logits in memory. `tiles` times many tiles of each product of a
level, with weights in the cache, where all levels but the first find them.
"""

import json
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import click
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.kernels_gpu import CACHE, timed, write
from specdec.build import draft_target
from specdec.cache.pages import KVPages
from specdec.drafters.heads import load_heads
from specdec.drafters.heads_drafter import HeadsDrafter
from specdec.drafters.protocol import DraftTarget
from specdec.drafters.recurrent_heads import RecurrentHeads
from specdec.drafters.registry import make_drafter
from specdec.engine.device import Bucket, DeviceStep
from specdec.engine.state import DeviceState
from specdec.kernels.gpu.candidates import candidates
from specdec.kernels.gpu.cell import cell
from specdec.kernels.gpu.tiles import Tile
from specdec.models.decoder import Decoder

Op = Callable[[Tile | None], object]
HEADS = Path(__file__).parent.parent / "specdec" / "heads" / "smollm2-135m"
LENGTH, BLOCK_SIZE = 100, 16


def base(folder: Path, device: str = "cuda") -> LlamaForCausalLM:
    """A random model of one layer with the hidden size and the vocabulary of the heads' own."""
    config = json.loads((folder / "config.json").read_text())
    size = config["hidden_size"]
    shape = LlamaConfig(
        hidden_size=size,
        vocab_size=config["vocab_size"],
        intermediate_size=2 * size,
        num_hidden_layers=1,
        num_attention_heads=size // 64,
        num_key_value_heads=1,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(shape).eval().requires_grad_(False).to(device, torch.bfloat16)


def composed(target: DraftTarget) -> DraftTarget:
    """The same target without anything that kernels could take apart."""
    assert target.embed is not None and target.head_rows is not None
    embed, head_rows, lm_head = target.embed, target.head_rows, target.lm_head

    def rows(ids: Tensor) -> Callable[[Tensor], Tensor]:
        head = head_rows(ids)
        return lambda states: head(states)

    return replace(target, lm_head=lambda states: lm_head(states), embed=lambda ids: embed(ids), head_rows=rows)


def state_of(num_seqs: int, model: Decoder, temperature: float) -> DeviceState:
    """Sequences of random tokens whose hidden states are known."""
    width = -(-(LENGTH + 4096) // BLOCK_SIZE)
    state = DeviceState.make(num_seqs, width * BLOCK_SIZE, width, model.device, model.hidden_size, model.dtype)
    state.history.random_(model.vocab_size)
    state.lengths.fill_(LENGTH)
    state.temperature.fill_(temperature)
    state.hidden.normal_()
    state.has_hidden.fill_(True)
    state.block_table.copy_(torch.arange(num_seqs * width).view(num_seqs, width))
    return state


def kernels(call: Callable[[], object]) -> Counter[str]:
    """How often a call launches each kernel, copies and fills included."""
    call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
        call()
        torch.cuda.synchronize()
    return Counter(e.name for e in found.events() if e.device_type == torch.autograd.DeviceType.CUDA)


def measure(drafter: HeadsDrafter, model: Decoder, num_seqs: int, temperature: float) -> dict[str, object]:
    """Microseconds and launches of drafting a whole tree, and launches of the step around it."""
    nodes, state = drafter.max_device_nodes(), state_of(num_seqs, model, temperature)
    flushed = torch.empty(4 * CACHE, dtype=torch.uint8, device=model.device)

    @torch.inference_mode()
    def draft() -> None:
        drafter.draft_on_device(state.query(num_seqs), nodes)

    def cold() -> None:
        flushed.zero_()
        draft()

    pages = KVPages(model.kv_layout, state.block_table.numel(), BLOCK_SIZE, model.device)
    pages.randomize(torch.Generator(model.device).manual_seed(0))
    step = DeviceStep(Bucket(num_seqs, nodes, 1024), model, pages, state, drafter, model.vocab_size)
    launches = kernels(draft)
    return {
        "cold_us": round(timed([cold] * 10) - timed([flushed.zero_] * 10), 1),
        "warm_us": round(timed([draft] * 10), 1),
        "kernels": launches.total(),
        "step_kernels_of_one_layer": kernels(step).total(),
        "by_name": dict(launches.most_common()),
    }


@click.group()
def main() -> None:
    """Time drafting."""


@main.command()
@click.option("--heads", "folder", default=HEADS, type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--nodes", default="8,16,32,64", help="Nodes of the trees.")
@click.option("--seqs", default="1,8", help="Sequences of a step.")
@click.option("--temperature", default=0.0)
@click.option("--names/--no-names", default=False, help="Print how often each kernel is launched.")
@click.option("--json", "path", type=click.Path(dir_okay=False))
def trees(folder: Path, nodes: str, seqs: str, temperature: float, names: bool, path: str | None) -> None:
    """Whole trees: time and launches."""
    hf = base(folder)
    model = Decoder(hf)
    target = draft_target(hf, model)
    kind = json.loads((folder / "config.json").read_text())["kind"]
    rows: list[dict[str, object]] = []
    for n in map(int, nodes.split(",")):
        for s in map(int, seqs.split(",")):
            for how, seen in (("fused", target), ("composed", composed(target))):
                drafter = make_drafter(f"{kind}:{folder}", seen, max_nodes=n, check_base=False)
                assert isinstance(drafter, HeadsDrafter)
                row = {"how": how, "nodes": n, "sequences": s, **measure(drafter, model, s, temperature)}
                click.echo(str(row if names else {key: value for key, value in row.items() if key != "by_name"}))
                rows.append(row)
    facts = {"command": " ".join(["python -m benchmarks.draft_gpu", *sys.argv[1:]]), "heads": folder.name}
    write(path, facts | {"temperature": temperature, "rows": rows})


def _tiles(rows: int, name: str) -> list[Tile]:
    """Tiles to try for a level's product; `k` is a program's in `candidates` and a warp's in the others."""
    whole = name == "candidates"
    return [
        Tile(high, out, k, warps, stages)
        for high in ((16,) if rows <= 16 else (16, 64))
        for out in ((64, 128) if whole else (16, 32))
        for k in ((64, 128) if whole else (32, 64, 128))
        for warps, stages in ((4, 3), (4, 4), (8, 3))
        if 2 * (high + out) * k * (1 if whole else warps) * 2 * stages < 200_000
    ]


def _ops(heads: RecurrentHeads, model: LlamaForCausalLM, num_rows: int, num_ranks: int) -> dict[str, Op]:
    """The products of a level of so many paths, as calls with a tile of their own."""
    device, ids = model.device, heads.token_ids
    weight = model.lm_head.weight if ids is None else model.lm_head.weight[ids]
    embedding = model.get_input_embeddings().weight
    parts = heads.up.weight, heads.up.bias, heads.down.weight, heads.down.bias
    states = torch.randn(1, num_rows, weight.shape[1], device=device).to(weight.dtype)
    found, paths = torch.randint(len(weight), (1, num_rows), device=device), torch.arange(num_rows, device=device)
    greedy = torch.zeros(1, device=device), *torch.zeros(2, 1, dtype=torch.int64, device=device)
    out = torch.empty(1, num_rows, num_ranks, dtype=torch.int64, device=device)

    def step(up: Tile | None, down: Tile | None) -> Tensor:
        return cell(states, paths, found, paths, embedding, *parts, tiles=(up, down))

    return {
        "up": lambda tile: step(tile, None),
        "down": lambda tile: step(None, tile),
        "candidates": lambda tile: candidates(states, weight, None, *greedy, out, token_ids=ids, tile=tile),
    }


@main.command()
@click.option("--heads", "folder", default=HEADS, type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--rows", default="1,10,80", help="Paths of a level.")
@click.option("--ranks", default=5, help="Candidates of each path.")
def tiles(folder: Path, rows: str, ranks: int) -> None:
    """Microseconds with many tiles of a level's products; those of up and down are of both together."""
    model = base(folder)
    heads = load_heads(folder, draft_target(model, Decoder(model)), check_base=False)
    assert isinstance(heads, RecurrentHeads) and heads.projection is None
    for n in map(int, rows.split(",")):
        for name, op in _ops(heads, model, n, ranks).items():
            times = {"as chosen": timed([partial(op, None)] * 20, 8)}
            for tile in _tiles(n, name):
                try:
                    times[str(tile)] = timed([partial(op, tile)] * 20, 8)
                except Exception as error:  # out of shared memory or registers: no tile for this size
                    click.echo(f"{tile}: {type(error).__name__}")
            order = ["as chosen", *sorted(times, key=times.__getitem__)[:5]]
            click.echo(f"{n} rows, {name}: { ({key: round(times[key], 2) for key in order}) }")


if __name__ == "__main__":
    main()
