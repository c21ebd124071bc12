"""Medusa's heads: residual blocks on the hidden state alone. Knows hidden states; no files, no requests.

Source: Cai et al., "Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding Heads" (2024).
"""

from collections.abc import Callable

from torch import Tensor

from specdec.drafters.draft_heads import DraftHeads, HeadsConfig

__all__ = ["HeadsConfig", "MedusaHeads"]


class MedusaHeads(DraftHeads):
    """K heads: residual blocks x + SiLU(W x + b), then a projection to the vocabulary. Blocks start as the identity."""

    def forward(self, hidden: Tensor, lm_head: Callable[[Tensor], Tensor], num_heads: int | None = None) -> Tensor:
        """Return the logits of the first heads.

        Args:
            hidden: [B, H] final hidden states of the base, in the heads' dtype.
            lm_head: the base's head, [R, H] to [R, V]; called only if the projection is shared.
            num_heads: K', how many heads; None for all K.

        Returns:
            [B, K', V].
        """
        return self.project(self.states(hidden, num_heads=num_heads), lm_head)

    def states(self, hidden: Tensor, following: Tensor | None = None, num_heads: int | None = None) -> Tensor:
        """Return what the projections read, as `DraftHeads.states`; `following` is not looked at."""
        k = self.config.num_heads if num_heads is None else num_heads
        x = hidden.expand(k, *hidden.shape)  # [K', T, H]
        for block in self.blocks:
            x = block(x)
        return x.transpose(0, 1)
