"""`specdec info`: what is installed, what would be used, and why."""

import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from specdec import __version__
from specdec.cli.options import DEFAULT_MODEL
from specdec.errors import ConfigError

if TYPE_CHECKING:
    import torch

_PACKAGES = ("torch", "transformers", "triton", "accelerate", "numpy", "safetensors", "tokenizers")


@click.command()
@click.option("--model", default=DEFAULT_MODEL, help="Also say whether this model can be used.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def info(model: str, as_json: bool) -> None:
    """Show versions, the device and the defaults, with the reason for each."""
    import json

    facts = _facts(model)
    if as_json:
        click.echo(json.dumps(facts))
        return
    for key, value in facts.items():
        click.echo(f"{key:<14} {value}")


def _facts(model: str) -> dict[str, Any]:
    import torch

    from specdec.drafters.registry import DRAFTERS
    from specdec.hub.load import describe
    from specdec.llm import resolve_device, resolve_dtype

    device = resolve_device("auto")
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else "torch sees no GPU"
    return {
        "specdec": __version__,
        "python": platform.python_version(),
        **{name: _version(name) for name in _PACKAGES},
        "device": f"{device.type} ({gpu})",
        "dtype": f"{str(resolve_dtype('auto', device)).removeprefix('torch.')} (the default on this device)",
        "threads": torch.get_num_threads(),
        "kernels": "torch references",
        "drafters": ", ".join(DRAFTERS),
        "model": f"{model}: {describe(model)}",
        "cost table": _cost_table(model, device, resolve_dtype("auto", device)),
    }


def _cost_table(model: str, device: "torch.device", dtype: "torch.dtype") -> str:
    """The newest table of a model of this name here; the engine also looks at the weights, which aren't opened."""
    import torch

    from specdec.engine.cost import device_name, list_tables, read_table

    here = (device_name(device), str(dtype).removeprefix("torch."), torch.__version__)
    for path in list_tables():
        try:
            table = read_table(path)
        except ConfigError as error:
            return str(error)
        key = table.key
        if (key.device, key.dtype, key.torch) == here and table.model in (model, Path(model).resolve().name):
            return f"{path}, measured {table.measured}"
    return "none: run `specdec tune`, and drafts get as many nodes as pay for themselves"


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"
