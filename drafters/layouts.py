"""Reading weights files: tensors in, tensors out, every flaw named. Executes nothing from them.

Knows the published Medusa layouts; see `specdec.drafters.heads` for our own folder and the module.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from specdec.errors import CheckpointError

PICKLE_SUFFIXES = (".pt", ".bin")

_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_MEDUSA_KEY = re.compile(r"(\d+)\.(\d+)\.(linear\.weight|linear\.bias|weight)")
_VLLM_BLOCK = re.compile(r"blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)")
_VLLM_HEAD = re.compile(r"lm_heads\.(\d+)\.weight")


class MedusaWeights(NamedTuple):
    """Medusa heads as read from a published file, stacked over the heads.

    Args:
        num_heads: K.
        num_layers: residual blocks a head.
        hidden_size: H.
        vocab_size: V of the projections, or None if the base's head is shared.
        state: `blocks.{l}.weight` [K, H, H] and `blocks.{l}.bias` [K, H]; `projection` [K, V, H] if not shared.
    """

    num_heads: int
    num_layers: int
    hidden_size: int
    vocab_size: int | None
    state: dict[str, Tensor]


def read_tensors(path: Path, allow_pickle: bool) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Read all tensors of a weights file to the CPU.

    Args:
        path: a `.safetensors`, `.pt` or `.bin` file.
        allow_pickle: whether a pickled file may be read, by the restricted unpickler that executes nothing.

    Returns:
        The tensors by name, and the file's metadata (empty for a pickled file).

    Raises:
        CheckpointError: the file is missing, damaged, pickled without `allow_pickle`, or holds more than tensors.
    """
    if not path.is_file():
        raise CheckpointError(f"{path}: no such file; give a folder or file that holds draft heads")
    if path.suffix in PICKLE_SUFFIXES:
        return _read_pickled(path, allow_pickle), {}
    if path.suffix != ".safetensors":
        raise CheckpointError(
            f"{path}: not a weights file; expected .safetensors, or .pt or .bin with allow_pickle=True"
        )
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}
    except SafetensorError as error:
        raise CheckpointError(f"{path}: damaged or cut short ({error}); copy or download it again") from error


def check_tensors(tensors: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]], path: Path) -> None:
    """Check that a file holds exactly the expected tensors, with finite numbers.

    Args:
        tensors: what the file holds.
        shapes: expected shape of each tensor.
        path: the file, for the message.

    Raises:
        CheckpointError: a tensor is missing, unexpected, of another shape, not floating-point, or not finite.
    """
    if missing := shapes.keys() - tensors.keys():
        raise CheckpointError(
            f"{path}: lacks {_names(missing)}; it is incomplete or of another layout, export it again"
        )
    if unexpected := tensors.keys() - shapes.keys():
        raise CheckpointError(
            f"{path}: holds {_names(unexpected)}, which don't belong to these heads; other layouts can't be read"
        )
    for name, shape in shapes.items():
        tensor = tensors[name]
        if tuple(tensor.shape) != shape:
            raise CheckpointError(
                f"{path}: {name} has shape {list(tensor.shape)} instead of {list(shape)}; it belongs to other heads"
            )
        if tensor.dtype not in _DTYPES or not bool(tensor.sum(dtype=torch.float32).isfinite()):
            raise CheckpointError(f"{path}: {name} ({tensor.dtype}) holds other than finite numbers; export it again")


def medusa_weights(tensors: Mapping[str, Tensor], path: Path, shares_head: bool) -> MedusaWeights:
    """Read heads of keys `{k}.{layer}.linear.weight`, `.bias` and, if they have projections, `{k}.{num_layers}.weight`.

    The number of heads and of blocks comes from the keys, for published configs are often wrong about it.

    Args:
        tensors: the file's tensors.
        path: the file, for the messages.
        shares_head: whether the layout is Medusa's version 2, residual blocks before the base's own head.

    Raises:
        CheckpointError: as `check_tensors`.
    """
    keys = [match for name in tensors if (match := _MEDUSA_KEY.fullmatch(name))]
    if not keys:
        raise CheckpointError(f"{path}: holds {_names(tensors)}, no Medusa heads; other layouts can't be read")
    num_heads = 1 + max(int(key[1]) for key in keys)
    projections = [int(key[2]) for key in keys if key[3] == "weight"]
    blocks = [1 + int(key[2]) for key in keys if key[3] != "weight"]
    num_layers = max(blocks, default=0) if shares_head or not projections else max(projections)
    if num_heads * num_layers > len(tensors):
        raise CheckpointError(f"{path}: lacks most of {num_heads} heads of {num_layers} blocks; export it again")
    hidden_size = _size(tensors, "0.0.linear.bias", -1, path)
    vocab_size = None if shares_head else _size(tensors, f"0.{num_layers}.weight", 0, path)
    shapes: dict[str, tuple[int, ...]] = {}
    for k in range(num_heads):
        for layer in range(num_layers):
            shapes[f"{k}.{layer}.linear.weight"] = (hidden_size, hidden_size)
            shapes[f"{k}.{layer}.linear.bias"] = (hidden_size,)
        if vocab_size is not None:
            shapes[f"{k}.{num_layers}.weight"] = (vocab_size, hidden_size)
    check_tensors(tensors, shapes, path)
    return MedusaWeights(num_heads, num_layers, hidden_size, vocab_size, _stack(tensors, num_heads, num_layers))


def medusa_names_of_vllm(
    tensors: Mapping[str, Tensor], path: Path, raw: Mapping[str, Any]
) -> tuple[dict[str, Tensor], Tensor | None]:
    """Give tensors of vLLM's Medusa layout the names of Medusa v1; "medusa_heads." may stand before them.

    `blocks.{k}.layers.{l}.*` becomes `{k}.{l}.linear.*`, `lm_heads.{k}.weight` the projection of head k; with
    "original_lm_head" the only `lm_heads.0.weight` is that of all heads. Biases are zero without "medusa_fc_bias".
    Heads of a "truncated_vocab_size" score the tokens of `token_map`, in any order; their projections may still hold
    rows for all tokens.

    Args:
        tensors: the file's tensors.
        path: the file, for the messages.
        raw: its config.json.

    Returns:
        The tensors, and the draft vocabulary, [D] int64 ascending, or None; projections have its rows in that order.

    Raises:
        CheckpointError: the draft vocabulary doesn't fit the config or the projections.
    """
    tensors = {name.removeprefix("medusa_heads."): tensor for name, tensor in tensors.items()}
    token_map = _token_map(tensors.pop("token_map", None), path, raw)
    blocks = {name: match for name in tensors if (match := _VLLM_BLOCK.fullmatch(name))}
    num_layers = 1 + max((int(match[2]) for match in blocks.values()), default=0)
    num_heads = 1 + max((int(match[1]) for match in blocks.values()), default=0)
    if num_heads > len(tensors):
        raise CheckpointError(f"{path}: lacks most of {num_heads} heads; export it again")
    renamed: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if match := blocks.get(name):
            renamed[f"{match[1]}.{match[2]}.linear.{match[3]}"] = tensor
            if not raw.get("medusa_fc_bias"):
                renamed.setdefault(f"{match[1]}.{match[2]}.linear.bias", tensor.new_zeros(tensor.shape[:1]))
        elif match := _VLLM_HEAD.fullmatch(name):
            heads = range(num_heads) if raw.get("original_lm_head") and match[1] == "0" else (match[1],)
            if token_map is not None:
                tensor = _rows_of_draft_vocab(name, tensor, token_map, path, raw)
            renamed |= {f"{k}.{num_layers}.weight": tensor for k in heads}
        else:
            renamed[name] = tensor
    return renamed, None if token_map is None else token_map.sort().values


def _token_map(ids: Tensor | None, path: Path, raw: Mapping[str, Any]) -> Tensor | None:
    """Check the ids of vLLM's columns, [D]; as there, they count only where the config says that there are fewer."""
    size, vocab_size = raw.get("truncated_vocab_size"), raw.get("vocab_size")
    if size in (None, vocab_size):
        return None
    if type(size) is not int or type(vocab_size) is not int or not 0 < size < vocab_size:
        raise CheckpointError(f"{path}: its config.json has truncated_vocab_size {size!r} of vocab_size {vocab_size!r}")
    fits = ids is not None and not ids.is_floating_point() and ids.shape == (size,) and len(set(ids.tolist())) == size
    if not fits or not 0 <= int(ids.min()) <= int(ids.max()) < vocab_size:  # type: ignore[union-attr]
        raise CheckpointError(
            f"{path}: token_map must be {size} different ids of {vocab_size} tokens, as its config.json says "
            "(truncated_vocab_size); export the heads again"
        )
    return ids.long()  # type: ignore[union-attr]


def _rows_of_draft_vocab(name: str, weight: Tensor, ids: Tensor, path: Path, raw: Mapping[str, Any]) -> Tensor:
    """The rows of ids, ascending, of a projection whose rows are those of `ids` as they stand, or of all tokens."""
    if len(weight) == raw["vocab_size"]:
        return weight[ids.sort().values]
    if len(weight) != len(ids):
        raise CheckpointError(f"{path}: {name} has {len(weight)} rows for {len(ids)} mapped tokens; export it again")
    return weight[ids.argsort()]


def _stack(tensors: Mapping[str, Tensor], num_heads: int, num_layers: int) -> dict[str, Tensor]:
    def over_heads(suffix: str) -> Tensor:
        return torch.stack([tensors[f"{k}.{suffix}"] for k in range(num_heads)])

    state = {
        f"blocks.{layer}.{part}": over_heads(f"{layer}.linear.{part}")
        for layer in range(num_layers)
        for part in ("weight", "bias")
    }
    if f"0.{num_layers}.weight" in tensors:
        state["projection"] = over_heads(f"{num_layers}.weight")
    return state


def _read_pickled(path: Path, allow_pickle: bool) -> dict[str, Tensor]:
    if not allow_pickle:
        raise CheckpointError(
            f"{path}: is a pickled file, which can carry code; pass allow_pickle=True to read its tensors with the "
            "restricted unpickler, or convert it to safetensors"
        )
    try:
        loaded: Any = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged or hostile pickle may raise anything; all of it means the same
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise CheckpointError(
            f"{path}: refused, damaged or more than tensors ({reason}); nothing was executed"
        ) from error
    if not isinstance(loaded, dict) or not all(isinstance(k, str) and isinstance(v, Tensor) for k, v in loaded.items()):
        raise CheckpointError(f"{path}: doesn't hold a dict of tensors; export the heads' state_dict")
    return loaded


def _size(tensors: Mapping[str, Tensor], name: str, dim: int, path: Path) -> int:
    if name not in tensors:
        raise CheckpointError(
            f"{path}: lacks {name}; it is incomplete, or its heads share the base's own head and its config.json "
            'doesn\'t say so with "version": "2"'
        )
    return tensors[name].shape[dim] if tensors[name].ndim else 0


def _names(names: Any, most: int = 4) -> str:
    """The first few names in order, for a message."""
    names = sorted(str(name) for name in names)
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
