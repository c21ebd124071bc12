"""Medusa: heads on the target's last hidden state guess the next tokens, each head one place further.

Knows hidden states and a static tree; nothing of scheduling. The hidden state that yielded the root (the last
emitted token) also feeds the heads: head 0 guesses the root's children, head 1 their children, and so on.
Source: Cai et al., "Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding Heads" (2024).
"""

from collections.abc import Sequence
from pathlib import Path

from specdec.drafters.choices import best_first_choices
from specdec.drafters.heads import load_heads_of
from specdec.drafters.heads_drafter import HeadsDrafter
from specdec.drafters.medusa_guesses import MedusaGuesses
from specdec.drafters.medusa_heads import MedusaHeads
from specdec.drafters.protocol import DraftTarget
from specdec.drafters.static_tree import StaticTree

__all__ = ["MedusaDrafter", "best_first_choices", "load_medusa"]


class MedusaDrafter(HeadsDrafter):
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

    def __init__(
        self,
        heads: MedusaHeads,
        target: DraftTarget,
        tree: Sequence[Sequence[int]] | None = None,
        max_nodes: int | None = None,
    ) -> None:
        self._heads = heads
        static = StaticTree(heads.config, target, tree, max_nodes)
        super().__init__(static, MedusaGuesses(heads, target, static.choices), target)


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
