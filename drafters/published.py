"""Finds and reads published draft heads: which file of a folder, which layout, which config it amounts to.

The layouts themselves are in `specdec.drafters.layouts` and `.hydra_layout`.
"""

from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from specdec.drafters.draft_heads import TOKEN_IDS, HeadsConfig
from specdec.drafters.hydra_layout import PUBLISHED_WIDTH, check_architecture, hydra_weights
from specdec.drafters.layouts import medusa_names_of_vllm, medusa_weights, read_tensors
from specdec.drafters.protocol import DraftTarget
from specdec.errors import CheckpointError, ConfigError

MEDUSA_FILES = ("medusa_lm_head.safetensors", "medusa_lm_head.pt")
HYDRA_FILES = ("hydra_lm_head.safetensors", "hydra_lm_head.pt")
VLLM_FILE = "model.safetensors"
PUBLISHED_FILES = (*MEDUSA_FILES, *HYDRA_FILES)

Read = tuple[HeadsConfig, dict[str, Tensor]]


def published_kind(path: Path) -> Literal["medusa", "hydra"]:
    """Return the kind of the heads of a published file or folder, by the files' names."""
    names = HYDRA_FILES if path.is_dir() else ()
    hydra = path.name in HYDRA_FILES or any((path / name).exists() for name in names)
    return "hydra" if hydra and not any((path / name).exists() for name in MEDUSA_FILES) else "medusa"


def is_vllm(raw: dict[str, Any]) -> bool:
    """Return whether a config.json is one of vLLM's Medusa."""
    return raw.get("model_type") == "medusa" and "num_heads" in raw


def read_published(
    path: Path, raw: dict[str, Any], target: DraftTarget | None, allow_pickle: bool, check_base: bool
) -> Read:
    """Read Medusa v1 or "version": "2", vLLM's Medusa, or Hydra's "mlp".

    Args:
        path: the folder, or the weights file.
        raw: the config.json beside it, empty if there is none.
        target: the model to draft for, or None.
        allow_pickle: whether a pickled file may be read, by the restricted unpickler.
        check_base: whether input embeddings saved with Hydra heads must be the target's.

    Returns:
        The config and the state_dict of the heads.

    Raises:
        CheckpointError: the file is missing, damaged, pickled, or of another layout.
    """
    if path.is_dir():
        names = [name for name in PUBLISHED_FILES if (path / name).exists()]
        names += [VLLM_FILE] if is_vllm(raw) and (path / VLLM_FILE).exists() else []
        if not names:
            wanted = ", ".join(("heads.safetensors", *PUBLISHED_FILES))
            raise CheckpointError(f"{path}: holds no draft heads that can be read; looked for {wanted}")
        path /= names[0]
    try:
        if path.name in HYDRA_FILES:
            return _read_hydra(path, raw, target, allow_pickle, check_base)
        return _read_medusa(path, raw, target, allow_pickle)
    except ConfigError as error:
        raise CheckpointError(f"{path}: {error}; these are no {published_kind(path).title()} heads") from error


def _read_medusa(path: Path, raw: dict[str, Any], target: DraftTarget | None, allow_pickle: bool) -> Read:
    tensors, token_ids = read_tensors(path, allow_pickle)[0], None
    if is_vllm(raw):
        tensors, token_ids = medusa_names_of_vllm(tensors, path, raw)
    weights = medusa_weights(tensors, path, shares_head=str(raw.get("version")) == "2")
    vocab_size = weights.vocab_size
    if vocab_size is None:
        if target is None:
            raise CheckpointError(f"{path}: has no projections, so its vocabulary is the target's; pass the target")
        vocab_size = target.vocab_size
    config = HeadsConfig(
        num_heads=weights.num_heads,
        num_layers=weights.num_layers,
        hidden_size=weights.hidden_size,
        vocab_size=vocab_size if token_ids is None else raw["vocab_size"],
        projection="shared" if weights.vocab_size is None else "own",
        draft_vocab=None if token_ids is None else len(token_ids),
    )
    return config, weights.state if token_ids is None else weights.state | {TOKEN_IDS: token_ids}


def _read_hydra(
    path: Path, raw: dict[str, Any], target: DraftTarget | None, allow_pickle: bool, check_base: bool
) -> Read:
    check_architecture(raw, path)
    weights = hydra_weights(read_tensors(path, allow_pickle)[0], path)
    config = HeadsConfig(
        num_heads=weights.num_heads,
        num_layers=weights.num_layers,
        hidden_size=weights.hidden_size,
        vocab_size=weights.vocab_size,
        projection="own",
        kind="hydra",
        width=PUBLISHED_WIDTH,
        projection_bias=True,
    )
    if check_base and target is not None and weights.embedding is not None:
        _check_embedding(weights.embedding, target, path)
    return config, weights.state


@torch.inference_mode()
def _check_embedding(embedding: Tensor, target: DraftTarget, path: Path) -> None:
    """Compare a few rows of the base's input embeddings, as bf16, with the target's."""
    if target.embed is None or embedding.shape != (target.vocab_size, target.hidden_size):
        return  # the sizes are checked, and named, later
    ids = torch.tensor([0, len(embedding) // 2, len(embedding) - 1])
    ours = target.embed(ids.to(target.device)).to("cpu", torch.bfloat16).float()
    if not torch.allclose(embedding[ids].to(torch.bfloat16).float(), ours, rtol=0.02, atol=1e-6):
        raise CheckpointError(
            f"{path}: holds other input embeddings than the target's: these heads were trained on another base; "
            "train heads for this one, or pass check_base=False if it is the same model in another precision"
        )
