"""The published Hydra layout of architecture "mlp": names, shapes, and how its arithmetic becomes ours.

Knows tensors; no files beyond their names in messages.
Source: the code of Ankner et al., "Hydra: Sequentially-Dependent Draft Heads for Medusa Decoding" (2024).
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specdec.drafters.layouts import check_tensors
from specdec.errors import CheckpointError

EMBEDDING = "input_embed_fn.weight"
"""The base's input embeddings, which Hydra's code saves with the heads because they are one of their submodules."""
PUBLISHED_WIDTH = 3
"""Of the MLPs that published heads become; see `hydra_weights`."""

_KEY = re.compile(r"(?:hydra_mlp|hydra_lm_head)\.(\d+)\..+")
_BLOCK = re.compile(r"hydra_mlp\.0\.(\d+)\.linear\.weight")


class HydraWeights(NamedTuple):
    """Published Hydra heads as `HydraHeads` holds them.

    Args:
        num_heads: K.
        num_layers: residual blocks behind the MLP.
        hidden_size: H.
        vocab_size: V.
        state: the state_dict of `HydraHeads` of width `PUBLISHED_WIDTH`, own projections with biases.
        embedding: [V, H] input embeddings of the base that they were trained on; None if the file holds none.
    """

    num_heads: int
    num_layers: int
    hidden_size: int
    vocab_size: int
    state: dict[str, Tensor]
    embedding: Tensor | None


def check_architecture(raw: Mapping[str, Any], path: Path) -> None:
    """Check that a published config.json describes heads that `hydra_weights` can read.

    Raises:
        CheckpointError: it describes another architecture, ungrounded heads or earlier hidden states, by name.
    """
    defaults = (("hydra_head_arch", "mlp", "mlp"), ("grounded_heads", True, False), ("hidden_state_offset", 0, 0))
    for key, readable, default in defaults:  # the defaults of Hydra's own code
        given = raw.get(key, default) if raw else readable
        if given != readable:
            raise CheckpointError(
                f"{path}: has {key} {given!r}; of published Hydra heads only those with {key} {readable!r} can be read"
            )


def hydra_weights(tensors: Mapping[str, Tensor], path: Path) -> HydraWeights:
    """Read heads of keys `hydra_mlp.{k}.{layer}.linear.*`, `hydra_mlp.{k}.0.res_connection.*`, `hydra_lm_head.{k}.*`.

    Their first block is R x + r + SiLU(L x + l) on x = [h, e_0, …, e_k]. Since SiLU(a) - SiLU(-a) = a, it is
    h + D SiLU(U x + u) with U = [L; S; -S], where S is R less the identity on h, and D = [I, I, -I].

    Args:
        tensors: the file's tensors.
        path: the file, for the messages.

    Raises:
        CheckpointError: as `check_tensors`.
    """
    if any(name.startswith("prefix_embeding_layer.") for name in tensors):
        raise CheckpointError(f"{path}: holds prefix-mlp heads, which have a decoder layer; only mlp heads can be read")
    heads = [int(match[1]) for name in tensors if (match := _KEY.fullmatch(name))]
    blocks = [int(match[1]) for name in tensors if (match := _BLOCK.fullmatch(name))]
    num_heads, num_layers = 1 + max(heads, default=-1), 1 + max(blocks, default=0)
    if num_heads * num_layers > len(tensors) or not num_heads:
        raise CheckpointError(f"{path}: lacks most of {num_heads} Hydra heads of {num_layers} blocks; export it again")
    hidden_size = _size(tensors, "hydra_mlp.0.0.linear.bias")
    vocab_size = _size(tensors, "hydra_lm_head.0.weight")
    shapes = _shapes(num_heads, num_layers, hidden_size, vocab_size)
    if EMBEDDING in tensors:
        shapes[EMBEDDING] = (vocab_size, hidden_size)
    check_tensors(tensors, shapes, path)
    state = _state(tensors, num_heads, num_layers, hidden_size)
    return HydraWeights(num_heads, num_layers - 1, hidden_size, vocab_size, state, tensors.get(EMBEDDING))


def _size(tensors: Mapping[str, Tensor], name: str) -> int:
    """First dimension of a tensor; 0 where it is missing, which `check_tensors` names."""
    return tensors[name].shape[0] if name in tensors and tensors[name].ndim else 0


def _shapes(num_heads: int, num_layers: int, h: int, vocab_size: int) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    for k in range(num_heads):
        for part in ("linear", "res_connection"):
            shapes[f"hydra_mlp.{k}.0.{part}.weight"] = (h, (k + 2) * h)
            shapes[f"hydra_mlp.{k}.0.{part}.bias"] = (h,)
        for layer in range(1, num_layers):
            shapes[f"hydra_mlp.{k}.{layer}.linear.weight"] = (h, h)
            shapes[f"hydra_mlp.{k}.{layer}.linear.bias"] = (h,)
        shapes[f"hydra_lm_head.{k}.weight"] = (vocab_size, h)
        shapes[f"hydra_lm_head.{k}.bias"] = (vocab_size,)
    return shapes


def _state(tensors: Mapping[str, Tensor], num_heads: int, num_layers: int, h: int) -> dict[str, Tensor]:
    def over_heads(name: str) -> Tensor:
        return torch.stack([tensors[name.format(k)] for k in range(num_heads)])

    state = {"projection": over_heads("hydra_lm_head.{}.weight")}
    state["projection_bias"] = over_heads("hydra_lm_head.{}.bias")
    for layer in range(1, num_layers):
        for part in ("weight", "bias"):
            state[f"blocks.{layer - 1}.{part}"] = over_heads(f"hydra_mlp.{{}}.{layer}.linear.{part}")
    for k in range(num_heads):
        linear, residual = (f"hydra_mlp.{k}.0.{part}" for part in ("linear", "res_connection"))
        skip, skip_bias = tensors[f"{residual}.weight"].clone(), tensors[f"{residual}.bias"]
        identity = torch.eye(h, dtype=skip.dtype)
        skip[:, :h] -= identity
        state[f"up.{k}.weight"] = torch.cat([tensors[f"{linear}.weight"], skip, -skip])
        state[f"up.{k}.bias"] = torch.cat([tensors[f"{linear}.bias"], skip_bias, -skip_bias])
        state[f"down.{k}.weight"] = torch.cat([identity, identity, -identity], 1)
        state[f"down.{k}.bias"] = torch.zeros(h, dtype=skip.dtype)
    return state
