"""What a checkpoint must be before transformers may open it: safetensors only, a causal LM, no code of its own.

`use_safetensors=True` alone is not enough: a weights index, or a file name in the config, can still point to a pickle.
"""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specdec.errors import CheckpointError, UnsupportedModel

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")

Source = Path | str  # a local folder, or a hub id


def find(source: Source, name: str) -> Path | None:
    """Return the path of one of a checkpoint's files, downloaded first where the source is a hub id.

    Args:
        source: a local folder or a hub id.
        name: the file's name.

    Returns:
        None where the checkpoint has no such file.
    """
    if isinstance(source, Path):
        return source / name if (source / name).is_file() else None
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError

    try:
        return Path(hf_hub_download(source, name))
    except EntryNotFoundError:  # offline, also a file that was never downloaded
        return None


def check_causal(source: Source, config: "PreTrainedConfig") -> None:
    """Refuse configs that are no decoder-only language model.

    Raises:
        UnsupportedModel: encoders, encoder-decoders, headless models, and models that need code of their own.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    kind = f"{source} is a {config.model_type} model ({', '.join(config.architectures or ['no architecture named'])})"
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING or getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModel(f"{kind}; specdec runs decoder-only language models")
    causal = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].__name__
    if config.architectures and causal not in config.architectures:
        reason = "and is never given code of its own to run" if hasattr(config, "auto_map") else "and has no such head"
        raise UnsupportedModel(f"{kind}; it is not saved as a {causal}, {reason}")


def check_weights(source: Source, config: "PreTrainedConfig") -> None:
    """Refuse checkpoints whose weights are anything but safetensors; nothing is unpickled to find out.

    Raises:
        CheckpointError: pickled weights, an adapter, a broken index, or no weights at all.
    """
    if find(source, "adapter_config.json") is not None:
        raise CheckpointError(f"{source} is an adapter; merge it into its base model and save that")
    name = getattr(config, "transformers_weights", None)
    if name is not None:
        _check_name(source, "config.json", name, (".safetensors", ".safetensors.index.json"))
        index = find(source, name) if name.endswith(".json") else None
    else:
        index = find(source, INDEX)
        if index is None and find(source, SINGLE) is None and not _shards(source):
            raise CheckpointError(_no_weights(source))
    if index is not None:
        for shard in _weight_map(index).values():
            _check_name(source, index.name, shard, (".safetensors",))
            if isinstance(source, Path) and not (source / shard).is_file():
                raise CheckpointError(f"{source} lacks {shard}, which {index.name} names; copy the model again")


def torn_files(source: Source) -> list[str]:
    """Return the names of a local folder's safetensors files that can't be opened, with the reason."""
    from safetensors import SafetensorError, safe_open

    torn = []
    for file in _shards(source):
        try:
            with safe_open(file, framework="pt"):
                continue
        except SafetensorError as error:
            torn.append(f"{file.name} ({error})")
    return torn


def _shards(source: Source) -> list[Path]:
    return sorted(source.glob("*.safetensors")) if isinstance(source, Path) else []


def _check_name(source: Source, where: str, name: Any, suffixes: tuple[str, ...]) -> None:
    if not isinstance(name, str) or not name.endswith(suffixes):
        raise CheckpointError(f"{where} of {source} names {name!r} as weights; only safetensors files are opened")


def _weight_map(index: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{index} is no index of weights ({error!r}); copy the model again") from error


def _no_weights(source: Source) -> str:
    local = source.iterdir() if isinstance(source, Path) else []
    pickles = sorted(file.name for file in local if file.suffix in _PICKLES)
    if pickles:
        return (
            f"{source} holds {', '.join(pickles)}: pickled weights can run code when they are opened, so specdec never "
            "opens them; convert them to safetensors (load them once where you trust them, then `save_pretrained`)"
        )
    return f"{source} holds no {SINGLE} and no {INDEX}; specdec reads safetensors weights only"
