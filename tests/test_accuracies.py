"""What heads are measured by, and the trees that come of it."""

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product
from math import prod
from typing import Any

import pytest
import torch
from torch import Tensor

from specdec.drafters.choices import Choice, best_first_choices, most_accepted_choices
from specdec.drafters.draft_heads import DraftHeads, HeadsConfig
from specdec.drafters.medusa import MedusaDrafter
from specdec.errors import ConfigError
from specdec.params import SamplingParams
from specdec.training import accuracies
from specdec.training.accuracies import (
    MISS,
    JointRanks,
    accepted_depths,
    accuracies_of,
    decoding_stops,
    expected_tau,
    joint_ranks,
    path_counts,
    rank_accuracies,
    replayed_tau,
)
from specdec.training.check import check_tau, prompts_of
from specdec.training.data import Example
from specdec.training.trees import (
    TreeSizes,
    draft_seconds,
    fastest_size,
    trees_from_accuracies,
    trees_from_ranks,
    trees_from_replay,
)
from tests.conftest import tiny_llama
from tests.engines import make_engine, run
from tests.medusa import SIZE, random_medusa, successor, walking_medusa, walking_model

SHAPES = [(3,), (3, 3), (2, 3, 2), (3, 3, 3), (1, 2, 3)]


def connected_trees(shape: Sequence[int], size: int) -> Iterator[frozenset[Choice]]:
    """Every tree of `size` choices over heads with so many ranks."""
    level: set[frozenset[Choice]] = {frozenset()}
    for _ in range(size):
        level = {
            tree | {(*above, rank)}
            for tree in level
            for above in ((), *tree)
            if len(above) < len(shape)
            for rank in range(shape[len(above)])
            if (*above, rank) not in tree
        }
    yield from level


def correlated(num_positions: int, seed: int) -> Tensor:
    """[N, 4] ranks of heads that are all right at half of the positions, and seldom at the others."""
    generator = torch.Generator().manual_seed(seed)
    hard = torch.multinomial(torch.tensor([2, 1, 4, 4, 4, 4.0]), num_positions * 4, True, generator=generator) - 1
    easy = torch.rand(num_positions, 1, generator=generator) < 0.5
    return torch.where(easy, 0, hard.view(-1, 4))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("monotone", [True, False])
def test_best_first_is_the_best_of_all_connected_trees(shape: tuple[int, ...], monotone: bool) -> None:
    generator = torch.Generator().manual_seed(sum(shape))
    table = [torch.rand(n, generator=generator).div(n).sort(descending=monotone).values.tolist() for n in shape]
    if not monotone:
        table[-1][0] = 0.0
    total = sum(prod(shape[:d]) for d in range(1, len(shape) + 1))
    for size in range(min(7, total + 1)):
        best = max(sum(prod(table[k][r] for k, r in enumerate(c)) for c in t) for t in connected_trees(shape, size))
        assert trees_from_accuracies(table, size + 1).taus[-1] == pytest.approx(1 + best)


@pytest.mark.parametrize("shape", SHAPES)
def test_most_accepted_is_the_best_of_all_connected_trees(shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(7)
    ranks = torch.stack([torch.randint(MISS, n, (23,), generator=generator) for n in shape], 1)
    for size in (1, 3, 5) if len(shape) > 1 else (1, 3):
        best = max(expected_tau(ranks, sorted(tree)) for tree in connected_trees(shape, size))
        sizes = trees_from_ranks(ranks, 3, size + 1)
        assert sizes.taus[-1] == pytest.approx(best) == pytest.approx(expected_tau(ranks, sizes.choices))


def test_joint_ranks_make_better_trees_than_products() -> None:
    """Where heads are right together, also at positions that the tree wasn't made from."""
    seen, unseen = correlated(4000, 0), correlated(4000, 1)
    table = accuracies_of(seen, 5)
    for num_nodes in (4, 8, 16, 32, 64):
        products = best_first_choices(table, num_nodes)
        joint = most_accepted_choices(path_counts(seen), table, num_nodes)
        assert len(joint) == num_nodes - 1 and all(len(c) == 1 or c[:-1] in joint[:i] for i, c in enumerate(joint))
        assert expected_tau(seen, joint) >= expected_tau(seen, products)
        assert num_nodes != 16 or expected_tau(unseen, joint) > expected_tau(unseen, products) + 0.03


def test_uncounted_choices_go_by_their_products() -> None:
    counts = {(0,): 3, (1,): 1, (1, 0): 1}
    table = [[0.6, 0.2], [0.5, 0.25]]
    assert most_accepted_choices(counts, table, 64) == [(0,), (1,), (1, 0), (0, 0), (0, 1), (1, 1)]
    assert most_accepted_choices(counts, table, 3) == [(0,), (1,)]
    with pytest.raises(ConfigError, match="num_nodes"):
        most_accepted_choices(counts, table, 65)


def test_expected_tau_by_hand() -> None:
    ranks = torch.tensor([[0, 0], [0, 1], [1, 0], [MISS, 0], [2, 2]])
    assert accepted_depths(ranks, [(0,), (0, 0), (1,)]).tolist() == [2, 1, 1, 0, 0]
    assert expected_tau(ranks, [(0,), (0, 0), (1,)]) == pytest.approx(1 + 4 / 5)
    assert expected_tau(ranks, []) == 1
    assert accuracies_of(ranks, 2) == [[0.4, 0.2], [0.6, 0.2]]
    assert path_counts(ranks) == {(0,): 2, (0, 0): 1, (0, 1): 1, (1,): 1, (1, 0): 1, (2,): 1, (2, 2): 1}
    with pytest.raises(ConfigError, match="parent"):
        expected_tau(ranks, [(0, 0)])


def test_replay_follows_the_roots_by_hand() -> None:
    """5 tokens: the prompt's forward, then two accepted, then the last; 1 token: the prompt's forward alone."""
    rows = torch.tensor([[0, 0], [1, 1], [1, 1], [1, MISS]])
    joint = JointRanks(rows, torch.tensor([True, True, True, False]), (5, 1))
    assert replayed_tau(joint, [(0,), (0, 0)]) == 6 / (3 + 1)
    assert replayed_tau(joint, []) == 6 / (5 + 1)
    assert decoding_stops(joint, [(0,), (0, 0)]).tolist() == [True, False, False, True]
    assert decoding_stops(joint, []).all()


def test_trees_suit_the_positions_that_decoding_stops_at() -> None:
    """Of five positions three are easy, but decoding runs past two of them."""
    rows = torch.tensor([[0, 0], [0, 0], [0, 0], [1, MISS], [1, MISS]] * 20)
    joint = JointRanks(rows, torch.ones(100, dtype=torch.bool), (101,))
    of_all, found = trees_from_ranks(joint.ranks, 2, 3), trees_from_replay(joint, 2, 3)
    assert of_all.choices == [(0,), (0, 0)] and of_all.tau(3) == pytest.approx(2.2)
    assert replayed_tau(joint, of_all.choices) == pytest.approx(101 / 61)
    assert found.choices == [(1,), (0,)] and replayed_tau(joint, found.choices) == pytest.approx(101 / 51)
    assert found.tau(3) == pytest.approx(2) and found.chances == pytest.approx([0.6, 0.4], abs=0.21)


def walk(length: int, start: int = 3) -> tuple[int, ...]:
    tokens = [start]
    while len(tokens) < length:
        tokens.append(successor(tokens[-1]))
    return tuple(tokens)


def test_positions_and_their_labels() -> None:
    """Heads that are always right: what counts are answers' own tokens, each answer for itself."""
    model = walking_model()
    heads = walking_medusa(model, lambda token: True)._heads
    marks = "..aaaaa...aa..a"
    example = Example(walk(len(marks)), tuple(mark == "a" for mark in marks))
    joint = joint_ranks(model, heads, [example], 4)
    miss = [MISS] * 3
    assert joint.lengths == (5, 2, 1)
    assert joint.rows.tolist() == [[0, 0, 0], [0, 0, 0], [0, 0, MISS], [0, MISS, MISS], [0, *miss[1:]]]
    assert joint.whole.tolist() == [True, True, False, False, False]
    assert rank_accuracies(model, heads, [example], 4) == [[1.0, 0.0, 0.0, 0.0]] * 3
    text = Example(walk(9), (True,) * 9)
    assert joint_ranks(model, heads, [text], 4).lengths == (8,), "nothing yields a text's first token"
    with pytest.raises(ConfigError, match="the 4 tokens that 3 heads"):
        joint_ranks(model, heads, [Example(walk(9), (False,) * 6 + (True,) * 3)])


def test_chunks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_llama()
    heads = random_medusa(model)._heads
    examples = [Example(walk(40, start), (False,) * 5 + (True,) * 35) for start in (1, 2)]
    whole = joint_ranks(model, heads, examples, 10).rows
    monkeypatch.setattr(accuracies, "_CHUNK_LOGITS", 7 * 3 * 97)
    assert joint_ranks(model, heads, examples, 10).rows.equal(whole) and (whole >= 0).any()
    monkeypatch.undo()
    assert all(sum(head) == pytest.approx(1) for head in rank_accuracies(model, heads, examples, 500)), "all 97 tokens"


class _SeesTokens(DraftHeads):
    """Hydra-like heads that follow `successor` from the token before theirs."""

    def __init__(self) -> None:
        config = HeadsConfig(
            kind="hydra", num_heads=3, num_layers=1, hidden_size=SIZE, vocab_size=SIZE, projection="shared"
        )
        super().__init__(config, dtype=torch.float64)

    def states(self, hidden: Tensor, following: Tensor | None = None, num_heads: int | None = None) -> Tensor:
        assert following is not None
        assert hidden.shape == (len(following), SIZE) and following.shape[1:] == (3, SIZE)
        return following


def test_hydra_heads_see_the_tokens_before_theirs() -> None:
    model, heads = walking_model(), _SeesTokens()
    example = Example(walk(12), (False,) * 2 + (True,) * 10)
    assert rank_accuracies(model, heads, [example], 2) == [[1.0, 0.0]] * 3
    assert draft_seconds(heads, model.lm_head) > 0


@pytest.mark.parametrize(("wide", "draft_vocab"), [(True, None), (True, 31), (False, None)])
def test_tau_is_what_the_engine_measures(wide: bool, draft_vocab: int | None) -> None:
    """Over the model's own greedy answers; the engine's stops, first forwards and roots included."""
    model: Any = tiny_llama() if wide else walking_model()
    knows_some = partial(walking_medusa, knows=lambda token: token * 7 % 10 < 6)
    drafter = random_medusa(model, draft_vocab=draft_vocab) if wide else knows_some(model)
    heads, target = drafter._heads, drafter._target
    tree = [(r,) for r in range(12)] + list(product(range(2), range(9))) if wide else [(0,), (0, 0), (0, 0, 0)]

    def ask(prompts: list[list[int]]) -> list[Any]:
        engine = make_engine(model, MedusaDrafter(heads, target, tree))
        return [r.completion() for r in run(engine, prompts, [SamplingParams(max_new_tokens=90)] * len(prompts))]

    found = check_tau(
        ask, model, heads, tree, [(list(walk(4, start)), kind) for start, kind in ((5, "a"), (50, "b"), (70, "a"))]
    )
    assert list(found.by_category) == ["a", "b"] and min(found.by_category.values()) > 1
    assert len(found.accuracies) == heads.config.num_heads and 0 < found.accuracies[0][0] <= 1
    assert found.num_tokens == 270 and found.measured > 1.1
    assert found.predicted == pytest.approx(found.measured, rel=1e-12) and abs(found.difference) < 1e-9
    assert found.expected == pytest.approx(found.measured, rel=0.03 if wide else 0.2)


def test_prompts_stand_before_the_answers() -> None:
    examples = [Example((1, 2, 3), (False, False, True)), Example((4, 5), (True, True)), Example((6,), (False,))]
    assert prompts_of(examples * 2, 64) == [([1, 2], "")] * 2 and prompts_of(examples * 2, 1) == [([1, 2], "")]
    with pytest.raises(ConfigError, match="no held-out text has a prompt"):
        prompts_of(examples[1:], 64)


def test_fastest_size() -> None:
    sizes = TreeSizes([(0,), (0, 0), (1,)], [1.0, 1.6, 1.9, 2.0])
    assert fastest_size(sizes, lambda n: 1.0, 64) == 4 and fastest_size(sizes, lambda n: 1.0, 2) == 2
    assert fastest_size(sizes, lambda n: 1 + 0.1 * n, 64) == 3
    assert fastest_size(sizes, lambda n: float(n), 64) == 1
    assert [sizes.tau(n) for n in (1, 3, 64)] == [1.0, 1.9, 2.0]
