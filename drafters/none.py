"""Plain decoding as a drafter: it proposes nothing."""

from collections.abc import Collection, Sequence

import torch

from specdec.drafters.protocol import DeviceQuery, DraftQuery, Observation
from specdec.verifier.tree import TokenTree


class NoDrafter:
    """Proposes the root alone, so that each step emits one token a sequence."""

    name = "none"
    reads_hidden = False
    chains_only = True

    def propose(self, queries: Sequence[DraftQuery]) -> TokenTree:
        """Return one root a query."""
        return TokenTree.roots([query.tokens[-1] for query in queries])

    def observe(self, observation: Observation) -> None:
        """Nothing to learn."""

    def forget(self, request_ids: Collection[int]) -> None:
        """Nothing to drop."""

    def max_device_nodes(self) -> int:
        """Return 1: the root."""
        return 1

    def draft_on_device(self, query: DeviceQuery, num_nodes: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the roots; see `DraftsOnDevice`."""
        from specdec.kernels.gpu.roots import roots

        tokens, _, sizes = roots(query.history, query.lengths, query.prompt_lens, query.has_hidden, 1, 1)
        return tokens, tokens.new_full(tokens.shape, -1), sizes
