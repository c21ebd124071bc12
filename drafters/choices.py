"""Static trees in Medusa's notation: a node is the tuple of its ranks, (0, 2) being head 1's third candidate below
head 0's first. Knows no tokens and no models.
"""

import heapq
from collections.abc import Mapping, Sequence
from math import prod

from specdec.errors import ConfigError
from specdec.verifier.tree import MAX_NODES

Choice = tuple[int, ...]

_FIRST_ACCURACY, _DECAY_PER_HEAD, _RANK_EXPONENT, _RANKS = 0.6, 0.72, 2.2, 10


def default_accuracies(num_heads: int) -> list[list[float]]:
    """Return a [num_heads][10] table of rank accuracies typical of Medusa heads, for heads that nobody measured."""
    return [
        [_FIRST_ACCURACY * _DECAY_PER_HEAD**k / (rank + 1) ** _RANK_EXPONENT for rank in range(_RANKS)]
        for k in range(num_heads)
    ]


def best_first_choices(accuracies: Sequence[Sequence[float]], num_nodes: int) -> list[Choice]:
    """Return the tree of that size with the most expected accepted tokens, best node first.

    A node is worth the product of its ranks' accuracies. Starting at the root's best child, the best of the
    frontier (next sibling or first child of a node taken) is added until the size is reached; every shorter prefix is
    the best tree of its own size. Nodes that are worth nothing are left out.

    Args:
        accuracies: [K][ranks], chance that a head's candidate of that rank is the right one, in [0, 1]; needn't fall
            with the rank.
        num_nodes: nodes of the tree, root included; 1 to 64.

    Returns:
        The choices, at most `num_nodes` - 1; parents precede children.

    Raises:
        ConfigError: a value is out of bounds.

    Source: Cai et al., "Medusa" (2024), section 2.3.3.
    """
    if not 1 <= num_nodes <= MAX_NODES:
        raise ConfigError(f"num_nodes must be from 1 to {MAX_NODES}, not {num_nodes}")
    if any(not 0 <= accuracy <= 1 for head in accuracies for accuracy in head):
        raise ConfigError(f"accuracies must lie between 0 and 1: {accuracies}")
    orders = [sorted(range(len(head)), key=lambda rank, head=head: -head[rank]) for head in accuracies]  # type: ignore[misc]
    chosen: list[Choice] = []
    frontier: list[tuple[float, int, Choice, tuple[int, ...], float]] = []

    def push(places: tuple[int, ...], above: Choice, above_worth: float) -> None:
        """Put a node on the frontier; `places` are its ranks' places in `orders`."""
        head = len(places) - 1
        if head < len(orders) and places[-1] < len(orders[head]):
            rank = orders[head][places[-1]]
            worth = above_worth * accuracies[head][rank]
            if worth > 0:
                heapq.heappush(frontier, (-worth, len(places), (*above, rank), places, above_worth))

    push((0,), (), 1.0)
    while frontier and len(chosen) < num_nodes - 1:
        worth, _, choice, places, above_worth = heapq.heappop(frontier)
        chosen.append(choice)
        push((*places[:-1], places[-1] + 1), choice[:-1], above_worth)
        push((*places, 0), choice, -worth)
    return chosen


def most_accepted_choices(
    counts: Mapping[Choice, int], accuracies: Sequence[Sequence[float]], num_nodes: int
) -> list[Choice]:
    """Return the tree of that size that is accepted deepest on counted positions, best node first.

    At one position the true tokens take one path, so the accepted depth of a tree is the number of its nodes on that
    path: a node is worth the number of positions whose path leads through it, whatever else is in the tree. No node is
    worth more than its parent. So the nodes with the largest counts are the best tree of their size, and heads that are
    right at the same positions, which products of accuracies take for independent, are counted as they are.

    Nodes with the same count, such as those that no position led through, go by the product of accuracies.

    Args:
        counts: positions whose true tokens have these ranks under the first heads, as `specdec.training.accuracies`
            counts them; every choice's parent is there too.
        accuracies: [K][ranks] of the same positions, as for `best_first_choices`.
        num_nodes: nodes of the tree, root included; 1 to 64.

    Returns:
        The choices, at most `num_nodes` - 1; parents precede children.

    Raises:
        ConfigError: a value is out of bounds.
    """
    known = set(counts).union(best_first_choices(accuracies, num_nodes))

    def order(choice: Choice) -> tuple[float, float, int, Choice]:
        likely = prod(accuracies[head][rank] for head, rank in enumerate(choice))
        return -counts.get(choice, 0), -likely, len(choice), choice

    return sorted(known, key=order)[: num_nodes - 1]


def as_choices(tree: Sequence[Sequence[int]], num_heads: int) -> tuple[Choice, ...]:
    """Check a tree of choices, and put parents before their children; else the order stays.

    Args:
        tree: the choices, such as Medusa's `medusa_choices`, best first.
        num_heads: K, the greatest depth.

    Raises:
        ConfigError: a choice isn't 1 to K ranks, comes twice or lacks its parent, or there are more than 63.
    """
    choices: dict[Choice, None] = {}

    def add(choice: Choice) -> None:
        if len(choice) > 1:
            add(choice[:-1])
        choices[choice] = None

    if not isinstance(tree, (list, tuple)):
        raise ConfigError(f"a tree must be a list of choices, such as [[0], [1], [0, 0]], not {tree!r}")
    given = [_as_choice(choice, num_heads) for choice in tree]
    if not 1 <= len(given) < MAX_NODES or len(set(given)) < len(given):
        raise ConfigError(
            f"a tree must have 1 to {MAX_NODES - 1} different choices; this one has {len(given)}: {given}"
        )
    for choice in given:
        if len(choice) > 1 and choice[:-1] not in given:
            raise ConfigError(f"the tree has {choice} but not its parent {choice[:-1]}; add it")
        add(choice)
    return tuple(choices)


def _as_choice(choice: Sequence[int], num_heads: int) -> Choice:
    whole = isinstance(choice, (list, tuple)) and all(type(rank) is int and rank >= 0 for rank in choice)
    if not whole or not 1 <= len(choice) <= num_heads:
        raise ConfigError(f"a choice must be 1 to {num_heads} ranks from 0 on, one for each head, not {choice!r}")
    return tuple(choice)
