"""What drafters with heads share: a static tree, and the hidden state of each request's last committed token.

Knows observations and budgets, and grows trees within them; not how tokens are guessed.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.drafters.choices import Choice, as_choices, best_first_choices, default_accuracies
from specdec.drafters.draft_heads import HeadsConfig
from specdec.drafters.grown_tree import Rank, grow, parents_of
from specdec.drafters.protocol import DraftQuery, DraftTarget, Observation
from specdec.errors import ConfigError
from specdec.verifier.tree import MAX_NODES, TokenTree

Guess = Callable[[Sequence[DraftQuery], Tensor, Sequence[Choice]], list[list[int]]]
"""R queries, their hidden states [R, H] and the choices to fill → the tokens of the choices for each query."""
Ranking = Callable[[Sequence[DraftQuery], Tensor, int], Rank]
"""R queries, their hidden states [R, H] and most candidates of a node → what ranks the candidates."""
_Drafted = tuple[list[int], list[int]]  # tokens below a root, and the parents with the root's

DEFAULT_NODES = 16
"""Nodes of the default tree, root included: for heads that nobody measured."""


@dataclass(slots=True)
class _Seen:
    """What was observed of a request."""

    hidden: Tensor | None = None  # [H], of its last committed token
    num_committed: int = 0
    queried: bool = False  # whether its steps reach the root by now: before, they commit chunks of the prompt


class StaticTree:
    """Gives each query the first nodes of one static tree, where the hidden state that yielded its root is known.

    Args:
        config: of the heads that fill the tree.
        target: the model that they read.
        tree: choices as in Medusa's `medusa_choices`, best first: a small budget takes the first ones. None takes the
            tree stored with the heads, else a default one.
        max_nodes: most nodes of a tree, root included; 1 to 64. None takes a given or stored tree whole, and 16 nodes
            of the default one.

    Raises:
        ConfigError: the tree is malformed, deeper than there are heads or wider than the vocabulary, max_nodes is out
            of bounds, or the heads don't fit the target.
    """

    def __init__(
        self, config: HeadsConfig, target: DraftTarget, tree: Sequence[Sequence[int]] | None, max_nodes: int | None
    ) -> None:
        if max_nodes is not None and (type(max_nodes) is not int or not 1 <= max_nodes <= MAX_NODES):
            raise ConfigError(f"max_nodes must be a whole number from 1 to {MAX_NODES}, not {max_nodes!r}")
        sizes = config.hidden_size, config.vocab_size
        if sizes != (target.hidden_size, target.vocab_size):
            raise ConfigError(f"the heads' hidden and vocabulary sizes {sizes} aren't the target's; train heads for it")
        self.choices = _choices(config, tree, max_nodes)
        measured = tree is None and config.chances is not None
        self.chances = config.chances[: len(self.choices)] if measured and config.chances else None
        """How likely each choice is accepted on average; None if that isn't known."""
        self.parents = [-1, *(1 + self.choices.index(c[:-1]) if len(c) > 1 else 0 for c in self.choices)]
        self._num_levels = config.num_heads
        self._seen: dict[int, _Seen] = {}

    def propose(self, queries: Sequence[DraftQuery], guess: Guess) -> TokenTree:
        """Return one tree a query; the root alone unless the token before the root was the last one observed."""

        def fill(drafted: Sequence[DraftQuery], hidden: Tensor, sizes: Sequence[int]) -> list[_Drafted]:
            tokens = guess(drafted, hidden, self.choices[: max(sizes) - 1])
            return [(some[: size - 1], self.parents[:size]) for some, size in zip(tokens, sizes, strict=True)]

        return self._propose(queries, fill)

    def grow(self, queries: Sequence[DraftQuery], ranking: Ranking, min_chance: float) -> TokenTree:
        """Return trees of as many nodes at most, where `propose` does, but of the likeliest nodes; see `grown_tree`."""

        def fill(drafted: Sequence[DraftQuery], hidden: Tensor, sizes: Sequence[int]) -> list[_Drafted]:
            grown = grow(ranking(drafted, hidden, max(sizes) - 1), sizes, self._num_levels, min_chance)
            return [([path[-1] for path in paths], parents_of(paths)) for paths in grown]

        return self._propose(queries, fill)

    def _propose(
        self,
        queries: Sequence[DraftQuery],
        fill: Callable[[Sequence[DraftQuery], Tensor, Sequence[int]], list[_Drafted]],
    ) -> TokenTree:
        sizes = [self._num_nodes(query) for query in queries]
        drafted = [query for query, size in zip(queries, sizes, strict=True) if size > 1]
        large = [size for size in sizes if size > 1]
        filled = iter(fill(drafted, self._hidden(drafted), large) if drafted else ())
        trees = [next(filled) if size > 1 else ([], [-1]) for size in sizes]
        tokens = [[query.tokens[-1], *below] for query, (below, _) in zip(queries, trees, strict=True)]
        return TokenTree.build(tokens, [parents for _, parents in trees])

    def observe(self, observation: Observation) -> None:
        """Keep the hidden state of each request's last committed token."""
        assert observation.hidden is not None, "reads_hidden is set"
        ends: dict[int, int] = {}
        end = 0
        for request_id, count in zip(observation.request_ids, observation.num_committed, strict=True):
            end += count
            if count:
                ends[request_id] = end
                self._seen.setdefault(request_id, _Seen()).num_committed += count
        last = torch.tensor([end - 1 for end in ends.values()], dtype=torch.int64, device=observation.hidden.device)
        for request_id, row in zip(ends, observation.hidden[last].unbind(), strict=True):  # a copy of these rows alone
            self._seen[request_id].hidden = row

    def forget(self, request_ids: Collection[int]) -> None:
        """Drop the hidden states of these requests."""
        for request_id in request_ids:
            self._seen.pop(request_id, None)

    def hidden_of(self, request_ids: Sequence[int]) -> list[Tensor | None]:
        """Return the hidden state [H] of each request's last committed token, where it was observed."""
        return [self._seen[request_id].hidden if request_id in self._seen else None for request_id in request_ids]

    def keep_hidden(self, request_ids: Sequence[int], hidden: Tensor) -> None:
        """Take the hidden states [R, H] of requests whose steps reach the root, observed by others."""
        for request_id, row in zip(request_ids, hidden.unbind(), strict=True):
            self._seen[request_id] = _Seen(row, queried=True)

    def _num_nodes(self, query: DraftQuery) -> int:
        """Nodes to propose. The last hidden state observed is that of the token before the root if it came from a step
        that reached the root, or if all tokens but the root were observed; else a chunk of the prompt lies between.
        """
        seen = self._seen.setdefault(query.request_id, _Seen())
        fresh = seen.hidden is not None and (seen.queried or seen.num_committed == len(query.tokens) - 1)
        seen.queried = True
        return min(query.max_nodes, 1 + len(self.choices)) if fresh else 1

    def _hidden(self, queries: Sequence[DraftQuery]) -> Tensor:
        states = (self._seen[query.request_id].hidden for query in queries)
        return torch.stack([state for state in states if state is not None])


def _choices(config: HeadsConfig, tree: Sequence[Sequence[int]] | None, max_nodes: int | None) -> tuple[Choice, ...]:
    """The tree to use, cut to `max_nodes`; a default one never ranks more tokens than there are."""
    num_heads, num_tokens = config.num_heads, config.num_columns
    tree = config.tree if tree is None else tree
    if tree is None:
        table = [head[:num_tokens] for head in default_accuracies(num_heads)]
        return tuple(best_first_choices(table, max_nodes or DEFAULT_NODES))
    choices = as_choices(tree, num_heads)
    widest = 1 + max(choice[-1] for choice in choices)
    if widest > num_tokens:
        raise ConfigError(f"the tree asks for {widest} candidates of {num_tokens} tokens; narrow it")
    return choices[: (max_nodes or MAX_NODES) - 1]
