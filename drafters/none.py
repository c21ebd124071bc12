"""Plain decoding as a drafter: it proposes nothing."""

from collections.abc import Collection, Sequence

from specdec.drafters.protocol import DraftQuery, Observation
from specdec.verifier.tree import TokenTree


class NoDrafter:
    """Proposes the root alone, so that each step emits one token a sequence."""

    name = "none"
    reads_hidden = False

    def propose(self, queries: Sequence[DraftQuery]) -> TokenTree:
        """Return one root a query."""
        return TokenTree.roots([query.tokens[-1] for query in queries])

    def observe(self, observation: Observation) -> None:
        """Nothing to learn."""

    def forget(self, request_ids: Collection[int]) -> None:
        """Nothing to drop."""
