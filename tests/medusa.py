"""Medusa drafters whose answers are known: over a model that walks through a permutation, and random ones."""

from collections.abc import Callable, Sequence

import torch
from transformers import LlamaForCausalLM, PreTrainedModel

from specdec.build import draft_target
from specdec.drafters.medusa import MedusaDrafter
from specdec.drafters.medusa_heads import HeadsConfig, MedusaHeads
from specdec.drafters.protocol import DraftTarget
from specdec.models.load import make_target
from tests.conftest import tiny_llama

SIZE = 96
CHOICES = [(0,), (0, 0), (1,), (0, 0, 0), (0, 1)]


def target_of(model: PreTrainedModel) -> DraftTarget:
    return draft_target(model, make_target(model))


def random_medusa(
    model: PreTrainedModel,
    num_heads: int = 3,
    draft_vocab: int | None = None,
    choices: Sequence[tuple[int, ...]] = CHOICES,
) -> MedusaDrafter:
    """Random heads with the base's own projection: nearly always wrong, never harmful. A draft vocabulary is of the
    tokens 1, 4, 7, ….
    """
    target = target_of(model)
    config = HeadsConfig(
        num_heads=num_heads,
        num_layers=1,
        hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        projection="shared",
        draft_vocab=draft_vocab,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        heads = MedusaHeads(config, target.device, target.dtype).requires_grad_(False)
        for parameter in heads.parameters():
            torch.nn.init.normal_(parameter)
    if heads.token_ids is not None:
        heads.token_ids.mul_(3).add_(1)
    return MedusaDrafter(heads, target, choices)


def successor(token: int) -> int:
    """The next token of `walking_model`: a permutation with one long cycle."""
    return (token * 5 + 7) % SIZE


def walking_model(dtype: torch.dtype = torch.float64) -> LlamaForCausalLM:
    """A Llama that always follows `successor`: one-hot embeddings, blocks that add nothing, a permuting head."""
    model = tiny_llama(vocab_size=SIZE, hidden_size=SIZE, num_hidden_layers=1, dtype=dtype)
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(torch.eye(SIZE))
        model.model.layers[0].self_attn.o_proj.weight.zero_()
        model.model.layers[0].mlp.down_proj.weight.zero_()
        model.lm_head.weight.copy_(_walk(1, lambda token: True))
    return model


def walking_medusa(
    model: LlamaForCausalLM, knows: Callable[[int], bool], tree: Sequence[tuple[int, ...]] = ((0,), (0, 0), (0, 0, 0))
) -> MedusaDrafter:
    """Heads that are right after the tokens that they know and say the token itself after the others."""
    target = target_of(model)
    config = HeadsConfig(num_heads=3, num_layers=1, hidden_size=SIZE, vocab_size=SIZE, projection="own")
    heads = MedusaHeads(config, target.device, target.dtype).requires_grad_(False)
    assert heads.projection is not None
    heads.projection.copy_(torch.stack([_walk(k + 2, knows) for k in range(3)]))
    for block in heads.blocks:
        for parameter in block.parameters():
            torch.nn.init.zeros_(parameter)
    return MedusaDrafter(heads, target, tree)


def _walk(steps: int, knows: Callable[[int], bool]) -> torch.Tensor:
    """[V, H] matrix that maps a one-hot token to the one that comes `steps` later, or to itself if unknown."""
    matrix = torch.zeros(SIZE, SIZE, dtype=torch.float64)
    for token in range(SIZE):
        after = token
        for _ in range(steps if knows(token) else 0):
            after = successor(after)
        matrix[after, token] = 1
    return matrix
