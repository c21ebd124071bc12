"""Medusa's tokens for a static tree, on the host or in captured steps. Knows hidden states; nothing of requests."""

from collections.abc import Sequence

import torch
from torch import Tensor

from specdec.drafters.choices import Choice
from specdec.drafters.coupling import coupled_scores
from specdec.drafters.medusa_heads import MedusaHeads
from specdec.drafters.protocol import DeviceQuery, DraftQuery, DraftTarget


class MedusaGuesses:
    """Each head ranks its candidates once, whatever path they stand on.

    Args:
        heads: the heads, on the target's device and in its dtype.
        target: the model that they read.
        choices: the tree, root left out, parents before their children.
    """

    def __init__(self, heads: MedusaHeads, target: DraftTarget, choices: Sequence[Choice]) -> None:
        self._heads, self._target, self._choices = heads, target, choices

        def put(values: list[int]) -> Tensor:  # here, because nothing can be copied from the host during a capture
            return torch.tensor(values, dtype=torch.int64, device=target.device)

        self._head, self._rank = put([len(choice) - 1 for choice in choices]), put([choice[-1] for choice in choices])

    def on_host(self, queries: Sequence[DraftQuery], hidden: Tensor, choices: Sequence[Choice]) -> list[list[int]]:
        """Return tokens for the first choices; see `Guesses`."""
        num_heads = max(len(choice) for choice in choices)
        logits = self._heads(hidden, self._target.lm_head, num_heads).float()  # [R, K', V]
        params = [query.params for query in queries for _ in range(num_heads)]
        positions = [query.num_output + k for query in queries for k in range(num_heads)]
        scores = coupled_scores(logits.flatten(0, 1), params, positions).view_as(logits)
        candidates = scores.topk(1 + max(choice[-1] for choice in choices)).indices.tolist()  # [R][K'][ranks]
        return [[ranked[len(choice) - 1][choice[-1]] for choice in choices] for ranked in candidates]

    def on_device(self, query: DeviceQuery, num_nodes: int) -> Tensor:
        """Return the tokens of the first nodes; see `Guesses`."""
        from specdec.kernels.gpu.rank import rank

        choices = self._choices[: num_nodes - 1]
        num_heads = max(len(choice) for choice in choices)
        logits = self._heads(query.hidden, self._target.lm_head, num_heads)  # [S, K', V]
        positions = query.first_positions().unsqueeze(1) + torch.arange(num_heads, device=logits.device)  # [S, K']
        num_ranks = 1 + max(choice[-1] for choice in choices)
        candidates = rank(
            logits.flatten(0, 1), query.temperature, query.seeds, positions.flatten(), num_ranks, num_heads
        ).view(len(logits), num_heads, num_ranks)
        drafts = candidates[:, self._head[: len(choices)], self._rank[: len(choices)]]
        return torch.cat([query.roots(), drafts], 1)
