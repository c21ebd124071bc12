"""Hydra's tokens for a static tree, level by level, on the host or in captured steps.

Knows hidden states and input embeddings; nothing of requests. A level takes one forward of its head, over all nodes of
the level before that have children; host and device differ in how they find its states and rank its candidates alone.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from specdec.drafters.choices import Choice
from specdec.drafters.coupling import coupled_scores, likeliest
from specdec.drafters.device_candidates import DeviceCandidates
from specdec.drafters.grown_tree import Path, Rank
from specdec.drafters.hydra_heads import HydraHeads
from specdec.drafters.int8 import HostHeads
from specdec.drafters.protocol import DeviceQuery, DraftQuery, DraftTarget
from specdec.drafters.recurrent_heads import RecurrentHeads
from specdec.errors import ConfigError
from specdec.kernels.ops import TRITON_DTYPES

Find = Callable[[int, Tensor, Tensor], None]
"""Depth, states [S, P, H] of its head and [S, P, k] int64, where the best tokens of each path are written."""


@dataclass(frozen=True, slots=True)
class _Level:
    """The nodes of one depth of a tree, as tensors on its device. P of the nodes above have C children.

    Candidates are found for each path up to the highest rank that any takes. All that were found, of all levels, stand
    in one row of each sequence, behind its root.

    Args:
        nodes: the children's places in the tree, in its order.
        num_paths: how many paths the first 1, 2, … children continue.
        num_ranks: how many candidates they take of a path at most.
        first: where the first candidate of the level stands.
        paths: [P, depth + 1] int64, where the tokens from the root to each node that has children stand.
        last: [P] int64, where the last of them does.
        above: [P] int64, for each path the one of the depth before that it continues; 0 at the root.
    """

    nodes: tuple[int, ...]
    num_paths: tuple[int, ...]
    num_ranks: tuple[int, ...]
    first: int
    paths: Tensor
    last: Tensor
    above: Tensor

    def part_of(self, found: Tensor, num_paths: int, num_ranks: int) -> Tensor:
        """[S, num_paths, num_ranks] of the level's candidates, a view of `found` [S, M]."""
        size = len(self.above) * self.num_ranks[-1]
        level = found[:, self.first : self.first + size].view(len(found), len(self.above), self.num_ranks[-1])
        return level[:, :num_paths, :num_ranks]


class HydraGuesses:
    """Each node's candidates follow the draft tokens on its own path.

    Args:
        heads: the heads, on the target's device and in its dtype.
        target: the model that they read; its `embed` is needed.
        choices: the tree, root left out, parents before their children.

    Raises:
        ConfigError: the target has no input embeddings.
    """

    def __init__(self, heads: HydraHeads | RecurrentHeads, target: DraftTarget, choices: Sequence[Choice]) -> None:
        if target.embed is None:
            raise ConfigError("Hydra heads read the target's input embeddings; give the DraftTarget its embed")
        self._heads, self._embed = heads, target.embed
        self._host = HostHeads(heads, target.head_for(heads.token_ids if heads.projection is None else None))
        self._candidates = DeviceCandidates(heads, self._host.lm_head)
        self._levels, places = _levels(choices, target.device)
        self._places = torch.tensor(places, device=target.device)
        self.num_found = 1 + sum(len(level.above) * level.num_ranks[-1] for level in self._levels)

    def on_host(self, queries: Sequence[DraftQuery], hidden: Tensor, choices: Sequence[Choice]) -> list[list[int]]:
        """Return tokens for the first choices; see `Guesses`."""
        found = torch.zeros(len(queries), self.num_found, dtype=torch.int64, device=hidden.device)
        found[:, 0] = torch.tensor([query.tokens[-1] for query in queries], device=hidden.device)

        def find(depth: int, states: Tensor, out: Tensor) -> None:
            logits = self._host.project(states.flatten(0, 1)[:, None], depth)  # [S P, 1, V]
            positions = [query.num_output + depth for query in queries]
            params = [query.params for query in queries]
            scores = coupled_scores(
                logits.view(*states.shape[:2], -1).float(), params, positions, self._heads.token_ids
            )
            out.copy_(self._heads.tokens_of(scores.topk(out.shape[2]).indices))

        tokens: list[list[int]] = self._expand(found, hidden, 1 + len(choices), self._next_states, find)[:, 1:].tolist()
        return tokens

    def ranking(self, queries: Sequence[DraftQuery], hidden: Tensor, width: int) -> Rank:
        """Return what ranks the candidates of trees that grow; see `Guesses`."""
        states = hidden

        def rank(
            sequences: Sequence[int], paths: Sequence[Path], above: Sequence[int]
        ) -> tuple[list[list[int]], list[list[float]]]:
            nonlocal states
            asked, depth = [queries[b] for b in sequences], len(paths[0])
            tokens = [(query.tokens[-1], *path) for query, path in zip(asked, paths, strict=True)]
            embedded = self._embed(torch.tensor(tokens, device=hidden.device)).to(hidden)  # [P, depth + 1, H]
            states = self._host.heads.next_states(hidden[list(sequences)], embedded, states[list(above)])
            logits = self._host.project(states.unsqueeze(1), depth).squeeze(1).float()  # [P, V]
            params, positions = [query.params for query in asked], [query.num_output + depth for query in asked]
            columns, chances = likeliest(logits, params, positions, self._heads.token_ids, width)
            return self._heads.tokens_of(columns).tolist(), chances.tolist()

        return rank

    def on_device(self, query: DeviceQuery, positions: Tensor, found: Tensor, num_nodes: int) -> Tensor:
        """Return the tokens of the first nodes; see `Guesses`."""
        embedding = _plain(self._embed, query.hidden) if isinstance(self._heads, RecurrentHeads) else None
        next_states = self._next_states if embedding is None else partial(self._next_by_kernel, embedding)

        def find(depth: int, states: Tensor, out: Tensor) -> None:
            self._candidates.of_head(depth, query, positions, states, out)

        return self._expand(found, query.hidden, num_nodes, next_states, find)

    def _expand(
        self,
        found: Tensor,
        hidden: Tensor,
        num_nodes: int,
        next_states: Callable[[Tensor, Tensor, Tensor, _Level, int], Tensor],
        find: Find,
    ) -> Tensor:
        """The tokens [S, num_nodes] of the first nodes, below roots found[:, 0] that hidden states [S, H] yielded."""
        states = hidden.unsqueeze(1)  # [S, P, H], of the level before
        for depth, level in enumerate(self._levels):
            count = bisect_left(level.nodes, num_nodes)
            if not count:
                break
            num_paths, num_ranks = level.num_paths[count - 1], level.num_ranks[count - 1]
            states = next_states(hidden, states, found, level, num_paths)
            find(depth, states, level.part_of(found, num_paths, num_ranks))
        return found.gather(1, self._places[:num_nodes].expand(len(found), -1))

    def _next_states(self, hidden: Tensor, states: Tensor, found: Tensor, level: _Level, num_paths: int) -> Tensor:
        """What the projection reads for the first paths, [S, P, H]."""
        embedded = self._embed(found[:, level.paths[:num_paths]]).to(hidden)  # [S, P, depth + 1, H]
        above = states[:, level.above[:num_paths]].flatten(0, 1)  # [S P, H]
        read = hidden[:, None].expand(-1, num_paths, -1).flatten(0, 1)
        return self._host.heads.next_states(read, embedded.flatten(0, 1), above).view(len(found), num_paths, -1)

    def _next_by_kernel(
        self, embedding: Tensor, hidden: Tensor, states: Tensor, found: Tensor, level: _Level, num_paths: int
    ) -> Tensor:
        from specdec.kernels.gpu.cell import cell

        assert isinstance(self._heads, RecurrentHeads)
        up, down = self._heads.up, self._heads.down
        paths = level.above[:num_paths], found, level.last[:num_paths]
        return cell(states, *paths, embedding, up.weight, up.bias, down.weight, down.bias)


def _plain(embed: Callable[[Tensor], Tensor], hidden: Tensor) -> Tensor | None:
    """The matrix whose rows `embed` gives as they are, if it is one that kernels can read beside hidden states."""
    if type(embed) is not nn.Embedding or embed.max_norm is not None:
        return None
    weight = embed.weight
    fits = weight.dtype == hidden.dtype and weight.dtype in TRITON_DTYPES and weight.is_contiguous()
    return weight if fits else None


def _levels(choices: Sequence[Choice], device: torch.device) -> tuple[list[_Level], list[int]]:
    """The tree by depth, and where the tokens of its nodes stand. Children keep the tree's order and paths stand by
    their first child, so that the first nodes of the tree take the first children and paths of each level.
    """
    node_of: dict[Choice, int] = {(): 0} | {choice: i for i, choice in enumerate(choices, 1)}
    place_of: dict[Choice, int] = {(): 0}

    def put(values: Sequence[object]) -> Tensor:  # here, because nothing can be copied from the host during a capture
        return torch.tensor(values, dtype=torch.int64, device=device)

    levels: list[_Level] = []
    before: list[Choice] = []
    first = 1
    for depth in range(max((len(choice) for choice in choices), default=0)):
        children = [choice for choice in choices if len(choice) == depth + 1]
        parents = list(dict.fromkeys(choice[:-1] for choice in children))
        rows, ranks = [parents.index(choice[:-1]) for choice in children], [choice[-1] for choice in children]
        num_ranks = _largest(ranks)
        place_of |= {c: first + row * num_ranks[-1] + c[-1] for c, row in zip(children, rows, strict=True)}
        levels.append(
            _Level(
                nodes=tuple(node_of[choice] for choice in children),
                num_paths=_largest(rows),
                num_ranks=num_ranks,
                first=first,
                paths=put([[place_of[parent[:d]] for d in range(depth + 1)] for parent in parents]),
                last=put([place_of[parent] for parent in parents]),
                above=put([before.index(parent[:-1]) if before else 0 for parent in parents]),
            )
        )
        first += len(parents) * num_ranks[-1]
        before = parents
    return levels, [place_of[choice] for choice in node_of]


def _largest(indices: Sequence[int]) -> tuple[int, ...]:
    """How many values the first 1, 2, … of some indices range over."""
    return tuple(1 + max(indices[: count + 1]) for count in range(len(indices)))
