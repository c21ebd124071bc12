"""Medusa's tokens for a static tree, on the host or in captured steps. Knows hidden states; nothing of requests."""

from collections.abc import Sequence

import torch
from torch import Tensor

from specdec.drafters.choices import Choice
from specdec.drafters.coupling import coupled_scores, likeliest
from specdec.drafters.device_candidates import DeviceCandidates
from specdec.drafters.grown_tree import Path, Rank
from specdec.drafters.int8 import HostHeads
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
        self._heads, self._choices = heads, choices
        self._host = HostHeads(heads, target.head_for(heads.token_ids if heads.projection is None else None))
        self._candidates = DeviceCandidates(heads, self._host.lm_head)
        self._num_heads, self._num_ranks = (
            max((len(choice) for choice in choices), default=0),
            1 + max((choice[-1] for choice in choices), default=0),
        )
        places = [0, *(1 + (len(choice) - 1) * self._num_ranks + choice[-1] for choice in choices)]
        # here, because nothing can be copied from the host during a capture
        self._places = torch.tensor(places, device=target.device)
        self.num_found = 1 + self._num_heads * self._num_ranks

    def on_host(self, queries: Sequence[DraftQuery], hidden: Tensor, choices: Sequence[Choice]) -> list[list[int]]:
        """Return tokens for the first choices; see `Guesses`."""
        num_heads = max(len(choice) for choice in choices)
        logits = self._host.project(self._host.heads.states(hidden, num_heads=num_heads)).float()  # [R, K', V]
        params = [query.params for query in queries for _ in range(num_heads)]
        positions = [query.num_output + k for query in queries for k in range(num_heads)]
        scores = coupled_scores(logits.flatten(0, 1), params, positions, self._heads.token_ids).view_as(logits)
        columns = scores.topk(1 + max(choice[-1] for choice in choices)).indices
        candidates = self._heads.tokens_of(columns).tolist()  # [R][K'][ranks]
        return [[ranked[len(choice) - 1][choice[-1]] for choice in choices] for ranked in candidates]

    def ranking(self, queries: Sequence[DraftQuery], hidden: Tensor, width: int) -> Rank:
        """Return what ranks the candidates of trees that grow; see `Guesses`."""
        states = self._host.heads.states(hidden)  # [R, K, H]
        params = [query.params for query in queries]

        def rank(
            sequences: Sequence[int], paths: Sequence[Path], above: Sequence[int]
        ) -> tuple[list[list[int]], list[list[float]]]:
            depth = len(paths[0])
            logits = self._host.project(states[:, depth : depth + 1], depth).squeeze(1).float()  # [R, V]
            positions = [query.num_output + depth for query in queries]
            columns, chances = likeliest(logits, params, positions, self._heads.token_ids, width)
            rows = list(sequences)
            return self._heads.tokens_of(columns)[rows].tolist(), chances[rows].tolist()

        return rank

    def on_device(self, query: DeviceQuery, positions: Tensor, found: Tensor, num_nodes: int) -> Tensor:
        """Return the tokens of the first nodes; see `Guesses`."""
        choices = self._choices[: num_nodes - 1]
        num_heads, num_ranks = max(len(choice) for choice in choices), 1 + max(choice[-1] for choice in choices)
        states = self._heads.states(query.hidden, num_heads=num_heads)  # [S, K', H]
        ranked = found[:, 1:].view(len(found), self._num_heads, self._num_ranks)
        self._candidates.of_heads(query, positions, states, ranked[:, :num_heads, :num_ranks])
        return found.gather(1, self._places[:num_nodes].expand(len(found), -1))
