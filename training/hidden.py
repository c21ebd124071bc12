"""The frozen base: its final hidden states, its head, its embeddings, and a proof that it didn't change."""

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from specdec.drafters.draft_heads import DraftHeads, HeadsConfig, KindName
from specdec.drafters.heads import base_fingerprint, make_heads
from specdec.errors import UnsupportedModel
from specdec.models.head import OutputHead
from specdec.training.batches import Batch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_CHUNK = 1 << 24  # bytes summed at once


class FrozenBase:
    """The base as the trainer uses it: in evaluation mode, without gradients.

    Args:
        model: the base; its parameters stop taking gradients.

    Raises:
        UnsupportedModel: it has no output head, or no body that gives final hidden states.
    """

    def __init__(self, model: "PreTrainedModel") -> None:
        if model.get_output_embeddings() is None or model.base_model is model:
            raise UnsupportedModel(f"{type(model).__name__} has no body and output head apart; heads can't be trained")
        self.model = model.requires_grad_(False).eval()
        self.device: torch.device = model.device
        self._head = model.get_output_embeddings()

    @property
    def vocab_size(self) -> int:
        """V, columns of the logits."""
        return len(self._head.weight)

    @property
    def head_weight(self) -> Tensor:
        """[V, H], the output head."""
        weight: Tensor = self._head.weight
        return weight

    @torch.no_grad()
    def hidden(self, batch: Batch) -> Tensor:
        """Return the final hidden states, behind the last norm, of all tokens: [B * L, H] in the base's dtype.

        The padding stands behind the texts, where a causal model's states don't see it: so nothing is masked, and
        attention runs by the kernel for causal texts.
        """
        if not len(batch.rows):
            return self.head_weight.new_zeros(batch.input_ids.numel(), self.head_weight.shape[1])
        return self.read(batch.input_ids).flatten(0, 1)

    @torch.no_grad()
    def read(self, input_ids: Tensor) -> Tensor:
        """Return the final hidden states of texts: [B, L] to [B, L, H] in the base's dtype."""
        body = self.model.base_model(input_ids=input_ids, use_cache=False, return_dict=True)
        hidden: Tensor = body.last_hidden_state
        return hidden

    @torch.no_grad()
    def embed(self, tokens: Tensor) -> Tensor:
        """Return input embeddings: [...] to [..., H]."""
        embeddings: Tensor = self.model.get_input_embeddings()(tokens)
        return embeddings

    def head_for(self, heads: DraftHeads) -> OutputHead:
        """Return the base's head, for the tokens that these heads score."""
        return OutputHead(self.model, heads.token_ids)

    @torch.no_grad()
    def checksum(self) -> str:
        """Return a hash of every bit of the base's parameters and buffers: 32 hexadecimal digits.

        The bits are summed on the device, each byte times an odd number of its place: any one change shows.
        """
        digest = hashlib.blake2b(digest_size=16)
        weights = 2 * torch.arange(_CHUNK, device=self.device) * 0x9E3779B1 + 1
        for name, tensor in [*self.model.named_parameters(), *self.model.named_buffers()]:
            total = 0
            for chunk in tensor.data.contiguous().flatten().view(torch.uint8).split(_CHUNK):
                part = (chunk * weights[: len(chunk)].to(chunk.device)).sum().item()
                total = (total * 1_000_003 + part) % (1 << 64)
            digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype} {total};".encode())
        return digest.hexdigest()


def heads_config(
    model: "PreTrainedModel",
    num_heads: int,
    num_layers: int,
    projection: Literal["own", "shared"],
    kind: KindName = "medusa",
    width: int | None = None,
    draft_vocab: int | None = None,
) -> HeadsConfig:
    """Return the config of new heads for a base.

    Args:
        model: the base.
        num_heads, num_layers, projection, kind, width, draft_vocab: as in `HeadsConfig`.

    Raises:
        ConfigError: a number is out of bounds.
        UnsupportedModel: the base has no output head.
    """
    base = FrozenBase(model)
    return HeadsConfig(
        num_heads=num_heads,
        num_layers=num_layers,
        hidden_size=base.head_weight.shape[1],
        vocab_size=base.vocab_size,
        projection=projection,
        base_fingerprint=base_fingerprint(model),
        kind=kind,
        width=width,
        draft_vocab=draft_vocab,
    )


def new_heads(
    model: "PreTrainedModel",
    num_heads: int,
    num_layers: int,
    projection: Literal["own", "shared"],
    kind: KindName = "medusa",
    width: int | None = None,
    token_ids: Sequence[int] | None = None,
    seed: int = 0,
) -> DraftHeads:
    """Make untrained heads for a base: fp32, on its device, each saying what the base's own head says.

    Args:
        model: the base.
        num_heads, num_layers, projection, kind, width: as in `HeadsConfig`.
        token_ids: the draft vocabulary; None for all tokens.
        seed: of the weights that don't start as zeros: those in the MLPs. torch's own random state stays as it is.

    Raises:
        ConfigError, UnsupportedModel: as `heads_config`.
    """
    base = FrozenBase(model)
    num_tokens = None if token_ids is None else len(token_ids)
    config = heads_config(model, num_heads, num_layers, projection, kind, width, num_tokens)
    with torch.random.fork_rng([base.device] if base.device.type == "cuda" else []):
        torch.manual_seed(seed)
        heads = make_heads(config, base.device, torch.float32)
    if token_ids is not None:
        assert heads.token_ids is not None
        heads.token_ids.copy_(torch.tensor(sorted(token_ids)))
    heads.copy_projection(base.head_weight)
    return heads
