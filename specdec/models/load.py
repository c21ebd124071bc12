"""Chooses how a loaded Hugging Face model is run."""

import psutil
import torch
from transformers import PreTrainedModel

from specdec.errors import ConfigError, UnsupportedModel
from specdec.kernels.ops import choose_ops
from specdec.kernels.prepack import WHERE, can_prepack
from specdec.kernels.slabs import LEAST_INPUTS, SLAB
from specdec.models.decoder import Decoder
from specdec.models.families import FAMILIES
from specdec.models.hf import HFModel


def make_target(model: PreTrainedModel, deterministic: bool = True, prepack: bool | None = False) -> Decoder | HFModel:
    """Make a model ready for packed batches: by the decoder where it knows the family, else by its own forward.

    Args:
        model: a loaded causal LM in eval mode.
        deterministic: whether the decoder's kernels on a GPU give a row the same bits in any batch.
        prepack: whether the decoder multiplies by copies of the weights in the order in which products read them; None
            where that can be and the copies take at most half of the memory that is left.

    Raises:
        ConfigError: weights can't be prepacked on this device, in this dtype, or as the model is run.
        UnsupportedModel: neither can run it, its weights lie on several devices, or on another than kernels run on; the
            message says why.
    """
    devices = sorted({str(p.device) for p in model.parameters()})
    if len(devices) > 1:
        raise UnsupportedModel(
            f"the weights lie on {' and '.join(devices)}; specdec runs a model on one device: load it without "
            'device_map, or with device_map={"": 0}'
        )
    if (why := why_not_on(model.device)) is not None:
        raise UnsupportedModel(why)
    prepacked = _prepacked(model, prepack)
    target = _make_target(model, deterministic, prepacked)
    if prepack and not isinstance(target, Decoder):
        raise ConfigError(
            f"this {model.config.model_type} runs by its own forward, with its own weights; leave prepack out"
        )
    if prepack and not target.prepacked:
        raise ConfigError(
            f"this model has no matrix that gains by it on {model.device}: of {LEAST_INPUTS:,} inputs or more, in "
            f"multiples of {SLAB}, and not quantized; leave prepack out"
        )
    return target


def _make_target(model: PreTrainedModel, deterministic: bool, prepacked: bool) -> Decoder | HFModel:
    if model.config.model_type not in FAMILIES:
        return HFModel(model)
    try:
        return Decoder(model, choose_ops(model.device, model.dtype, deterministic), prepacked=prepacked)
    except UnsupportedModel as error:  # a feature of the config that the decoder doesn't know
        try:
            return HFModel(model)
        except UnsupportedModel as also:
            raise UnsupportedModel(f"{error}; by its own forward: {also}") from also


def _prepacked(model: PreTrainedModel, prepack: bool | None) -> bool:
    """Whether the weights of a model that the decoder runs are to be prepacked."""
    can = can_prepack(model.device, model.dtype)
    if prepack and not can:
        raise ConfigError(
            f"weights in {str(model.dtype).removeprefix('torch.')} can't be prepacked on {model.device}; that is for "
            f"{WHERE}: leave prepack out"
        )
    return can and (2 * model.get_memory_footprint() <= _left(model.device) if prepack is None else prepack)


def _left(device: torch.device) -> int:
    """Bytes of memory that are left on a device."""
    if device.type != "cuda":
        available: int = psutil.virtual_memory().available
        return available
    free: int = torch.cuda.mem_get_info(device)[0]
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def why_not_on(device: torch.device) -> str | None:
    """Return why models can't be run on a device, or None if they can: on a CPU, and on torch's current GPU."""
    if device.type not in ("cpu", "cuda"):
        return f"device '{device}' is neither a CPU nor an NVIDIA GPU; use device='cpu' or 'cuda'"
    if device.type == "cuda" and device.index not in (None, torch.cuda.current_device()):
        return (
            f"device '{device}' isn't torch's current GPU, number {torch.cuda.current_device()}, on which kernels run; "
            f"choose a GPU by the variable CUDA_VISIBLE_DEVICES, or call torch.cuda.set_device({device.index}) first"
        )
    return None
