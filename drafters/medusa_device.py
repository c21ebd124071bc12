"""Medusa's static tree as tensors: drafts a step without the host. Knows hidden states; nothing of requests."""

from collections.abc import Sequence

import torch
from torch import Tensor

from specdec.drafters.choices import Choice
from specdec.drafters.medusa_heads import MedusaHeads
from specdec.drafters.protocol import DeviceQuery, DraftTarget


class DeviceTree:
    """A static tree, cut to its first nodes, and what fills it from the target's hidden states.

    Args:
        heads: the heads, on the target's device and in its dtype.
        target: the model that they read.
        choices: the tree, root left out, parents before their children.
        parents: of its nodes, -1 for the root first.
    """

    def __init__(
        self, heads: MedusaHeads, target: DraftTarget, choices: Sequence[Choice], parents: Sequence[int]
    ) -> None:
        self._heads, self._target, self._choices = heads, target, choices

        def put(values: list[int]) -> Tensor:  # here, because nothing can be copied from the host during a capture
            return torch.tensor(values, dtype=torch.int64, device=target.device)

        self._parents = put(list(parents))
        self._head, self._rank = put([len(choice) - 1 for choice in choices]), put([choice[-1] for choice in choices])

    def draft(self, query: DeviceQuery, num_nodes: int) -> tuple[Tensor, Tensor, Tensor]:
        """Draft the first nodes of the tree; the root alone where no hidden state is known. See `DraftsOnDevice`."""
        tokens = query.roots()
        if num_nodes > 1:
            tokens = torch.cat([tokens, self._candidates(query, num_nodes - 1)], 1)
        parents = self._parents[:num_nodes].expand_as(tokens).contiguous()
        size = torch.where(query.has_hidden, num_nodes, 1).where(query.lengths > 0, 0)
        return tokens, parents, size.to(torch.int32)

    def _candidates(self, query: DeviceQuery, num_choices: int) -> Tensor:
        """[S, num_choices] int64, tokens of the first choices."""
        from specdec.kernels.gpu.rank import rank

        choices = self._choices[:num_choices]
        num_heads = max(len(choice) for choice in choices)
        logits = self._heads(query.hidden, self._target.lm_head, num_heads)  # [S, K', V]
        first = (query.lengths - query.prompt_lens).clamp(min=0)  # output position of the root's children
        positions = first.unsqueeze(1) + torch.arange(num_heads, device=first.device)  # [S, K']
        num_ranks = 1 + max(choice[-1] for choice in choices)
        candidates = rank(
            logits.flatten(0, 1), query.temperature, query.seeds, positions.flatten(), num_ranks, num_heads
        ).view(len(first), num_heads, num_ranks)
        return candidates[:, self._head[:num_choices], self._rank[:num_choices]]
