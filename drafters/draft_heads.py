"""What all kinds of draft heads share: their config, their residual blocks and their projections.

Knows hidden states; no files, no requests. The kinds are in `specdec.drafters.medusa_heads` and `.hydra_heads`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

import torch
import torch.nn.functional as F  # noqa: N812 - the field's name for it
from torch import Tensor, nn

from specdec.drafters.choices import Choice, as_choices
from specdec.errors import ConfigError
from specdec.verifier.tree import MAX_NODES

TOKEN_IDS = "token_ids"
"""The name of the draft vocabulary in a state_dict."""
MAX_LAYERS = 16
MAX_WIDTH = 16
DEFAULT_WIDTHS = {"hydra": 2, "recurrent": 4}
"""Of the kinds that have MLPs."""
KindName = Literal["medusa", "hydra", "recurrent"]


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadsConfig:
    """The shape of draft heads and what they were trained on.

    Args:
        num_heads: K; head k, from 0, reads the hidden state that yields the next token (the root) and predicts the
            token that stands k + 1 places after it.
        num_layers: residual blocks of each head; Hydra heads, which have an MLP before them, may have 0, and recurrent
            heads have none.
        hidden_size: H of the base.
        vocab_size: V, columns of the base's logits.
        projection: "own", a matrix for each head, or "shared", the base's own head.
        base_fingerprint: `base_fingerprint` of the base; empty if unknown.
        tree: the tree that suits them, as Medusa's choices, best first; None if there is none.
        chances: how likely each node of the tree was accepted on held-out answers, in the tree's order; None if that
            wasn't measured.
        kind: "medusa", heads that read the hidden state alone; "hydra", heads that also read the embeddings of the
            root and of the draft tokens before theirs; "recurrent", heads that read them by one cell for all.
        width: the MLPs have width × H inner units; None is 2 for Hydra heads, 4 for recurrent ones. Medusa heads have
            none.
        projection_bias: whether own projections of Hydra heads have biases, as published ones do.
        draft_vocab: D, how many tokens of the vocabulary the heads score, as in FR-Spec; None is all of them.

    Raises:
        ConfigError: a value is out of bounds, or is for another kind.
    """

    num_heads: int
    num_layers: int
    hidden_size: int
    vocab_size: int
    projection: Literal["own", "shared"]
    base_fingerprint: str = ""
    tree: tuple[Choice, ...] | None = None
    chances: tuple[float, ...] | None = None
    kind: KindName = "medusa"
    width: int | None = None
    projection_bias: bool = False
    draft_vocab: int | None = None

    def __post_init__(self) -> None:
        if self.kind not in get_args(KindName):
            raise ConfigError(f"kind must be one of {', '.join(get_args(KindName))}, not {self.kind!r}")
        if self.width is None:
            object.__setattr__(self, "width", DEFAULT_WIDTHS.get(self.kind))
        for name, least, most in (
            ("num_heads", 1, MAX_NODES - 1),
            ("num_layers", *_LAYERS[self.kind]),
            ("hidden_size", 1, 1 << 20),
            ("vocab_size", 1, 1 << 24),
            *((("width", 1, MAX_WIDTH),) if self.kind in DEFAULT_WIDTHS else ()),
            *((("draft_vocab", 1, self.vocab_size),) if self.draft_vocab is not None else ()),
        ):
            value = getattr(self, name)
            if type(value) is not int or not least <= value <= most:
                raise ConfigError(f"{name} must be a whole number from {least} to {most}, not {value!r}")
        if self.projection not in ("own", "shared"):
            raise ConfigError(f'projection must be "own" or "shared", not {self.projection!r}')
        if not isinstance(self.base_fingerprint, str):
            raise ConfigError(f"base_fingerprint must be a string, not {self.base_fingerprint!r}")
        self._check_kind()
        if self.tree is not None:
            object.__setattr__(self, "tree", as_choices(self.tree, self.num_heads))
        if self.chances is not None:
            object.__setattr__(self, "chances", tuple(self.chances))
            fits = self.tree is not None and len(self.chances) == len(self.tree)
            if not fits or any(type(x) not in (int, float) or not 0 <= x <= 1 for x in self.chances):
                raise ConfigError("chances must be numbers from 0 to 1, one for each node of the tree but its root")

    @property
    def num_columns(self) -> int:
        """Columns of the heads' logits: the draft vocabulary, or all of the base's."""
        return self.vocab_size if self.draft_vocab is None else self.draft_vocab

    def _check_kind(self) -> None:
        if self.kind not in DEFAULT_WIDTHS and self.width is not None:
            raise ConfigError(f"width is for heads with MLPs; leave it out for Medusa heads, not {self.width!r}")
        if type(self.projection_bias) is not bool:
            raise ConfigError(f"projection_bias must be true or false, not {self.projection_bias!r}")
        if self.projection_bias and not (self.kind == "hydra" and self.projection == "own"):
            raise ConfigError("projection_bias is for Hydra heads with own projections; leave it out")


_LAYERS = {"medusa": (1, MAX_LAYERS), "hydra": (0, MAX_LAYERS), "recurrent": (0, 0)}


class DraftHeads(nn.Module):
    """K heads behind one interface: `states` for all heads at once, then `project` to the vocabulary.

    Own projections start at zero, and `copy_projection` gives them the base's. Heads with a draft vocabulary score
    the tokens `token_ids` alone, [D] int64 and ascending; it is the first D ids until others are put there.

    Source: Zhao et al., "FR-Spec: Accelerating Large-Vocabulary Language Models via Frequency-Ranked Speculative
    Sampling" (2025).

    Args:
        config: the heads' shape.
        device: where to make the weights.
        dtype: their dtype.
    """

    token_ids: Tensor | None
    projection: nn.Parameter | None
    projection_bias: nn.Parameter | None

    def __init__(
        self, config: HeadsConfig, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.config = config
        k, h, v = config.num_heads, config.hidden_size, config.num_columns
        self.register_buffer(TOKEN_IDS, None if config.draft_vocab is None else torch.arange(v, device=device))
        own = config.projection == "own"
        self.blocks = nn.ModuleList(ResidualBlocks(k, h, device, dtype) for _ in range(config.num_layers))
        self.projection = nn.Parameter(torch.zeros(k, v, h, device=device, dtype=dtype)) if own else None
        biased = config.projection_bias
        self.projection_bias = nn.Parameter(torch.zeros(k, v, device=device, dtype=dtype)) if biased else None

    def states(self, hidden: Tensor, following: Tensor | None = None, num_heads: int | None = None) -> Tensor:
        """Return what the projections read.

        Args:
            hidden: [T, H] final hidden states of the base, in the heads' dtype.
            following: [T, K, H] input embeddings of the tokens that follow: following[t, 0] is that of the root that
                hidden[t] yields, following[t, k] that of the k-th token behind it. Head k reads following[:, :k + 1],
                or nothing of it if its kind doesn't.
            num_heads: K', how many heads; None for all K.

        Returns:
            [T, K', H].
        """
        raise NotImplementedError  # the kinds differ in this alone

    def followed(self, following: Tensor | None, num_heads: int) -> Tensor:
        """Return what heads that read the tokens before theirs were given.

        Raises:
            ValueError: it is missing or holds fewer tokens than there are heads.
        """
        if following is None or following.shape[1] < num_heads:
            kind = self.config.kind
            raise ValueError(
                f"{num_heads} {kind} heads need the embeddings of the {num_heads} tokens that follow; pass following"
            )
        return following

    def project(self, states: Tensor, lm_head: Callable[[Tensor], Tensor], first: int = 0) -> Tensor:
        """Return the logits of some heads.

        Args:
            states: [T, K', H], of heads `first` to `first` + K' - 1.
            lm_head: the base's head, [R, H] to [R, V], or [R, D] of the tokens `token_ids`; called only if the
                projection is shared.
            first: the first of these heads.

        Returns:
            [T, K', V], or [T, K', D] with a draft vocabulary.
        """
        if self.projection is None:
            logits = lm_head(states.flatten(0, 1))
            return logits.reshape(*states.shape[:2], logits.shape[-1])
        heads = slice(first, first + states.shape[1])
        logits = torch.bmm(states.transpose(0, 1), self.projection[heads].mT).transpose(0, 1)
        return logits if self.projection_bias is None else logits + self.projection_bias[heads]

    def columns_of(self, tokens: Tensor, missing: int) -> Tensor:
        """Return the column of the logits in which each token stands, `missing` where it isn't scored.

        Args:
            tokens: [...] int64; what is no token, such as a negative number, isn't scored.
            missing: stays what it is where it stands in `tokens` already.
        """
        if self.token_ids is None:
            return tokens
        columns = torch.searchsorted(self.token_ids, tokens.contiguous()).clamp(max=len(self.token_ids) - 1)
        return columns.masked_fill(self.token_ids[columns] != tokens, missing)

    def tokens_of(self, columns: Tensor) -> Tensor:
        """Return the tokens that stand in these columns of the logits."""
        return columns if self.token_ids is None else self.token_ids[columns]

    @torch.no_grad()
    def copy_projection(self, weight: Tensor) -> None:
        """Start every head's own projection from the base's head, [V, H]. A shared one needs nothing."""
        if self.projection is not None:
            scored = weight if self.token_ids is None else weight[self.token_ids.to(weight.device)]
            self.projection.copy_(scored.expand_as(self.projection))


class ResidualBlocks(nn.Module):
    """The same residual block x + SiLU(W x + b) of K heads, stacked: one batched product. Starts as the identity."""

    def __init__(
        self, num_heads: int, hidden_size: int, device: torch.device | str | None, dtype: torch.dtype | None
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(num_heads, hidden_size, hidden_size, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.zeros(num_heads, hidden_size, device=device, dtype=dtype))

    def forward(self, x: Tensor, first: int = 0) -> Tensor:
        """Run the block of heads `first` to `first` + K' - 1: [K', T, H] to [K', T, H]."""
        heads = slice(first, first + len(x))
        return x + F.silu(torch.baddbmm(self.bias[heads, None], x, self.weight[heads].mT))
