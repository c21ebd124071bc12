"""N-grams and draft heads as one drafter of captured steps: a chain where n-grams are sure, else the heads' tree."""

from collections.abc import Sequence

from torch import Tensor

from specdec.drafters.heads_drafter import HeadsDrafter
from specdec.drafters.hybrid import HybridDrafter
from specdec.drafters.ngram import NGramDrafter
from specdec.drafters.protocol import DeviceQuery

SURE = 3
"""Tokens of a match from which on a chain is taken: shorter ones go on otherwise too often."""


class NGramHeadsDrafter(HybridDrafter):
    """Drafts as `HybridDrafter` does on the host, and in captured steps.

    There nobody counts how often n-grams were right, so the length of the match decides. The heads draft in any case: a
    captured step is the same whatever its sequences hold. The chances of the heads' tree aren't those of its drafts, so
    it isn't `KnowsChances`: a chain may be longer than a tree that was cut to a few nodes.

    Args:
        first: n-grams.
        second: heads.
    """

    chains_only = False

    def __init__(self, first: NGramDrafter, second: HeadsDrafter) -> None:
        super().__init__(first, second)
        self._ngrams, self._heads = first, second

    def max_device_nodes(self) -> int:
        """Return the nodes of the heads' tree, root included; a chain may be as long."""
        return self._heads.max_device_nodes()

    def draft_on_device(self, query: DeviceQuery, num_nodes: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return a chain or a tree for each sequence; see `DraftsOnDevice`."""
        tokens, parents, sizes = self._heads.draft_on_device(query, num_nodes)
        chain, chain_parents, chain_sizes = self._ngrams.draft_on_device(query, num_nodes, shortest=SURE)
        sure = chain_sizes > 1
        which = sure.unsqueeze(1)
        return chain.where(which, tokens), chain_parents.where(which, parents), chain_sizes.where(sure, sizes)

    def hidden_of(self, request_ids: Sequence[int]) -> list[Tensor | None]:
        """Return what the heads go on from; see `KeepsHidden`."""
        return self._heads.hidden_of(request_ids)

    def keep_hidden(self, request_ids: Sequence[int], hidden: Tensor) -> None:
        """Let the heads go on from what captured steps kept; see `KeepsHidden`."""
        self._heads.keep_hidden(request_ids, hidden)
