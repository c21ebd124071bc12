"""Medusa: heads on the target's last hidden state guess the next tokens, each head one place further.

Knows hidden states and a static tree; nothing of scheduling. The hidden state that yielded the root (the last
emitted token) also feeds the heads: head 0 guesses the root's children, head 1 their children, and so on.
Source: Cai et al., "Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding Heads" (2024).
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from specdec.drafters.choices import Choice, as_choices, best_first_choices, default_accuracies
from specdec.drafters.coupling import coupled_scores
from specdec.drafters.heads import load_heads
from specdec.drafters.medusa_heads import MedusaHeads
from specdec.drafters.protocol import DraftQuery, DraftTarget, Observation
from specdec.errors import ConfigError
from specdec.verifier.tree import MAX_NODES, TokenTree

__all__ = ["MedusaDrafter", "best_first_choices", "load_medusa"]

DEFAULT_NODES = 16
"""Nodes of the default tree, root included: for heads that nobody measured."""


@dataclass(slots=True)
class _Seen:
    """What was observed of a request."""

    hidden: Tensor | None = None  # [H], of its last committed token
    num_committed: int = 0
    queried: bool = False  # whether its steps reach the root by now: before, they commit chunks of the prompt


class MedusaDrafter:
    """Drafts a static tree whose node (…, r) at depth d holds the candidate of rank r of head d - 1.

    Candidates of a greedy request are its heads' most likely tokens. Those of a sampling request are ranked by
    log-probability / temperature + the noise of the output position that the head predicts: the noise that the
    target's own choice there will use.

    Args:
        heads: the heads, on the target's device and in its dtype.
        target: the model that they read.
        tree: choices as in Medusa's `medusa_choices`, best first: a small budget takes the first ones. None takes the
            tree stored with the heads, else a default one.
        max_nodes: most nodes of a tree, root included; 1 to 64. None takes a given or stored tree whole, and 16 nodes
            of the default one.

    Raises:
        ConfigError: the tree is malformed, deeper than there are heads or wider than the vocabulary, max_nodes is out
            of bounds, or the heads don't fit the target.
    """

    name = "medusa"
    reads_hidden = True

    def __init__(
        self,
        heads: MedusaHeads,
        target: DraftTarget,
        tree: Sequence[Sequence[int]] | None = None,
        max_nodes: int | None = None,
    ) -> None:
        if max_nodes is not None and (type(max_nodes) is not int or not 1 <= max_nodes <= MAX_NODES):
            raise ConfigError(f"max_nodes must be a whole number from 1 to {MAX_NODES}, not {max_nodes!r}")
        sizes = heads.config.hidden_size, heads.config.vocab_size
        if sizes != (target.hidden_size, target.vocab_size):
            raise ConfigError(f"the heads' hidden and vocabulary sizes {sizes} aren't the target's; train heads for it")
        self._heads = heads
        self._target = target
        self._choices = _choices(heads, tree, max_nodes)
        self._parents = [-1, *(1 + self._choices.index(c[:-1]) if len(c) > 1 else 0 for c in self._choices)]
        self._seen: dict[int, _Seen] = {}

    @property
    def choices(self) -> tuple[Choice, ...]:
        """The tree in use, root left out, in the order in which a budget takes its nodes."""
        return self._choices

    @torch.inference_mode()
    def propose(self, queries: Sequence[DraftQuery]) -> TokenTree:
        """Return one tree a query; the root alone unless the token before the root was the last one observed."""
        sizes = [self._num_nodes(query) for query in queries]
        drafted = [query for query, size in zip(queries, sizes, strict=True) if size > 1]
        drafts = iter(self._drafts(drafted, max(sizes) - 1) if drafted else ())
        tokens = [
            [query.tokens[-1], *(next(drafts)[: size - 1] if size > 1 else ())]
            for query, size in zip(queries, sizes, strict=True)
        ]
        return TokenTree.build(tokens, [self._parents[:size] for size in sizes])

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

    def _num_nodes(self, query: DraftQuery) -> int:
        """Nodes to propose. The last hidden state observed is that of the token before the root if it came from a step
        that reached the root, or if all tokens but the root were observed; else a chunk of the prompt lies between.
        """
        seen = self._seen.setdefault(query.request_id, _Seen())
        fresh = seen.hidden is not None and (seen.queried or seen.num_committed == len(query.tokens) - 1)
        seen.queried = True
        return min(query.max_nodes, 1 + len(self._choices)) if fresh else 1

    def _drafts(self, queries: Sequence[DraftQuery], num_choices: int) -> list[list[int]]:
        """Tokens of the first choices for each query."""
        choices = self._choices[:num_choices]
        num_heads = max(len(choice) for choice in choices)
        states = (self._seen[query.request_id].hidden for query in queries)
        hidden = torch.stack([state for state in states if state is not None])  # [R, H]
        logits = self._heads(hidden, self._target.lm_head, num_heads).float()  # [R, K', V]
        scores = add_noise(logits, queries)
        candidates = scores.topk(1 + max(choice[-1] for choice in choices)).indices.tolist()  # [R][K'][ranks]
        return [[ranked[len(choice) - 1][choice[-1]] for choice in choices] for ranked in candidates]


def add_noise(logits: Tensor, queries: Sequence[DraftQuery]) -> Tensor:
    """Return scores whose order is each query's order of candidates.

    Args:
        logits: [R, K, V] float32, head k predicting output position num_output + k.
        queries: the R queries.

    Returns:
        [R, K, V] float32: the logits themselves where the request is greedy, log-probability / temperature + noise
        where it samples.
    """
    num_heads = logits.shape[1]
    params = [query.params for query in queries for _ in range(num_heads)]
    positions = [query.num_output + k for query in queries for k in range(num_heads)]
    return coupled_scores(logits.flatten(0, 1), params, positions).view_as(logits)


def load_medusa(
    target: DraftTarget,
    path: str | Path,
    *,
    tree: Sequence[Sequence[int]] | None = None,
    max_nodes: int | None = None,
    allow_pickle: bool = False,
    check_base: bool = True,
) -> MedusaDrafter:
    """Load heads as `load_heads` does, and return the drafter that uses them.

    Raises:
        CheckpointError: the heads can't be read or belong to another model.
        ConfigError: an option is out of bounds.
    """
    heads = load_heads(path, target, allow_pickle=allow_pickle, check_base=check_base)
    return MedusaDrafter(heads, target, tree, max_nodes)


def _choices(heads: MedusaHeads, tree: Sequence[Sequence[int]] | None, max_nodes: int | None) -> tuple[Choice, ...]:
    """The tree to use, cut to `max_nodes`; a default one never ranks more tokens than there are."""
    num_heads, vocab_size = heads.config.num_heads, heads.config.vocab_size
    tree = heads.config.tree if tree is None else tree
    if tree is None:
        table = [head[:vocab_size] for head in default_accuracies(num_heads)]
        return tuple(best_first_choices(table, max_nodes or DEFAULT_NODES))
    choices = as_choices(tree, num_heads)
    widest = 1 + max(choice[-1] for choice in choices)
    if widest > vocab_size:
        raise ConfigError(f"the tree asks for {widest} candidates of {vocab_size} tokens; narrow it")
    return choices[: (max_nodes or MAX_NODES) - 1]
