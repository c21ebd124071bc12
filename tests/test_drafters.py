"""Prompt lookup, static trees, the registry, and the scripted drafters of the other tests."""

import random
import re
from collections.abc import Iterable, Sequence
from itertools import combinations, product
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.drafters.choices import as_choices, best_first_choices, default_accuracies
from specdec.drafters.coupling import coupled_scores
from specdec.drafters.ngram import MAX_OCCURRENCES, NGramDrafter, NGramIndex, continuation
from specdec.drafters.none import NoDrafter
from specdec.drafters.protocol import Drafter, DraftQuery, Observation
from specdec.drafters.registry import DRAFTERS, check_drafter, make_drafter
from specdec.errors import CheckpointError, ConfigError
from specdec.params import SamplingParams
from specdec.verifier.tree import TokenTree
from tests.scripted import AdversarialDrafter, OracleDrafter, RandomDrafter, ScriptedDrafter, SometimesDrafter

VOCAB = 97
SEEDED = SamplingParams(seed=0)


def query(tokens: Sequence[int], max_nodes: int = 64, request_id: int = 0, num_output: int = 1) -> DraftQuery:
    return DraftQuery(request_id, tokens, num_output, max_nodes, SEEDED)


def paths(tree: TokenTree, b: int = 0) -> list[list[int]]:
    """The tokens below the root on the way to each node of a sequence."""
    start = tree.cu_nodes[b]
    below: list[list[int]] = []
    for token, parent in zip(tree.tokens[start:].tolist(), tree.parents_of(b), strict=False):
        below.append([*below[parent], token] if parent >= 0 else [])
    return below


def draft(drafter: Drafter, tokens: Sequence[int], max_nodes: int = 64) -> list[list[int]]:
    """Paths to the drafted nodes."""
    return paths(drafter.propose([query(tokens, max_nodes)]))[1:]


def naive_occurrences(tokens: Sequence[int], n: int) -> list[int]:
    """Positions after the earlier occurrences of the last n tokens, most recent first."""
    return [p for p in range(len(tokens) - 1, n - 1, -1) if list(tokens[p - n : p]) == list(tokens[len(tokens) - n :])]


def turn_off(path: list[int], first: list[int]) -> list[int]:
    """The path up to the token where it leaves the first one."""
    return next((path[: i + 1] for i in range(len(path)) if path[i] != first[i]), path)


def naive_guesses(tokens: Sequence[int], lengths: Iterable[int], length: int, most: int) -> list[list[int]]:
    """What the longest match promises, by searching the whole sequence."""
    found = next((ps for n in lengths if n < len(tokens) and (ps := naive_occurrences(tokens, n))), [])
    guesses: list[list[int]] = []
    for position in found[:MAX_OCCURRENCES]:
        period = len(tokens) - position
        guess = [tokens[position + i % period] for i in range(length)]
        turns = [turn_off(guess, guesses[0]) for guess in guesses]
        if not guesses or (len(guesses) < most and turn_off(guess, guesses[0]) not in turns):
            guesses.append(guess)
    return guesses


# ---- the index and the tree ----


@given(st.lists(st.integers(0, 3), min_size=1, max_size=80), st.data())
def test_index_equals_naive_search(tokens: list[int], data: st.DataObject) -> None:
    lengths = (4, 3, 2, 1)
    index = NGramIndex(lengths)
    end = 0
    while end < len(tokens):
        end = data.draw(st.integers(end + 1, len(tokens)))
        seen = tokens[:end]
        index.extend(seen)
        matches = [n for n in lengths if n < end and naive_occurrences(seen, n)]
        assert index.longest_match(seen) == max(matches, default=0)
        for n in matches:
            assert list(index.occurrences(seen, n)) == naive_occurrences(seen, n)


@given(st.lists(st.integers(0, 2), min_size=1, max_size=60), st.integers(1, 12), st.integers(1, 5), st.integers(1, 64))
def test_tree_holds_only_what_followed_earlier(tokens: list[int], k: int, most: int, budget: int) -> None:
    drafted = draft(NGramDrafter(k, max_paths=most), tokens, budget)
    guesses = naive_guesses(tokens, (4, 3, 2, 1), k, most)
    assert all(any(path == guess[: len(path)] for guess in guesses) for path in drafted)
    assert len(drafted) <= min(k, budget - 1)
    assert bool(drafted) == (bool(guesses) and budget > 1)
    assert not drafted or guesses[0][: (len(drafted) + 1) // 2] in drafted, "half goes to the most recent one"


def test_several_continuations_share_a_tree() -> None:
    tokens = [1, 2, 3, 50, 51, 1, 2, 3, 60, 61, 1, 2, 3, 60, 61, 1, 2, 3, 70, 71, 72, 73, 74, 1, 2, 3]
    drafted = draft(NGramDrafter(7), tokens)
    assert drafted[:4] == [[70], [70, 71], [70, 71, 72], [70, 71, 72, 73]]
    assert drafted[4:6] == [[60], [50]], "the others add the token where they turn off, most recent first"
    assert drafted[6:] == [[70, 71, 72, 73, 74]]
    assert draft(NGramDrafter(7, max_paths=1), tokens)[-1] == [70, 71, 72, 73, 74, 1, 2]


def test_longest_match_wins() -> None:
    tokens = [8, 9, 1, 2, 3, 40, 7, 2, 3, 50, 6, 3, 60, 1, 2, 3]
    assert draft(NGramDrafter(), tokens)[0] == [40]
    assert draft(NGramDrafter(prompt_lookup_max=2), tokens)[0] == [50]
    assert draft(NGramDrafter(prompt_lookup_max=1), tokens)[0] == [60]
    assert draft(NGramDrafter(prompt_lookup_min=4), tokens) == []


@pytest.mark.parametrize("k", range(1, 9))
@pytest.mark.parametrize("unit", [[5], [5, 6], [5, 6, 7, 8, 9], list(range(20))])
def test_repeated_prompt_is_drafted_in_full(unit: list[int], k: int) -> None:
    """Case a1."""
    tokens = unit * (48 if len(unit) == 1 else 3)
    drafted = draft(NGramDrafter(k), tokens)
    assert drafted == [(unit * 9)[: i + 1] for i in range(k)]


def test_weak_matches_draft_little() -> None:
    assert len(draft(NGramDrafter(), [9, 1, 2, 3, 4, 5, 6, 7, 9])) == 2
    assert len(draft(NGramDrafter(), [8, 9, 1, 2, 3, 4, 5, 6, 8, 9])) == 3
    assert len(draft(NGramDrafter(), [7, 8, 9, 1, 2, 3, 4, 5, 7, 8, 9])) == 7


@pytest.mark.parametrize("tokens", [[1], [1, 2], [1, 2, 3, 4, 5]])
def test_nothing_matches(tokens: list[int]) -> None:
    assert draft(NGramDrafter(), tokens) == []


def test_continuation_repeats_past_the_end() -> None:
    assert continuation([1, 2, 3, 1], 1, 7) == [2, 3, 1, 2, 3, 1, 2]
    assert continuation([1, 2, 3, 1], 0, 2) == [1, 2]


# ---- learning ----


def follow_wrong(drafter: NGramDrafter, tokens: list[int], steps: int) -> list[int]:
    """Append tokens that are never what the drafter could guess; return how many it drafted at each step."""
    rng = random.Random(0)
    counts = []
    for _ in range(steps):
        counts.append(len(draft(drafter, tokens)))
        wrong = {guess[0] for guess in naive_guesses(tokens, (4, 3, 2, 1), 7, 3)}
        tokens.append(rng.choice([t for t in range(9) if t not in wrong]))
    return counts


def test_always_wrong_stops_costing_and_right_brings_it_back() -> None:
    drafter, tokens = NGramDrafter(), [1, 2, 3] * 5
    counts = follow_wrong(drafter, tokens, 600)
    assert 0 < sum(counts) < 60 and counts.count(0) > 570, "only rare longer matches are still tried"
    lengths = []
    for token in [20, 21, 22, 23, 24] * 6:
        tokens.append(token)
        lengths.append(len(draft(drafter, tokens)))
    assert not any(lengths[:5]) and 7 in lengths[:15] and set(lengths[20:]) == {7}


def test_length_shrinks_with_misses() -> None:
    drafter, tokens, counts = NGramDrafter(), [1, 2, 3, 4] * 4, []
    for fresh in range(100, 112):
        counts.append(len(draft(drafter, tokens)))
        tokens += [fresh, 1, 2, 3, 4]
        drafter.propose([query([5], request_id=1)])  # a neighbour changes nothing
    assert counts[0] == 7 and counts[-1] <= 1 and counts == sorted(counts, reverse=True)


def test_step_touches_only_new_tokens() -> None:
    class Counting(list[int]):
        touched = 0

        def __getitem__(self, index: Any) -> Any:
            item = super().__getitem__(index)
            Counting.touched += len(item) if isinstance(index, slice) else 1
            return item

    rng = random.Random(0)
    tokens = Counting(rng.randrange(50) for _ in range(20_000))
    drafter = NGramDrafter()
    drafter.propose([query(tokens)])
    Counting.touched = 0
    for _ in range(10):
        tokens += [rng.randrange(50), rng.randrange(50)]
        drafter.propose([query(tokens)])
    assert Counting.touched < 10 * 500


def test_forget_and_reused_ids() -> None:
    drafter = NGramDrafter()
    assert draft(drafter, [1, 2, 3, 1, 2, 3])
    assert draft(drafter, [4, 5, 6]) == [], "fewer tokens: another sequence"
    assert draft(drafter, [4, 5, 6, 4])
    drafter.forget([0, 7])
    assert draft(drafter, [6, 4, 7, 8, 9]) == []


# ---- every drafter ----

ANSWERS = {0: list(range(40, 80)), 1: list(range(90, 10, -1))}

EVERY = [
    NoDrafter(),
    NGramDrafter(63, max_paths=20),
    *(OracleDrafter(ANSWERS, shape) for shape in ("chain", "wide", "ragged")),
    *(AdversarialDrafter(ANSWERS, shape) for shape in ("chain", "wide")),
    RandomDrafter(),
    SometimesDrafter(ANSWERS),
]


@pytest.mark.parametrize("drafter", EVERY, ids=lambda drafter: drafter.name)
def test_budgets_and_trees(drafter: Drafter) -> None:
    rng = random.Random(0)
    sequences = [[rng.randrange(3) for _ in range(40)], [rng.randrange(90) for _ in range(9)]]
    for budget in range(1, 65):
        budgets = (budget, 65 - budget)
        tree = drafter.propose([query(s, m, i) for i, (s, m) in enumerate(zip(sequences, budgets, strict=True))])
        assert tree.num_sequences == 2
        for b, sequence in enumerate(sequences):
            assert tree.tokens[tree.cu_nodes[b]] == sequence[-1]
            assert 1 <= tree.num_nodes(b) <= budgets[b]
            assert len({tuple(path) for path in paths(tree, b)}) == tree.num_nodes(b), "siblings differ"
        drafter.observe(Observation([0], [0], None))
    assert drafter.propose([]).num_sequences == 0
    drafter.forget([0, 1])


def test_none_proposes_roots() -> None:
    assert NoDrafter().propose([query([1, 2]), query([3], request_id=1)]).tokens.tolist() == [2, 3]


@pytest.mark.parametrize("shape", ["chain", "wide"])
def test_oracle_holds_the_future(shape: str) -> None:
    by_prompt = OracleDrafter({(7, 8): [40, 41, 42, 43]}, shape)
    by_function = OracleDrafter(lambda q: [41, 42, 43], shape)
    for drafter in (by_prompt, by_function):
        assert [41, 42, 43] in draft(drafter, [7, 8, 40])
        assert [41] in draft(drafter, [7, 8, 40], max_nodes=2)


def test_ragged_oracle_varies() -> None:
    drafter = OracleDrafter(ANSWERS, "ragged")
    trees = [draft(drafter, [5, *ANSWERS[0][:n]]) for n in range(1, 30)]
    assert len({len(tree) for tree in trees}) > 5 and any(len(max(tree, key=len, default=[])) > 3 for tree in trees)


@pytest.mark.parametrize("shape", ["chain", "wide"])
def test_adversary_is_never_right(shape: str) -> None:
    drafter = AdversarialDrafter(ANSWERS, shape)
    for n in range(1, 30):
        tree = drafter.propose([query([5, *ANSWERS[0][:n]], num_output=n)])
        assert tree.num_nodes(0) == 64 and [ANSWERS[0][n]] not in paths(tree)


def test_sometimes_is_right_at_its_rate() -> None:
    drafter = SometimesDrafter(ANSWERS, rate=0.7)
    right = [
        [ANSWERS[0][n]] in paths(drafter.propose([query([5, *ANSWERS[0][:n]], num_output=n)])) for n in range(1, 40)
    ]
    assert 0.5 < sum(right) / len(right) < 0.9


def test_scripted_drafters_hold_the_engine_to_the_protocol() -> None:
    def fresh() -> ScriptedDrafter:
        return RandomDrafter()

    for bad in ([query([1, 2]), query([1, 2])], [query([1], num_output=1)], [query([1, 2], 0)], [query([1, 2], 65)]):
        with pytest.raises(AssertionError):
            fresh().propose(bad)
    drafter = fresh()
    drafter.propose([query([1, 2, 3])])
    with pytest.raises(AssertionError, match="rewritten"):
        drafter.propose([query([1, 9, 3, 4])])
    with pytest.raises(AssertionError, match="committed"):
        drafter.observe(Observation([0], [4], None))
        drafter.propose([query([1, 2, 3, 4])])
    drafter.forget([0])
    assert not drafter.known


# ---- static trees ----


@given(
    st.lists(st.lists(st.floats(0.01, 1), min_size=1, max_size=3), min_size=1, max_size=3).filter(
        lambda table: sum(prod(map(len, table[:d])) for d in range(1, len(table) + 1)) <= 15
    ),
    st.integers(1, 6),
)
@settings(deadline=None, derandomize=True)
def test_best_first_equals_brute_force(table: list[list[float]], num_nodes: int) -> None:
    nodes = [c for d in range(1, len(table) + 1) for c in product(*(range(len(head)) for head in table[:d]))]
    size = min(num_nodes - 1, len(nodes))

    def worth(choices: Iterable[tuple[int, ...]]) -> float:
        return sum(prod(table[k][r] for k, r in enumerate(choice)) for choice in choices)

    closed = (s for s in combinations(nodes, size) if all(len(c) == 1 or c[:-1] in s for c in s))
    chosen = best_first_choices(table, num_nodes)
    assert len(set(chosen)) == size and as_choices(chosen or [(0,)], len(table))
    assert all(len(c) == 1 or c[:-1] in chosen[:i] for i, c in enumerate(chosen)), "parents first"
    assert worth(chosen) == pytest.approx(max(map(worth, closed)))


def test_best_first_by_hand() -> None:
    table = [[0.6, 0.2, 0.09], [0.5, 0.3]]
    assert best_first_choices(table, 6) == [(0,), (0, 0), (1,), (0, 1), (1, 0)]
    assert best_first_choices(table, 1) == []
    assert best_first_choices([[0.0, 0.3]], 8) == [(1,)], "worthless nodes are left out"
    assert len(best_first_choices(default_accuracies(5), 64)) == 63
    for bad in (0, 65):
        with pytest.raises(ConfigError, match="num_nodes"):
            best_first_choices(table, bad)
    with pytest.raises(ConfigError, match="between 0 and 1"):
        best_first_choices([[1.5]], 4)


def test_choices_are_checked() -> None:
    assert as_choices([[0, 0], [1], [0]], 2) == ((0,), (0, 0), (1,))
    for bad, match in (
        ([(0, 1)], "parent"),
        ([(0,), (0,)], "different"),
        ([], "1 to 63"),
        ([(i,) for i in range(64)], "1 to 63"),
        ([(0,), (0, 0), (0, 0, 0)], "1 to 2 ranks"),
        ([(-1,)], "ranks"),
        ([(0.5,)], "ranks"),
        ([()], "ranks"),
        ([3], "ranks"),
        (3, "a list of choices"),
    ):
        with pytest.raises(ConfigError, match=match):
            as_choices(bad, 2)  # type: ignore[arg-type]


# ---- the registry ----


def test_drafters_by_name() -> None:
    assert make_drafter("none").name == "none"
    assert len(draft(make_drafter("ngram", num_speculative_tokens=2), [1] * 9)) == 2
    oracle = OracleDrafter({})
    assert make_drafter(oracle) is oracle
    assert {"none", "ngram", "medusa"} <= DRAFTERS.keys()


def test_registered_drafter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(DRAFTERS, "random", lambda: RandomDrafter)
    assert make_drafter("random", vocab_size=5).name == "random"


@pytest.mark.parametrize(
    ("spec", "options", "match"),
    [
        ("ngramm", {}, "did you mean 'ngram'.*none, ngram, medusa"),
        ("zzz", {}, "unknown drafter 'zzz'"),
        ("", {}, "unknown"),
        ("ngram", {"num_speculative_token": 3}, "did you mean 'num_speculative_tokens'.*prompt_lookup_min"),
        ("none", {"k": 3}, "no option 'k'.*accepts: none"),
        ("none:folder", {}, "no option 'path'"),
        ("ngram", {"num_speculative_tokens": 0}, "num_speculative_tokens.*not 0"),
        ("ngram", {"num_speculative_tokens": True}, "not True"),
        ("ngram", {"num_speculative_tokens": 64}, "63"),
        ("ngram", {"prompt_lookup_min": 5}, "prompt_lookup_max.*from 5"),
        ("ngram", {"max_paths": "3"}, "max_paths"),
        ("draft_model", {}, 'needs path: write "draft_model:PATH"'),
        ("medusa", {}, "pass the target"),
        ("medusa", {"allow_pickle": True}, "'medusa without a path' has no option 'allow_pickle'"),
        ("medusa:folder", {}, "pass the target"),
        ("ngram+medusa:folder", {}, "pass the target"),
        ("medusa:", {}, "no path"),
        (3, {}, "neither"),
        (NoDrafter(), {"k": 1}, "already made"),
        (NoDrafter, {}, "NoDrafter'> is a class"),
    ],
)
def test_unknown_names_and_options(spec: Any, options: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        make_drafter(spec, **options)


@pytest.mark.parametrize("spec", ["none", "ngram", "medusa", "medusa:nowhere", "ngram+draft_model:nowhere"])
def test_names_are_checked_without_a_target_and_without_weights(spec: str) -> None:
    check_drafter(spec)
    check_drafter(NoDrafter())
    with pytest.raises(ConfigError, match="has no option 'colour'"):
        check_drafter(spec, colour="red")
    for wrong in ("ngramm", "ngram+ngramm", "draft_model", object()):
        with pytest.raises(ConfigError):
            check_drafter(wrong)  # type: ignore[arg-type]


def test_a_path_may_hold_a_plus(tmp_path: Path) -> None:
    folder = tmp_path / "c++" / "heads"
    folder.mkdir(parents=True)
    for spec in (f"medusa:{folder}", f"ngram+medusa:{folder}", str(folder)):
        with pytest.raises(CheckpointError, match=re.escape(f"{folder}: holds no draft heads")):
            make_drafter(spec, object())  # type: ignore[arg-type]


@pytest.mark.parametrize("temperature", [1e-300, 1e-30])
def test_the_smallest_temperatures_rank_as_the_choice_does(temperature: float) -> None:
    logits = torch.randn(3, 50)
    params = [SamplingParams(temperature=temperature, seed=seed) for seed in range(3)]
    assert torch.equal(coupled_scores(logits, params, [0, 1, 2]).argmax(-1), logits.argmax(-1))
