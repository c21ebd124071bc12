"""The drafter of recurrent heads: a tree that grows level by level, as Hydra's. Knows nothing of scheduling."""

from collections.abc import Sequence
from pathlib import Path

from specdec.drafters.heads import load_heads_of
from specdec.drafters.heads_drafter import HeadsDrafter
from specdec.drafters.hydra_guesses import HydraGuesses
from specdec.drafters.protocol import DraftTarget
from specdec.drafters.recurrent_heads import RecurrentHeads
from specdec.drafters.static_tree import StaticTree


class RecurrentDrafter(HeadsDrafter):
    """Drafts a static tree as `HydraDrafter` does, by heads that are one cell.

    Args:
        heads: the heads, on the target's device and in its dtype.
        target: the model that they read; its `embed` is needed.
        tree, max_nodes: as for `StaticTree`.

    Raises:
        ConfigError: as `StaticTree`, or the target has no input embeddings.
    """

    name = "recurrent"

    def __init__(
        self,
        heads: RecurrentHeads,
        target: DraftTarget,
        tree: Sequence[Sequence[int]] | None = None,
        max_nodes: int | None = None,
    ) -> None:
        static = StaticTree(heads.config, target, tree, max_nodes)
        super().__init__(static, HydraGuesses(heads, target, static.choices), target)


def load_recurrent(
    target: DraftTarget,
    path: str | Path,
    *,
    tree: Sequence[Sequence[int]] | None = None,
    max_nodes: int | None = None,
    check_base: bool = True,
) -> RecurrentDrafter:
    """Load recurrent heads as `load_heads` does, and return the drafter that uses them.

    Raises:
        CheckpointError: the heads can't be read, are of another kind, or belong to another model.
        ConfigError: an option is out of bounds.
    """
    heads = load_heads_of(RecurrentHeads, path, target, check_base=check_base)
    return RecurrentDrafter(heads, target, tree, max_nodes)
