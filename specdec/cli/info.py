"""`specdec info`: what is installed, what would be used, and why."""

import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from specdec import __version__
from specdec.cli.memory import check_facts, plan_facts
from specdec.cli.options import DEFAULT_MODEL, cache_options, deterministic_option, prepack_option
from specdec.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from specdec.engine.config import EngineConfig

_PACKAGES = ("torch", "transformers", "triton", "accelerate", "numpy", "safetensors", "tokenizers")


@click.command()
@click.option("--model", default=DEFAULT_MODEL, help="Also say whether this model can be used.")
@click.option("--device", default="auto", help="auto takes a GPU where there is one.")
@click.option("--dtype", default="auto", help="auto is float32 on a CPU, bfloat16 on a GPU.")
@deterministic_option
@click.option("--plan", is_flag=True, help="Load the model and say what fits in memory.")
@click.option("--check-cache", is_flag=True, help="Load the model and measure what each cache format does to it.")
@click.option("--drafter", default="auto", help="For --plan: a draft model's cache counts too.")
@prepack_option
@cache_options
@click.option("--max-model-len", type=int, help="For --plan: most tokens of a request.")
@click.option("--max-num-seqs", type=int, default=16, help="For --plan: requests at once.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def info(as_json: bool, plan: bool, check_cache: bool, deterministic: bool, **options: Any) -> None:
    """Show versions, the device and what would run there, with the reason for each."""
    import json

    from specdec.engine.config import EngineConfig

    place = {name: options[name] for name in ("model", "device", "dtype")}
    stored = {name: options[name] for name in ("prepack", "kv_cache_dtype", "kv_group_size")}
    facts = _facts(**place, config=EngineConfig(deterministic=deterministic, **stored))
    if plan:
        facts |= plan_facts(options)
    if check_cache:
        facts |= check_facts(**place)
    if as_json:
        click.echo(json.dumps(facts))
        return
    for key, value in facts.items():
        click.echo(f"{key:<14} {value}")


def _facts(model: str, device: str, dtype: str, config: "EngineConfig") -> dict[str, Any]:
    import torch

    from specdec.drafters.registry import DRAFTERS
    from specdec.drafters.shipped import FOLDER
    from specdec.hub.load import describe
    from specdec.llm import resolve_device, resolve_dtype

    place = resolve_device(device)
    kind = resolve_dtype(dtype, place)
    gpu = torch.cuda.is_available()
    what = torch.cuda.get_device_name(place) if place.type == "cuda" else "as asked for" if gpu else "torch sees no GPU"
    return {
        "specdec": __version__,
        "python": platform.python_version(),
        **{name: _version(name) for name in _PACKAGES},
        "device": f"{place.type} ({what})",
        "dtype": f"{_short(kind)} ({'the default on this device' if dtype == 'auto' else 'as asked for'})",
        "threads": torch.get_num_threads(),
        "kernels": _kernels(place, kind, config.deterministic),
        "drafters": ", ".join(DRAFTERS),
        "quantization": _quantization(),
        "shipped heads": ", ".join(sorted(path.name for path in FOLDER.glob("*/"))) or "none",
        "model": f"{model}: {describe(model)}",
        **_steps(place, kind),
        "cost table": _cost_table(model, place, kind, config),
    }


def _kernels(device: "torch.device", dtype: "torch.dtype", deterministic: bool) -> str:
    """Which ops the decoder would run by, and what that means for a token's bits."""
    from specdec.kernels.ops import choose_ops, why_not_triton

    ops, why = choose_ops(device, dtype, deterministic), why_not_triton(device, dtype)
    if why is None:
        promise = "don't depend on its batch" if deterministic else "may depend on its batch"
        return f"{ops.name}: a token's bits {promise}"
    return f"{ops.name}: a token's last bits may depend on its batch; Triton's kernels need {why}"


def _quantization() -> str:
    """Which ways to quantize weights are ready, what the others need, and what quantized weights cost."""
    from specdec.hub.quantize import QUANTIZATIONS, is_installed

    ready: dict[str, list[str]] = {}
    for name, kind in QUANTIZATIONS.items():
        how = f"by {kind.package}" if is_installed(kind.package) else f"after pip install {kind.package}"
        ready.setdefault(how, []).append(f"{name} (on a GPU)" if kind.gpu_only else name)
    kinds = "; ".join(f"{', '.join(names)} {how}" for how, names in ready.items())
    return f"{kinds}; by these products a token's last bits may depend on its batch"


def _steps(device: "torch.device", dtype: "torch.dtype") -> dict[str, str]:
    """Whether decode steps would be captured, and what that depends on besides the device."""
    from specdec.drafters.registry import DRAFTERS, drafts_on_device
    from specdec.engine.capturable import EAGER_PARAMETERS
    from specdec.kernels.ops import why_not_triton
    from specdec.models.families import FAMILIES
    from specdec.verifier.rules import RULES, CoupledRule

    drafters = {
        name: drafts_on_device(name) for name in [*DRAFTERS, "ngram+shipped", "ngram+draft_model"] if name != "auto"
    }
    rules = {name: rule is CoupledRule for name, rule in RULES.items()}

    def names(of: dict[str, bool], captured: bool) -> str:
        return ", ".join(name for name, yes in of.items() if yes == captured)

    able = why_not_triton(device, dtype) is None
    return {
        "steps": "captured, where nothing below is eager" if able else "eager: captured steps need Triton's kernels",
        "captured": f"models {', '.join(FAMILIES)}; drafters {names(drafters, True)}; rule {names(rules, True)}",
        "eager": f"other models; quantized weights; drafters {names(drafters, False)}; rule {names(rules, False)}; "
        f"parameters {', '.join(EAGER_PARAMETERS)}",
    }


def _cost_table(model: str, device: "torch.device", dtype: "torch.dtype", config: "EngineConfig") -> str:
    """The newest table of a model of this name here; the engine also looks at the weights, which aren't opened.

    They are taken to be prepacked as asked, and else where that can be. On a GPU those of a small model aren't, so a
    table of either kind is named there.
    """
    import torch

    from specdec.engine.cost import costs_folder, device_name, list_tables, read_table
    from specdec.kernels.prepack import can_prepack

    can = can_prepack(device, dtype)
    prepacked = {can, can and device.type == "cpu"} if config.prepack is None else {config.prepack}
    kinds = {_short(dtype) + ("-prepacked" if yes else "") for yes in prepacked}
    here = (device_name(device), torch.__version__, config.deterministic, config.kv_cache_name)
    for path in list_tables():
        try:
            table = read_table(path)
        except ConfigError as error:
            return str(error)
        key = table.key
        there = (key.device, key.torch, key.deterministic, key.kv_cache)
        if there == here and key.dtype in kinds and table.model in (model, Path(model).resolve().name):
            return f"{path}, measured {table.measured}"
    command = "specdec tune" if config.deterministic else "specdec tune --no-deterministic"
    if config.prepack is not None:
        command += f" --{'' if config.prepack else 'no-'}prepack"
    if config.kv_cache_dtype != "auto":
        command += f" --kv-cache-dtype {config.kv_cache_dtype}"
    if config.kv_group_size is not None:
        command += f" --kv-group-size {config.kv_group_size}"
    return f"none: run `{command}`, and drafts get as many nodes as pay for themselves; it will be in {costs_folder()}"


def _short(dtype: "torch.dtype") -> str:
    return str(dtype).removeprefix("torch.")


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"
