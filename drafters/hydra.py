"""Hydra: heads that also see the draft tokens before their own, so that a tree grows level by level.

Knows hidden states, input embeddings and a static tree; nothing of scheduling.
Source: Ankner et al., "Hydra: Sequentially-Dependent Draft Heads for Medusa Decoding" (2024).
"""

from collections.abc import Sequence
from pathlib import Path

from specdec.drafters.heads import load_heads_of
from specdec.drafters.heads_drafter import HeadsDrafter
from specdec.drafters.hydra_guesses import HydraGuesses
from specdec.drafters.hydra_heads import HydraHeads
from specdec.drafters.protocol import DraftTarget
from specdec.drafters.recurrent_heads import RecurrentHeads
from specdec.drafters.static_tree import StaticTree


class HydraDrafter(HeadsDrafter):
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

    def __init__(
        self,
        heads: HydraHeads | RecurrentHeads,
        target: DraftTarget,
        tree: Sequence[Sequence[int]] | None = None,
        max_nodes: int | None = None,
    ) -> None:
        static = StaticTree(heads.config, target, tree, max_nodes)
        super().__init__(static, HydraGuesses(heads, target, static.choices), target)


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
