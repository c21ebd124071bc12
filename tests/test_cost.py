"""The cost table, its file, how it is measured, and the node budgets that follow from it."""

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from specdec import LLM
from specdec.build import build_engine, cost_key
from specdec.drafters.ngram import NGramDrafter
from specdec.drafters.protocol import DraftQuery
from specdec.engine import cost
from specdec.engine.budget import LAST_WAIT, PROBE_NODES, NodeBudget
from specdec.engine.config import EngineConfig
from specdec.engine.cost import CostTable, costs_folder, device_name, find_table, list_tables, read_table, save_table
from specdec.engine.gains import FIRST_RATE, ChainGains, TreeGains
from specdec.engine.measure import EngineStep, Grid, make_grid, measure
from specdec.engine.request import Request
from specdec.engine.text import StopChecker
from specdec.engine.times import BELIEVED, FORGOTTEN, StepTimes
from specdec.errors import ConfigError
from specdec.models.load import make_target
from specdec.params import SamplingParams
from specdec.verifier.tree import TokenTree
from tests.conftest import tiny_llama
from tests.costs import DEAR, FREE, KEY, LINEAR, NUM_NODES, TABLES, make_table
from tests.engines import make_engine, outputs, run
from tests.scripted import AdversarialDrafter, OracleDrafter, RandomDrafter, SometimesDrafter

PROMPT = [5, 6, 7, 8, 9]


@pytest.fixture(scope="module")
def answer(tiny: PreTrainedModel) -> list[int]:
    return outputs(run(make_engine(tiny), [PROMPT], [SamplingParams(max_new_tokens=64)]))[0]


def test_seconds_are_linear_between_points_and_constant_beyond() -> None:
    table = make_table(lambda s, n, c: 1 + s + 10 * n + 100 * c)
    assert table.seconds(2.5, 3, 300) == pytest.approx(1 + 2.5 + 30 + 30_000)
    assert table.seconds(4, 64, 1024) == 1 + 4 + 640 + 102_400
    assert table.seconds(1, 1, 5) == table.seconds(1, 1, 128) == 1 + 1 + 10 + 12_800
    assert table.seconds(99, 64, 10**6) == table.seconds(4, 64, 1024)


def test_a_table_survives_its_file(tmp_path: Path) -> None:
    path = save_table(LINEAR, tmp_path)
    assert path.parent == costs_folder(tmp_path) == tmp_path / "costs"
    assert read_table(path) == find_table(KEY, tmp_path) == LINEAR
    newer = replace(LINEAR, measured="2026-02-02T00:00:00+00:00")
    assert save_table(newer, tmp_path) == path
    assert find_table(KEY, tmp_path) == newer
    assert list(list_tables(tmp_path)) == list(path.parent.iterdir()) == [path], "something was left beside it"


def test_what_a_table_is_true_for_is_in_its_name(tmp_path: Path) -> None:
    save_table(LINEAR, tmp_path)
    other = {"fingerprint": "f" * 16, "device": "H100", "dtype": "bfloat16", "torch": "3.0", "deterministic": False}
    for name, value in (other | {"kv_cache": "int8-g32"}).items():
        key = replace(KEY, **{name: value})
        assert find_table(key, tmp_path) is None
    assert replace(KEY, device="a/b c").file_name == "0123456789abcdef-a_b_c-float64-torch2.0.json"


def test_tables_from_before_the_cache_was_looked_at_are_of_native_pages(tmp_path: Path) -> None:
    path = save_table(LINEAR, tmp_path)
    raw = LINEAR.to_dict()
    assert raw["key"].pop("kv_cache") == "auto"
    path.write_text(json.dumps(raw))
    assert find_table(KEY, tmp_path) == LINEAR


@pytest.mark.parametrize(
    "change, message",
    [
        ({"format": "other"}, "not a cost table of version 1"),
        ({"version": 2}, "not a cost table of version 1"),
        ({"num_seqs": [4, 1]}, "num_seqs of a cost table must be ascending"),
        ({"num_seqs": 3}, "no lists"),
        ({"num_seqs": []}, "num_seqs"),
        ({"contexts": [1, True]}, "contexts"),
        ({"num_nodes": [2, 4]}, "must start at 1"),
        ({"num_nodes": [1, 65]}, "end by 64"),
        ({"num_seqs": [1, 2, 3]}, "must be 3 × 7 × 2 numbers"),
        ({"contexts": [1]}, "must be 2 × 7 × 1 numbers"),
        ({"num_nodes": [1]}, "must be 2 × 1 × 2 numbers"),
        ({"step_seconds": [[["x"] * 2] * 7] * 2}, "must be finite and above 0, not 'x'"),
        ({"step_seconds": [[[0.0] * 2] * 7] * 2}, "must be finite and above 0, not 0"),
        ({"step_seconds": [[[float("nan")] * 2] * 7] * 2}, "must be finite and above 0, not nan"),
        ({"extra": 1}, "the table lacks or has in excess: extra"),
        ({"key": {"device": "x"}}, "its key lacks or has in excess: deterministic"),
        ({"key": 3}, "its key lacks"),
        ({"command": 3}, "command is of the wrong kind"),
    ],
)
def test_a_broken_file_says_to_tune_again(change: dict[str, object], message: str, tmp_path: Path) -> None:
    path = save_table(LINEAR, tmp_path)
    path.write_text(json.dumps(LINEAR.to_dict() | change))
    with pytest.raises(ConfigError, match=message) as caught:
        find_table(KEY, tmp_path)
    assert "run `specdec tune` again" in str(caught.value) and str(path) in str(caught.value)


def test_a_torn_or_foreign_file_says_so_too(tmp_path: Path) -> None:
    path = save_table(LINEAR, tmp_path)
    whole = path.read_text()
    for text in ("", whole[:-20], "[]", "\x00"):
        path.write_text(text)
        with pytest.raises(ConfigError, match="run `specdec tune` again"):
            find_table(KEY, tmp_path)
    path.write_text(whole.replace("cpu test", "gpu test"))
    with pytest.raises(ConfigError, match="was measured for .*gpu test.* not .*cpu test"):
        find_table(KEY, tmp_path)


def test_a_failed_write_keeps_the_old_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save_table(LINEAR, tmp_path)

    def fail(path: Path, write: object) -> None:
        raise OSError("no space")

    monkeypatch.setattr(cost, "replace_file", fail)
    with pytest.raises(ConfigError, match="no space; set SPECDEC_CACHE"):
        save_table(FREE, tmp_path)
    assert read_table(path) == LINEAR


def make_request(request_id: int = 0) -> Request:
    params = SamplingParams(max_new_tokens=500)
    return Request(request_id, 1, params, StopChecker(params), [1])


def limit(budget: NodeBudget, request: Request) -> int:
    """Nodes of a request that is alone."""
    return budget.allot([request], 64)[0]


def step(budget: NodeBudget, request: Request, num_accepted: int) -> int:
    """One step of a drafter that fills its budget with a chain of which so many are right."""
    nodes = limit(budget, request)
    depth = min(num_accepted, nodes - 1)
    request.stats.count(depth + 1, depth, depth == nodes - 1, nodes - 1)
    budget.observe(request, nodes)
    return nodes


def expected_tokens(rate: float, num_nodes: int) -> float:
    """Tokens expected of a chain of nodes, root included, each accepted at that rate once its parent is."""
    return sum(rate**depth for depth in range(num_nodes))


def best_alone(table: CostTable, rate: float) -> int:
    """The number of nodes with the most expected tokens a second, by trying all."""
    return max(range(1, 65), key=lambda n: expected_tokens(rate, n) / table.seconds(1, n, 1))


def test_a_chains_nodes_buy_ever_less() -> None:
    gains = ChainGains(4)
    assert gains.of(0.5).tolist() == [0.5, 0.25, 0.125]
    assert gains.of(1.0).tolist() == [1, 1, 1] and gains.of(0.0).tolist() == [0, 0, 0]
    assert gains.learn(0.5, 1, 1, 4) == pytest.approx((0.5 + 0.2 * 0.5) * 0.8)


def test_a_measured_trees_nodes_buy_their_chances() -> None:
    chances = [0.5, 0.2, 0.3, 0.1]
    gains = TreeGains(chances, 8)
    assert gains.of(1.0).tolist() == [0.5, 0.2, 0.2, 0.1, 0, 0, 0], "falling, and nothing behind the tree"
    assert gains.of(3.0).tolist()[:2] == [1, pytest.approx(0.6)]
    quality = gains.first
    for i in range(2000):  # half as good as on average: 0.35 of the 0.7 expected of three nodes
        accepted = 7 * i % 20 < 7
        quality = gains.learn(quality, int(accepted), int(not accepted), 3)
    assert 0.3 < quality < 0.7
    assert gains.learn(quality, 0, 0, 3) == quality == gains.learn(quality, 1, 0, 1), "nothing was learned"
    assert TreeGains([], 1).of(1.0).tolist() == []


def test_budgets_follow_the_measured_tree() -> None:
    """One good node and many bad ones: a chain's rate would have the bad ones taken, too."""
    measured = NodeBudget(LINEAR, 64, [0.7] + [0.001] * 62)
    assert measured.allot([make_request()], 63) == [2]
    assert NodeBudget(LINEAR, 64).allot([make_request()], 63)[0] > 2
    assert measured.shared_limit([make_request()]) == 2
    assert NodeBudget(None, 64, [0.7] + [0.001] * 62).shared_limit([make_request()]) == 2
    assert NodeBudget(None, 64, [0.06] * 63).shared_limit([make_request()]) == 64


def test_without_a_table_the_budget_is_what_it_was() -> None:
    budget = NodeBudget(None, 40)
    assert [step(budget, make_request(), 0) for _ in range(50)] == [40] * 50


def test_free_nodes_are_all_taken_and_dear_ones_never() -> None:
    free, dear = NodeBudget(FREE, 64), NodeBudget(DEAR, 64)
    one, other = make_request(), make_request()
    assert {step(free, one, 64) for _ in range(20)} == {64}
    assert {step(dear, other, 64) for _ in range(200)} == {1}  # no probe either: it could not pay
    assert {step(NodeBudget(FREE, 7), make_request(), 64) for _ in range(20)} == {7}


def test_more_are_allowed_the_more_are_accepted_and_the_fewer_share_the_step() -> None:
    budget = NodeBudget(LINEAR, 64)
    best = [budget._share([rate], [64], 64, 128)[0] for rate in (0.0, 0.3, 0.7, 0.9, 1.0)]
    assert best == sorted(best) and best[0] == 1 and best[2] > 1 and best[-1] == 64
    assert max(budget._share([0.92] * 4, [64] * 4, 256, 128)) < budget._share([0.92], [64], 64, 128)[0]
    dear_when_long = NodeBudget(make_table(lambda s, n, c: 1 + 0.001 * n * c), 64)
    assert dear_when_long._share([0.7], [64], 64, 1024) < dear_when_long._share([0.7], [64], 64, 128)
    for rate in (0.0, 0.4, 0.8):
        assert budget._share([rate], [64], 64, 128) == [best_alone(LINEAR, rate)]


@pytest.mark.parametrize("costs", ["free", "dear", "linear", "stairs"])
def test_nodes_are_shared_as_if_all_ways_had_been_tried(costs: str) -> None:
    """Against every way to give three trees up to five nodes each."""
    stairs = make_table(lambda s, n, c: 1.0 + (s * n > 8) + (s * n > 16), num_seqs=(3,))
    table = (TABLES | {"stairs": stairs})[costs]
    assert table is not None
    budget, rng = NodeBudget(table, 5), random.Random(0)

    def gain(rates: list[float], nodes: Sequence[int]) -> float:
        tokens = sum(expected_tokens(rate, n) for rate, n in zip(rates, nodes, strict=True))
        return tokens / table.seconds(3, sum(nodes) / 3, 100)

    for _ in range(40):
        rates = [round(rng.random(), 2) for _ in range(3)]
        num_rows = rng.choice([0, 3, 7, 12])
        got = budget._share(rates, [5] * 3, num_rows, 100)
        ways = [nodes for nodes in product(range(1, 6), repeat=3) if sum(nodes) - 3 <= num_rows]
        assert gain(rates, got) == pytest.approx(max(gain(rates, nodes) for nodes in ways))
        assert sum(got) - 3 <= num_rows


def test_one_tree_may_have_64_nodes_where_another_has_one() -> None:
    budget, good, bad = NodeBudget(LINEAR, 64), make_request(0), make_request(1)
    shared = []
    for _ in range(60):
        nodes = budget.allot([good, bad], 128)
        shared.append(tuple(nodes))
        for request, most in zip((good, bad), nodes, strict=True):
            depth = most - 1 if request is good else 0
            request.stats.count(depth + 1, depth, depth == most - 1, most - 1)
            budget.observe(request, most)
    assert shared[-1] in ((64, 1), (64, PROBE_NODES)) and (64, 1) in shared[-5:]
    assert shared[0][0] == shared[0][1] > 1, "nothing is known yet"


def test_few_rows_go_to_those_who_make_most_of_them() -> None:
    for table in (None, FREE):
        budget = NodeBudget(table, 64)
        assert budget._share([0.9, 0.5, 0.1], [64] * 3, 4, 100) == [5, 1, 1]  # 0.9⁴ is more than 0.5
        assert budget._share([0.6, 0.5, 0.1], [64] * 3, 4, 100) == [3, 3, 1]
        assert budget._share([0.6, 0.6, 0.6], [64, 1, 64], 3, 100) == [3, 1, 2]
    assert NodeBudget(None, 8)._share([0.0, 0.5], [8, 8], 100, 100) == [8, 8]


def test_scarce_rows_are_not_kept_for_trees_that_the_drafter_does_not_make() -> None:
    budget, requests = NodeBudget(None, 64), [make_request(i) for i in range(4)]
    assert budget.allot(requests, 4 * 63) == [64] * 4
    assert budget.allot(requests, 4 * 63, busy=True) == [PROBE_NODES + 1] * 4
    assert budget.allot(requests, 200) == [PROBE_NODES + 1] * 4
    requests[0].stats.count(1, 0, False, 15)
    budget.observe(requests[0], 64)
    assert budget.allot(requests, 4 * 63, busy=True) == [17] * 4


def test_the_last_token_needs_no_draft() -> None:
    budget, request, other = NodeBudget(None, 8), make_request(0), make_request(1)
    request.tokens += [1] * 499
    assert budget.allot([request, other], 100) == [1, 8]


def test_trees_of_one_step_differ_in_size(tiny: PreTrainedModel, answer: list[int]) -> None:
    """One request's drafts are all right, the other's all wrong."""

    class Half(OracleDrafter):
        sizes: list[tuple[int, ...]] = []

        def propose(self, queries: Sequence[DraftQuery]) -> TokenTree:
            self.sizes.append(tuple(q.max_nodes for q in queries))
            return super().propose(queries)

    drafter = Half(lambda q: answer[q.num_output :] if q.tokens[0] == PROMPT[0] else [(q.tokens[-1] + 1) % 97] * 64)
    asked = [SamplingParams(max_new_tokens=64), SamplingParams(max_new_tokens=30)]
    got = outputs(run(make_engine(tiny, drafter, cost_table=LINEAR, max_nodes=16), [PROMPT, [3]], asked))
    assert got == [answer, outputs(run(make_engine(tiny), [[3]], asked[1:]))[0]]
    assert (16, 1) in drafter.sizes


def test_a_request_that_keeps_failing_is_probed_ever_more_rarely_and_comes_back() -> None:
    budget, request = NodeBudget(LINEAR, 64), make_request()
    first = limit(budget, request)
    assert first == best_alone(LINEAR, FIRST_RATE) > 1
    nodes = [step(budget, request, 0) for _ in range(400)]
    probes = [i for i, n in enumerate(nodes) if n > 1 and i > 20]
    assert {nodes[i] for i in probes} == {PROBE_NODES}
    assert [b - a for a, b in zip(probes, probes[1:], strict=False)][-3:] == [LAST_WAIT + 1] * 3
    assert sum(n - 1 for n in nodes) < 0.15 * len(nodes)
    back = [step(budget, request, 64) for _ in range(3 * LAST_WAIT)]
    assert back[-1] == 64


def test_a_probe_waits_until_the_drafter_has_something() -> None:
    budget, request = NodeBudget(LINEAR, 64), make_request()
    while limit(budget, request) > 1:
        step(budget, request, 0)
    while limit(budget, request) == 1:
        step(budget, request, 0)
    for _ in range(10):  # the drafter finds nothing
        request.stats.count(1, 0, True, 0)
        budget.observe(request, limit(budget, request))
    assert limit(budget, request) == PROBE_NODES
    step(budget, request, 0)
    assert limit(budget, request) == 1


def shared_step(budget: NodeBudget, requests: list[Request], accepted: list[int], drafted: bool = True) -> int:
    """One step in which all trees have as many nodes, whether the drafter fills them or not."""
    nodes = budget.shared_limit(requests)
    for request, count in zip(requests, accepted, strict=True):
        depth = min(count, nodes - 1)
        request.stats.count(depth + 1, depth, depth == nodes - 1, nodes - 1 if drafted else 0)
        budget.observe(request, nodes, padded=True)
    return nodes


@pytest.mark.parametrize("table", [None, LINEAR])
def test_trees_of_a_shared_size_are_as_large_as_pays_for_all(table: CostTable | None) -> None:
    budget, one, other = NodeBudget(table, 64), make_request(0), make_request(1)
    for _ in range(30):
        alone = shared_step(budget, [one], [64])
    assert alone > 8
    for _ in range(30):
        shared_step(budget, [other], [0])
    assert budget.shared_limit([other]) in (1, PROBE_NODES)
    assert 1 <= budget.shared_limit([one, other]) <= alone


def test_padding_that_nothing_fills_ends_drafting_and_probes_bring_it_back() -> None:
    budget, request = NodeBudget(None, 16), make_request()
    nodes = [shared_step(budget, [request], [0], drafted=False) for _ in range(200)]
    assert nodes[0] > 1 and nodes[-LAST_WAIT:].count(1) >= LAST_WAIT - 2
    assert sum(n > 1 for n in nodes) < 20
    back = [shared_step(budget, [request], [64]) for _ in range(2 * LAST_WAIT)]
    assert back[-1] == 16


def test_times_that_were_seen_go_before_what_was_expected() -> None:
    times = StepTimes()
    assert times.seconds(4, 8, float) == 8 and not times.lack_plain(4)
    for i in range(BELIEVED):
        assert times.seconds(4, 2, float) == 2, "one step may be an accident"
        times.observe(4, 2, 6.0 if i else 100.0)
    assert [times.seconds(4, n, float) for n in (1, 2, 8)] == [3, 6, 24] and times.seconds(8, 2, float) == 2
    assert times.lack_plain(4) and not times.lack_plain(8)
    for _ in range(FORGOTTEN):
        times.observe(4, 1, 5.0)
    assert [times.seconds(4, n, float) for n in (1, 2)] == [5, 6] and not times.lack_plain(4)
    times.observe(4, 1, 5.0)
    assert times.seconds(4, 2, float) == 10, "it hasn't come for long"


@pytest.mark.parametrize("table", [None, LINEAR])
def test_a_crowd_whose_drafts_never_pay_drafts_next_to_nothing(table: CostTable | None) -> None:
    """Requests come and go; each new one is thought well of at first, and would be probed soon."""
    budget, requests = NodeBudget(table, 16), [make_request(i) for i in range(8)]
    nodes = []
    for i in range(1000):
        nodes.append(shared_step(budget, requests, [0] * 8))
        budget.times.observe(8, nodes[-1], 1.0 if nodes[-1] == 1 else 2.0)
        if i % 25 == 0:
            requests[i // 25 % 8] = make_request(8 + i)
    assert nodes[0] > 1 and sum(n > 1 for n in nodes[200:]) < 40, "more than one step in twenty"


@pytest.mark.parametrize(("seconds", "most"), [(1.1, 16), (20.0, 1)])
def test_right_drafts_go_on_as_long_as_steps_are_seen_to_be_cheap(seconds: float, most: int) -> None:
    budget, request = NodeBudget(None, 16), make_request()
    nodes = []
    for _ in range(300):
        nodes.append(shared_step(budget, [request], [64]))
        budget.times.observe(1, nodes[-1], 1.0 if nodes[-1] == 1 else seconds)
    assert nodes[0] > 1 and set(nodes[-100:]) == {most}


def test_requests_learn_apart_and_are_forgotten() -> None:
    budget, good, bad = NodeBudget(LINEAR, 64), make_request(0), make_request(1)
    for _ in range(12):
        step(budget, good, 64)
        step(budget, bad, 0)
    assert limit(budget, good) == 64 > limit(budget, bad)
    budget.forget(1)
    assert limit(budget, make_request(1)) == best_alone(LINEAR, FIRST_RATE)


@pytest.mark.parametrize("costs", sorted(TABLES))
@pytest.mark.parametrize("temperature", [0.0, 1.3])
def test_budgets_never_show_in_the_output(costs: str, temperature: float, tiny: PreTrainedModel) -> None:
    prompts = [PROMPT, [3], [1, 2, 3] * 12, list(range(40))]
    asked = [SamplingParams(max_new_tokens=8, temperature=temperature, seed=i) for i in range(4)]
    plain = [outputs(run(make_engine(tiny), [p], [a]))[0] for p, a in zip(prompts, asked, strict=True)]
    answers = {tuple(p): a for p, a in zip(prompts, plain, strict=True)}
    drafters = (NGramDrafter(), OracleDrafter(answers), SometimesDrafter(answers), RandomDrafter())
    for drafter in drafters:
        for sizes in ({}, {"num_blocks": 6, "max_model_len": 80}, {"max_num_batched_tokens": 8, "max_num_seqs": 2}):
            engine = make_engine(tiny, drafter, cost_table=TABLES[costs], **sizes)
            assert outputs(run(engine, prompts, asked)) == plain


class Recording(AdversarialDrafter):
    """Never right, and notes the budgets that it is given."""

    def propose(self, queries: Sequence[DraftQuery]) -> TokenTree:
        self.budgets = [*getattr(self, "budgets", []), *(query.max_nodes for query in queries)]
        return super().propose(queries)


def test_the_drafter_is_asked_for_what_pays(tiny: PreTrainedModel, answer: list[int]) -> None:
    budgets = {}
    for name, table in TABLES.items():
        drafter = Recording({tuple(PROMPT): answer})
        run(make_engine(tiny, drafter, cost_table=table), [PROMPT], [SamplingParams(max_new_tokens=64)])
        budgets[name] = drafter.budgets[:-1]  # the last token needs no draft
    assert set(budgets["none"]) == {64} and min(budgets["free"][:3]) > 40
    assert set(budgets["dear"]) == {1}
    assert budgets["linear"][0] > 1 and sum(n > 1 for n in budgets["linear"]) < 16
    assert 1 < budgets["linear"][-1] or 1 in budgets["linear"]


def test_the_table_is_found_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECDEC_CACHE", str(tmp_path))
    model = tiny_llama(dtype=torch.float32)
    assert LLM(model).engine.node_budget.table is None
    here = make_target(model, prepack=None).prepacked
    table = replace(FREE, key=cost_key(model, prepacked=here))
    path = save_table(table)
    assert LLM(model).engine.node_budget.table == table
    assert LLM(model, cost_table=None).engine.node_budget.table is None
    assert LLM(model, cost_table=DEAR).engine.node_budget.table is DEAR
    assert LLM(model, kv_cache_dtype="int8").engine.node_budget.table is None
    of_int8 = replace(DEAR, key=cost_key(model, kv_cache="int8-g8", prepacked=here))
    save_table(of_int8)
    assert LLM(model, kv_cache_dtype="int8", kv_group_size=8).engine.node_budget.table == of_int8
    assert LLM(model).engine.node_budget.table == table
    assert (LLM(model, prepack=False).engine.node_budget.table is None) is here
    assert LLM(model, dtype="float64").engine.node_budget.table is None
    assert build_engine(model, "none", EngineConfig()).node_budget.table is None
    with pytest.raises(ConfigError, match='cost_table must be a CostTable, "auto" or None, not 3'):
        LLM(model, cost_table=3)  # type: ignore[arg-type]
    path.write_text("{")
    with pytest.raises(ConfigError, match="run `specdec tune` again"):
        LLM(tiny_llama(dtype=torch.float32))


def test_devices_have_names(monkeypatch: pytest.MonkeyPatch) -> None:
    assert device_name(torch.device("cpu")).endswith(", 1 thread")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3")
    assert device_name(torch.device("cuda")) == "NVIDIA H100 80GB HBM3"


def test_the_grid_follows_the_device_and_the_model() -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert make_grid(cpu, 8192) == Grid((1, 4), NUM_NODES, (128, 1024))
    assert make_grid(gpu, 8192) == Grid((1, 2, 4, 8, 16), NUM_NODES, (128, 1024, 4096))
    assert make_grid(gpu, 2048).contexts == (128, 1024, 2048 - 66)
    assert make_grid(cpu, 256, max_seqs=6).num_seqs == (1, 4, 6)
    assert make_grid(cpu, 256, max_seqs=1, contexts=[9, 4]) == Grid((1,), NUM_NODES, (4, 9))
    assert len(make_grid(cpu, 8192)) == 28
    with pytest.raises(ConfigError, match="context 191 is out of bounds: give 1 to 190"):
        make_grid(cpu, 256, contexts=[191])
    with pytest.raises(ConfigError, match="max_seqs must be at least 1, not 0"):
        make_grid(cpu, 256, max_seqs=0)
    with pytest.raises(ConfigError, match="64 positions, too few"):
        make_grid(cpu, 64)


def test_a_point_is_the_median_after_the_warm_up() -> None:
    asked: list[tuple[int, int, int]] = []
    told: list[str] = []

    def step(num_seqs: int, num_nodes: int, context: int) -> float:
        asked.append((num_seqs, num_nodes, context))
        return [100.0, 100.0, 3.0, 1.0, 2.0][(len(asked) - 1) % 5]

    grid = Grid((1, 2), (1, 8), (16,))
    assert measure(step, grid, repeats=3, warmup=2, progress=told.append) == (((2.0,), (2.0,)), ((2.0,), (2.0,)))
    assert asked == [p for p in [(1, 1, 16), (1, 8, 16), (2, 1, 16), (2, 8, 16)] for _ in range(5)]
    assert told[1] == "1 × 8 nodes at context 16"


def test_a_measured_step_is_the_engines_own(tiny: PreTrainedModel) -> None:
    grid = Grid((1, 3), (1, 64), (5, 190))
    run_step = EngineStep(make_target(tiny), grid)
    engine = run_step._engine
    for s in grid.num_seqs:
        for n in grid.num_nodes:
            for c in grid.contexts:
                assert run_step(s, n, c) > 0
                engine.check_integrity()
    assert engine.num_steps == 8 and not engine.has_work
    assert engine.pool.num_free == engine.pool.num_blocks


def test_a_table_is_whole_or_refused() -> None:
    with pytest.raises(ConfigError, match="step_seconds"):
        CostTable(KEY, "m", "c", "d", (1,), (1,), (1,), ())
