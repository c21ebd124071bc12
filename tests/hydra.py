"""Hydra drafters whose answers are known: over the model that walks through a permutation, and random ones."""

from collections.abc import Sequence

import torch
from transformers import LlamaForCausalLM, PreTrainedModel

from specdec.drafters.draft_heads import DraftHeads, KindName
from specdec.drafters.heads import HeadsConfig, make_heads
from specdec.drafters.hydra import HydraDrafter
from specdec.drafters.hydra_heads import HydraHeads
from specdec.drafters.protocol import DraftTarget
from specdec.drafters.recurrent import RecurrentDrafter
from specdec.drafters.recurrent_heads import RecurrentHeads
from tests.medusa import CHOICES, SIZE, successor, target_of


def random_hydra(model: PreTrainedModel, num_heads: int = 3) -> HydraDrafter:
    """Random heads with the base's own projection: nearly always wrong, never harmful."""
    heads, target = _random_heads(model, "hydra", num_heads, 1)
    assert isinstance(heads, HydraHeads)
    return HydraDrafter(heads, target, CHOICES)


def random_recurrent(model: PreTrainedModel, num_heads: int = 3) -> RecurrentDrafter:
    """The same of recurrent heads."""
    heads, target = _random_heads(model, "recurrent", num_heads, 0)
    assert isinstance(heads, RecurrentHeads)
    return RecurrentDrafter(heads, target, CHOICES)


def _random_heads(
    model: PreTrainedModel, kind: KindName, num_heads: int, num_layers: int
) -> tuple[DraftHeads, DraftTarget]:
    target = target_of(model)
    config = HeadsConfig(
        kind=kind,
        num_heads=num_heads,
        num_layers=num_layers,
        width=1,
        hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        projection="shared",
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        heads = make_heads(config, target.device, target.dtype).requires_grad_(False)
        for parameter in heads.parameters():
            torch.nn.init.normal_(parameter)
    return heads, target


def walking_heads(num_heads: int = 3) -> HydraHeads:
    """Heads of `walking_model` that are always right: the state is the last token's one-hot embedding, walked on.

    h + D SiLU(U x) is e_k with U x = ±(e_k - h), for SiLU(a) - SiLU(-a) = a.
    """
    config = HeadsConfig(
        kind="hydra",
        num_heads=num_heads,
        num_layers=0,
        width=2,
        hidden_size=SIZE,
        vocab_size=SIZE,
        projection="own",
    )
    heads = HydraHeads(config, dtype=torch.float64).requires_grad_(False)
    one = torch.eye(SIZE, dtype=torch.float64)
    for k in range(num_heads):
        change = torch.cat([-one, *[torch.zeros_like(one)] * k, one], 1)
        heads.up[k].weight.copy_(torch.cat([change, -change]))  # type: ignore[operator]
        heads.up[k].bias.zero_()  # type: ignore[operator]
        heads.down[k].weight.copy_(torch.cat([one, -one], 1))  # type: ignore[operator]
    heads.copy_projection(one[:, [_predecessor(token) for token in range(SIZE)]].T)
    return heads


def walking_hydra(model: LlamaForCausalLM, choices: Sequence[tuple[int, ...]]) -> HydraDrafter:
    """The drafter of these heads."""
    target = target_of(model)
    return HydraDrafter(walking_heads().to(target.device, target.dtype), target, choices, max_nodes=64)


def _predecessor(token: int) -> int:
    return next(other for other in range(SIZE) if successor(other) == token)
