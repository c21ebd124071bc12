"""`specdec info`: what is installed, what would be used, and why."""

import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import click

from specdec import __version__
from specdec.cli.options import DEFAULT_MODEL

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
    }


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"
