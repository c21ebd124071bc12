"""The rows that a rule visits: a sequence to verify, a node of its tree, and how to change some rows of a batch.

Knows request parameters and tokens, not what is done to the scores.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from specdec.params import SamplingParams


@dataclass(frozen=True, slots=True)
class VerifyQuery:
    """One sequence whose tree is to be verified, made anew for every step.

    Args:
        params: the request's parameters; `params.seed` is set unless it is greedy.
        tokens: prompt and output so far; the last one is the tree's root. Read only.
        num_output: how many of `tokens` are output: the token chosen at the root stands at this output position.
        eos_token_ids: the model's EOS tokens; read by `min_new_tokens` and `bad_words_ids`.
        keep_scores: whether the rule returns the scores that each emitted token was chosen by.
    """

    params: SamplingParams
    tokens: Sequence[int]
    num_output: int
    eos_token_ids: Collection[int] = ()
    keep_scores: bool = False
    _made: dict[str, Tensor] = field(default_factory=dict, init=False, repr=False, compare=False)

    def once(self, name: str, make: Callable[[], Tensor]) -> Tensor:
        """Return the tensor of that name, made at the first call: what all nodes of the sequence share."""
        if name not in self._made:
            self._made[name] = make()
        return self._made[name]


@dataclass(frozen=True, slots=True)
class NodeContext:
    """One node at which the target chooses: its prefix is `query.tokens` followed by `path`.

    Args:
        sequence: index of the sequence in the batch, named in errors.
        query: the node's sequence.
        path: tokens from below the root down to the node itself; empty at the root.
    """

    sequence: int
    query: VerifyQuery
    path: tuple[int, ...] = ()

    @property
    def params(self) -> SamplingParams:
        """The request's parameters."""
        return self.query.params

    @property
    def position(self) -> int:
        """Output position of the token chosen at this node."""
        return self.query.num_output + len(self.path)

    def prefix(self, device: torch.device) -> Tensor:
        """Return the whole prefix, [L] int64: prompt, output and path. Read only."""
        tokens = self.query.once("tokens", lambda: torch.tensor(self.query.tokens, dtype=torch.int64, device=device))
        return torch.cat([tokens, torch.tensor(self.path, dtype=torch.int64, device=device)]) if self.path else tokens

    def tail(self, num_tokens: int) -> tuple[int, ...]:
        """Return the last tokens of the prefix, at most that many."""
        if len(self.path) >= num_tokens:
            return self.path[len(self.path) - num_tokens :]
        start = max(0, len(self.query.tokens) - (num_tokens - len(self.path)))
        return (*self.query.tokens[start:], *self.path)


Change = Callable[[Tensor, Sequence[NodeContext]], Tensor]
"""Maps the scores [r, V] of r nodes to changed ones; never writes into them."""


def change_rows(scores: Tensor, rows: Sequence[int], change: Callable[[Tensor], Tensor]) -> Tensor:
    """Return scores [R, V] with the given rows [r, V] changed; the others cost nothing if all or none are given."""
    if not rows:
        return scores
    if len(rows) == scores.shape[0]:
        return change(scores)
    index = torch.tensor(rows, device=scores.device)
    return scores.index_copy(0, index, change(scores[index]))


def change_where(
    asks: Callable[[SamplingParams], object], scores: Tensor, nodes: Sequence[NodeContext], change: Change
) -> Tensor:
    """Return scores [R, V] with the rows changed whose request asks for it."""
    rows = [row for row, node in enumerate(nodes) if asks(node.params)]
    return change_rows(scores, rows, lambda chosen: change(chosen, [nodes[row] for row in rows]))
