"""Forwards over padded batches: the bits of the batch as it is, whatever was there before, and when they are captured.

Without a GPU nothing is captured: the same padded forward runs in Triton's interpreter.
"""

from threading import Thread

import pytest
import torch

from specdec.cache.pages import KVPages
from specdec.engine import forwards
from specdec.engine.engine import Engine
from specdec.engine.forwards import ForwardGraphs
from specdec.engine.recorder import Recorder
from specdec.kernels.ops import triton_ops
from specdec.models.batch import Batch, Rows, pack_rows
from specdec.models.decoder import Decoder
from specdec.models.padded import PaddedBatch, PaddedShape, bound_of
from specdec.params import SamplingParams
from specdec.verifier.tree import TokenTree, chain_parents
from tests.conftest import tiny_llama
from tests.engines import make_engine, outputs, run
from tests.families import tiny_model
from tests.kernels import DEVICE, ON_GPU
from tests.scripted import RandomDrafter

pytestmark = pytest.mark.gpu if ON_GPU else []
SIZE: dict[str, object] = {
    "dtype": torch.float32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
BUSH = [-1, 0, 0, 2, 2, 4]


def rows(start: int, num_causal: int, parents: list[int], first_block: int) -> Rows:
    """A sequence whose blocks follow each other, with tokens that its place decides."""
    tree = TokenTree.build([[*range(len(parents))]], [parents]) if parents else None
    shape = (tree.depth.tolist(), tree.ancestors.tolist()) if tree else ((), ())
    tokens = [(7 * first_block + 3 * i) % 97 for i in range(num_causal + len(parents))]
    num_blocks = -(-(start + len(tokens)) // 16)
    return Rows(range(first_block, first_block + num_blocks), start, tokens, start + num_causal, *shape)


BATCHES = {
    "prompts": [rows(0, 6, [-1], 0), rows(0, 4, [-1], 2), rows(0, 3, [], 4)],
    "trees": [rows(0, 2, BUSH, 0), rows(5, 0, [-1, 0, 1], 2), rows(33, 0, [-1], 4)],
    "one": [rows(70, 0, [-1], 3)],
    "two": [rows(0, 7, [-1], 0), rows(0, 7, [-1], 2)],
}


def pages_of(model: Decoder) -> KVPages:
    pages = KVPages(model.kv_layout, 16, 16, model.device)
    pages.randomize(torch.Generator(model.device).manual_seed(0))
    return pages


def packed(name: str) -> Batch:
    return pack_rows(BATCHES[name], 16, torch.device(DEVICE))


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])  # the second one has windows
def test_bits_are_those_of_the_batch_as_it_is(family: str) -> None:
    model = Decoder(tiny_model(family).float().to(DEVICE), triton_ops()).first_layers(1)
    w = model.weights
    shape = PaddedShape(num_rows=16, num_seqs=4, num_nodes=8, max_context=128)
    padded = PaddedBatch(shape, 8, w.num_heads // w.num_kv_heads, w.head_dim, model.device)
    for name in ("trees", "one", "prompts"):  # one after another in the same tensors
        batch, own, other = packed(name), pages_of(model), pages_of(model)
        want = model.forward(batch, own)
        padded.fill(batch)
        got = model.forward(padded.batch, other)
        assert torch.equal(got[: len(want)], want), name
        for layer in range(len(own.k)):
            assert torch.equal(own.k[layer], other.k[layer]) and torch.equal(own.v[layer], other.v[layer]), name


def captured_forwards(engine: Engine) -> Recorder:
    """Let an engine run by captured forwards, also where there is no GPU."""
    recorder = Recorder(torch.device(DEVICE))
    assert isinstance(engine.model, Decoder)
    engine.forwards = ForwardGraphs(engine.model, engine.pages, engine.limits.max_model_len, recorder)
    return recorder


@pytest.mark.parametrize("drafts", [False, True])
def test_tokens_are_those_of_plain_forwards(drafts: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forwards, "ROWS", (16,))
    model = tiny_llama(**SIZE)
    prompts = [[5, 6, 7, 5, 6], [3]]
    params = [SamplingParams(max_new_tokens=n, seed=n, presence_penalty=0.5) for n in (5, 4)]
    want = outputs(run(make_engine(model), prompts, params))
    engine = make_engine(Decoder(model.to(DEVICE), triton_ops()), RandomDrafter() if drafts else None, max_nodes=4)
    recorder = captured_forwards(engine)
    assert outputs(run(engine, prompts, params)) == want
    assert recorder.stats.num_graphs


def test_trees_may_reach_behind_the_longest_sequence() -> None:
    """A sequence's last drafts need blocks behind its own; their nodes are never emitted, but others are."""
    model = Decoder(tiny_llama(**SIZE).to(DEVICE), triton_ops())
    pages, recorder = pages_of(model), Recorder(torch.device(DEVICE))
    run_forward = ForwardGraphs(model, pages, 16, recorder)
    batch = pack_rows([rows(10, 1, chain_parents(28), 4), rows(0, 2, [-1], 8)], 16, torch.device(DEVICE))
    want = model.forward(batch, pages)
    for _ in range(2):
        got = run_forward(batch)
    assert recorder.stats.num_graphs == 1 and torch.equal(got, want)


def test_a_shape_is_captured_when_it_comes_again() -> None:
    engine = make_engine(Decoder(tiny_llama(**SIZE).to(DEVICE), triton_ops()))
    engine.pages.randomize(torch.Generator(DEVICE).manual_seed(0))
    recorder, seen = captured_forwards(engine), list[int]()
    assert engine.forwards is not None
    for name in ("one", "prompts", "one", "one", "prompts"):
        engine.forwards(packed(name))
        seen.append(recorder.stats.num_graphs)
    assert seen == [0, 0, 1, 1, 2]


def test_what_no_shape_holds_runs_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forwards, "ROWS", (8,))
    engine = make_engine(Decoder(tiny_llama(**SIZE).to(DEVICE), triton_ops()))
    recorder = captured_forwards(engine)
    assert engine.forwards is not None
    want = engine.model.forward(packed("prompts"), engine.pages)  # 15 rows
    for _ in range(3):
        assert torch.equal(engine.forwards(packed("prompts")), want)
    assert recorder.stats.num_graphs == 0


def test_forwards_that_take_longer_than_their_launches_are_not_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(Decoder(tiny_llama(**SIZE).to(DEVICE), triton_ops()))
    layer = engine.model.weights.layers[0]  # type: ignore[attr-defined]
    num_weights = sum(m.numel() for m in (layer.qkv, layer.o, layer.gate_up, layer.down))
    monkeypatch.setattr(forwards, "WORK", 16 * num_weights)
    monkeypatch.setattr(forwards, "ROWS", (8, 16, 32))
    recorder = captured_forwards(engine)
    assert engine.forwards is not None
    for name in ("prompts", "prompts", "two", "two"):  # 15 rows and one of padding, 16 and one
        engine.forwards(packed(name))
    assert recorder.stats.num_graphs == 1


@pytest.mark.skipif(not ON_GPU, reason="nothing is captured without a GPU")
def test_other_threads_may_take_memory_during_a_capture() -> None:
    taken, x = list[torch.Tensor](), torch.ones(8, device=DEVICE)

    def run() -> None:
        thread = Thread(target=lambda: taken.append(torch.empty(2**28, dtype=torch.uint8, device=DEVICE)))
        thread.start()
        thread.join()
        x.add_(1)

    replay = Recorder(torch.device(DEVICE)).record(run)
    replay()
    assert len(taken) == 1 and x.tolist() == [2] * 8


def test_bounds_of_contexts() -> None:
    assert [bound_of(n, 3000) for n in (1, 1024, 1025, 2049, 3000)] == [1024, 1024, 2048, 3000, 3000]
    assert bound_of(40000, 50000) == 50000 and bound_of(5, 100) == 100
