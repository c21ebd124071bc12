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
    from specdec.training.clock import Clock
    from specdec.training.config import TrainConfig
    from specdec.training.data import Example
    from specdec.training.trainer import TrainResult

Report = Callable[[Mapping[str, Any]], None]
MOST_HELD_OUT = 128
"""Most prompts that are held out."""
STEPS, NO_LIMIT = 1000, 1 << 40
"""Steps where nothing else is said: of a run whose time isn't limited, and of one whose time is."""
TRAIN_UNTIL = 0.95
"""Share of a limited time after which the training ends; the rest is for the last measurement and the tree."""


@click.group()
def train() -> None:
    """Train draft heads for a model, which itself stays as it is."""


@train.command()
@click.option("--model", default=DEFAULT_MODEL, help="A folder, a hub id, or a name that `specdec pull` knows.")
@click.option("--data", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="Chats or plain text.")
@click.option("--prompts", help="A file of prompts, or `self`: the model writes them; it answers them itself.")
@click.option("--self-distill", is_flag=True, help="The model answers the prompts of --data anew.")
@click.option(
    "--num-prompts",
    type=click.IntRange(min=1),
    default=2000,
    help="How many prompts there are with `--prompts self`, tasks included.",
)
@click.option(
    "--openings/--no-openings",
    default=True,
    help="Whether half of the prompts that the model writes begin as people's do: with a task, often on a text.",
)
@click.option(
    "--tasks",
    type=click.FloatRange(0, 1, max_open=True),
    default=0.5,
    show_default=True,
    help="Share of them that are tasks: to write texts, and to rewrite, translate, search, … these.",
)
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
@click.option("--draft-vocab", type=click.IntRange(min=1), help="Score the N most frequent answer tokens alone.")
@click.option(
    "--base-precision",
    type=click.Choice(["auto", "fp32", "bf16", "int8", "nf4"]),
    default="auto",
    help="auto is fp32 on a CPU, bf16 on a GPU; int8 and nf4 need bitsandbytes.",
)
@click.option(
    "--steps", type=int, help=f"Optimizer steps, one batch each.  [default: {STEPS}; no end with --time-limit]"
)
@click.option(
    "--time-limit",
    type=float,
    help="Minutes for all, from prompts to tree: the steps and the learning rate end in time.  [default: no limit]",
)
@click.option("--batch-tokens", default=8192, help="Most tokens of a batch, padding included; longer examples are cut.")
@click.option("--lr", default=1e-3, help="Peak learning rate.")
@click.option(
    "--soft-labels/--hard-labels",
    default=True,
    help="Whether heads learn the model's distribution at each answer token, or the token alone.",
)
@click.option("--decay", default=0.8, help="The loss of head k counts decay ** k.")
@click.option("--warmup", default=40, help="Steps of warm-up before the cosine.")
@click.option("--seed", default=0, help="Of the examples' order, the heads' first weights, the model's own texts.")
@click.option("--eval-every", default=100, help="Steps between measurements on held-out examples.")
@click.option("--save-every", default=100, help="Steps between checkpoints.")
@click.option(
    "--resume", is_flag=True, help="Go on from the last checkpoint in --out; from the start if none is there."
)
@click.option("--licence", help="Of the heads, for their card; by default the base's.")
@click.option("--device", default="auto", help="auto takes a GPU where there is one.")
@click.option("--dtype", default="auto", help="Of the heads at the end: auto is float32 on a CPU, bfloat16 on a GPU.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as one JSON object.")
def medusa(**options: Any) -> None:
    """Train draft heads on answers, and write a heads folder to --out.

    The answers are those of --data, or the model's own: to the prompts of --data with --self-distill, or to --prompts.
    Prompts that the model wrote, and its answers, are kept in --out and found there again by --resume.

    With --time-limit prompts and answers end after about half of the time, and the model trains on what is there.
    A run that is resumed gets the time anew; what it had done of its training is done.

    Of twenty prompts one, of all at most 128, are held out and measured on; the tree that suits the heads there is
    stored with them, and `specdec tree` finds the one that is fastest on this device. Several processes:
    `accelerate launch "$(which specdec)" train medusa …`.
    """
    from specdec.cli.examples import check_answers, make_examples
    from specdec.errors import CheckpointError, ConfigError
    from specdec.llm import resolve_dtype
    from specdec.training.clock import Clock
    from specdec.training.hidden import heads_config
    from specdec.training.trainer import prepare_out

    clock = None if options["time_limit"] is None else Clock(60 * options["time_limit"])
    if (options["data"] is None) == (options["prompts"] is None):
        raise ConfigError("give either --data or --prompts")

    config = _config(options)
    check_answers(options)
    prepare_out(options["out"], options["resume"])
    loaded = _load_base(options)
    if loaded.tokenizer is None:
        raise CheckpointError(f"{options['model']}: has no tokenizer, which the data needs")
    longest = getattr(loaded.model.config.get_text_config(), "max_position_embeddings", None) or config.batch_tokens
    resolve_dtype(options["dtype"], loaded.model.device)
    heads_config(loaded.model, **_shape(options), draft_vocab=options["draft_vocab"])
    examples = make_examples(loaded, options, min(longest, config.batch_tokens), clock)
    train_medusa(loaded.model, examples, config, options, clock)


def train_medusa(
    model: "PreTrainedModel",
    examples: "list[Example]",
    config: "TrainConfig",
    options: Mapping[str, Any],
    clock: "Clock | None" = None,
) -> None:
    """Train new heads on examples, wherever they come from, and say how it went.

    Args:
        model: the base, on its device.
        examples: of which some are held out.
        config: how to train.
        options: the command's out, kind, num_heads, num_layers, width, projection, draft_vocab, resume, dtype, as_json,
            and what the heads' card tells of: model, licence and where the data come from.
        clock: of the whole command, if its time is limited.

    Raises:
        ConfigError: no time is left to train.
    """
    from accelerate import PartialState

    from specdec.errors import ConfigError
    from specdec.llm import resolve_dtype
    from specdec.training.card import add_facts
    from specdec.training.checkpoint import writing
    from specdec.training.data import num_prompts, split
    from specdec.training.hidden import new_heads
    from specdec.training.trainer import train as run
    from specdec.training.vocab import frequent_tokens

    dtype = resolve_dtype(options["dtype"], model.device)
    train_set, held_out = split(examples, min(MOST_HELD_OUT, max(1, num_prompts(examples) // 20)))
    count, vocab_size = options["draft_vocab"], len(model.get_output_embeddings().weight)
    token_ids = None if count is None else frequent_tokens(train_set, count, vocab_size)
    heads = new_heads(model, **_shape(options), token_ids=token_ids, seed=config.seed)
    spent = None if clock is None else clock.span_to(TRAIN_UNTIL)
    if spent is not None and spent() == 1:
        raise ConfigError(
            f"the {options['time_limit']:g} minutes of --time-limit were over before the training; give more, with "
            "--resume, which finds the prompts and answers that are there"
        )
    with _progress(config.steps, spent) as report:
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
            spent=spent,
        )
    if PartialState().is_main_process:
        taus = _store_tree(model, held_out, options["out"]) if held_out else {}
        with writing(options["out"]):
            facts = _card_facts(options, train_set, held_out, config, result)
            add_facts(options["out"], heads.config, training=facts)
        _print_result(result, options["out"], taus, options["as_json"])


def _shape(options: Mapping[str, Any]) -> dict[str, Any]:
    """What the options say of the heads' shape, in `new_heads`'s words."""
    shape = {name: options[name] for name in ("num_heads", "num_layers", "projection", "kind", "width")}
    if shape["num_layers"] is None:
        shape["num_layers"] = 0 if shape["kind"] == "recurrent" else 1
    return shape


def _store_tree(model: "PreTrainedModel", held_out: "list[Example]", out: Path) -> dict[int, float]:
    """Store the tree that the trained heads are accepted deepest with; return the τ expected of each size."""
    from specdec.cli.tree import MAX_NODES, NUM_RANKS, SIZES
    from specdec.drafters.heads import load_heads, save_config
    from specdec.errors import ConfigError
    from specdec.training.accuracies import joint_ranks
    from specdec.training.checkpoint import writing
    from specdec.training.trees import trees_from_replay

    heads = load_heads(out).to(model.device, model.dtype).requires_grad_(False)
    try:
        joint = joint_ranks(model, heads, held_out, NUM_RANKS)
    except ConfigError as error:
        click.echo(f"no tree was stored: {error}", err=True)
        return {}
    sizes = trees_from_replay(joint, NUM_RANKS, MAX_NODES)
    if sizes.choices:
        with writing(out):
            save_config(replace(heads.config, tree=tuple(sizes.choices), chances=tuple(sizes.chances)), out)
    return {n: sizes.tau(n) for n in SIZES if n <= len(sizes.taus)}


def _card_facts(
    options: Mapping[str, Any],
    train_set: "list[Example]",
    held_out: "list[Example]",
    config: "TrainConfig",
    result: "TrainResult",
) -> dict[str, Any]:
    """What the heads' card says of their training."""
    from specdec.cli.options import given_command
    from specdec.hub.known import KNOWN_MODELS

    known = KNOWN_MODELS.get(options["model"])
    facts: dict[str, Any] = {
        "base": known.title if known else Path(options["model"]).name,
        "licence": options["licence"] or (known.licence if known else "that of the base"),
        "command": given_command(),
        "data": _recipe(options),
        "examples": len(train_set),
        "held_out": len(held_out),
        "labels": sum(sum(example.answer) for example in train_set),
        "peak_bytes": result.peak_bytes,
        "steps": result.steps,
    }
    facts |= {name: getattr(config, name) for name in ("batch_tokens", "lr", "decay", "soft_labels", "seed")}
    found = result.evaluation
    return facts | ({} if found is None else {"top1": found.top(1), "top5": found.top(5)})


def _recipe(options: Mapping[str, Any]) -> str:
    """Where the examples come from, in words."""
    file = options["data"] or options["prompts"]
    if options["prompts"] is None and not options["self_distill"]:
        return f"the answers in {Path(file).name}"
    own = "prompts that the model wrote itself" + (", half of them from given openings" if options["openings"] else "")
    if options["tasks"]:
        own = f"{own}, and for {options['tasks']:.0%} of all tasks from templates, to write texts and on these texts"
    own += "; none shares eight words in a row with the built-in benchmark's prompts"
    prompts = own if file == "self" else f"the prompts of {Path(file).name}"
    *others, last = map(str, options["temperatures"])
    warmth = f"{', '.join(others)} and {last} in turn" if others else last
    how = f"at temperature {warmth}, at most {options['answer_tokens']} tokens each"
    return f"{prompts}, answered by the model itself {how}"


def _config(options: Mapping[str, Any]) -> "TrainConfig":
    from specdec.training.config import TrainConfig

    names = ("batch_tokens", "lr", "decay", "warmup", "seed", "soft_labels", "eval_every", "save_every")
    steps = options["steps"]
    if steps is None:
        steps = STEPS if options["time_limit"] is None else NO_LIMIT
    return TrainConfig(steps=steps, **{name: options[name] for name in names})


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
    import torch

    from specdec.errors import ConfigError
    from specdec.hub.quantize import is_installed, quantization_config

    if name == "auto":
        name = "fp32" if device.type == "cpu" else "bf16"
    if name in ("fp32", "bf16"):
        return (torch.float32 if name == "fp32" else torch.bfloat16), None
    if name == "nf4":
        return torch.bfloat16, quantization_config("nf4", torch.bfloat16, device)
    if not is_installed("bitsandbytes"):
        raise ConfigError(f"base precision {name!r} needs bitsandbytes: pip install bitsandbytes; or use bf16")
    from transformers import BitsAndBytesConfig

    return torch.bfloat16, BitsAndBytesConfig(load_in_8bit=True)


@contextmanager
def _progress(steps: int, spent: Callable[[], float] | None = None) -> Iterator[Report]:
    """A bar on a terminal, of the steps or of the time; elsewhere one line a measurement."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TaskProgressColumn,
        TextColumn,
        TimeRemainingColumn,
    )

    console = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
    done = MofNCompleteColumn() if spent is None else TaskProgressColumn()
    columns = TextColumn("{task.description}", markup=False), BarColumn(), done, TimeRemainingColumn()
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("starting", total=steps if spent is None else 1.0)

        def report(line: Mapping[str, Any]) -> None:
            text = f"loss {line['loss']:.3f}, {line['tokens_per_s']:.0f} tok/s"
            bar.update(task, completed=line["step"] if spent is None else spent(), description=text)
            if "top1" in line:
                console.print(f"step {line['step']}: {text}, {_accuracies(line['top1'], line['top5'])}")

        yield report


def _accuracies(top1: list[float], top5: list[float]) -> str:
    return "held-out top-1/top-5 by head " + " ".join(f"{a:.2f}/{b:.2f}" for a, b in zip(top1, top5, strict=True))


def _print_result(result: "TrainResult", out: Path, taus: Mapping[int, float], as_json: bool) -> None:
    found = result.evaluation
    if as_json:
        measured = {"top1": found.top(1), "top5": found.top(5), "accuracies": found.accuracies} if found else {}
        loss = None if math.isnan(result.loss) else result.loss
        line = {"out": str(out), "steps": result.steps, "loss": loss, "skipped": result.num_skipped}
        line |= {"peak_bytes": result.peak_bytes}
        click.echo(json.dumps(line | measured | {"expected_tau": taus, "plot": result.plotted}))
        return
    if found is not None:
        click.echo(_accuracies(found.top(1), found.top(5)))
    if taus:
        click.echo("expected τ by nodes of the tree " + ", ".join(f"{n}: {tau:.2f}" for n, tau in taus.items()))
    click.echo(f"peak memory {result.peak_bytes / 1e9:.2f} GB")
    if result.num_skipped:
        click.echo(f"{result.num_skipped} batches had no answer token and were skipped")
    if not result.plotted:
        click.echo("no plot: matplotlib isn't installed; `pip install matplotlib` adds it", err=True)
    click.echo(f"heads in {out}; use them with `--drafter {out}`")
