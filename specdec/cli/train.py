"""`specdec train`: draft heads for a base that stays as it is."""

import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from specdec.cli.options import DEFAULT_MODEL

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from specdec.hub.load import Loaded
    from specdec.training.config import TrainConfig
    from specdec.training.data import Example
    from specdec.training.trainer import TrainResult

Report = Callable[[Mapping[str, Any]], None]
MOST_HELD_OUT = 64
"""Most prompts that are held out."""


@click.group()
def train() -> None:
    """Train draft heads for a model, which itself stays as it is."""


@train.command()
@click.option("--model", default=DEFAULT_MODEL, help="A folder, a hub id, or a name that `specdec pull` knows.")
@click.option("--data", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="Chats or plain text.")
@click.option("--prompts", help="A file of prompts, or `self`: the model writes them; it answers them itself.")
@click.option("--self-distill", is_flag=True, help="The model answers the prompts of --data anew.")
@click.option("--num-prompts", default=2000, help="How many prompts the model writes with `--prompts self`.")
@click.option("--answer-tokens", default=256, help="Most tokens of the model's own answers.")
@click.option(
    "--temperature",
    "temperatures",
    multiple=True,
    default=(0.0, 0.7),
    show_default=True,
    help="Of the model's own answers; several are taken in turn.",
)
@click.option("--out", required=True, type=click.Path(path_type=Path), help="Becomes the folder of the heads.")
@click.option(
    "--kind",
    type=click.Choice(["medusa", "hydra", "recurrent"]),
    default="medusa",
    help="Hydra's see the drafts before them; recurrent heads too, by one cell for all.",
)
@click.option("--heads", "num_heads", default=4, help="How many heads: tokens that can be drafted in a row.")
@click.option(
    "--layers", "num_layers", type=int, help="Residual blocks of each head.  [default: 1; recurrent heads have none]"
)
@click.option("--width", type=int, help="Inner size of MLPs, in hidden sizes.  [default: 2 for hydra, 4 for recurrent]")
@click.option("--projection", type=click.Choice(["shared", "own"]), default="shared", help="The base's, or one a head.")
@click.option(
    "--base-precision",
    type=click.Choice(["auto", "fp32", "bf16", "int8", "nf4"]),
    default="auto",
    help="auto is fp32 on a CPU, bf16 on a GPU; int8 and nf4 need bitsandbytes.",
)
@click.option("--steps", default=1000, help="Optimizer steps, one batch each.")
@click.option("--batch-tokens", default=8192, help="Most tokens of a batch, padding included; longer examples are cut.")
@click.option("--lr", default=1e-3, help="Peak learning rate.")
@click.option(
    "--soft-labels/--hard-labels",
    default=True,
    help="Whether heads learn the model's distribution at each answer token, or the token alone.",
)
@click.option("--decay", default=0.8, help="The loss of head k counts decay ** k.")
@click.option("--warmup", default=40, help="Steps of warm-up before the cosine.")
@click.option("--seed", default=0, help="Of the order of the examples, and of the model's own prompts and answers.")
@click.option("--eval-every", default=100, help="Steps between measurements on held-out examples.")
@click.option("--save-every", default=100, help="Steps between checkpoints.")
@click.option(
    "--resume", is_flag=True, help="Go on from the last checkpoint in --out; from the start if none is there."
)
@click.option("--device", default="auto", help="auto takes a GPU where there is one.")
@click.option("--dtype", default="auto", help="Of the heads at the end: auto is float32 on a CPU, bfloat16 on a GPU.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as one JSON object.")
def medusa(**options: Any) -> None:
    """Train draft heads on answers, and write a heads folder to --out.

    The answers are those of --data, or the model's own: to the prompts of --data with --self-distill, or to --prompts.
    Prompts that the model wrote, and its answers, are kept in --out and found there again by --resume.

    Of twenty prompts one, of all at most 64, are held out and measured on; the tree that suits the heads there is
    stored with them, and `specdec tree` finds the one that is fastest on this device. Several processes: `accelerate launch
    "$(which specdec)" train medusa …`.
    """
    from specdec.cli.examples import make_examples
    from specdec.errors import CheckpointError, ConfigError
    from specdec.training.trainer import prepare_out

    if (options["data"] is None) == (options["prompts"] is None):
        raise ConfigError("give either --data or --prompts")

    config = _config(options)
    prepare_out(options["out"], options["resume"])
    loaded = _load_base(options)
    if loaded.tokenizer is None:
        raise CheckpointError(f"{options['model']}: has no tokenizer, which the data needs")
    longest = getattr(loaded.model.config.get_text_config(), "max_position_embeddings", None) or config.batch_tokens
    examples = make_examples(loaded, options, min(longest, config.batch_tokens))
    train_medusa(loaded.model, examples, config, options)


def train_medusa(
    model: "PreTrainedModel", examples: "list[Example]", config: "TrainConfig", options: Mapping[str, Any]
) -> None:
    """Train new heads on examples, wherever they come from, and say how it went.

    Args:
        model: the base, on its device.
        examples: of which some are held out.
        config: how to train.
        options: the command's out, kind, num_heads, num_layers, width, projection, resume, dtype, as_json.
    """
    from accelerate import PartialState

    from specdec.llm import resolve_dtype
    from specdec.training.data import split
    from specdec.training.hidden import new_heads
    from specdec.training.trainer import train as run

    dtype = resolve_dtype(options["dtype"], model.device)
    train_set, held_out = split(examples, min(MOST_HELD_OUT, max(1, len(examples) // 20)))
    kind = options["kind"]
    num_layers = (0 if kind == "recurrent" else 1) if options["num_layers"] is None else options["num_layers"]
    heads = new_heads(model, options["num_heads"], num_layers, options["projection"], kind, options["width"])
    with _progress(config.steps) as report:
        result = run(
            model,
            heads,
            train_set,
            held_out,
            config,
            options["out"],
            resume=options["resume"],
            dtype=dtype,
            report=report,
        )
    if PartialState().is_main_process:
        taus = _store_tree(model, held_out, options["out"]) if held_out else {}
        _print_result(result, config.steps, options["out"], taus, options["as_json"])


def _store_tree(model: "PreTrainedModel", held_out: "list[Example]", out: Path) -> dict[int, float]:
    """Store the tree that the trained heads are accepted deepest with; return the τ expected of each size."""
    from specdec.cli.tree import MAX_NODES, NUM_RANKS, SIZES
    from specdec.drafters.heads import load_heads, save_config
    from specdec.errors import ConfigError
    from specdec.training.accuracies import joint_ranks
    from specdec.training.trainer import writing
    from specdec.training.trees import trees_from_ranks

    heads = load_heads(out).to(model.device, model.dtype).requires_grad_(False)
    try:
        ranks = joint_ranks(model, heads, held_out, NUM_RANKS).ranks
    except ConfigError as error:
        click.echo(f"no tree was stored: {error}", err=True)
        return {}
    sizes = trees_from_ranks(ranks, NUM_RANKS, MAX_NODES)
    with writing(out):
        save_config(replace(heads.config, tree=tuple(sizes.choices) or None), out)
    return {n: sizes.tau(n) for n in SIZES if n <= len(sizes.taus)}


def _config(options: Mapping[str, Any]) -> "TrainConfig":
    from specdec.training.config import TrainConfig

    names = ("steps", "batch_tokens", "lr", "decay", "warmup", "seed", "soft_labels", "eval_every", "save_every")
    return TrainConfig(**{name: options[name] for name in names})


def _load_base(options: Mapping[str, Any]) -> "Loaded":
    from accelerate import PartialState

    from specdec.hub.load import load
    from specdec.llm import resolve_device

    device = resolve_device(options["device"])
    state = PartialState(cpu=device.type == "cpu")
    if state.num_processes > 1:
        device = state.device
    dtype, quantization = _precision(options["base_precision"], device)
    return load(options["model"], dtype=dtype, device=device, quantization=quantization)


def _precision(name: str, device: "torch.device") -> "tuple[torch.dtype, Any]":
    """The dtype of the base, and how transformers shall quantize it; None for not at all."""
    import importlib.util

    import torch

    from specdec.errors import ConfigError

    if name == "auto":
        name = "fp32" if device.type == "cpu" else "bf16"
    if name in ("fp32", "bf16"):
        return (torch.float32 if name == "fp32" else torch.bfloat16), None
    if importlib.util.find_spec("bitsandbytes") is None:
        raise ConfigError(f"base precision {name!r} needs bitsandbytes; `pip install bitsandbytes`, or use bf16")
    from transformers import BitsAndBytesConfig

    if name == "int8":
        return torch.bfloat16, BitsAndBytesConfig(load_in_8bit=True)
    quantization = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16
    )
    return torch.bfloat16, quantization


@contextmanager
def _progress(steps: int) -> Iterator[Report]:
    """A bar on a terminal; elsewhere one line a measurement."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
    columns = TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("starting", total=steps)

        def report(line: Mapping[str, Any]) -> None:
            text = f"loss {line['loss']:.3f}, {line['tokens_per_s']:.0f} tok/s"
            bar.update(task, completed=line["step"], description=text)
            if "top1" in line:
                console.print(f"step {line['step']}: {text}, {_accuracies(line['top1'], line['top5'])}")

        yield report


def _accuracies(top1: list[float], top5: list[float]) -> str:
    return "held-out top-1/top-5 by head " + " ".join(f"{a:.2f}/{b:.2f}" for a, b in zip(top1, top5, strict=True))


def _print_result(result: "TrainResult", steps: int, out: Path, taus: Mapping[int, float], as_json: bool) -> None:
    found = result.evaluation
    if as_json:
        measured = {"top1": found.top(1), "top5": found.top(5), "accuracies": found.accuracies} if found else {}
        loss = None if math.isnan(result.loss) else result.loss
        line = {"out": str(out), "steps": steps, "loss": loss, "skipped": result.num_skipped}
        click.echo(json.dumps(line | measured | {"expected_tau": taus, "plot": result.plotted}))
        return
    if found is not None:
        click.echo(_accuracies(found.top(1), found.top(5)))
    if taus:
        click.echo("expected τ by nodes of the tree " + ", ".join(f"{n}: {tau:.2f}" for n, tau in taus.items()))
    if result.num_skipped:
        click.echo(f"{result.num_skipped} batches had no answer token and were skipped")
    if not result.plotted:
        click.echo("no plot: matplotlib isn't installed; `pip install specdec[plot]` adds it", err=True)
    click.echo(f"heads in {out}; use them with `--drafter {out}`")
