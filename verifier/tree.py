"""The token tree: what a drafter proposes for a batch and the target scores in one forward.

A tree is flat and ragged. Node 0 of a sequence is its root, the last emitted token. A chain is a tree; a
root alone is plain decoding.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch

MAX_NODES = 64
"""Most nodes a sequence may have, root included: ancestors fit one int64 bitmask."""


@dataclass(frozen=True, slots=True)
class TokenTree:
    """The trees of a batch of B sequences, N nodes in all; parents precede children.

    Args:
        tokens: [N] int64, token id of each node.
        parents: [N] int64, index of the parent in its own sequence; -1 for a root.
        depth: [N] int64, edges to the root.
        ancestors: [N] int64 bitmask over the nodes of its sequence: bit j is set for each ancestor j and for
            the node itself.
        cu_nodes: B + 1 offsets: sequence b owns nodes cu_nodes[b] to cu_nodes[b + 1].
        proposers: N names of the drafters that proposed the nodes, where a tree has several; else empty.
    """

    tokens: torch.Tensor
    parents: torch.Tensor
    depth: torch.Tensor
    ancestors: torch.Tensor
    cu_nodes: tuple[int, ...]
    proposers: tuple[str, ...] = ()

    @property
    def num_sequences(self) -> int:
        """B, the number of sequences."""
        return len(self.cu_nodes) - 1

    def num_nodes(self, b: int) -> int:
        """Nodes of sequence b, root included."""
        return self.cu_nodes[b + 1] - self.cu_nodes[b]

    def parents_of(self, b: int) -> list[int]:
        """Parents of the nodes of sequence b."""
        parents: list[int] = self.parents[self.cu_nodes[b] : self.cu_nodes[b + 1]].tolist()
        return parents

    def tokens_of(self, b: int) -> list[int]:
        """Tokens of the nodes of sequence b."""
        tokens: list[int] = self.tokens[self.cu_nodes[b] : self.cu_nodes[b + 1]].tolist()
        return tokens

    def check(self) -> None:
        """Check that the fields fit each other, as `build` makes them: for trees that may come from elsewhere.

        Raises:
            ValueError: they don't; the message says what is wrong.
        """
        fields, count = (self.tokens, self.parents, self.depth, self.ancestors), self.cu_nodes[-1]
        if self.cu_nodes[0] or any(field.shape != (count,) or field.is_floating_point() for field in fields):
            shapes = [tuple(field.shape) for field in fields]
            raise ValueError(f"tokens, parents, depth and ancestors {shapes} must be [{count}] int64: cu_nodes says so")
        if self.proposers:
            _check_proposers(self.proposers, count)
        tokens, parents, depth, ancestors = (field.tolist() for field in fields)
        for b, (start, end) in enumerate(pairwise(self.cu_nodes)):
            _check_sequence(b, tokens[start:end], parents[start:end])
            if _lineage(parents[start:end]) != (depth[start:end], ancestors[start:end]):
                raise ValueError(f"sequence {b}: depth or ancestors don't follow from the parents; use TokenTree.build")

    @classmethod
    def join(cls, trees: Sequence["TokenTree"]) -> "TokenTree":
        """Put the trees of several batches, at least one, behind each other; where one lacks proposers none has any."""
        proposers = [t.proposers or ("",) * len(t.tokens) for t in trees]
        return cls(
            torch.cat([t.tokens for t in trees]),
            torch.cat([t.parents for t in trees]),
            torch.cat([t.depth for t in trees]),
            torch.cat([t.ancestors for t in trees]),
            tuple(accumulate((t.num_nodes(b) for t in trees for b in range(t.num_sequences)), initial=0)),
            tuple(name for names in proposers for name in names) if all(map(all, proposers)) else (),
        )

    @classmethod
    def build(
        cls, tokens: Sequence[Sequence[int]], parents: Sequence[Sequence[int]], proposers: Sequence[str] = ()
    ) -> "TokenTree":
        """Make the tree of a batch from per-sequence token and parent lists.

        Args:
            tokens: for each sequence, the token ids, root first.
            parents: for each sequence, the parents' indices, -1 for the root, each before its children.
            proposers: a name for each node of all sequences, or nothing.

        Raises:
            ValueError: a sequence has no root, more than 64 nodes, or a parent that doesn't precede its child; or the
                number of proposers isn't that of the nodes.
        """
        depth: list[int] = []
        ancestors: list[int] = []
        cu_nodes = [0]
        for b, (toks, pars) in enumerate(zip(tokens, parents, strict=True)):
            _check_sequence(b, toks, pars)
            depths, masks = _lineage(pars)
            depth += depths
            ancestors += masks
            cu_nodes.append(len(depth))
        if proposers:
            _check_proposers(proposers, len(depth))
        return cls(
            torch.tensor([t for toks in tokens for t in toks], dtype=torch.int64),
            torch.tensor([p for pars in parents for p in pars], dtype=torch.int64),
            torch.tensor(depth, dtype=torch.int64),
            torch.tensor(ancestors, dtype=torch.int64),
            tuple(cu_nodes),
            tuple(proposers),
        )

    @classmethod
    def roots(cls, tokens: Sequence[int]) -> "TokenTree":
        """Trees of one node each: plain decoding of the given last tokens."""
        return cls.build([[t] for t in tokens], [[-1]] * len(tokens))


def chain_parents(num_nodes: int) -> list[int]:
    """Parents of a chain of that many nodes, root included: [-1, 0, 1, …]."""
    return list(range(-1, num_nodes - 1))


def merge_paths(root: int, paths: Sequence[Sequence[int]], max_nodes: int) -> tuple[list[int], list[int]]:
    """Merge token paths below one root into a tree that shares their common prefixes.

    Earlier paths win when the node budget runs out; a path that no longer fits is cut.

    Args:
        root: token id of the root.
        paths: continuations of the root, best first.
        max_nodes: most nodes, root included.

    Returns:
        tokens and parents of one sequence, ready for `TokenTree.build`.
    """
    tokens, parents = [root], [-1]
    children: dict[tuple[int, int], int] = {}
    for path in paths:
        node = 0
        for token in path:
            child = children.get((node, token))
            if child is None:
                if len(tokens) == max_nodes:
                    break
                child = children[node, token] = len(tokens)
                tokens.append(token)
                parents.append(node)
            node = child
    return tokens, parents


def _check_sequence(b: int, tokens: Sequence[int], parents: Sequence[int]) -> None:
    if not 1 <= len(tokens) <= MAX_NODES or len(tokens) != len(parents):
        raise ValueError(f"sequence {b} has {len(tokens)} tokens and {len(parents)} parents; 1 to {MAX_NODES} of each")
    for i, p in enumerate(parents):
        if (p != -1) if i == 0 else not 0 <= p < i:
            raise ValueError(f"sequence {b}, node {i}: parent {p} must be -1 for node 0 and precede any other node")


def _check_proposers(proposers: Sequence[str], num_nodes: int) -> None:
    if len(proposers) != num_nodes:
        raise ValueError(f"{len(proposers)} proposers are given for {num_nodes} nodes; name one for each, or none")


def _lineage(parents: Sequence[int]) -> tuple[list[int], list[int]]:
    """Depth and ancestors, as int64 values, of the nodes of one sequence."""
    depth, masks = [0], [1]
    for i, p in enumerate(parents[1:], 1):
        depth.append(depth[p] + 1)
        masks.append(masks[p] | 1 << i)
    return depth, [_signed(mask) for mask in masks]


def _signed(mask: int) -> int:
    """The int64 whose bits are the low 64 of `mask`."""
    return mask - (1 << 64) if mask >> 63 else mask
