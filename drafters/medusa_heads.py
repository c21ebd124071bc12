"""The module of Medusa's heads and its config. Knows hidden states; no files, no requests.

Source: Cai et al., "Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding Heads" (2024).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F  # noqa: N812 - the field's name for it
from torch import Tensor, nn

from specdec.drafters.choices import Choice, as_choices
from specdec.errors import ConfigError
from specdec.verifier.tree import MAX_NODES

MAX_LAYERS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadsConfig:
    """The shape of Medusa heads and what they were trained on.

    Args:
        num_heads: K; head k, from 0, reads the hidden state that yields the next token and predicts the token that
            stands k + 1 places after that one.
        num_layers: residual blocks of each head.
        hidden_size: H of the base.
        vocab_size: V, columns of the base's logits.
        projection: "own", a matrix for each head, or "shared", the base's own head.
        base_fingerprint: `base_fingerprint` of the base; empty if unknown.
        tree: the tree that suits them, as Medusa's choices, best first; None if there is none.

    Raises:
        ConfigError: a value is out of bounds.
    """

    num_heads: int
    num_layers: int
    hidden_size: int
    vocab_size: int
    projection: Literal["own", "shared"]
    base_fingerprint: str = ""
    tree: tuple[Choice, ...] | None = None

    def __post_init__(self) -> None:
        for name, most in (
            ("num_heads", MAX_NODES - 1),
            ("num_layers", MAX_LAYERS),
            ("hidden_size", 1 << 20),
            ("vocab_size", 1 << 24),
        ):
            value = getattr(self, name)
            if type(value) is not int or not 1 <= value <= most:
                raise ConfigError(f"{name} must be a whole number from 1 to {most}, not {value!r}")
        if self.projection not in ("own", "shared"):
            raise ConfigError(f'projection must be "own" or "shared", not {self.projection!r}')
        if not isinstance(self.base_fingerprint, str):
            raise ConfigError(f"base_fingerprint must be a string, not {self.base_fingerprint!r}")
        if self.tree is not None:
            object.__setattr__(self, "tree", as_choices(self.tree, self.num_heads))


class MedusaHeads(nn.Module):
    """K heads: residual blocks x + SiLU(W x + b), then a projection to the vocabulary.

    The weights of all heads are stacked, so that a block is one batched product. Blocks start as the identity; an own
    projection starts at zero, and `copy_projection` gives it the base's.

    Args:
        config: the heads' shape.
        device: where to make the weights.
        dtype: their dtype.
    """

    projection: nn.Parameter | None

    def __init__(
        self, config: HeadsConfig, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.config = config
        k, h, v = config.num_heads, config.hidden_size, config.vocab_size
        self.blocks = nn.ModuleList(_ResidualBlocks(k, h, device, dtype) for _ in range(config.num_layers))
        own = config.projection == "own"
        self.projection = nn.Parameter(torch.zeros(k, v, h, device=device, dtype=dtype)) if own else None

    def forward(self, hidden: Tensor, lm_head: Callable[[Tensor], Tensor], num_heads: int | None = None) -> Tensor:
        """Return the logits of the first heads.

        Args:
            hidden: [B, H] final hidden states of the base, in the heads' dtype.
            lm_head: the base's head, [R, H] to [R, V]; called only if the projection is shared.
            num_heads: K', how many heads; None for all K.

        Returns:
            [B, K', V].
        """
        states = self.states(hidden, num_heads)  # [B, K', H]
        if self.projection is None:
            return lm_head(states.flatten(0, 1)).reshape(*states.shape[:2], -1)
        weight = self.projection[: states.shape[1]]  # [K', V, H]
        return torch.bmm(states.transpose(0, 1), weight.mT).transpose(0, 1)

    def states(self, hidden: Tensor, num_heads: int | None = None) -> Tensor:
        """Return what the projection reads: [B, K', H] for hidden states [B, H]."""
        k = self.config.num_heads if num_heads is None else num_heads
        x = hidden.expand(k, *hidden.shape)  # [K', B, H]
        for block in self.blocks:
            x = block(x)
        return x.transpose(0, 1)

    @torch.no_grad()
    def copy_projection(self, weight: Tensor) -> None:
        """Start every head's own projection from the base's head, [V, H]. A shared one needs nothing."""
        if self.projection is not None:
            self.projection.copy_(weight.expand_as(self.projection))


class _ResidualBlocks(nn.Module):
    """The same residual block of K heads: [K', B, H] to [K', B, H] for the first K' of them."""

    def __init__(
        self, num_heads: int, hidden_size: int, device: torch.device | str | None, dtype: torch.dtype | None
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(num_heads, hidden_size, hidden_size, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.zeros(num_heads, hidden_size, device=device, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        k = x.shape[0]
        return x + F.silu(torch.baddbmm(self.bias[:k, None], x, self.weight[:k].mT))
