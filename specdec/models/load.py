"""Chooses how a loaded Hugging Face model is run."""

from transformers import PreTrainedModel

from specdec.errors import UnsupportedModel
from specdec.kernels.ops import choose_ops
from specdec.models.decoder import Decoder
from specdec.models.families import FAMILIES
from specdec.models.hf import HFModel


def make_target(model: PreTrainedModel, deterministic: bool = True) -> Decoder | HFModel:
    """Make a model ready for packed batches: by the decoder where it knows the family, else by its own forward.

    Args:
        model: a loaded causal LM in eval mode.
        deterministic: whether the decoder's kernels on a GPU give a row the same bits in any batch.

    Raises:
        UnsupportedModel: neither can run it, or its weights lie on several devices; the message says why.
    """
    devices = sorted({str(p.device) for p in model.parameters()})
    if len(devices) > 1:
        raise UnsupportedModel(
            f"the weights lie on {' and '.join(devices)}; specdec runs a model on one device: load it without "
            'device_map, or with device_map={"": 0}'
        )
    if model.config.model_type not in FAMILIES:
        return HFModel(model)
    try:
        return Decoder(model, choose_ops(model.device, model.dtype, deterministic))
    except UnsupportedModel as error:  # a feature of the config that the decoder doesn't know
        try:
            return HFModel(model)
        except UnsupportedModel as also:
            raise UnsupportedModel(f"{error}; by its own forward: {also}") from also
