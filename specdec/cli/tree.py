"""`specdec tree`: measure draft heads on held-out answers and store the tree that suits them and this device."""

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from specdec.cli.options import DEFAULT_MODEL, deterministic_option
from specdec.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from specdec.drafters.protocol import DraftTarget
    from specdec.engine.cost import CostTable
    from specdec.hub.load import Loaded
    from specdec.training.check import Prompt, TauCheck
    from specdec.training.data import Example
    from specdec.training.trees import TreeSizes

MAX_NODES = 64
SIZES = (1, 2, 4, 8, 16, 32, 64)
NUM_RANKS = 10
CONTEXT = 512  # committed tokens of the step whose time counts
MAX_LEN = 2048  # tokens of a held-out text
FEW_POSITIONS = 2000
CHECK_PROMPTS, CHECK_TOKENS = 64, 128


@dataclass(frozen=True, slots=True)
class _Loaded:
    """What the command works on."""

    base: "Loaded"
    target: "DraftTarget"
    heads: Any  # a module of any kind of heads
    table: "CostTable | None"
    deterministic: bool


@click.command()
@click.option("--heads", "folder", type=click.Path(path_type=Path), required=True, help="The folder of the heads.")
@click.option("--model", default=DEFAULT_MODEL, help="Their base: a folder, a hub id, or a name that `pull` knows.")
@click.option("--data", type=click.Path(path_type=Path), help="Held-out texts: chat JSONL, or plain text.")
@click.option(
    "--accuracies",
    type=click.Path(path_type=Path),
    help="Instead of --data: a JSON list of heads of chances by rank, or what --json printed.",
)
@click.option(
    "--nodes",
    type=click.IntRange(1, MAX_NODES),
    help="Nodes of the tree, root included; with a cost table, at most.  [default: 64; on a CPU without a table 16]",
)
@click.option("--device-costs", default="auto", help="A cost table's file; auto takes what `specdec tune` measured.")
@click.option("--device", default="auto", help="auto takes a GPU where there is one.")
@click.option("--dtype", default="auto", help="auto is float32 on a CPU, bfloat16 on a GPU.")
@deterministic_option
@click.option("--check", is_flag=True, help="Also compare the predicted τ with the engine's on the held-out prompts.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def tree(as_json: bool, check: bool, **options: Any) -> None:
    """Store the tree with the most expected tokens a second in the heads' folder, where it is the default from then on.

    Expected tokens are exact for the held-out texts given with --data; from --accuracies they take the heads to be
    independent. Without a cost table the tree has --nodes nodes.
    """
    from rich.console import Console

    from specdec.training.check import prompts_of
    from specdec.training.trees import read_accuracies

    console = Console(stderr=as_json)
    _check_usage(options, check)
    given = read_accuracies(options["accuracies"]) if options["accuracies"] else None
    loaded = _load(options)
    with console.status("measuring"):
        examples = [] if given else _read_data(options["data"], loaded)
        prompts = prompts_of(examples, CHECK_PROMPTS) if check else []
        sizes, source = _measure(loaded, examples, given)
        nodes, rates = _choose(loaded, sizes, options["nodes"])
    choices = sizes.choices[: nodes - 1]
    if choices:
        _store(loaded, choices, sizes.chances[: nodes - 1], options["folder"])
    with console.status("answering the held-out prompts"):
        found = _check(loaded, choices, options["folder"], prompts) if prompts and choices else None
    if found:
        _add_to_card(loaded, choices, options["folder"], found, len(prompts))
    facts = source | {
        "nodes": nodes,
        "tree": choices,
        "expected_tau": {n: sizes.tau(n) for n in sorted({*SIZES, nodes}) if n <= len(sizes.taus)},
        "tokens_per_second": rates,
        "cost_table": loaded.table and asdict(loaded.table.key) | {"measured": loaded.table.measured},
        "stored_in": str(options["folder"]) if choices else None,
        "check": found and asdict(found) | {"difference": found.difference},
    }
    if as_json:
        click.echo(json.dumps(facts))
    else:
        _print(console, facts, found)


def _check_usage(options: dict[str, Any], check: bool) -> None:
    if (options["data"] is None) == (options["accuracies"] is None):
        raise click.UsageError("give held-out texts with --data, or --accuracies that were measured before")
    if check and options["data"] is None:
        raise click.UsageError("--check answers the prompts of --data; give that file")


def _load(options: dict[str, Any]) -> _Loaded:
    from specdec.build import cost_key, draft_target
    from specdec.drafters.heads import WEIGHTS_FILE, load_heads
    from specdec.engine.cost import find_table, read_table
    from specdec.hub.load import load
    from specdec.llm import resolve_device, resolve_dtype
    from specdec.models.load import make_target

    folder: Path = options["folder"]
    if not (folder / WEIGHTS_FILE).exists():
        raise CheckpointError(
            f"{folder}: holds no {WEIGHTS_FILE}; a tree is stored beside heads of our own layout: read others with "
            "`specdec.drafters.heads.load_heads`, and write them with `save_heads`"
        )
    table = None if options["device_costs"] == "auto" else read_table(Path(options["device_costs"]))
    device = resolve_device(options["device"])
    base = load(options["model"], dtype=resolve_dtype(options["dtype"], device), device=device)
    packed = make_target(base.model, options["deterministic"], None)
    key = cost_key(base.model, options["deterministic"], prepacked=packed.prepacked)
    if table is not None and table.key.fingerprint != key.fingerprint:
        raise ConfigError(
            f"{options['device_costs']} was measured for {table.model!r}, another model; "
            "run `specdec tune` for this one"
        )
    target = draft_target(base.model, packed)
    heads = load_heads(folder, target).requires_grad_(False)
    table = find_table(key) if table is None else table
    return _Loaded(base, target, heads, table, options["deterministic"])


def _read_data(path: Path, loaded: _Loaded) -> "list[Example]":
    from specdec.training.data import read_examples

    if loaded.base.tokenizer is None:
        raise ConfigError(f"model {loaded.base.name!r} has no tokenizer to read {path} with")
    longest = getattr(loaded.base.model.config.get_text_config(), "max_position_embeddings", None) or MAX_LEN
    return read_examples(path, loaded.base.tokenizer, min(longest, MAX_LEN))


def _measure(
    loaded: _Loaded, examples: "list[Example]", given: list[list[float]] | None
) -> "tuple[TreeSizes, dict[str, Any]]":
    """The trees of all sizes, and what they were made from."""
    from specdec.training.accuracies import accuracies_of, joint_ranks
    from specdec.training.trees import trees_from_accuracies, trees_from_replay

    if given is None:
        num_ranks = min(NUM_RANKS, loaded.heads.config.num_columns)
        joint = joint_ranks(loaded.base.model, loaded.heads, examples, num_ranks)
        return trees_from_replay(joint, num_ranks, MAX_NODES), {
            "positions": len(joint.ranks),
            "accuracies": accuracies_of(joint.ranks, num_ranks),
        }
    num_heads, num_tokens = loaded.heads.config.num_heads, loaded.heads.config.num_columns
    if len(given) != num_heads or max(map(len, given)) > num_tokens:
        raise ConfigError(
            f"the accuracies are of {len(given)} heads and up to {max(map(len, given))} ranks; these are {num_heads} "
            f"heads over {num_tokens} tokens"
        )
    return trees_from_accuracies(given, MAX_NODES), {"positions": None, "accuracies": given}


def _choose(loaded: _Loaded, sizes: "TreeSizes", nodes: int | None) -> tuple[int, dict[int, float]]:
    """Nodes of the tree to store, and expected tokens a second by size; empty where step times aren't known."""
    from specdec.training.trees import draft_seconds, fastest_size

    table = loaded.table
    if table is None:
        default = 16 if loaded.target.device.type == "cpu" else MAX_NODES
        return min(nodes or default, len(sizes.taus)), {}
    drafting = draft_seconds(loaded.heads, loaded.target.head_for(loaded.heads.token_ids))

    def seconds(n: int) -> float:
        return table.seconds(1, n, CONTEXT) + (drafting if n > 1 else 0.0)

    most = min(nodes or MAX_NODES, table.num_nodes[-1], len(sizes.taus))
    best = fastest_size(sizes, seconds, most)
    return best, {n: sizes.tau(n) / seconds(n) for n in sorted({*SIZES, best}) if n <= most}


def _store(loaded: _Loaded, choices: list[tuple[int, ...]], chances: list[float], folder: Path) -> None:
    from specdec.drafters.heads import save_config

    try:
        save_config(replace(loaded.heads.config, tree=tuple(choices), chances=tuple(chances)), folder)
    except OSError as error:
        raise ConfigError(f"can't write the tree to {folder}: {error}; nothing was changed") from error


def _check(loaded: _Loaded, choices: list[tuple[int, ...]], folder: Path, prompts: "list[Prompt]") -> "TauCheck":
    """Compare predicted and measured τ, with the engine as anyone gets it who names the folder."""
    from specdec.llm import LLM
    from specdec.params import SamplingParams
    from specdec.training.check import check_tau

    llm = LLM(
        loaded.base.model,
        str(folder),
        tokenizer=loaded.base.tokenizer,
        cost_table=None,
        deterministic=loaded.deterministic,
    )
    params = SamplingParams(max_new_tokens=CHECK_TOKENS)
    return check_tau(lambda ids: llm.generate(ids, params), loaded.base.model, loaded.heads, choices, prompts)


def _add_to_card(
    loaded: _Loaded, choices: list[tuple[int, ...]], folder: Path, found: "TauCheck", num_prompts: int
) -> None:
    from specdec.training.card import add_facts

    facts = {"nodes": 1 + len(choices), "prompts": num_prompts} | asdict(found)
    try:
        add_facts(folder, loaded.heads.config, tau=facts)
    except OSError as error:
        raise ConfigError(f"can't write the model card to {folder}: {error}; the tree is stored") from error


def _print(console: "Console", facts: dict[str, Any], found: "TauCheck | None") -> None:
    from rich import box
    from rich.table import Table

    where = "accuracies given" if facts["positions"] is None else f"{facts['positions']} held-out positions"
    console.print(f"expected from {where}; top-1 by head " + " ".join(f"{a[0]:.2f}" for a in facts["accuracies"]))
    if facts["positions"] is not None and facts["positions"] < FEW_POSITIONS:
        console.print(
            "so few positions make a tree that suits these texts better than others; give more held-out texts"
        )
    shown = Table(box=box.SIMPLE_HEAD, show_edge=False)
    rates = facts["tokens_per_second"]
    for heading in ("nodes", "τ", *(("tokens/s",) if rates else ())):
        shown.add_column(heading, justify="right")
    for n, tau in facts["expected_tau"].items():
        chosen = " ←" if n == facts["nodes"] else ""
        cells = [f"{tau:.2f}", *([f"{rates[n]:.1f}" if n in rates else "–"] if rates else [])]
        shown.add_row(str(n), *cells[:-1], cells[-1] + chosen)
    console.print(shown)
    if facts["stored_in"]:
        tau = facts["expected_tau"][facts["nodes"]]
        click.echo(f"{facts['nodes']} nodes, expected τ {tau:.2f}; stored in {facts['stored_in']}")
    else:
        click.echo("one node, which is plain decoding, is the fastest: no tree was stored")
    if found is not None:
        click.echo(
            f"τ predicted {found.predicted:.3f}, measured {found.measured:.3f} ({found.difference:+.1%}) over "
            f"{found.num_tokens} tokens; mean over all positions {found.expected:.3f}"
        )
        if found.by_category:
            click.echo("measured by category: " + ", ".join(f"{c} {tau:.2f}" for c, tau in found.by_category.items()))
