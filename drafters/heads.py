"""Draft heads on disk: our folder, the published ones, and the fingerprint of the base that they belong to.

Our folder holds `config.json` and `heads.safetensors`. Knows no requests and no trees' meaning; the modules are in
`specdec.drafters.draft_heads`, published heads in `specdec.drafters.published`.
"""

import hashlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from safetensors.torch import save_file
from torch import Tensor

from specdec.drafters.draft_heads import TOKEN_IDS, DraftHeads, HeadsConfig
from specdec.drafters.hydra_heads import HydraHeads
from specdec.drafters.layouts import check_tensors, read_tensors
from specdec.drafters.medusa_heads import MedusaHeads
from specdec.drafters.protocol import DraftTarget
from specdec.drafters.published import PUBLISHED_FILES, published_kind, read_published
from specdec.drafters.recurrent_heads import RecurrentHeads
from specdec.errors import CheckpointError, ConfigError
from specdec.hub.cache import replace_file

if TYPE_CHECKING:
    from transformers import PreTrainedModel

H = TypeVar("H", MedusaHeads, HydraHeads, RecurrentHeads)
Heads = MedusaHeads | HydraHeads | RecurrentHeads

__all__ = [
    "DraftHeads",
    "HeadsConfig",
    "HydraHeads",
    "MedusaHeads",
    "RecurrentHeads",
    "base_fingerprint",
    "base_of_heads",
    "heads_kind",
    "load_heads",
    "load_heads_of",
    "make_heads",
    "save_config",
    "save_heads",
]

FORMAT = "specdec-heads"
KINDS: dict[str, type[Heads]] = {"medusa": MedusaHeads, "hydra": HydraHeads, "recurrent": RecurrentHeads}
VERSION = 1
CONFIG_FILE = "config.json"
WEIGHTS_FILE = "heads.safetensors"

_FINGERPRINT_KEYS = ("model_type", "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
_FINGERPRINT_ROWS = 8


def base_fingerprint(model: "PreTrainedModel") -> str:
    """Return a short hash that tells one base model from another.

    It covers the model type, the sizes and a few rows of the input embedding and the output head, as bf16: a model in
    bf16 and the same model loaded in fp32 have the same fingerprint.

    Args:
        model: the base, on any device.

    Returns:
        16 hexadecimal digits.
    """
    config = model.config.get_text_config().to_dict()
    digest = hashlib.blake2b(json.dumps([config.get(key) for key in _FINGERPRINT_KEYS]).encode(), digest_size=8)
    for module in (model.get_input_embeddings(), model.get_output_embeddings() or model.get_input_embeddings()):
        weight: Tensor = module.weight.detach()
        rows = [i * (len(weight) - 1) // (_FINGERPRINT_ROWS - 1) for i in range(_FINGERPRINT_ROWS)]
        sample = weight[rows].to("cpu", torch.bfloat16).contiguous()
        digest.update(sample.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def make_heads(
    config: HeadsConfig, device: torch.device | str | None = None, dtype: torch.dtype | None = None
) -> Heads:
    """Return new heads of the config's kind: the identity on the hidden state, own projections zero."""
    return KINDS[config.kind](config, device, dtype)


def save_heads(heads: DraftHeads, path: str | Path) -> None:
    """Write heads to a folder, each file in one atomic step; whatever else it holds is left alone.

    Args:
        heads: the heads; their dtype is kept.
        path: the folder, made if it doesn't exist.
    """
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    state = {name: tensor.detach().cpu().contiguous() for name, tensor in heads.state_dict().items()}
    metadata = {"format": FORMAT, "base_fingerprint": heads.config.base_fingerprint}
    replace_file(folder / WEIGHTS_FILE, lambda file: save_file(state, file, metadata))
    save_config(heads.config, folder)


def save_config(config: HeadsConfig, path: str | Path) -> None:
    """Write the config of a heads folder alone, in one atomic step: for another tree beside the same weights."""
    text = json.dumps({"format": FORMAT, "kind": config.kind, "version": VERSION} | asdict(config), indent=2)
    replace_file(Path(path) / CONFIG_FILE, lambda file: file.write_text(text + "\n", encoding="utf-8"))


def load_heads(
    path: str | Path, target: DraftTarget | None = None, *, allow_pickle: bool = False, check_base: bool = True
) -> Heads:
    """Load draft heads, ours or published, and check that they are whole and belong to the target.

    Reads our folder, Medusa v1 (`medusa_lm_head.safetensors` or `.pt`), Medusa "version": "2" (residual blocks
    before the base's own head), vLLM's Medusa, and Hydra's "mlp" (`hydra_lm_head.safetensors` or `.pt`). The number of
    heads and blocks of a published checkpoint comes from its weights. Nothing in a file is executed.

    Args:
        path: the folder, or the weights file itself.
        target: the model that they shall draft for: its sizes and fingerprint are checked, its device and dtype
            taken. None checks nothing and reads to the CPU in the file's dtype.
        allow_pickle: whether a `.pt` or `.bin` file may be read, by the restricted unpickler.
        check_base: False takes heads whose base has another fingerprint, such as the same model quantized otherwise.

    Raises:
        CheckpointError: a file is missing, damaged, pickled, of another layout, or for another model; the message
            names the file and the key.
    """
    path = Path(path)
    if not path.exists():
        raise CheckpointError(f"{path}: no such file or folder; give the folder that holds the heads' {CONFIG_FILE}")
    folder = path if path.is_dir() else path.parent
    raw = _read_json(folder / CONFIG_FILE)
    if _is_ours(path, raw):
        config, state = _read_ours(folder, raw)
    else:
        config, state = read_published(path, raw, target, allow_pickle, check_base)
    if target is not None:
        _check_target(config, target, path, check_base)
    heads = make_heads(config, device="meta")
    heads.load_state_dict(state, assign=True)
    return heads if target is None else heads.to(target.device, target.dtype)


def load_heads_of(kind: type[H], path: str | Path, target: DraftTarget, **how: bool) -> H:
    """Load heads as `load_heads` does, and check that they are of one kind.

    Args:
        kind: their class.
        path, target: as for `load_heads`.
        how: its keyword arguments.

    Raises:
        CheckpointError: as `load_heads`, or they are of another kind.
    """
    heads = load_heads(path, target, **how)
    if not isinstance(heads, kind):
        raise CheckpointError(f'{path}: holds {heads.config.kind} heads; draft with "{heads.config.kind}:{path}"')
    return heads


def heads_kind(path: str | Path) -> str:
    """Return the kind of the heads at a path, "medusa" where it can't be told: `load_heads` says what is wrong.

    Args:
        path: as for `load_heads`.
    """
    path = Path(path)
    try:
        raw = _read_json((path if path.is_dir() else path.parent) / CONFIG_FILE)
    except CheckpointError:
        return "medusa"
    kind = raw.get("kind") if _is_ours(path, raw) else published_kind(path)
    return kind if isinstance(kind, str) and kind in KINDS else "medusa"


def base_of_heads(folder: Path) -> str:
    """Return the fingerprint of the base that the heads in a folder of our layout were trained for; empty if unknown.

    Raises:
        CheckpointError: its config is damaged.
    """
    return str(_read_json(folder / CONFIG_FILE).get("base_fingerprint", ""))


def _is_ours(path: Path, raw: dict[str, Any]) -> bool:
    folder = path if path.is_dir() else path.parent
    return (folder / WEIGHTS_FILE).exists() and path.name not in PUBLISHED_FILES or "format" in raw


def _read_json(path: Path) -> dict[str, Any]:
    """The config beside the weights; empty if there is none."""
    if not path.exists():
        return {}
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{path}: isn't JSON ({error}); copy or download it again") from error
    if not isinstance(raw, dict):
        raise CheckpointError(f"{path}: isn't a JSON object; copy or download it again")
    return raw


def _read_ours(folder: Path, raw: dict[str, Any]) -> tuple[HeadsConfig, dict[str, Tensor]]:
    config = _parse_config(folder / CONFIG_FILE, raw)
    file = folder / WEIGHTS_FILE
    tensors, metadata = read_tensors(file, allow_pickle=False)
    expected = make_heads(config, device="meta").state_dict()
    shapes = {name: tuple(tensor.shape) for name, tensor in expected.items()}
    if shapes.pop(TOKEN_IDS, None):
        _check_token_ids(tensors.get(TOKEN_IDS), config, file)
        check_tensors({name: tensor for name, tensor in tensors.items() if name != TOKEN_IDS}, shapes, file)
    else:
        check_tensors(tensors, shapes, file)
    if metadata.get("base_fingerprint") != config.base_fingerprint:
        raise CheckpointError(
            f"{file}: was saved for base {metadata.get('base_fingerprint')!r}, but {CONFIG_FILE} says "
            f"{config.base_fingerprint!r}; the two are from different saves, save the heads again"
        )
    return config, tensors


def _check_token_ids(ids: Tensor | None, config: HeadsConfig, file: Path) -> None:
    """Check the map of a draft vocabulary: [D] int64, ascending ids of the base's vocabulary."""
    count = config.num_columns
    fits = ids is not None and ids.dtype == torch.int64 and ids.shape == (count,)
    if not fits or not (ids.diff() > 0).all() or not 0 <= int(ids[0]) <= int(ids[-1]) < config.vocab_size:  # type: ignore[union-attr,index]
        raise CheckpointError(
            f"{file}: {TOKEN_IDS} must be {count} different ids of {config.vocab_size} tokens, ascending, as int64: "
            "the draft vocabulary is damaged, save the heads again"
        )


def _parse_config(path: Path, raw: dict[str, Any]) -> HeadsConfig:
    if not raw:
        raise CheckpointError(f"{path}: missing; {WEIGHTS_FILE} can't be read without it")
    header = {key: raw.get(key) for key in ("format", "kind", "version")}
    if header not in [{"format": FORMAT, "kind": kind, "version": VERSION} for kind in KINDS]:
        raise CheckpointError(
            f"{path}: describes {header}; this version reads {FORMAT}, kind {' or '.join(KINDS)}, version {VERSION}"
        )
    try:
        return HeadsConfig(**{key: value for key, value in raw.items() if key not in ("format", "version")})
    except (ConfigError, TypeError) as error:  # TypeError: a key is unknown or missing
        raise CheckpointError(f"{path}: {error}; save the heads again") from error


def _check_target(config: HeadsConfig, target: DraftTarget, path: Path, check_base: bool) -> None:
    for name in ("hidden_size", "vocab_size"):
        ours, theirs = getattr(config, name), getattr(target, name)
        if ours != theirs:
            raise CheckpointError(
                f"{path}: these heads have {name} {ours}, the target has {theirs}; train heads for this target"
            )
    if check_base and config.base_fingerprint not in ("", target.fingerprint):
        raise CheckpointError(
            f"{path}: base_fingerprint {config.base_fingerprint} isn't the target's {target.fingerprint}: these heads "
            "were trained on another base; train heads for this one, or pass check_base=False if it is the same model "
            "in another precision"
        )
