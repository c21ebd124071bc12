"""Writes Medusa heads in the layouts that other engines read: Medusa v1 and v2 (TGI, Medusa's own code) and vLLM's.

Knows tensors and files. TGI reads `medusa_num_heads`, `medusa_num_layers` and `base_model_name_or_path`; vLLM
`model_type`, `num_heads`, `num_hidden_layers`, the sizes, `medusa_fc_bias` and `original_lm_head`.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from specdec.drafters.heads import base_fingerprint
from specdec.drafters.medusa_heads import MedusaHeads
from specdec.drafters.published import MEDUSA_FILES, VLLM_FILE
from specdec.errors import CheckpointError, ConfigError
from specdec.hub.cache import new_folder

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from specdec.drafters.draft_heads import DraftHeads, HeadsConfig

Layout = tuple[str, dict[str, Tensor], dict[str, Any]]
"""Name of the weights file, its tensors, and the config.json."""


def export_heads(
    heads: "DraftHeads",
    out: str | Path,
    layout: str,
    base: "PreTrainedModel | None" = None,
) -> None:
    """Write heads to a new folder, which appears whole or not at all.

    A shared projection is written out where the layout has only own ones: the weight of the base's head, without the
    scale or softcap that some models put on its logits (they don't change which tokens are likeliest).

    Args:
        heads: Medusa heads; their dtype is kept.
        out: the folder; it must not exist yet, or be empty.
        layout: one of `LAYOUTS`.
        base: the model that the heads were trained on; needed where its head has to be written out. Its name or
            folder goes into the config, by which TGI loads it.

    Raises:
        ConfigError: the layout is unknown.
        CheckpointError: the layout can't express these heads, they are for another base, or `out` can't be written.
    """
    if layout not in LAYOUTS:
        raise ConfigError(f"unknown layout {layout!r}; known: {', '.join(LAYOUTS)}")
    if not isinstance(heads, MedusaHeads):
        raise CheckpointError(f"layout {layout} holds Medusa heads; it can't express {heads.config.kind} heads")
    if base is not None:
        _check_base(heads.config, base)
    name, tensors, config = LAYOUTS[layout](heads, base)
    if base is not None and base.name_or_path:
        config["base_model_name_or_path"] = base.name_or_path
    state = {key: tensor.detach().cpu().clone(memory_format=torch.contiguous_format) for key, tensor in tensors.items()}
    _write(Path(out), name, state, config)


def _medusa_v1(heads: MedusaHeads, base: "PreTrainedModel | None") -> Layout:
    _refuse_draft_vocab(heads, "medusa-v1")
    tensors = _blocks(heads, "{k}.{layer}.linear.{part}")
    for k, projection in enumerate(_projections(heads, base, "medusa-v1")):
        tensors[f"{k}.{heads.config.num_layers}.weight"] = projection
    return MEDUSA_FILES[0], tensors, _medusa_config(heads.config)


def _medusa_v2(heads: MedusaHeads, base: "PreTrainedModel | None") -> Layout:
    _refuse_draft_vocab(heads, "medusa-v2")
    if heads.config.projection != "shared":
        raise CheckpointError("layout medusa-v2 has no projections, these heads have their own; export to medusa-v1")
    if heads.config.num_layers != 1:
        raise CheckpointError(
            f"layout medusa-v2 has one block a head where it is read, these heads have {heads.config.num_layers}; "
            "export to medusa-v1"
        )
    return MEDUSA_FILES[0], _blocks(heads, "{k}.{layer}.linear.{part}"), _medusa_config(heads.config) | {"version": "2"}


def _vllm(heads: MedusaHeads, base: "PreTrainedModel | None") -> Layout:
    shared = heads.config.projection == "shared"
    tensors = _blocks(heads, "blocks.{k}.layers.{layer}.{part}")
    projections = _projections(heads, base, "vllm")
    tensors |= {f"lm_heads.{k}.weight": weight for k, weight in enumerate(projections[:1] if shared else projections)}
    if heads.token_ids is not None:
        tensors["token_map"] = heads.token_ids
    config = {
        "model_type": "medusa",
        "architectures": ["MedusaModel"],
        "hidden_size": heads.config.hidden_size,
        "vocab_size": heads.config.vocab_size,
        "truncated_vocab_size": heads.config.num_columns,
        "num_heads": heads.config.num_heads,
        "num_hidden_layers": heads.config.num_layers,
        "medusa_fc_bias": True,
        "original_lm_head": shared,
        "torch_dtype": str(tensors["lm_heads.0.weight"].dtype).removeprefix("torch."),
    }
    return VLLM_FILE, tensors, config


LAYOUTS: dict[str, Callable[[MedusaHeads, "PreTrainedModel | None"], Layout]] = {
    "medusa-v1": _medusa_v1,
    "medusa-v2": _medusa_v2,
    "vllm": _vllm,
}


def _refuse_draft_vocab(heads: MedusaHeads, layout: str) -> None:
    if heads.token_ids is not None:
        raise CheckpointError(
            f"layout {layout} has no map of a draft vocabulary, these heads score {heads.config.num_columns} of "
            f"{heads.config.vocab_size} tokens; export to vllm"
        )


def _medusa_config(config: "HeadsConfig") -> dict[str, Any]:
    return {"medusa_num_heads": config.num_heads, "medusa_num_layers": config.num_layers}


def _blocks(heads: MedusaHeads, name: str) -> dict[str, Tensor]:
    return {
        name.format(k=k, layer=layer, part=part): getattr(block, part)[k]
        for layer, block in enumerate(heads.blocks)
        for part in ("weight", "bias")
        for k in range(heads.config.num_heads)
    }


def _projections(heads: MedusaHeads, base: "PreTrainedModel | None", layout: str) -> list[Tensor]:
    """Each head's [V, H], or [D, H] with a draft vocabulary: its own, or the base's."""
    if heads.projection is not None:
        return list(heads.projection)
    if base is None:
        raise CheckpointError(f"layout {layout} holds projections, these heads share the base's head; give the model")
    head: Any = base.get_output_embeddings()
    if getattr(head, "bias", None) is not None:
        raise CheckpointError(f"layout {layout} has projections without biases, the base's head has one")
    weight: Tensor = head.weight.to(heads.blocks[0].weight.dtype)
    weight = weight if heads.token_ids is None else weight[heads.token_ids]
    return [weight] * heads.config.num_heads


def _check_base(config: "HeadsConfig", base: "PreTrainedModel") -> None:
    vocab_size, hidden_size = base.get_output_embeddings().weight.shape
    for name, theirs in (("hidden_size", hidden_size), ("vocab_size", vocab_size)):
        if getattr(config, name) != theirs:
            raise CheckpointError(
                f"the heads have {name} {getattr(config, name)}, the model has {theirs}; give the model that they were "
                "trained on"
            )
    if config.base_fingerprint not in ("", actual := base_fingerprint(base)):
        raise CheckpointError(
            f"the heads' base_fingerprint {config.base_fingerprint} isn't the model's {actual}; give the model that "
            "they were trained on"
        )


def _write(out: Path, name: str, state: dict[str, Tensor], config: dict[str, Any]) -> None:
    """Write both files to a new folder."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise CheckpointError(f"{out}: exists and isn't an empty folder; give another one")
    try:
        with new_folder(out) as folder:
            save_file(state, folder / name, {"format": "pt"})
            (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{out}: can't be written ({error}); give another folder") from error
