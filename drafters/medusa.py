"""Medusa: heads on the target's last hidden state guess the next tokens, each head one place further.

Knows hidden states and a static tree; nothing of scheduling. The hidden state that yielded the root (the last
emitted token) also feeds the heads: head 0 guesses the root's children, head 1 their children, and so on.
Source: Cai et al., "Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding Heads" (2024).
"""

from collections.abc import Collection, Sequence
from pathlib import Path

import torch
from torch import Tensor

from specdec.drafters.choices import Choice, best_first_choices
from specdec.drafters.coupling import coupled_scores
from specdec.drafters.heads import load_heads_of
from specdec.drafters.medusa_device import DeviceTree
from specdec.drafters.medusa_heads import MedusaHeads
from specdec.drafters.protocol import DeviceQuery, DraftQuery, DraftTarget, Observation
from specdec.drafters.static_tree import StaticTree
from specdec.verifier.tree import TokenTree, chain_parents

__all__ = ["MedusaDrafter", "best_first_choices", "load_medusa"]


class MedusaDrafter:
    """Drafts a static tree whose node (…, r) at depth d holds the candidate of rank r of head d - 1.

    Candidates of a greedy request are its heads' most likely tokens. Those of a sampling request are ranked by
    log-probability / temperature + the noise of the output position that the head predicts: the noise that the
    target's own choice there will use.

    Args:
        heads: the heads, on the target's device and in its dtype.
        target: the model that they read.
        tree, max_nodes: as for `StaticTree`.

    Raises:
        ConfigError: as `StaticTree`.
    """

    name = "medusa"
    reads_hidden = True
    chains_only = False

    def __init__(
        self,
        heads: MedusaHeads,
        target: DraftTarget,
        tree: Sequence[Sequence[int]] | None = None,
        max_nodes: int | None = None,
    ) -> None:
        self._heads = heads
        self._target = target
        self._tree = StaticTree(heads.config, target, tree, max_nodes)
        self.chains_only = self._tree.parents == chain_parents(len(self._tree.parents))
        self._on_device = DeviceTree(heads, target, self._tree.choices, self._tree.parents)

    @property
    def choices(self) -> tuple[Choice, ...]:
        """The tree in use, root left out, in the order in which a budget takes its nodes."""
        return self._tree.choices

    @torch.inference_mode()
    def propose(self, queries: Sequence[DraftQuery]) -> TokenTree:
        """Return one tree a query; the root alone unless the token before the root was the last one observed."""
        return self._tree.propose(queries, self._guess)

    def observe(self, observation: Observation) -> None:
        """Keep the hidden state of each request's last committed token."""
        self._tree.observe(observation)

    def forget(self, request_ids: Collection[int]) -> None:
        """Drop the hidden states of these requests."""
        self._tree.forget(request_ids)

    def max_device_nodes(self) -> int:
        """Return the nodes of the tree, root included."""
        return len(self._tree.parents)

    def draft_on_device(self, query: DeviceQuery, num_nodes: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return the first nodes of the tree, the root alone where no hidden state is known; see `DraftsOnDevice`."""
        return self._on_device.draft(query, num_nodes)

    def hidden_of(self, request_ids: Sequence[int]) -> list[Tensor | None]:
        """Return what captured steps go on from; see `KeepsHidden`."""
        return self._tree.hidden_of(request_ids)

    def keep_hidden(self, request_ids: Sequence[int], hidden: Tensor) -> None:
        """Go on from what captured steps kept; see `KeepsHidden`. Their steps reach the root."""
        self._tree.keep_hidden(request_ids, hidden)

    def _guess(self, queries: Sequence[DraftQuery], hidden: Tensor, choices: Sequence[Choice]) -> list[list[int]]:
        """Tokens of the choices for each query."""
        num_heads = max(len(choice) for choice in choices)
        logits = self._heads(hidden, self._target.lm_head, num_heads).float()  # [R, K', V]
        scores = add_noise(logits, queries)
        candidates = scores.topk(1 + max(choice[-1] for choice in choices)).indices.tolist()  # [R][K'][ranks]
        return [[ranked[len(choice) - 1][choice[-1]] for choice in choices] for ranked in candidates]


def add_noise(logits: Tensor, queries: Sequence[DraftQuery]) -> Tensor:
    """Return scores whose order is each query's order of candidates.

    Args:
        logits: [R, K, V] float32, head k predicting output position num_output + k.
        queries: the R queries.

    Returns:
        [R, K, V] float32: the logits themselves where the request is greedy, log-probability / temperature + noise
        where it samples.
    """
    num_heads = logits.shape[1]
    params = [query.params for query in queries for _ in range(num_heads)]
    positions = [query.num_output + k for query in queries for k in range(num_heads)]
    return coupled_scores(logits.flatten(0, 1), params, positions).view_as(logits)


def load_medusa(
    target: DraftTarget,
    path: str | Path,
    *,
    tree: Sequence[Sequence[int]] | None = None,
    max_nodes: int | None = None,
    allow_pickle: bool = False,
    check_base: bool = True,
) -> MedusaDrafter:
    """Load Medusa heads as `load_heads` does, and return the drafter that uses them.

    Raises:
        CheckpointError: the heads can't be read, are of another kind, or belong to another model.
        ConfigError: an option is out of bounds.
    """
    heads = load_heads_of(MedusaHeads, path, target, allow_pickle=allow_pickle, check_base=check_base)
    return MedusaDrafter(heads, target, tree, max_nodes)
