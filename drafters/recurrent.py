"""The drafter of recurrent heads: a tree that grows level by level, as Hydra's. Knows nothing of scheduling."""

from collections.abc import Sequence
from pathlib import Path

from specdec.drafters.heads import load_heads_of
from specdec.drafters.hydra import HydraDrafter
from specdec.drafters.protocol import DraftTarget
from specdec.drafters.recurrent_heads import RecurrentHeads


class RecurrentDrafter(HydraDrafter):
    """Drafts as `HydraDrafter` does, by heads that are one cell."""

    name = "recurrent"


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
