"""Hydra's heads: each sees the draft tokens before its own. Knows hidden states and embeddings; no files, no requests.

Source: Ankner et al., "Hydra: Sequentially-Dependent Draft Heads for Medusa Decoding" (2024).
"""

import torch
import torch.nn.functional as F  # noqa: N812 - the field's name for it
from torch import Tensor, nn

from specdec.drafters.draft_heads import DraftHeads, HeadsConfig


class HydraHeads(DraftHeads):
    """K heads: h + D SiLU(U [h, e_0, …, e_k] + b) + c for head k, then residual blocks, then a projection.

    h is the base's hidden state, e_0 the input embedding of the root that it yields, e_1 to e_k those of the draft
    tokens behind it. D and c start at zero and the blocks as the identity, so new heads are the identity on h.
    """

    def __init__(
        self, config: HeadsConfig, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__(config, device, dtype)
        assert config.width is not None, "the config has set it"
        h, inner = config.hidden_size, config.width * config.hidden_size
        self.up = nn.ModuleList(
            nn.Linear((k + 2) * h, inner, device=device, dtype=dtype) for k in range(config.num_heads)
        )
        self.down = nn.ModuleList(nn.Linear(inner, h, device=device, dtype=dtype) for _ in range(config.num_heads))
        for parameter in self.down.parameters():
            nn.init.zeros_(parameter)

    def states(self, hidden: Tensor, following: Tensor | None = None, num_heads: int | None = None) -> Tensor:
        """Return what the projections read, as `DraftHeads.states`: teacher-forced, all heads at once.

        Raises:
            ValueError: `following` is missing or holds fewer tokens than there are heads.
        """
        k = self.config.num_heads if num_heads is None else num_heads
        following = self.followed(following, k)
        x = torch.stack([self._mlp(hidden, following[:, : head + 1]) for head in range(k)])  # [K', T, H]
        for block in self.blocks:
            x = block(x)
        return x.transpose(0, 1)

    def next_states(self, hidden: Tensor, path: Tensor, above: Tensor) -> Tensor:
        """Return what the projection of head k reads, for drafting level by level.

        Args:
            hidden: [R, H] final hidden states of the base.
            path: [R, k + 1, H] input embeddings of the root and of the k draft tokens behind it.
            above: [R, H], what the projection of head k - 1 read on the same path; `hidden` for head 0.

        Returns:
            [R, H].
        """
        x = self._mlp(hidden, path)[None]
        for block in self.blocks:
            x = block(x, path.shape[1] - 1)
        return x[0]

    def _mlp(self, hidden: Tensor, path: Tensor) -> Tensor:
        """The MLP of head k on [R, H] and [R, k + 1, H]."""
        k = path.shape[1] - 1
        x = torch.cat([hidden, path.flatten(1)], -1)
        down: Tensor = self.down[k](F.silu(self.up[k](x)))
        return hidden + down
