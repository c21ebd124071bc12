"""A model of its own as the drafter: another causal LM, or the target's first layers.

Its keys and values stand under the engine's block tables, so allocation, preemption and rollback are the engine's. It
keeps count of the tokens whose keys and values it has, and runs those that it lacks before it drafts: the prompt, but
for blocks that another request filled, what a rejection replaced, what came while it stood down.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from specdec.cache.blocks import BlockPool
from specdec.cache.filled import FilledBlocks
from specdec.cache.pages import KVPages
from specdec.drafters.coupling import coupled_scores
from specdec.drafters.protocol import DraftQuery, Observation
from specdec.errors import ConfigError
from specdec.models.batch import Rows, pack_rows
from specdec.models.protocol import PackedModel
from specdec.verifier.tree import MAX_NODES, TokenTree

CHUNK = 1024
"""Most tokens of one sequence that a catch-up forward runs."""


@dataclass(slots=True)
class _Cached:
    """What the drafter's pages hold of a request: its first `num_tokens` tokens, then the chain of `drafted` ones."""

    num_tokens: int = 0
    drafted: list[int] = field(default_factory=list)


@dataclass(slots=True)
class _Growing:
    """One query's tree in the making. `values` are cumulative log-probabilities; `level` the nodes to run next."""

    query: DraftQuery
    tokens: list[int]
    parents: list[int] = field(default_factory=lambda: [-1])
    ancestors: list[int] = field(default_factory=lambda: [1])
    values: list[float] = field(default_factory=lambda: [0.0])
    level: list[int] = field(default_factory=lambda: [0])
    num_run: int = 0  # nodes whose keys and values are written


class DraftModelDrafter:
    """Grows a tree level by level with a draft model: a forward a level.

    A level keeps the likeliest nodes of all candidates of the level before, by cumulative log-probability. A node's
    candidates are its top tokens; for sampling requests they are ranked with the noise of the target's own draw, and
    the log-probability is that of the noisy scores.

    Args:
        model: the draft model, on the target's device.
        vocab_size: tokens of the target; only those are drafted.
        widths: nodes to keep at depths 1, 2, …; all 1 is a chain.
        own_pages: whether the model has layers of its own; else it runs over the target's.
        name: stands in reports.

    Raises:
        ConfigError: a width is out of bounds, or there are too many nodes for a tree.
    """

    reads_hidden = False

    def __init__(
        self,
        model: PackedModel,
        vocab_size: int,
        widths: Sequence[int] = (1, 1, 1, 1),
        *,
        own_pages: bool = True,
        name: str = "draft_model",
    ) -> None:
        whole = isinstance(widths, (list, tuple)) and all(type(w) is int and w >= 1 for w in widths)
        if not whole or not widths or sum(widths) >= MAX_NODES:
            raise ConfigError(f"widths must be positive numbers that add up to at most {MAX_NODES - 1}, not {widths!r}")
        self.name = name
        self._model = model
        self._vocab_size = min(vocab_size, model.vocab_size)
        self._widths = tuple(widths)
        self._own_pages = own_pages
        self.kv_layouts = (model.kv_layout,) if own_pages else ()
        self._pages: KVPages | None = None
        self._filled: FilledBlocks | None = None
        self._cached: dict[int, _Cached] = {}

    def attach(self, pages: KVPages, pool: BlockPool) -> None:
        """Take the target's pages, or make own ones of as many blocks and the same format."""
        if self._own_pages:
            layout = self._model.kv_layout.like(pages.layout)
            pages = KVPages(layout, pages.num_blocks, pages.block_size, self._model.device)
        self._pages, self._filled = pages, FilledBlocks(pool.versions, pages.block_size)
        self._cached.clear()

    @torch.inference_mode()
    def propose(self, queries: Sequence[DraftQuery]) -> TokenTree:
        """Return one tree a query; the root alone where the draft model's context or vocabulary doesn't reach."""
        trees = [_Growing(query, [query.tokens[-1]]) for query in queries]
        active = [tree for tree in trees if self._can_draft(tree.query)]
        if active:
            self._catch_up(active)
        for depth, width in enumerate(self._widths):
            active = [tree for tree in active if tree.level and len(tree.tokens) < tree.query.max_nodes]
            if not active:
                break
            logits = self._run(active, depth)
            for tree, rows in zip(active, torch.split(logits, [len(t.level) for t in active]), strict=True):
                tree.num_run = tree.level[-1] + 1
                _expand(tree, rows, depth, width)
        for tree in trees:
            self._note(tree)
        return TokenTree.build([t.tokens for t in trees], [t.parents for t in trees])

    def observe(self, observation: Observation) -> None:
        """Nothing to note: the next query shows what was accepted."""

    def forget(self, request_ids: Collection[int]) -> None:
        """Drop the counts of these requests; their blocks are the engine's."""
        for request_id in request_ids:
            self._cached.pop(request_id, None)

    def _can_draft(self, query: DraftQuery) -> bool:
        if query.max_nodes < 2 or len(query.tokens) + len(self._widths) > self._model.max_len:
            return False
        first = self._num_cached(query)
        if not self._own_pages and len(query.tokens) - 1 > first:
            return False  # the target runs these tokens in this very step
        return max(query.tokens[first:]) < self._model.vocab_size

    def _num_cached(self, query: DraftQuery) -> int:
        """Leading tokens whose keys and values stand; the root's never count, since its logits are wanted."""
        if not self._own_pages:
            return query.num_computed
        if query.request_id not in self._cached:
            assert self._filled is not None, "the engine attaches its pages"
            self._cached[query.request_id] = _Cached(self._filled.count(query.block_table))
        cached = self._cached[query.request_id]
        num = cached.num_tokens
        for token in cached.drafted:
            if num == len(query.tokens) or query.tokens[num] != token:
                break
            num += 1
        return min(num, len(query.tokens) - 1)

    def _catch_up(self, trees: Sequence[_Growing]) -> None:
        """Run the tokens before the root that the pages lack."""
        pending = {tree.query.request_id: (tree.query, self._num_cached(tree.query)) for tree in trees}
        while pending := {i: (q, start) for i, (q, start) in pending.items() if start < len(q.tokens) - 1}:
            rows = []
            for i, (q, start) in pending.items():
                end = min(start + CHUNK, len(q.tokens) - 1)
                rows.append(Rows(q.block_table, start, q.tokens[start:end], context=end))
                pending[i] = (q, end)
            self._forward(rows)

    def _run(self, trees: Sequence[_Growing], depth: int) -> Tensor:
        """Score the nodes of each tree's level: [nodes, V] float."""
        rows = []
        for tree in trees:
            root = len(tree.query.tokens) - 1  # key of the root; node i stands at root + i
            rows.append(
                Rows(
                    tree.query.block_table,
                    root + tree.level[0],
                    [tree.tokens[node] for node in tree.level],
                    context=root,
                    depth=[depth] * len(tree.level),
                    ancestors=[tree.ancestors[node] for node in tree.level],
                )
            )
        logits = self._model.logits(self._forward(rows))[:, : self._vocab_size]
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        params = [tree.query.params for tree in trees for _ in tree.level]
        positions = [tree.query.num_output + depth for tree in trees for _ in tree.level]
        return coupled_scores(logits, params, positions)

    def _forward(self, rows: Sequence[Rows]) -> Tensor:
        assert self._pages is not None, "the engine attaches its pages"
        batch = pack_rows(rows, self._pages.block_size, self._model.device)
        return self._model.forward(batch, self._pages)

    def _note(self, tree: _Growing) -> None:
        """Keep what was written: all tokens up to the root, then the chain of first nodes that were run."""
        if not self._own_pages or not tree.num_run:
            return
        assert self._filled is not None, "the engine attaches its pages"
        self._filled.note(tree.query.block_table, len(tree.query.tokens))
        chain = 1
        while chain < tree.num_run and tree.parents[chain] == chain - 1:
            chain += 1
        self._cached[tree.query.request_id] = _Cached(len(tree.query.tokens), tree.tokens[1:chain])


def _expand(tree: _Growing, scores: Tensor, depth: int, width: int) -> None:
    """Add the best children of a level's nodes, as many as the width and the budget allow."""
    room = min(width, tree.query.max_nodes - len(tree.tokens))
    values, ids = scores.log_softmax(-1).topk(min(room, scores.shape[-1]))  # [level, room]
    candidates = [
        (tree.values[node] + value, node, token)
        for node, row, tokens in zip(tree.level, values.tolist(), ids.tolist(), strict=True)
        for value, token in zip(row, tokens, strict=True)
    ]
    candidates.sort(key=lambda c: -c[0])  # stable: ties keep their parents' order
    tree.level = []
    for value, parent, token in candidates[:room]:
        tree.level.append(len(tree.tokens))
        tree.tokens.append(token)
        tree.parents.append(parent)
        tree.ancestors.append(tree.ancestors[parent] | 1 << len(tree.ancestors))
        tree.values.append(value)
