"""Trees that grow where the heads are sure: each sequence's likeliest paths, level by level. Knows no heads.

A static tree holds what is right most often. Heads also say how sure they are this time, and that can be believed: of
the tokens that they give 30%, about 30% are accepted. So a step without prospects takes little longer than a plain one,
and what that saves pays for more nodes where they will be accepted. For the host alone, as shapes depend on values.
Source: Li et al., "EAGLE-2: Faster Inference of Language Models with Dynamic Draft Trees" (2024), section 4.
"""

from collections.abc import Sequence
from typing import Protocol

Path = tuple[int, ...]
"""A node, as the tokens from below the root down to it; empty at the root."""

OTHER_ROWS = 20
"""What a step takes besides its rows, reading the weights above all, in rows: about that on two CPU cores."""
PARENTS_CHANCE = 0.4
"""A level is drafted where the nodes that it continues, of one sequence on average, are accepted with this chance in
all: besides its nodes' rows it costs a forward of the head."""


class Rank(Protocol):
    """Ranks what may follow some paths: the roots at first, paths one token longer at each call."""

    def __call__(
        self, sequences: Sequence[int], paths: Sequence[Path], above: Sequence[int]
    ) -> tuple[list[list[int]], list[list[float]]]:
        """Return for each of P paths tokens, likeliest first, and how likely each is accepted if the path was.

        Args:
            sequences: [P], the paths' sequences.
            paths: [P], all of one length.
            above: [P], for each path the row of the call before that it continues; its sequence at first.
        """
        ...


def grow(rank: Rank, sizes: Sequence[int], num_levels: int, min_chance: float) -> list[list[Path]]:
    """Return the nodes of a tree for each of B sequences, roots left out, likeliest first: parents precede children.

    Args:
        rank: asked once for each level that is drafted.
        sizes: [B], most nodes of each tree, root included; at least 2.
        num_levels: most levels below the roots.
        min_chance: least chance of a node: the product of those on its path. Where there are many sequences more is
            asked, because a row takes its time from all of them.
    """
    least = max(min_chance, len(sizes) / (len(sizes) + OTHER_ROWS))
    trees: list[dict[Path, float]] = [{(): 1.0} for _ in sizes]
    ends: list[tuple[int, Path]] = [(b, ()) for b in range(len(sizes))]
    above = list(range(len(sizes)))
    for depth in range(1, num_levels + 1):
        ranked = rank([b for b, _ in ends], [path for _, path in ends], above)
        for (b, path), tokens, chances in zip(ends, *ranked, strict=True):
            children = {(*path, t): trees[b][path] * chance for t, chance in zip(tokens, chances, strict=True)}
            trees[b] |= {child: chance for child, chance in children.items() if chance >= least}
        trees = [_likeliest(tree, size) for tree, size in zip(trees, sizes, strict=True)]
        rows = {end: row for row, end in enumerate(ends)}
        ends = [(b, path) for b, tree in enumerate(trees) for path in tree if len(path) == depth]
        above = [rows[b, path[:-1]] for b, path in ends]
        if sum(trees[b][path] for b, path in ends) < PARENTS_CHANCE * max(1, len({b for b, _ in ends})):
            break
    return [list(tree)[1:] for tree in trees]


def parents_of(paths: Sequence[Path]) -> list[int]:
    """Return the parents of a tree's nodes, root included, as `TokenTree.build` takes them."""
    places = {path: place for place, path in enumerate(((), *paths))}
    return [-1, *(places[path[:-1]] for path in paths)]


def _likeliest(tree: dict[Path, float], size: int) -> dict[Path, float]:
    """The first nodes by chance. No child is likelier than its parent or, as sorting keeps order, comes before it."""
    return {path: tree[path] for path in sorted(tree, key=tree.__getitem__, reverse=True)[:size]}
