"""How often draft heads are right on held-out answers: each rank of each head, and all heads at once.

Position t yields the root, token t + 1; head k, from 0, predicts token t + 2 + k. Everything here is teacher-forced:
heads read the hidden states of the true text, as they do in decoding where the text is the model's own greedy answer.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from specdec.drafters.choices import Choice, as_choices
from specdec.drafters.draft_heads import DraftHeads
from specdec.errors import ConfigError
from specdec.training.data import Example
from specdec.training.hidden import FrozenBase

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MISS = -1
"""The rank of a token that isn't among a head's candidates, or isn't there at all."""
_CHUNK_LOGITS = 1 << 24  # scores held at once: 64 MiB of fp32


@dataclass(frozen=True, slots=True)
class JointRanks:
    """The rank of the true token under every head, position by position.

    Args:
        rows: [M, K] int64 on the CPU; answer after answer, one row for every root but an answer's last token. `MISS`
            where the token isn't among the candidates or lies beyond the answer.
        whole: [M] bool, whether all K tokens lie within the answer.
        lengths: tokens of each answer; one of n tokens has n - 1 rows.
    """

    rows: Tensor
    whole: Tensor
    lengths: tuple[int, ...]

    @property
    def ranks(self) -> Tensor:
        """[N, K] int64: the rows of positions where all heads have a label."""
        return self.rows[self.whole]


def rank_accuracies(
    model: "PreTrainedModel", heads: DraftHeads, examples: Iterable[Example], num_ranks: int = 10
) -> list[list[float]]:
    """Return how often the candidate of each rank of each head is the right token.

    Args:
        model, heads, examples, num_ranks: as for `joint_ranks`.

    Returns:
        [K][ranks], over the answer positions where all heads have a label.

    Raises:
        ConfigError: there is no such position.
    """
    return accuracies_of(joint_ranks(model, heads, examples, num_ranks).ranks, num_ranks)


@torch.inference_mode()
def joint_ranks(
    model: "PreTrainedModel", heads: DraftHeads, examples: Iterable[Example], num_ranks: int = 10
) -> JointRanks:
    """Return the rank of the true token under every head at every answer position.

    Memory for scores stays under 64 MiB or one position's, whatever the examples.

    Args:
        model: the base; its parameters stop taking gradients.
        heads: draft heads of any kind, on the model's device.
        examples: held-out texts, no longer than the model allows.
        num_ranks: candidates of each head.

    Raises:
        ConfigError: no answer has a token for every head.
    """
    base, num_heads = FrozenBase(model), heads.config.num_heads
    num_ranks = min(num_ranks, heads.config.num_columns)
    rows: list[Tensor] = []
    lengths: list[int] = []
    for example in examples:
        answers = list(_answers(example))
        lengths += [end - start for start, end in answers]
        # [n] positions and, for each, where its answer ends
        at = torch.tensor([t for start, end in answers for t in range(start - 1, end - 2)], dtype=torch.int64)
        ends = torch.tensor([end for start, end in answers for _ in range(start - 1, end - 2)], dtype=torch.int64)
        if len(at):
            rows.append(_example_ranks(base, heads, torch.tensor(example.input_ids), at, ends, num_ranks))
    joint = torch.cat(rows) if rows else torch.empty(0, num_heads, dtype=torch.int64)
    left = [min(n - 1 - i, num_heads) for n in lengths for i in range(n - 1)]
    whole = torch.tensor(left, dtype=torch.int64) == num_heads
    if not whole.any():
        raise ConfigError(
            f"no held-out answer has the {num_heads + 1} tokens that {num_heads} heads are measured on; "
            "give longer answers"
        )
    return JointRanks(joint, whole, tuple(lengths))


def accuracies_of(ranks: Tensor, num_ranks: int) -> list[list[float]]:
    """Return [K][ranks], the share of positions whose true token has each rank; `ranks` are [N, K]."""
    return [[float((head == rank).double().mean()) for rank in range(num_ranks)] for head in ranks.unbind(1)]


def path_counts(ranks: Tensor) -> Counter[Choice]:
    """Return how many positions' true tokens lead through each node of the tree of all candidates.

    Args:
        ranks: [N, K], as `JointRanks.ranks`.

    Returns:
        For every choice through which at least one position leads, their number; a parent's is never below its child's.
    """
    paths, numbers = torch.unique(ranks, dim=0, return_counts=True)
    counts: Counter[Choice] = Counter()
    for path, number in zip(paths.tolist(), numbers.tolist(), strict=True):
        depth = path.index(MISS) if MISS in path else len(path)
        for d in range(1, depth + 1):
            counts[tuple(path[:d])] += number
    return counts


def accepted_depths(ranks: Tensor, tree: Sequence[Sequence[int]]) -> Tensor:
    """Return [N] int64, the depth to which each position's true tokens follow the tree at temperature 0.

    Args:
        ranks: [N, K], as `JointRanks.ranks`.
        tree: choices whose parents are there too; may be empty.

    Raises:
        ConfigError: the tree is malformed or deeper than K.
    """
    depths = torch.zeros(len(ranks), dtype=torch.int64)
    for choice in as_choices(tree, ranks.shape[1]) if tree else ():
        depths += (ranks[:, : len(choice)] == torch.tensor(choice)).all(1)  # a path holds one node of each depth
    return depths


def expected_tau(ranks: Tensor, tree: Sequence[Sequence[int]]) -> float:
    """Return the tokens of a forward, bonus token included, if every position were a root equally often.

    It takes the heads' joint outcomes as they were counted: nothing is assumed to be independent.

    Args:
        ranks: [N, K], as `JointRanks.ranks`.
        tree: as for `accepted_depths`.
    """
    return 1 + float(accepted_depths(ranks, tree).double().mean())


def replayed_tau(joint: JointRanks, tree: Sequence[Sequence[int]]) -> float:
    """Return τ as the engine counts it over these answers, if the model gives them greedily.

    Only the positions that decoding stops at count, and an answer's end cuts the last path. The prompt's forward gives
    an answer's first token and has no draft.

    Args:
        joint: from `joint_ranks`.
        tree: as for `accepted_depths`.
    """
    return sum(joint.lengths) / (len(joint.lengths) + int(decoding_stops(joint, tree).sum()))


def decoding_stops(joint: JointRanks, tree: Sequence[Sequence[int]]) -> Tensor:
    """Return at which positions greedy decoding drafts: the root after an accepted path lies behind it. [M] bool.

    They are harder than the rest, since it is in easy places that paths are long.

    Args:
        joint: from `joint_ranks`.
        tree: as for `accepted_depths`.
    """
    depths, first = accepted_depths(joint.rows, tree).tolist(), 0
    stops = torch.zeros(len(joint.rows), dtype=torch.bool)
    for length in joint.lengths:
        at = 0
        while at < length - 1:
            stops[first + at] = True
            at += 1 + depths[first + at]
        first += length - 1
    return stops


def _answers(example: Example) -> Iterator[tuple[int, int]]:
    """First token and end of each answer; nothing yields the text's very first token, so it is no label."""
    start = None
    for i, labelled in enumerate((*example.answer, False)):
        if labelled and i and start is None:
            start = i
        elif not labelled and start is not None:
            yield start, i
            start = None


def label_ranks(heads: DraftHeads, logits: Tensor, labels: Tensor, num_ranks: int) -> Tensor:
    """Return the rank of each label among the head's candidates, as the drafter takes them: [R, K] int64.

    Args:
        heads: whose logits they are.
        logits: [R, K, V], or [R, K, D] of heads with a draft vocabulary, in fp32 or better.
        labels: [R, K] tokens; a negative one is none and gets `MISS`, as does one that isn't scored.
        num_ranks: candidates of each head.
    """
    hits = heads.tokens_of(logits.topk(num_ranks).indices) == labels[..., None]  # [R, K, ranks]
    return torch.where(hits.any(-1), hits.int().argmax(-1), MISS)


def _example_ranks(
    base: FrozenBase, heads: DraftHeads, ids: Tensor, at: Tensor, ends: Tensor, num_ranks: int
) -> Tensor:
    """[n, K] ranks at the positions `at` [n] of a text [T]; answers end at `ends` [n]."""
    ids, at, ends = (x.to(base.device) for x in (ids, at, ends))
    dtype, lm_head = next(heads.parameters()).dtype, base.head_for(heads)
    places = at[:, None] + 2 + torch.arange(heads.config.num_heads, device=base.device)  # [n, K]
    labels = ids[places.clamp(max=len(ids) - 1)].masked_fill(places >= ends[:, None], MISS)
    before = ids[(places - 1).clamp(max=len(ids) - 1)]  # the token before each label
    hidden = base.read(ids[None])[0, at].to(dtype)  # [n, H]
    size = max(1, _CHUNK_LOGITS // (heads.config.num_heads * heads.config.num_columns))
    ranks = []
    for part in (slice(i, i + size) for i in range(0, len(at), size)):
        states = heads.states(hidden[part], base.embed(before[part]).to(dtype))
        ranks.append(label_ranks(heads, heads.project(states, lm_head).float(), labels[part], num_ranks))
    return torch.cat(ranks).cpu()
