"""How weights are quantized while they are read, by name: transformers' quantizers and the libraries they need."""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from specdec.errors import ConfigError
from specdec.hub.quiet import quiet


def _int8() -> Any:
    """Int8 weights, a scale a row."""
    from torchao.quantization import Int8WeightOnlyConfig
    from transformers import TorchAoConfig

    return TorchAoConfig(Int8WeightOnlyConfig(set_inductor_config=False))


def _int8_dynamic() -> Any:
    """Int8 weights and, a scale a token, int8 activations."""
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig
    from transformers import TorchAoConfig

    return TorchAoConfig(Int8DynamicActivationInt8WeightConfig(set_inductor_config=False))


def _int4() -> Any:
    """Int4 weights in groups of 64."""
    from torchao.quantization import Int4WeightOnlyConfig
    from transformers import TorchAoConfig

    return TorchAoConfig(
        Int4WeightOnlyConfig(group_size=64, int4_packing_format="tile_packed_to_4d", set_inductor_config=False)
    )


def _fp8() -> Any:
    """Fp8 (e4m3) weights, a scale a row."""
    from torchao.quantization import Float8WeightOnlyConfig
    from transformers import TorchAoConfig

    return TorchAoConfig(Float8WeightOnlyConfig(set_inductor_config=False))


def _nf4() -> Any:
    """4-bit normal-float weights."""
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16)


@dataclass(frozen=True, slots=True)
class Quantization:
    """One way to quantize.

    Args:
        package: does it.
        make: makes the config; the settings that torchao changes for the whole process stay as they are.
        gpu_only: whether it needs an NVIDIA GPU and bfloat16.
    """

    package: str
    make: Callable[[], Any]
    gpu_only: bool = False


QUANTIZATIONS = {
    "int8": Quantization("torchao", _int8),
    "int8_dynamic": Quantization("torchao", _int8_dynamic),
    "int4": Quantization("torchao", _int4, gpu_only=True),
    "fp8": Quantization("torchao", _fp8),
    "nf4": Quantization("bitsandbytes", _nf4),
}
"""LLM.int8 is not among them: which columns are outliers to it depends on all rows of a batch, so drafts would show."""


def quantization_config(name: str, dtype: torch.dtype, device: torch.device) -> Any:
    """Return transformers' config for a kind of quantization.

    Args:
        name: a key of `QUANTIZATIONS`.
        dtype: of what is not quantized.
        device: where the weights go.

    Raises:
        ConfigError: the name is unknown, the library is not installed, or the device or the dtype don't do.
    """
    if name not in QUANTIZATIONS:
        raise ConfigError(f"quantization {name!r} is unknown; choose from {', '.join(QUANTIZATIONS)}")
    chosen = QUANTIZATIONS[name]
    if not is_installed(chosen.package):
        raise ConfigError(f"quantization {name!r} needs {chosen.package}: pip install {chosen.package}")
    if chosen.gpu_only and (device.type != "cuda" or dtype != torch.bfloat16):
        others = ", ".join(other for other, kind in QUANTIZATIONS.items() if not kind.gpu_only)
        raise ConfigError(f"quantization {name!r} needs an NVIDIA GPU and bfloat16; others are {others}")
    with quiet():
        return chosen.make()


def is_installed(package: str) -> bool:
    """Whether a package can be imported; it isn't, to find out."""
    return importlib.util.find_spec(package) is not None
