"""Acceptance rules: which path of the tree to keep, and the token after it.

Knows trees and logits, not the model or the requests behind them. One walk serves every rule: at each node it
visits the rule picks a token; the walk goes on to the child that holds it, or ends with it as the bonus token.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from inspect import signature
from typing import Protocol

import torch
from torch import Tensor

from specdec.errors import ConfigError, InvalidRequest, SpecdecError
from specdec.kernels.gumbel import gumbel_noise, gumbel_noise_at
from specdec.verifier.nodes import NodeContext, VerifyQuery, change_rows
from specdec.verifier.processors import process_logits
from specdec.verifier.tree import TokenTree

__all__ = ["RULES", "Accepted", "AcceptanceRule", "CoupledRule", "TypicalRule", "VerifyQuery", "choose", "make_rule"]


@dataclass(frozen=True, slots=True)
class Accepted:
    """What one sequence gained in one verification.

    Args:
        path: the accepted nodes, as indices in their sequence, root first.
        tokens: the tokens to emit: those of path[1:], then the bonus token; as many as `path` has nodes.
        scores: if the query asked to keep them, [K, V] float32 or float64: for each of the K tokens the processed
            scores it was chosen by, before the noise; else None.
        error: why nothing could be chosen at the path's last node; then there is no bonus token. Plain decoding would
            have met it after the same tokens.
    """

    path: tuple[int, ...]
    tokens: tuple[int, ...]
    scores: Tensor | None = field(default=None, compare=False)
    error: Exception | None = None


class AcceptanceRule(Protocol):
    """Decides what a verified tree yields."""

    name: str
    """The rule's key in `RULES`."""
    lossless: bool
    """Whether what is emitted is the target's own choice, whatever the drafter does."""

    def __call__(
        self, tree: TokenTree, logits: Tensor, queries: Sequence[VerifyQuery], num_real_tokens: int
    ) -> list[Accepted]:
        """Walk each sequence's tree.

        Args:
            tree: the trees of B sequences, N nodes in all.
            logits: [N, V] floating point, the target's raw logits at each node; never changed.
            queries: the B sequences, in the tree's order.
            num_real_tokens: how many ids the tokenizer knows; the others pad the vocabulary.

        Returns:
            What each of the B sequences gained; those that came to a dead end say why in `error`:
            SpecdecError: the logits of a visited node hold NaN, or -inf alone.
            InvalidRequest: the request's parameters leave no token to choose at a visited node.
            Anything else: its own logits processors raised it.

        Raises:
            ValueError: the arguments' sizes differ.
        """
        ...


def choose(scores: Tensor, nodes: Sequence[NodeContext]) -> Tensor:
    """Return the target's own choice at each node: argmax(scores + gumbel(seed, position, token)).

    Greedy rows take no noise. A tie goes to the lowest id: torch promises the first maximum on every device.

    Args:
        scores: [R, V] float32 or float64 from `process_logits`.
        nodes: the R rows' contexts.

    Returns:
        [R] int64 token ids; -1 for a row that holds NaN, or -inf alone.

    Raises:
        ValueError: a row samples but its request has no seed.
    """
    sampled = [row for row, node in enumerate(nodes) if not node.params.greedy]
    scores = change_rows(scores, sampled, lambda chosen: _add_noise(chosen, [nodes[row] for row in sampled]))
    best, tokens = scores.max(-1)
    return tokens.masked_fill(~(best > -torch.inf), -1)


def _add_noise(scores: Tensor, nodes: Sequence[NodeContext]) -> Tensor:
    """Scores plus noise; where cuts left few tokens only theirs is drawn, which is faster on a CPU, the bits equal."""
    seeds = torch.tensor([_seed(node) for node in nodes], dtype=torch.int64, device=scores.device)
    positions = torch.tensor([node.position for node in nodes], dtype=torch.int64, device=scores.device)
    if all(node.params.cuts for node in nodes):
        rows, tokens = (scores > -torch.inf).nonzero(as_tuple=True)
        if len(tokens) < scores.numel() // 8:
            noise = gumbel_noise_at(seeds[rows], positions[rows], tokens.unsqueeze(1)).squeeze(1)
            return scores.index_put((rows, tokens), scores[rows, tokens] + noise)
    return scores + gumbel_noise(seeds, positions, scores.shape[-1])


class CoupledRule:
    """The lossless rule: the path that the target, with the request's own noise, would have taken alone.

    The choice at a node depends on the seed, the output position and the node's logits, never on the tree; so
    the same seed gives the same tokens with any drafter or none. Where two children hold the chosen token the
    first one is taken.
    """

    name = "coupled"
    lossless = True

    def __call__(
        self, tree: TokenTree, logits: Tensor, queries: Sequence[VerifyQuery], num_real_tokens: int
    ) -> list[Accepted]:
        """Walk each sequence's tree; see `AcceptanceRule`."""
        return _walk(tree, logits, queries, num_real_tokens, lambda scores, nodes, drafts: choose(scores, nodes))


@dataclass(frozen=True, slots=True)
class TypicalRule:
    """Medusa's typical acceptance. LOSSY: what is emitted doesn't follow the target's distribution.

    A child x is accepted if p(x) > min(epsilon, delta · exp(-H(p))), p being the processed (temperature first)
    distribution at its parent and H its entropy in nats; the walk goes on to the likeliest accepted child. Where
    none is accepted the token is the coupled choice. Greedy rows match exactly, as under `CoupledRule`.

    Source: Cai et al., "Medusa" (2024), section 2.3.1.

    Args:
        epsilon: probability from which a child is always accepted, in (0, 1).
        delta: scale of the entropy-dependent threshold, above 0; the paper's choice is the root of epsilon.

    Raises:
        ConfigError: an option is out of bounds.
    """

    epsilon: float = 0.09
    delta: float = 0.3
    name = "typical"
    lossless = False

    def __post_init__(self) -> None:
        if type(self.epsilon) not in (int, float) or not 0 < self.epsilon < 1:
            raise ConfigError(f"epsilon must be above 0 and below 1, not {self.epsilon!r}")
        if type(self.delta) not in (int, float) or not 0 < self.delta < math.inf:
            raise ConfigError(f"delta must be a finite number above 0, not {self.delta!r}")

    def __call__(
        self, tree: TokenTree, logits: Tensor, queries: Sequence[VerifyQuery], num_real_tokens: int
    ) -> list[Accepted]:
        """Walk each sequence's tree; see `AcceptanceRule`."""
        return _walk(tree, logits, queries, num_real_tokens, self._pick)

    def _pick(self, scores: Tensor, nodes: Sequence[NodeContext], drafts: Sequence[Sequence[int]]) -> Tensor:
        choice = choose(scores, nodes)
        width = max(map(len, drafts))
        if not width or all(node.params.greedy for node in nodes):
            return choice
        # Greedy rows and padding, -1, accept nothing.
        rows = [[] if node.params.greedy else list(row) for node, row in zip(nodes, drafts, strict=True)]
        padded = [row + [-1] * (width - len(row)) for row in rows]
        tokens = torch.tensor(padded, device=scores.device)  # [R, width]
        known = (tokens >= 0) & (tokens < scores.shape[-1])
        probs = scores.softmax(-1)
        drafted = probs.gather(-1, tokens.where(known, 0)).where(known, 0)
        entropy = torch.special.entr(probs).sum(-1, keepdim=True)
        threshold = (self.delta * torch.exp(-entropy)).clamp(max=self.epsilon)
        best, child = drafted.where(drafted > threshold, 0).max(-1, keepdim=True)
        return tokens.gather(-1, child).where(best > 0, choice.unsqueeze(-1)).squeeze(-1)


RULES: dict[str, Callable[..., AcceptanceRule]] = {"coupled": CoupledRule, "typical": TypicalRule}
"""Name → factory of the rule, called with the rule's options."""


def make_rule(name: str, **options: float) -> AcceptanceRule:
    """Make the rule of that name.

    Raises:
        ConfigError: no such rule, or the rule has no such option, or the option is out of bounds.
    """
    if name not in RULES:
        raise ConfigError(f"unknown acceptance rule {name!r}; choose one of {', '.join(RULES)}")
    known = signature(RULES[name]).parameters
    unknown = [option for option in options if option not in known]
    if unknown:
        raise ConfigError(f"rule {name!r} has no option {unknown[0]!r}; it takes {', '.join(known) or 'none'}")
    return RULES[name](**options)


Pick = Callable[[Tensor, Sequence[NodeContext], Sequence[Sequence[int]]], Tensor]
"""Maps the R visited nodes' scores [R, V], their contexts and their children's tokens to R token ids."""


def _walk(
    tree: TokenTree, logits: Tensor, queries: Sequence[VerifyQuery], num_real_tokens: int, pick: Pick
) -> list[Accepted]:
    """Walk all trees at once, one depth at a time: only visited rows are processed, one sync a depth."""
    if logits.shape[0] != tree.cu_nodes[-1] or len(queries) != tree.num_sequences:
        raise ValueError(
            f"{logits.shape[0]} rows of logits and {len(queries)} queries don't fit a tree of "
            f"{tree.cu_nodes[-1]} nodes and {tree.num_sequences} sequences"
        )
    children = _children(tree)
    paths = [[start] for start in tree.cu_nodes[:-1]]  # rows of the batch
    emitted: list[list[int]] = [[] for _ in queries]
    kept: list[list[Tensor]] = [[] for _ in queries]
    failures: dict[int, Exception] = {}
    active = list(range(len(queries)))
    while active:
        nodes = [NodeContext(b, queries[b], tuple(emitted[b])) for b in active]
        rows = torch.tensor([paths[b][-1] for b in active], device=logits.device)
        visited = logits[rows]
        scores = process_logits(visited, nodes, num_real_tokens, failures)
        drafts = [list(children[paths[b][-1]]) for b in active]
        for row, (node, token) in enumerate(zip(nodes, pick(scores, nodes, drafts).tolist(), strict=True)):
            path = paths[node.sequence]
            path.append(children[path[-1]].get(token, -1))
            if token < 0:
                failures.setdefault(node.sequence, _no_choice(node, visited[row, :num_real_tokens]))
                continue
            if node.query.keep_scores:
                kept[node.sequence].append(scores[row])
            emitted[node.sequence].append(token)
        active = [b for b in active if paths[b][-1] >= 0]
    return [
        Accepted(
            path=tuple(row - start for row in paths[b][:-1]),
            tokens=tuple(emitted[b]),
            scores=torch.stack(kept[b]) if kept[b] else None,
            error=failures.get(b),
        )
        for b, start in enumerate(tree.cu_nodes[:-1])
    ]


def _children(tree: TokenTree) -> list[dict[int, int]]:
    """For each row of the batch, token → row of its first child with that token."""
    tokens, parents = tree.tokens.tolist(), tree.parents.tolist()
    children: list[dict[int, int]] = [{} for _ in tokens]
    for start, end in zip(tree.cu_nodes, tree.cu_nodes[1:], strict=False):
        for row in range(start + 1, end):
            children[start + parents[row]].setdefault(tokens[row], row)
    return children


def _seed(node: NodeContext) -> int:
    if node.params.seed is None:
        raise ValueError(f"{_where(node)} samples, but its request has no seed; the engine draws one for each")
    return node.params.seed


def _no_choice(node: NodeContext, logits: Tensor) -> SpecdecError:
    """Say whose fault it is that nothing can be chosen by a node's raw logits."""
    if bool(logits.isnan().any()) or not bool((logits > -torch.inf).any()):
        return SpecdecError(f"the target's logits for {_where(node)} hold NaN, or -inf alone")
    return InvalidRequest(
        f"the request's own parameters leave no token to choose for {_where(node)}; loosen allowed_token_ids, "
        "suppress_tokens, bad_words_ids, no_repeat_ngram_size or min_new_tokens, or mend its logits_processors"
    )


def _where(node: NodeContext) -> str:
    return f"sequence {node.sequence}, output position {node.position}"
