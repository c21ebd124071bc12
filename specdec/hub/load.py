"""Open a model safely: a known name, a local folder, a hub id, or a model already in memory.

Weights come from safetensors only and no code from a checkpoint is ever imported; nothing here can be told otherwise.
"""

import difflib
import os
import re
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from specdec.errors import CheckpointError, ConfigError, ModelNotFound, SpecdecError, UnsupportedModel
from specdec.hub import checks, fetch
from specdec.hub.checks import Source
from specdec.hub.known import KNOWN_MODELS
from specdec.hub.quiet import quiet

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

DType = torch.dtype | Literal["auto"]

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")
_HUB_ID = r"[\w-][\w.-]*(/[\w-][\w.-]*)?"
_CHOICES = f"give a folder, a hub id (owner/name), or a name that `specdec pull` knows: {', '.join(KNOWN_MODELS)}"


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model ready to run.

    Args:
        model: in evaluation mode, on its device.
        tokenizer: None where the checkpoint has none and none was given.
        name: what to call the model: its known name, its folder's name, or its hub id.
    """

    model: "PreTrainedModel"
    tokenizer: "PreTrainedTokenizerBase | None"
    name: str


def load(
    model: "str | os.PathLike[str] | PreTrainedModel",
    *,
    dtype: DType,
    device: torch.device | str,
    tokenizer: "str | os.PathLike[str] | PreTrainedTokenizerBase | None" = None,
    quantization: Any = None,
) -> Loaded:
    """Open a causal language model and its tokenizer.

    Args:
        model: a name that `specdec pull` knows (fetched when it isn't yet), a folder, a hub id, or a model in memory.
            The last is moved to `device` and, unless `dtype` is "auto", to `dtype`; whether its parameters take
            gradients stays as it was, and whether it can be run is `make_target`'s to say.
        dtype: of the weights, e.g. `torch.bfloat16`; "auto" takes the checkpoint's own.
        device: where the weights go.
        tokenizer: an object, folder or hub id to use in place of the checkpoint's own tokenizer.
        quantization: a transformers quantization config, to quantize the weights of a checkpoint as they are read;
            `specdec.hub.quantize` makes some by name.

    Returns:
        The model in evaluation mode, without gradients, its tokenizer and its name.

    Raises:
        ModelNotFound: neither a known name, a folder, nor a hub id that can be reached.
        DownloadError: a known model could not be fetched.
        CheckpointError: pickled, torn, incomplete or ill-fitting weights, a broken config or tokenizer.
        ConfigError: a model in memory is to be quantized.
        UnsupportedModel: a checkpoint of no decoder-only language model, or one that needs its own code; an object
            that is no transformers model; weights that can't be quantized as asked.
    """
    if not isinstance(model, (str, os.PathLike)):
        if quantization is not None:
            raise ConfigError("a model in memory can't be quantized; give its folder, or load it quantized")
        return Loaded(_in_memory(model, dtype, device), _given_tokenizer(tokenizer), _name_in_memory(model))
    source, name = _resolve(model)
    with quiet() if isinstance(source, Path) else nullcontext():  # a hub's downloads show their bars
        weights = _open_weights(source, _open_config(source), dtype, device, quantization)
        own = _open_tokenizer(source) if tokenizer is None else _given_tokenizer(tokenizer)
    return Loaded(weights, own, name)


def describe(model: str | os.PathLike[str]) -> str:
    """Say in one line what `load` would do with a model, without fetching or opening any weights.

    Args:
        model: a known name, a folder or a hub id.
    """
    known = KNOWN_MODELS.get(str(model))
    if known is not None:
        folder = fetch.model_folder(known.name)
        size = sum(part.size for part in known.parts) / 1e6
        there = fetch.is_complete(folder, known)
        return f"{known.title}, " + (f"ready in {folder}" if there else f"fetched on first use ({size:.0f} MB)")
    try:
        source, _ = _resolve(model)
        if isinstance(source, str):
            return "a hub id, fetched on first use where the hub can be reached"
        with quiet():
            config = _open_config(source)
            checks.check_weights(source, config)
    except SpecdecError as error:
        return f"can't be used: {error}"
    return f"a {config.model_type} model in {source}"


def _resolve(model: str | os.PathLike[str]) -> tuple[Source, str]:
    """Return where the checkpoint is, and its name."""
    if isinstance(model, str) and model in KNOWN_MODELS:
        return fetch.pull(model), model
    path = Path(model).expanduser()
    if path.is_dir():
        return path, path.resolve().name
    if path.is_file():
        raise CheckpointError(f"{path} is a file; give the folder that holds config.json and the safetensors weights")
    if not isinstance(model, str) or not re.fullmatch(_HUB_ID, model, re.ASCII):
        raise ModelNotFound(f"there is no folder {str(model)!r}; {_CHOICES}")
    close = difflib.get_close_matches(model.lower(), KNOWN_MODELS, n=1)
    if close and "/" not in model:  # what has an owner before it is an id of the hub
        raise ModelNotFound(f"there is no model {model!r}; did you mean {close[0]!r}? Or {_CHOICES}")
    return model, model


def _open_config(source: Source) -> "PreTrainedConfig":
    """Read and check a checkpoint's config; a choice of kernels in it, code from the hub, is dropped."""
    from transformers import AutoConfig

    if isinstance(source, Path) and checks.find(source, "config.json") is None:
        raise CheckpointError(f"{source} holds no config.json; give the folder that `save_pretrained` wrote")
    try:
        config = AutoConfig.from_pretrained(source, trust_remote_code=False)
    except OSError as error:
        if isinstance(source, Path):
            raise CheckpointError(f"the config of {source} can't be read: {_short(error)}") from error
        raise ModelNotFound(f"{source!r} is no folder, and the hub gave none: {_short(error)}; {_CHOICES}") from error
    except ValueError as error:
        reason = str(error).partition("\n")[0]
        raise UnsupportedModel(f"{reason} (specdec never runs code that comes with a checkpoint)") from error
    except Exception as error:  # transformers' validators raise exceptions of many kinds
        raise CheckpointError(f"the config of {source} can't be read: {_short(error)}") from error
    for choice in ("_attn_implementation", "_experts_implementation"):
        if getattr(config, choice, None) is not None:
            setattr(config, choice, None)
    checks.check_causal(source, config)
    return config


def _open_weights(
    source: Source, config: "PreTrainedConfig", dtype: DType, device: torch.device | str, quantization: Any
) -> "PreTrainedModel":
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM

    checks.check_weights(source, config)
    try:
        model, info = AutoModelForCausalLM.from_pretrained(
            source,
            config=config,
            dtype=dtype,
            device_map={"": device},
            quantization_config=quantization,
            use_safetensors=True,
            trust_remote_code=False,
            ignore_mismatched_sizes=True,  # collected and refused below, by name
            output_loading_info=True,
        )
    except SafetensorError as error:
        torn = "; ".join(checks.torn_files(source)) or str(error)
        raise CheckpointError(f"weights of {source} are torn: {torn}; copy the model again") from error
    except OSError as error:
        raise CheckpointError(f"the weights of {source} can't be read: {_short(error)}") from error
    except (KeyError, ValueError) as error:
        raise CheckpointError(f"{source} can't be built from its config: {error!r}") from error
    except RuntimeError as error:
        if quantization is None or isinstance(error, torch.OutOfMemoryError):
            raise
        raise UnsupportedModel(f"{source} can't be quantized so in {dtype} on {device}: {_short(error)}") from error
    except ImportError as error:
        raise UnsupportedModel(f"{source} needs a package that is not installed: {_short(error)}") from error
    bad = sorted([*info["missing_keys"], *(name for name, *_ in info["mismatched_keys"])])
    if bad:
        raise CheckpointError(
            f"{len(bad)} weights of {source} are missing or of the wrong shape, {bad[0]} for one; "
            "the checkpoint doesn't belong to its config"
        )
    return model.requires_grad_(False).eval()


def _open_tokenizer(source: Source) -> "PreTrainedTokenizerBase | None":
    from transformers import AutoTokenizer

    if not any(checks.find(source, name) for name in _TOKENIZER_FILES):
        return None
    try:
        return AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    except Exception as error:  # the tokenizers library raises bare exceptions
        raise CheckpointError(f"the tokenizer of {source} can't be read: {_short(error)}") from error


def _given_tokenizer(
    tokenizer: "str | os.PathLike[str] | PreTrainedTokenizerBase | None",
) -> "PreTrainedTokenizerBase | None":
    if not isinstance(tokenizer, (str, os.PathLike)):
        return tokenizer
    found = _open_tokenizer(_resolve(tokenizer)[0])
    if found is None:
        raise CheckpointError(f"{str(tokenizer)!r} holds no tokenizer")
    return found


def _in_memory(model: "PreTrainedModel", dtype: DType, device: torch.device | str) -> "PreTrainedModel":
    """Check a model that the user built, and move it where it isn't there yet."""
    from transformers import PreTrainedModel

    if not isinstance(model, PreTrainedModel):
        raise UnsupportedModel(f"{type(model).__name__} is no transformers model; merge an adapter into its base first")
    if len({p.device for p in model.parameters()}) > 1:
        return model.eval()  # its hooks move what it computes; who needs one device refuses it by name
    there, wanted = model.device, torch.device(device)
    if getattr(model, "hf_quantizer", None) is not None and dtype in ("auto", model.dtype):
        if there.type == wanted.type and wanted.index in (None, there.index):
            return model.eval()  # some quantized models refuse to be moved, even to where they are
    if dtype != "auto" and dtype != model.dtype:
        _cast(model, dtype)
    return model.to(device).eval()


def _cast(model: "PreTrainedModel", dtype: torch.dtype) -> None:
    """Change the dtype as `from_pretrained` does, which leaves alone what it computes: rotary frequencies need fp32."""
    computed = [
        (module, name, buffer)
        for module in model.modules()
        for name, buffer in module.named_buffers(recurse=False)
        if name in module._non_persistent_buffers_set
    ]
    model.to(dtype=dtype)
    for module, name, buffer in computed:
        setattr(module, name, buffer)


def _name_in_memory(model: "PreTrainedModel") -> str:
    return Path(model.config.name_or_path or type(model).__name__).name


def _short(error: BaseException) -> str:
    """Return an exception's message on one line."""
    return " ".join(str(error).split())[:300]
