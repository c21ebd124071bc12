"""Recurrent heads: one cell for every depth, fed with its own state. Knows hidden states and embeddings; no files.

Hydra's heads have weights of their own for each depth, and each reads all draft tokens before its own. Here one cell
reads the state of the depth before and the token that was drafted last, so that its weights learn from every depth.
Source: Cheng et al., "Recurrent Drafter for Fast Speculative Decoding in Large Language Models" (2024), section 3.
"""

import torch
from torch import Tensor, nn

from specdec.drafters.draft_heads import DraftHeads, HeadsConfig
from specdec.kernels.cell import next_state


class RecurrentHeads(DraftHeads):
    """K heads: s_k = s_{k-1} + D SiLU(U [norm(s_{k-1}), norm(e_k)] + b) + c, then a projection of s_k.

    s_{-1} is the base's hidden state, e_0 the input embedding of the root that it yields, e_k that of the k-th draft
    token behind it; norm divides by the root mean square, for embeddings are often much smaller than hidden states and
    would hardly be heard at first. D and c start at zero, so new heads are the identity.
    """

    def __init__(
        self, config: HeadsConfig, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__(config, device, dtype)
        assert config.width is not None, "the config has set it"
        h, inner = config.hidden_size, config.width * config.hidden_size
        self.up = nn.Linear(2 * h, inner, device=device, dtype=dtype)
        self.down = nn.Linear(inner, h, device=device, dtype=dtype)
        for parameter in self.down.parameters():
            nn.init.zeros_(parameter)

    def states(self, hidden: Tensor, following: Tensor | None = None, num_heads: int | None = None) -> Tensor:
        """Return what the projections read, as `DraftHeads.states`: teacher-forced, depth after depth.

        Raises:
            ValueError: `following` is missing or holds fewer tokens than there are heads.
        """
        k = self.config.num_heads if num_heads is None else num_heads
        following = self.followed(following, k)
        states = [hidden]
        for token in following[:, :k].unbind(1):
            states.append(self._cell(states[-1], token))
        return torch.stack(states[1:], 1)

    def next_states(self, hidden: Tensor, path: Tensor, above: Tensor) -> Tensor:
        """Return what the projection of head k reads, as `HydraHeads.next_states`; the path's last token is enough."""
        return self._cell(above, path[:, -1])

    def _cell(self, state: Tensor, token: Tensor) -> Tensor:
        """The next state of states [R, H] and embeddings [R, H]."""
        return next_state(state, token, self.up, self.down)
