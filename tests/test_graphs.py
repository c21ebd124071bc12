"""Captured steps: the same tokens as eager steps, blocks reserved ahead, and who may take part.

Without a GPU nothing is captured: the same step runs in Triton's interpreter, one launch ahead all the same.
"""

import gc
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from specdec.drafters.hybrid import HybridDrafter
from specdec.drafters.ngram import NGramDrafter
from specdec.drafters.ngram_heads import NGramHeadsDrafter
from specdec.drafters.none import NoDrafter
from specdec.drafters.protocol import DeviceQuery, Drafter, DraftQuery, Observation
from specdec.engine.device import Captured
from specdec.engine.engine import Engine
from specdec.engine.graphs import PATIENCE, Mark, Outcome
from specdec.engine.measure import CapturedStep, EngineStep, Grid, make_step
from specdec.engine.recorder import Recorder
from specdec.engine.request import Request
from specdec.engine.times import BELIEVED
from specdec.errors import SpecdecError
from specdec.kernels.formats import FORMATS
from specdec.kernels.ops import triton_ops
from specdec.models.decoder import Decoder
from specdec.models.load import make_target
from specdec.params import SamplingParams
from specdec.verifier.rules import TypicalRule
from specdec.verifier.tree import TokenTree
from tests.conftest import tiny_llama
from tests.costs import DEAR
from tests.engines import Optimist, drain, make_engine, outputs, run
from tests.hydra import random_hydra, random_recurrent, walking_hydra
from tests.kernels import DEVICE, ON_GPU
from tests.medusa import random_medusa, walking_medusa, walking_model

pytestmark = pytest.mark.gpu if ON_GPU else []
SECONDS_SINCE = Mark.seconds_since  # tests see no times, for they would decide how many nodes steps have
PROMPTS = [[5, 6, 7, 5, 6], [3], [11, 12] * 3]
GREEDY = [SamplingParams(max_new_tokens=5)] * 3
SIZE: dict[str, object] = {
    "dtype": torch.float32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
BUSH = [(1,), (0,), (0, 1), (0, 0), (0, 0, 0)]  # the best path is nodes 2, 4, 5: what is accepted has to move


class BushDrafter:
    """Two guesses below the root, on the device: one random and one right if an oracle's answer is given."""

    name = "bush"
    reads_hidden = False
    chains_only = False

    def __init__(self, answers: dict[int, int] | None = None, width: int = 97) -> None:
        self._parents = torch.tensor([[-1, 0, 0, 2]], device=DEVICE)  # a capture can't copy from the host
        self._next = torch.zeros(width, dtype=torch.int64, device=DEVICE)
        for token, follower in (answers or {}).items():
            self._next[token] = follower

    def max_device_nodes(self) -> int:
        return 4

    def draft_on_device(self, query: DeviceQuery, num_nodes: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        root, lengths = query.roots(), query.lengths
        tokens = torch.cat([root, (root + 1) % 97, self._next[root], self._next[self._next[root]]], 1)
        tokens = tokens[:, :num_nodes].contiguous()
        parents = self._parents[:, :num_nodes].expand(len(tokens), -1)
        count = torch.full_like(lengths, num_nodes, dtype=torch.int32)
        return tokens, parents, torch.where(lengths > 0, count, 0)

    def propose(self, queries: Sequence[DraftQuery]) -> TokenTree:
        return TokenTree.roots([q.tokens[-1] for q in queries])

    def observe(self, observation: Observation) -> None: ...

    def forget(self, request_ids: Collection[int]) -> None: ...


def graph_engine(drafter: object = None, model: PreTrainedModel | None = None, **config: Any) -> Engine:
    model = model or tiny_llama(**SIZE).to(DEVICE)
    engine = make_engine(Decoder(model, triton_ops()), drafter or NoDrafter(), **config)  # type: ignore[arg-type]
    assert engine.graphs is not None
    return engine


def plain(
    params: Sequence[SamplingParams], prompts: Sequence[Sequence[int]] = PROMPTS, **config: int
) -> list[list[int]]:
    return outputs(run(make_engine(tiny_llama(**SIZE), **config), prompts[: len(params)], params))


def successors(answers: list[list[int]]) -> dict[int, int]:
    return {a: b for tokens in answers for a, b in zip(tokens, tokens[1:], strict=False)}


@pytest.mark.parametrize("name", ["none", "ngram", "bush"])
def test_tokens_are_those_of_eager_steps(name: str) -> None:
    params = [SamplingParams(max_new_tokens=n, seed=n, temperature=t) for n, t in ((5, 0.0), (3, 1.1), (7, 0.0))]
    want = plain(params)
    drafters = {"none": NoDrafter(), "ngram": NGramDrafter(), "bush": BushDrafter(successors(want))}
    engine = graph_engine(drafters[name], max_nodes=4)
    requests = run(engine, PROMPTS, params)
    assert outputs(requests) == want
    assert engine.graphs is not None and engine.graphs.stats.num_graphs > 0
    assert [r.finish_reason for r in requests] == ["length"] * 3
    if name == "bush":
        assert max(r.stats.mean_acceptance_length for r in requests) > 1.2, "no draft was right: nothing was tested"


@pytest.mark.parametrize("call", [1, 2])
def test_an_interrupted_step_loses_no_token(call: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device is ahead of the host then: what it did is forgotten, and all requests are computed anew."""
    want, calls, wait = plain(GREEDY), list[Mark](), Mark.wait

    def interrupted(mark: Mark) -> None:
        calls.append(mark)
        if len(calls) == call:
            raise KeyboardInterrupt
        wait(mark)

    monkeypatch.setattr(Mark, "wait", interrupted)
    engine = graph_engine(BushDrafter(successors(want)), max_nodes=4)
    requests = [engine.add(prompt, params) for prompt, params in zip(PROMPTS, GREEDY, strict=True)]
    with pytest.raises(KeyboardInterrupt):
        drain(engine)
    drain(engine)
    assert outputs(requests) == want and len(calls) > call


def test_a_request_may_limit_its_own_drafts() -> None:
    want = plain(GREEDY)
    params = [replace(p, num_speculative_tokens=k) for p, k in zip(GREEDY, (0, 2, None), strict=True)]
    requests = run(graph_engine(BushDrafter(successors(want)), max_nodes=4), PROMPTS, params)
    assert outputs(requests) == want
    assert requests[0].stats.num_draft_tokens == 0 and requests[0].stats.mean_acceptance_length == 1
    drafted = [r.stats.num_draft_tokens / max(1, r.stats.num_drafts) for r in requests]
    assert 0 < drafted[1] <= 2 < drafted[2] <= 3


@pytest.mark.parametrize("name", FORMATS if ON_GPU else ["int4"])
def test_quantized_pages_change_with_no_tree(name: str) -> None:
    """Accepted nodes move with their scales, inside the captured step."""
    params = [SamplingParams(max_new_tokens=6), SamplingParams(max_new_tokens=6, seed=1, temperature=1.1)]
    model = tiny_llama(**(SIZE | {"head_dim": 32})).to(DEVICE)
    want = outputs(run(graph_engine(model=model, kv_cache_dtype=name), PROMPTS[:2], params))
    engine = graph_engine(BushDrafter(successors(want)), model, max_nodes=4, kv_cache_dtype=name)
    requests = run(engine, PROMPTS[:2], params)
    assert outputs(requests) == want
    assert max(r.stats.mean_acceptance_length for r in requests) > 1.2, "no draft was right: nothing was tested"


def ngrams_and_random_heads(model: PreTrainedModel) -> Drafter:
    return NGramHeadsDrafter(NGramDrafter(), random_medusa(model))


@pytest.mark.parametrize("random_heads", [random_medusa, random_hydra, random_recurrent, ngrams_and_random_heads])
def test_random_heads_change_no_token(random_heads: Callable[[PreTrainedModel], Drafter]) -> None:
    params = [SamplingParams(max_new_tokens=4), SamplingParams(max_new_tokens=4, seed=3, temperature=1.1)]
    model = tiny_llama(**SIZE).to(DEVICE)
    engine = graph_engine(random_heads(model), model)
    requests = run(engine, PROMPTS[:2], params)
    assert outputs(requests) == outputs(run(make_engine(tiny_llama(**SIZE)), PROMPTS[:2], params))
    assert engine.graphs is not None
    assert max(bucket.num_nodes for bucket in engine.graphs._captured) == 6, "no step held the whole tree"


@pytest.mark.parametrize("kind", ["medusa", "hydra"])
@pytest.mark.parametrize("tree", [BUSH, [(0,), (0, 0), (0, 0, 0)]], ids=["bush", "chain"])
def test_right_heads_are_believed(tree: list[tuple[int, ...]], kind: str) -> None:
    """At temperature 3 the noise decides: heads that were ranked by another position's would be wrong."""
    params = [SamplingParams(max_new_tokens=9), SamplingParams(max_new_tokens=12, seed=4, temperature=3.0)]
    model = walking_model(torch.float32)
    want = outputs(run(make_engine(model), PROMPTS[:2], params))
    model.to(DEVICE)
    knows_all = walking_medusa(model, lambda token: True, tree) if kind == "medusa" else walking_hydra(model, tree)
    engine = graph_engine(knows_all, model)
    requests = run(engine, PROMPTS[:2], params)
    assert outputs(requests) == want and knows_all.chains_only == (tree is not BUSH)
    taus = [r.stats.mean_acceptance_length for r in requests]
    assert taus[0] == 3 and taus[1] > 2, taus
    assert requests[0].stats.acceptance_by_depth == [1, 1, 1], "a path that ended at a leaf counts as refused"


@pytest.mark.parametrize(("num_running", "num_waiting", "patience"), [(1, 1, 2), (2, 1, 2), (2, 2, 2), (1, 1, 100)])
def test_requests_wait_longer_the_more_run_and_the_fewer_wait(
    num_running: int, num_waiting: int, patience: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every admission takes an eager step; a crowd would otherwise run eagerly nearly all the time."""
    monkeypatch.setattr("specdec.engine.graphs.PATIENCE", patience)
    monkeypatch.setattr("specdec.engine.graphs.LONGEST_WAIT", 5)
    engine = graph_engine()
    params = SamplingParams(max_new_tokens=11)
    first = [engine.add(prompt, params) for prompt in PROMPTS[:num_running]]
    for _ in range(3):
        engine.step()
    others = [engine.add(PROMPTS[1], SamplingParams(max_new_tokens=2)) for _ in range(num_waiting)]
    waited = 0
    while not others[0].num_computed:
        engine.step()
        waited += 1
    launched = min(5, -(-patience * num_running // num_waiting))
    assert waited == launched + 2, "then the last one is read, and an eager step lets them in"
    drain(engine)
    assert outputs(first) == outputs(
        run(make_engine(tiny_llama(**SIZE)), PROMPTS[:num_running], [params] * num_running)
    )


def test_a_place_that_an_admission_leaves_free_waits_for_captured_steps_too() -> None:
    """Else a queue of short answers, or of long drafts, would be run by the host alone."""
    engine = graph_engine(max_num_seqs=2)
    assert engine.graphs is not None
    first = engine.add(PROMPTS[0], SamplingParams(max_new_tokens=16))
    short = [engine.add(PROMPTS[1], SamplingParams(max_new_tokens=1)) for _ in range(3)]
    launched = []
    for request in short:
        while request.finish_reason is None:
            engine.step()
        launched.append(engine.graphs._launches)
    assert launched[0] == 0 and launched[1] >= PATIENCE and launched[2] >= launched[1] + PATIENCE, launched
    drain(engine)
    assert outputs([first]) == outputs(run(make_engine(tiny_llama(**SIZE)), PROMPTS[:1], [first.params]))


def test_nobody_is_let_in_where_there_is_no_place() -> None:
    engine = graph_engine(max_num_seqs=1)
    first, second = (engine.add(PROMPTS[0], SamplingParams(max_new_tokens=12)) for _ in "ab")
    while first.finish_reason is None:
        engine.step()
        assert not second.num_computed, "there is no place for it"
    drain(engine)
    assert outputs([first]) == outputs([second])


def test_heads_go_on_where_captured_and_eager_steps_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specdec.engine.graphs.PATIENCE", 0)
    model = walking_model(torch.float32)
    params = [SamplingParams(max_new_tokens=n) for n in (22, 5)]
    want = outputs(run(make_engine(model), PROMPTS[:2], params))
    engine = graph_engine(walking_medusa(model.to(DEVICE), lambda token: True, BUSH), model)
    requests = [engine.add(PROMPTS[0], params[0])]
    for _ in range(3):
        engine.step()
    requests.append(engine.add(PROMPTS[1], params[1]))
    drain(engine)
    assert outputs(requests) == want
    assert engine.graphs is not None and len(engine.graphs._captured) > 1
    for request, between in zip(requests, (1, 0), strict=True):  # eager steps between captured ones draft nothing
        # and neither do the first step, which had no hidden state, and one that needs none
        assert request.stats.num_forwards - request.stats.num_drafts <= 2 + between
        assert request.stats.accepted_by_depth == request.stats.tried_by_depth


def test_a_request_at_its_last_token_lets_no_nodes_in_that_do_not_pay() -> None:
    engine = graph_engine(BushDrafter(), max_nodes=4, cost_table=DEAR)
    run(engine, PROMPTS[:2], [SamplingParams(max_new_tokens=n) for n in (3, 6)])
    assert engine.graphs is not None and {bucket.num_nodes for bucket in engine.graphs._captured} == {1}


def test_drafts_end_where_steps_are_seen_to_take_longer_than_they_save(monkeypatch: pytest.MonkeyPatch) -> None:
    """The guess of a step's time knows nothing of what drafts take; here all of them are right, and dear."""
    clock, nodes = [0.0], list[int]()

    class Clock:
        def __init__(self, device: torch.device) -> None:
            self.at = clock[0]

        def wait(self) -> None: ...

        def seconds_since(self, earlier: "Clock") -> float:
            return self.at - earlier.at

    def replay(captured: Captured) -> None:
        captured.step()
        nodes.append(captured.step.bucket.num_nodes)
        clock[0] += 50.0 if nodes[-1] > 1 else 1.0

    monkeypatch.setattr("specdec.engine.graphs.Mark", Clock)
    monkeypatch.setattr(Captured, "replay", replay)
    model, params = walking_model(torch.float32), [SamplingParams(max_new_tokens=30)]
    want = outputs(run(make_engine(model), PROMPTS[:1], params))
    drafter = walking_medusa(model.to(DEVICE), lambda token: True, [(0,)])
    assert outputs(run(graph_engine(drafter, model), PROMPTS[:1], params)) == want
    assert nodes[0] == 2 and nodes.count(2) <= 3 * BELIEVED and nodes[-6:] == [1] * 6, nodes


def test_marks_know_the_time_between_them_on_a_gpu_alone() -> None:
    first, second = (Mark(torch.device(DEVICE)) for _ in range(2))
    second.wait()
    seconds = SECONDS_SINCE(second, first)
    assert seconds is None if not ON_GPU else seconds is not None and 0 <= seconds < 60


def test_a_stop_costs_one_step_and_blocks_return() -> None:
    want = plain(GREEDY[:2])
    stops = [SamplingParams(max_new_tokens=5, stop_token_ids=[tokens[3]]) for tokens in want]
    engine = graph_engine()
    requests = run(engine, PROMPTS[:2], stops)
    for request, tokens in zip(requests, want, strict=True):
        assert request.finish_reason == "stop"
        assert request.tokens[request.prompt_len :] == tokens[: tokens.index(tokens[3]) + 1]


def test_requests_join_and_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specdec.engine.graphs.PATIENCE", 0)
    want = plain(GREEDY)
    engine = graph_engine(max_num_seqs=2)
    first = engine.add(PROMPTS[0], GREEDY[0])
    for _ in range(3):
        engine.step()
    others = [engine.add(prompt, GREEDY[0]) for prompt in PROMPTS[1:]]
    drain(engine)
    assert outputs([first, *others]) == want


def test_an_abort_in_flight() -> None:
    want = plain(GREEDY[:2])
    engine = graph_engine()
    requests = [engine.add(prompt, GREEDY[0]) for prompt in PROMPTS[:2]]
    while requests[0].num_output < 3:
        engine.step()
    engine.abort(requests[0])
    drain(engine)
    assert requests[0].finish_reason == "abort" and outputs(requests[1:]) == want[1:]


def test_an_aborted_request_is_asked_again_while_its_step_is_in_flight() -> None:
    """CASES e1: its blocks go to others at once, though a step that was launched still writes to them."""
    want = plain(GREEDY, max_model_len=32)
    engine = graph_engine(num_blocks=7, max_model_len=32)
    assert engine.graphs is not None
    requests = [engine.add(prompt, GREEDY[0]) for prompt in PROMPTS]
    again = []
    for i, request in enumerate(requests):
        while not engine.graphs._flying:
            engine.step()
        engine.abort(request)
        engine.check_integrity()
        again.append(engine.add(PROMPTS[i], GREEDY[0]))
    drain(engine)
    assert outputs(again) == want


def test_a_small_pool_goes_back_to_eager_steps() -> None:
    """Where blocks can't be reserved ahead, eager steps preempt; tokens stay the same."""
    params, prompts = [SamplingParams(max_new_tokens=8)] * 2, [[5, 6] * 6, [11, 12, 13] * 4]
    engine = graph_engine(num_blocks=3, max_model_len=48)
    engine.scheduler.lengths = Optimist()
    assert outputs(run(engine, prompts, params)) == plain(params, prompts, max_model_len=48)
    assert engine.graphs is not None and engine.graphs.stats.num_graphs and engine.scheduler.num_preemptions


def test_the_context_limit_is_reached() -> None:
    params, prompts = [SamplingParams(max_new_tokens=100)] * 2, [[5, 6, 7, 5, 6, 7], [11, 12] * 4]
    engine = graph_engine(NGramDrafter(), max_model_len=16, max_nodes=4)
    requests = run(engine, prompts, params)
    assert outputs(requests) == plain(params, prompts, max_model_len=16)
    assert all(len(r.tokens) == 16 and r.finish_reason == "length" for r in requests)
    assert engine.graphs is not None and engine.graphs.stats.num_graphs


def test_cuts_run_in_captured_steps_beside_greedy_requests() -> None:
    """The last steps, after the requests with cuts have ended, have none."""
    prompts = [*PROMPTS, [3, 4]]
    params = [
        SamplingParams(max_new_tokens=4, seed=1, temperature=1.5, top_k=3, min_p=0.02),
        SamplingParams(max_new_tokens=2),
        SamplingParams(max_new_tokens=4, seed=3, temperature=1.2, top_p=0.6, top_k=10**30),
        SamplingParams(max_new_tokens=11, seed=4, temperature=1.1),
    ]
    want = outputs(run(make_engine(tiny_llama(**SIZE)), prompts, params))
    engine = graph_engine(BushDrafter(successors(want)), max_nodes=4)
    assert outputs(run(engine, prompts, params)) == want
    uncut = [SamplingParams(max_new_tokens=p.max_new_tokens, seed=p.seed, temperature=p.temperature) for p in params]
    plain_tokens = outputs(run(make_engine(tiny_llama(**SIZE)), prompts, uncut))
    assert plain_tokens[0] != want[0] and plain_tokens[2] != want[2], "nothing was cut"
    assert engine.graphs is not None
    assert {bucket.cuts for bucket in engine.graphs._captured} == {True, False}


def test_greedy_requests_pay_for_no_cuts() -> None:
    params = [SamplingParams(max_new_tokens=3, top_k=3, top_p=0.5, min_p=0.1)] * 2
    engine = graph_engine()
    assert outputs(run(engine, PROMPTS[:2], params)) == plain(params)
    assert engine.graphs is not None and not any(bucket.cuts for bucket in engine.graphs._captured)


def test_what_cannot_be_captured_runs_eagerly() -> None:
    params = [GREEDY[0], SamplingParams(max_new_tokens=5, logprobs=1)]
    engine = graph_engine()
    requests = run(engine, PROMPTS[:2], params)
    assert outputs(requests) == plain(params)
    assert len(requests[1].logprobs) == 5
    assert engine.graphs is not None and not engine.graphs._captured


def test_why_not() -> None:
    model = tiny_llama(**SIZE).to(DEVICE)
    assert "torch ops" in str(make_engine(tiny_llama()).why_no_graphs)
    medusa = random_medusa(model)
    assert make_engine(Decoder(model, triton_ops()), medusa).why_no_graphs is None
    hybrid = make_engine(Decoder(model, triton_ops()), HybridDrafter(NGramDrafter(), NGramDrafter()))
    assert hybrid.why_no_graphs == "drafter 'ngram+ngram' drafts on the host"
    assert make_engine(Decoder(model, triton_ops()), NGramHeadsDrafter(NGramDrafter(), medusa)).why_no_graphs is None
    typical = make_engine(Decoder(model, triton_ops()), rule=TypicalRule())
    assert "rule 'typical'" in str(typical.why_no_graphs) and typical.graphs is None
    off = make_engine(Decoder(model, triton_ops()), cuda_graphs=False)
    assert off.why_no_graphs == "cuda_graphs is off"


def test_a_model_that_fails_is_named() -> None:
    model = tiny_llama(**SIZE).to(DEVICE)
    engine = make_engine(Decoder(model, triton_ops()))
    request: Request = engine.add(PROMPTS[0], SamplingParams(max_new_tokens=20))
    while request.num_output < 2:
        engine.step()
    with torch.no_grad():
        model.lm_head.weight.fill_(torch.nan)
    drain(engine)
    assert (request.finish_reason, isinstance(request.error, SpecdecError)) == ("error", True)
    assert str(request.error) == "the target's logits for request 0 hold NaN, or -inf alone"


@pytest.mark.filterwarnings("ignore:All-NaN slice:RuntimeWarning")  # the interpreter's NumPy
def test_a_dead_end_in_flight_ends_its_own_request() -> None:
    """A token that only one request says leads to a row of NaN."""
    params = [GREEDY[0], SamplingParams(max_new_tokens=6, seed=2, temperature=1.5), GREEDY[0]]
    want = plain(params)
    others = {*want[0], *want[2], want[1][0], *(token for prompt in PROMPTS for token in prompt)}
    end = next(token for token in want[1][1:-1] if token not in others)
    told = want[1].index(end) + 1
    model = tiny_llama(**SIZE).to(DEVICE)
    with torch.no_grad():
        model.model.embed_tokens.weight[end] = torch.nan
    engine = graph_engine(model=model)
    requests = [engine.add(prompt, p) for prompt, p in zip(PROMPTS, params, strict=True)]
    drain(engine)
    assert engine.graphs is not None and engine.graphs.stats.num_graphs > 0
    assert outputs(requests) == [want[0], want[1][:told], want[2]]
    assert [r.finish_reason for r in requests] == ["length", "error", "length"]
    with pytest.raises(SpecdecError, match="request 1 hold NaN"):
        requests[1].check()


def test_tokens_before_a_dead_end_are_delivered() -> None:
    engine = graph_engine()
    request = engine.add(PROMPTS[0], GREEDY[0])
    while request.num_output < 2:
        engine.step()
    engine._emit_captured([Outcome(request, [7, -1], False, 3, 4)])
    assert engine._retire() == [request]
    assert (request.tokens[-1], request.num_output, request.finish_reason) == (7, 3, "error")
    assert engine.pool.num_free == engine.pool.num_blocks


def test_a_callback_that_raises_in_a_captured_step() -> None:
    want = plain(GREEDY)

    def stopping(request: Request) -> bool:
        if request.num_output == 3:
            raise KeyError("mine")
        return False

    engine = graph_engine()
    requests = [
        engine.add(prompt, GREEDY[0], stopping=stopping if i == 0 else None) for i, prompt in enumerate(PROMPTS)
    ]
    drain(engine)
    assert outputs(requests) == [want[0][:3], *want[1:]]
    assert isinstance(requests[0].error, KeyError)


def test_a_measured_captured_step_has_full_chains() -> None:
    """Sequences are padded to a power of 2 as in the engine; the last column of the result counts each tree's nodes."""
    grid = Grid((1, 3), (1, 4), (20,))
    run_step = CapturedStep(Decoder(tiny_llama(**SIZE).to(DEVICE), triton_ops()), grid)
    for s in grid.num_seqs:
        for n in grid.num_nodes:
            for c in grid.contexts:
                assert run_step(s, n, c) > 0
                ((point, captured),) = run_step._captured.items()
                assert point == (s, n, c) and captured.step.bucket.num_nodes == n
                assert captured.step.out[:, -1].tolist() == ([n] if s == 1 else [n, n, n, 0])
                assert run_step(s, n, c) > 0
                assert run_step._captured[point] is captured, "a point was captured twice"
                emitted = captured.step.out[:, -2]
                assert (run_step._state.lengths[:s] == c + 1 + emitted[:s]).all(), "lengths were not reset"


@pytest.mark.gpu
def test_a_graph_that_became_garbage_does_not_end_a_capture() -> None:
    """Such graphs are freed whenever Python collects its garbage, which any new object may begin."""
    recorder, x = Recorder(torch.device("cuda")), torch.zeros(1, device="cuda")
    old: list[object] = [recorder.record(lambda: x.add_(1))]
    old.append(old)
    held, before = [old], gc.get_threshold()
    del old

    def run() -> None:
        held.clear()
        gc.set_threshold(1)
        assert len([[i] for i in range(1000)]) == 1000  # enough for a collection
        x.add_(2)

    try:
        replay = recorder.record(run)
    finally:
        gc.set_threshold(*before)
    replay()
    assert x.item() == 2
    assert gc.isenabled()


def test_steps_are_measured_as_the_engine_runs_them() -> None:
    grid = Grid((1,), (1,), (5,))
    step, how = make_step(Decoder(tiny_llama(**SIZE).to(DEVICE), triton_ops()), grid)
    assert isinstance(step, CapturedStep) and how == "captured steps"
    step, how = make_step(make_target(tiny_llama()), grid)
    assert isinstance(step, EngineStep) and "eager steps, because the model runs by torch ops" in how
