"""What drafters with heads share: one static tree, drafted on the host or in captured steps.

Knows queries and hidden states; how the tree is filled with tokens is the business of each kind's `Guesses`.
"""

from collections.abc import Collection, Sequence
from typing import Protocol

import torch
from torch import Tensor

from specdec.drafters.choices import Choice
from specdec.drafters.grown_tree import Rank
from specdec.drafters.protocol import DeviceQuery, DraftQuery, DraftTarget, Observation
from specdec.drafters.static_tree import StaticTree
from specdec.verifier.tree import TokenTree, chain_parents


class Guesses(Protocol):
    """Fills the first nodes of a static tree with tokens."""

    def on_host(self, queries: Sequence[DraftQuery], hidden: Tensor, choices: Sequence[Choice]) -> list[list[int]]:
        """Return tokens for the tree's first nodes, root left out.

        Args:
            queries: R queries.
            hidden: [R, H], the hidden states that yielded their roots.
            choices: the first choices of the tree.
        """
        ...

    def ranking(self, queries: Sequence[DraftQuery], hidden: Tensor, width: int) -> Rank:
        """Return what ranks the candidates, `width` of a node at most, of trees that grow.

        Args:
            queries, hidden: as for `on_host`.
            width: 1 or more.
        """
        ...

    @property
    def num_found(self) -> int:
        """M, candidates that are found for a whole tree, its root among them."""
        ...

    def on_device(self, query: DeviceQuery, positions: Tensor, found: Tensor, num_nodes: int) -> Tensor:
        """Return the tree's first `num_nodes` tokens, root included, [S, num_nodes] int64, for S sequences.

        Nothing may be asked of the host or copied from it. Where no hidden state is known, any tokens are.

        Args:
            query: the sequences.
            positions: [S] int64, output positions of the roots' children.
            found: [S, M] int64, the roots in the first column; the others are room for candidates.
            num_nodes: at least 2.
        """
        ...


class HeadsDrafter:
    """Drafts a static tree whose node (…, r) at depth d holds the candidate of rank r of head d - 1.

    Args:
        tree: the tree, and the hidden states seen last.
        guesses: fill it with tokens.
        target: the model that the heads read.
    """

    name: str
    reads_hidden = True
    chains_only = False
    min_chance: float | None = None
    """On the host, trees grow by the heads' confidence to as many nodes as the static one has, each at least that
    likely (`specdec.drafters.grown_tree`). None takes the static tree's."""

    def __init__(self, tree: StaticTree, guesses: Guesses, target: DraftTarget) -> None:
        self._tree, self._guesses, self._target = tree, guesses, target
        self.chains_only = tree.parents == chain_parents(len(tree.parents))
        # here, because nothing can be copied from the host during a capture
        self._parents = torch.tensor(tree.parents, dtype=torch.int64, device=target.device)

    @property
    def node_chances(self) -> tuple[float, ...] | None:
        """How likely each node but the root is accepted on average; see `KnowsChances`."""
        return self._tree.chances

    @property
    def choices(self) -> tuple[Choice, ...]:
        """The tree in use, root left out, in the order in which a budget takes its nodes."""
        return self._tree.choices

    @torch.inference_mode()
    def propose(self, queries: Sequence[DraftQuery]) -> TokenTree:
        """Return one tree a query; the root alone unless the token before the root was the last one observed."""
        if self.min_chance is not None:
            return self._tree.grow(queries, self._guesses.ranking, self.min_chance)
        return self._tree.propose(queries, self._guesses.on_host)

    def observe(self, observation: Observation) -> None:
        """Keep the hidden state of each request's last committed token."""
        self._tree.observe(observation)

    def forget(self, request_ids: Collection[int]) -> None:
        """Drop the hidden states of these requests."""
        self._tree.forget(request_ids)

    def max_device_nodes(self) -> int:
        """Return the nodes of the tree, root included."""
        return len(self._tree.parents)

    def draft_on_device(self, query: DeviceQuery, num_nodes: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return the first nodes of the tree, the root alone where no hidden state is known; see `DraftsOnDevice`."""
        from specdec.kernels.gpu.roots import roots

        known = query.history, query.lengths, query.prompt_lens, query.has_hidden
        found, positions, sizes = roots(*known, num_nodes, self._guesses.num_found if num_nodes > 1 else 1)
        tokens = self._guesses.on_device(query, positions, found, num_nodes) if num_nodes > 1 else found
        return tokens, self._parents[:num_nodes].expand_as(tokens), sizes

    def hidden_of(self, request_ids: Sequence[int]) -> list[Tensor | None]:
        """Return what captured steps go on from; see `KeepsHidden`."""
        return self._tree.hidden_of(request_ids)

    def keep_hidden(self, request_ids: Sequence[int], hidden: Tensor) -> None:
        """Go on from what captured steps kept; see `KeepsHidden`. Their steps reach the root."""
        self._tree.keep_hidden(request_ids, hidden)
