"""Hydra: heads that also see the draft tokens before their own, so that a tree grows level by level.

Knows hidden states, input embeddings and a static tree; nothing of scheduling.
Source: Ankner et al., "Hydra: Sequentially-Dependent Draft Heads for Medusa Decoding" (2024).
"""

from collections.abc import Collection, Sequence
from pathlib import Path

import torch
from torch import Tensor

from specdec.drafters.choices import Choice
from specdec.drafters.coupling import coupled_scores
from specdec.drafters.heads import load_heads_of
from specdec.drafters.hydra_heads import HydraHeads
from specdec.drafters.protocol import DraftQuery, DraftTarget, Observation
from specdec.drafters.static_tree import StaticTree
from specdec.errors import ConfigError
from specdec.verifier.tree import TokenTree


class HydraDrafter:
    """Drafts a static tree whose node (…, r) at depth d holds the candidate of rank r of head d - 1 on its path.

    A level takes one forward of its head, over all nodes of the level before that have children. Candidates are
    ranked as by `MedusaDrafter`: by logits for greedy requests, with the noise of the target's own choice for
    sampling ones.

    Args:
        heads: the heads, on the target's device and in its dtype.
        target: the model that they read; its `embed` is needed.
        tree, max_nodes: as for `StaticTree`.

    Raises:
        ConfigError: as `StaticTree`, or the target has no input embeddings.
    """

    name = "hydra"
    reads_hidden = True

    def __init__(
        self,
        heads: HydraHeads,
        target: DraftTarget,
        tree: Sequence[Sequence[int]] | None = None,
        max_nodes: int | None = None,
    ) -> None:
        if target.embed is None:
            raise ConfigError("Hydra heads read the target's input embeddings; give the DraftTarget its embed")
        self._heads = heads
        self._embed = target.embed
        self._lm_head = target.lm_head
        self._tree = StaticTree(heads.config, target, tree, max_nodes)

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

    def _guess(self, queries: Sequence[DraftQuery], hidden: Tensor, choices: Sequence[Choice]) -> list[list[int]]:
        """Tokens of the choices for each query."""
        node_of: dict[Choice, int] = {(): 0} | {choice: i for i, choice in enumerate(choices, 1)}
        roots = torch.tensor([query.tokens[-1] for query in queries], device=hidden.device)
        tokens = roots[:, None].repeat(1, len(node_of))  # [R, nodes], the root's until a level is drafted
        for depth in range(max(len(choice) for choice in choices)):
            children = [choice for choice in choices if len(choice) == depth + 1]
            parents = list(dict.fromkeys(choice[:-1] for choice in children))
            paths = [[node_of[parent[:d]] for d in range(depth + 1)] for parent in parents]  # [P][depth + 1]
            scores = self._level(queries, hidden, tokens[:, paths], depth)
            ranked = scores.topk(1 + max(choice[-1] for choice in children)).indices  # [R, P, ranks]
            rows = [parents.index(choice[:-1]) for choice in children]
            tokens[:, [node_of[choice] for choice in children]] = ranked[:, rows, [choice[-1] for choice in children]]
        drafts: list[list[int]] = tokens[:, 1:].tolist()
        return drafts

    def _level(self, queries: Sequence[DraftQuery], hidden: Tensor, paths: Tensor, depth: int) -> Tensor:
        """Scores [R, P, V] of what follows P paths [R, P, depth + 1] of each query."""
        num_paths = paths.shape[1]
        embedded = self._embed(paths.flatten(0, 1)).to(hidden)  # [R P, depth + 1, H]
        states = self._heads.next_states(hidden.repeat_interleave(num_paths, 0), embedded)
        logits = self._heads.project(states[:, None], self._lm_head, depth).float()
        positions = [query.num_output + depth for query in queries]
        shaped = logits.view(len(queries), num_paths, -1)
        return coupled_scores(shaped, [query.params for query in queries], positions)


def load_hydra(
    target: DraftTarget,
    path: str | Path,
    *,
    tree: Sequence[Sequence[int]] | None = None,
    max_nodes: int | None = None,
    allow_pickle: bool = False,
    check_base: bool = True,
) -> HydraDrafter:
    """Load Hydra heads as `load_heads` does, and return the drafter that uses them.

    Raises:
        CheckpointError: the heads can't be read, are of another kind, or belong to another model.
        ConfigError: an option is out of bounds.
    """
    heads = load_heads_of(HydraHeads, path, target, allow_pickle=allow_pickle, check_base=check_base)
    return HydraDrafter(heads, target, tree, max_nodes)
