"""Hydra's tokens for a static tree, level by level, on the host or in captured steps.

Knows hidden states and input embeddings; nothing of requests. A level takes one forward of its head, over all nodes of
the level before that have children; host and device differ in how they rank its candidates alone.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from specdec.drafters.choices import Choice
from specdec.drafters.coupling import coupled_scores
from specdec.drafters.hydra_heads import HydraHeads
from specdec.drafters.protocol import DeviceQuery, DraftQuery, DraftTarget
from specdec.drafters.recurrent_heads import RecurrentHeads
from specdec.errors import ConfigError

Rank = Callable[[Tensor, int, int], Tensor]
"""Logits [S, P, V] of the head of a depth, that depth and k → each row's k best tokens, [S, P, k] int64."""


@dataclass(frozen=True, slots=True)
class _Level:
    """The nodes of one depth of a tree, as tensors on its device. P of the nodes above have C children.

    Args:
        nodes: the children's places in the tree, in its order.
        num_paths: how many paths the first 1, 2, … children continue.
        num_ranks: how many candidates they take of a path at most.
        paths: [P, depth + 1] int64, the nodes from the root to each one that has children.
        above: [P] int64, for each path the one of the depth before that it continues; 0 at the root.
        places: [C] int64, `nodes`.
        rows: [C] int64, the path that each child continues.
        ranks: [C] int64, its rank there.
    """

    nodes: tuple[int, ...]
    num_paths: tuple[int, ...]
    num_ranks: tuple[int, ...]
    paths: Tensor
    above: Tensor
    places: Tensor
    rows: Tensor
    ranks: Tensor


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
        self._heads, self._embed, self._lm_head = heads, target.embed, target.lm_head
        self._levels = _levels(choices, target.device)

    def on_host(self, queries: Sequence[DraftQuery], hidden: Tensor, choices: Sequence[Choice]) -> list[list[int]]:
        """Return tokens for the first choices; see `Guesses`."""
        roots = torch.tensor([[query.tokens[-1]] for query in queries], device=hidden.device)

        def rank(logits: Tensor, depth: int, num_ranks: int) -> Tensor:
            positions = [query.num_output + depth for query in queries]
            return coupled_scores(logits.float(), [q.params for q in queries], positions).topk(num_ranks).indices

        tokens: list[list[int]] = self._expand(roots, hidden, 1 + len(choices), rank)[:, 1:].tolist()
        return tokens

    def on_device(self, query: DeviceQuery, num_nodes: int) -> Tensor:
        """Return the tokens of the first nodes; see `Guesses`."""
        return self._expand(query.roots(), query.hidden, num_nodes, partial(_rank_on_device, query))

    def _expand(self, roots: Tensor, hidden: Tensor, num_nodes: int, rank: Rank) -> Tensor:
        """The tokens [S, num_nodes] of the first nodes below roots [S, 1] that hidden states [S, H] yielded."""
        tokens = roots.repeat(1, num_nodes)  # the root's until a level is drafted
        states = hidden.unsqueeze(1)  # [S, P, H], of the level before
        for depth, level in enumerate(self._levels):
            count = bisect_left(level.nodes, num_nodes)
            if not count:
                break
            num_paths, num_ranks = level.num_paths[count - 1], level.num_ranks[count - 1]
            embedded = self._embed(tokens[:, level.paths[:num_paths]]).to(hidden)  # [S, P, depth + 1, H]
            above = states[:, level.above[:num_paths]].flatten(0, 1)  # [S P, H]
            read = hidden[:, None].expand(-1, num_paths, -1).flatten(0, 1)
            found = self._heads.next_states(read, embedded.flatten(0, 1), above)
            logits = self._heads.project(found[:, None], self._lm_head, depth)  # [S P, 1, V]
            states = found.view(len(roots), num_paths, -1)
            ranked = rank(logits.view(len(roots), num_paths, -1), depth, num_ranks)
            tokens.index_copy_(1, level.places[:count], ranked[:, level.rows[:count], level.ranks[:count]])
        return tokens


def _rank_on_device(query: DeviceQuery, logits: Tensor, depth: int, num_ranks: int) -> Tensor:
    from specdec.kernels.gpu.rank import rank

    num_paths = logits.shape[1]
    positions = (query.first_positions() + depth).unsqueeze(1).expand(-1, num_paths).flatten()
    best = rank(logits.flatten(0, 1), query.temperature, query.seeds, positions, num_ranks, num_paths)
    return best.view(*logits.shape[:2], num_ranks)


def _levels(choices: Sequence[Choice], device: torch.device) -> list[_Level]:
    """The tree by depth. Children keep the tree's order and paths stand by their first child, so that the first nodes
    of the tree take the first children and paths of each level.
    """
    node_of: dict[Choice, int] = {(): 0} | {choice: i for i, choice in enumerate(choices, 1)}

    def put(values: Sequence[object]) -> Tensor:  # here, because nothing can be copied from the host during a capture
        return torch.tensor(values, dtype=torch.int64, device=device)

    levels: list[_Level] = []
    before: list[Choice] = []
    for depth in range(max(len(choice) for choice in choices)):
        children = [choice for choice in choices if len(choice) == depth + 1]
        parents = list(dict.fromkeys(choice[:-1] for choice in children))
        nodes, rows = [node_of[choice] for choice in children], [parents.index(choice[:-1]) for choice in children]
        ranks = [choice[-1] for choice in children]
        levels.append(
            _Level(
                nodes=tuple(nodes),
                num_paths=_largest(rows),
                num_ranks=_largest(ranks),
                above=put([before.index(parent[:-1]) if before else 0 for parent in parents]),
                paths=put([[node_of[parent[:d]] for d in range(depth + 1)] for parent in parents]),
                places=put(nodes),
                rows=put(rows),
                ranks=put(ranks),
            )
        )
        before = parents
    return levels


def _largest(indices: Sequence[int]) -> tuple[int, ...]:
    """How many values the first 1, 2, … of some indices range over."""
    return tuple(1 + max(indices[: count + 1]) for count in range(len(indices)))
