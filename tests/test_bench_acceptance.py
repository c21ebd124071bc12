"""`bench acceptance`: counts recounted from what was emitted, equal in every run; failures named; runs that go on."""

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from click.testing import Result as Invoked

from specdec import LLM, SamplingParams
from specdec.bench import acceptance, hf_peers
from specdec.bench.acceptance import first_difference, run
from specdec.bench.counts import accepted_lengths, cumulative_acceptance, mean_accepted, total
from specdec.bench.parts import node_ranks, watched
from specdec.bench.results import Result, Settings, read_result
from specdec.bench.summary import summarize, system_name
from specdec.bench.systems import Answer, EngineSystem, Room, check_system
from specdec.cli.main import main
from specdec.drafters.ngram import NGramDrafter
from specdec.errors import CheckpointError, ConfigError, DataError
from specdec.outputs import TARGET, Completion
from tests.conftest import tiny_llama
from tests.engines import make_engine
from tests.engines import run as run_engine
from tests.scripted import RandomDrafter

PROMPTS = [
    {"id": "a", "category": "copy", "prompt": "one two three one two three one two"},
    {"id": "b", "category": "copy", "prompt": "abababababab"},
    {"id": "c", "category": "talk", "prompt": "hello there"},
]


@pytest.fixture
def prompts(tmp_path: Path) -> str:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in PROMPTS))
    return str(path)


@pytest.fixture
def settings(folder: Path, prompts: str) -> Settings:
    return Settings(
        model=str(folder), drafters=("ngram",), prompts=prompts, max_new_tokens=8, batch_sizes=(2,), device="cpu"
    )


def recount(completions: Sequence[Completion]) -> tuple[int, int, list[int]]:
    """Forwards, accepted drafts and the histogram of accepted lengths, from who proposed each token alone."""
    lengths: Counter[int] = Counter()
    for completion in completions:
        run_length = 0
        for proposer in completion.proposers:
            if proposer == TARGET:
                lengths[run_length] += 1
                run_length = 0
            else:
                run_length += 1
        if run_length:  # the answer ended inside the block
            lengths[run_length] += 1
    most = max(lengths)
    accepted = sum(length * count for length, count in lengths.items())
    return lengths.total(), accepted, [lengths[n] for n in range(most + 1)]


def counts(result: Result) -> list[tuple[object, ...]]:
    """All that must be the same in two runs."""
    return [(*cell.key, cell.num_tokens, cell.stats, cell.split and cell.split.tree) for cell in result.cells]


@pytest.mark.parametrize("temperature", [0.0, 0.1])
def test_counts_are_those_of_the_raw_outputs(settings: Settings, folder: Path, temperature: float) -> None:
    result = run(replace(settings, temperature=temperature, max_new_tokens=20, batch_sizes=(1, 2)))
    asked = acceptance._ask(acceptance.load_prompts(settings.prompts), _loaded(folder), result.settings)
    llm = LLM(folder, "ngram", device="cpu", cost_table=None)
    completions = [llm.generate(one.ids, one.params)[0] for one in asked]
    forwards, accepted, histogram = recount(completions)
    tokens = sum(len(c.token_ids) for c in completions)
    rows = [row for row in summarize(result) if (row["system"], row["category"]) == ("ngram", "all")]
    assert [row["batch_size"] for row in rows] == [1, 2]
    for row in rows:
        assert row["accepted_lengths"][: len(histogram)] == histogram and row["num_tokens"] == tokens
        assert not any(row["accepted_lengths"][len(histogram) :]) and row["num_prompts"] == 3
        assert row["mean_acceptance_length"] == tokens / forwards
        assert row["mean_accepted_drafts"] == accepted / forwards
        at_least = [sum(histogram[d:]) / forwards for d in range(1, len(histogram))]
        assert row["cumulative_by_depth"][: len(at_least)] == pytest.approx(at_least)
        assert not any(row["cumulative_by_depth"][len(at_least) :])
        assert (row["num_different"], row["num_compared"]) == (0, 3)
    assert histogram[1:] and any(histogram[1:]), "nothing was accepted: the test shows nothing"


def _loaded(folder: Path) -> Any:
    from specdec.hub.load import load

    return load(folder, dtype=torch.float32, device="cpu")


def test_by_depth_counts_are_those_of_the_trees_and_paths() -> None:
    engine = make_engine(tiny_llama(), RandomDrafter(vocab_size=8))
    steps: list[tuple[list[int], tuple[int, ...]]] = []
    rule = engine.rule

    def watching(tree: Any, logits: Any, queries: Any, num_real: int) -> Any:
        accepted = rule(tree, logits, queries, num_real)
        steps.extend((tree.parents_of(b), one.path) for b, one in enumerate(accepted))
        return accepted

    watching.name, watching.lossless = "watching", True  # type: ignore[attr-defined]
    engine.rule = watching
    allowed = SamplingParams(max_new_tokens=40, temperature=1.0, seed=1, allowed_token_ids=range(8))
    requests = run_engine(engine, [[1, 2, 3], [4, 5]], [allowed, allowed.with_seed(2)])
    whole = total(r.stats for r in requests)
    tried: Counter[int] = Counter()
    for parents, path in steps:
        tried.update(depth + 1 for depth, node in enumerate(path) if node in parents)
    assert whole.num_forwards == len(steps) and whole.num_output_tokens == 80
    assert whole.tried_by_depth[0] in (tried[1], tried[1] - 1, tried[1] - 2)  # an answer's end may cut its last block
    assert whole.num_accepted_tokens == sum(whole.accepted_by_depth) > 10
    assert sum(n * count for n, count in enumerate(accepted_lengths(whole))) == whole.num_accepted_tokens
    assert sum(accepted_lengths(whole)) == whole.num_forwards
    assert mean_accepted(whole) == pytest.approx(sum(cumulative_acceptance(whole)))


def test_two_runs_with_one_seed_give_the_same_counts(settings: Settings) -> None:
    sampled = replace(settings, temperature=0.8, seed=7, trees=(8,))
    first = counts(run(sampled))
    assert first == counts(run(sampled)) != counts(run(replace(sampled, seed=8)))


def test_a_tree_size_bounds_the_nodes(settings: Settings) -> None:
    rows = summarize(run(replace(settings, trees=(1, 3), max_new_tokens=32)))
    sizes = {row["max_nodes"]: row for row in rows if row["system"] == "ngram" and row["category"] == "all"}
    assert sizes[1]["draft_tokens_per_forward"] == 0 and sizes[1]["mean_acceptance_length"] == 1
    assert 0 < sizes[3]["draft_tokens_per_forward"] <= 2 and not any(sizes[3]["accepted_lengths"][3:])


def test_the_split_adds_up_and_leaves_the_engine_as_it_was() -> None:
    engine = make_engine(tiny_llama(), NGramDrafter())
    before = engine.drafter, engine.model, engine.rule
    prompt, params = [1, 2, 3, 1, 2, 3, 1, 2], SamplingParams(max_new_tokens=30)
    with watched(engine) as parts:
        (request,) = run_engine(engine, [prompt], [params])
    assert (engine.drafter, engine.model, engine.rule) == before
    assert min(parts.draft, parts.forward, parts.accept) > 0
    assert parts.proposed.total() == request.stats.num_draft_tokens
    assert parts.accepted <= parts.proposed and parts.accepted.total() >= request.stats.num_accepted_tokens
    (plain,) = run_engine(make_engine(tiny_llama()), [prompt], [params])
    assert request.tokens == plain.tokens


def test_nodes_are_named_as_medusa_names_them() -> None:
    assert node_ranks([-1, 0, 0, 1, 1, 2]) == [(), (0,), (1,), (0, 0), (0, 1), (1, 0)]


@pytest.mark.parametrize(
    "one, other, want", [([1, 2], [1, 2], None), ([1, 2], [1, 3], 1), ([1], [1, 2], 1), ([], [1], 0)]
)
def test_the_first_difference(one: list[int], other: list[int], want: int | None) -> None:
    assert first_difference(one, other) == want


class Liar:
    """A peer whose answers differ at the third token."""

    exact = captures = False
    drafter = None

    def __init__(self, loaded: Any, path: str | None, room: Room) -> None:
        self.truth = hf_peers.HFGenerate(loaded, None, room)

    def answer(self, prompts: Sequence[list[int]], params: Sequence[SamplingParams]) -> list[Answer]:
        return [Answer([*a.token_ids[:2], a.token_ids[2] ^ 1]) for a in self.truth.answer(prompts, params)]

    def split(self, prompts: object, params: object) -> None:
        return None


def test_divergences_are_counted_with_their_margins(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(acceptance_peers(), "liar", lambda: Liar)
    result = run(replace(settings, drafters=(), peers=("hf", "liar"), batch_sizes=(1,)))
    cells = {(cell.system, cell.category): cell for cell in result.cells}
    assert cells["hf", "copy"].divergences == [] and cells["hf", "copy"].stats is None
    assert cells["plain", "copy"].divergences is None and set(result.reference) == set("abc")
    found = cells["liar", "copy"].divergences
    assert found is not None and [(d.prompt, d.position) for d in found] == [("a", 2), ("b", 2)]
    model = _loaded(Path(settings.model))
    ids = acceptance.load_prompts(settings.prompts)[0].encode(model.tokenizer) + result.reference["a"][:2]
    best = model.model(torch.tensor([ids])).logits[0, -1].sort(descending=True).values
    assert found[0].margin == pytest.approx(float(best[0] - best[1]), abs=1e-4)
    sampled = run(replace(settings, drafters=("ngram",), peers=("hf",), batch_sizes=(1,), temperature=1.0))
    compared = {cell.system: cell.divergences for cell in sampled.cells}
    assert compared["ngram"] == [] and compared["hf"] is None  # a peer's draws are its own


def acceptance_peers() -> dict[str, Any]:
    from specdec.bench.systems import PEERS

    return PEERS


def test_a_batch_of_hf_answers_is_that_of_single_ones(folder: Path) -> None:
    loaded = _loaded(folder)
    peer = hf_peers.HFGenerate(loaded, None, Room(2, 64))
    ids, params = [[5, 6, 7, 8, 9], [10, 11]], [SamplingParams(max_new_tokens=9)] * 2
    together = [a.token_ids for a in peer.answer(ids, params)]
    assert together == [peer.answer([one], params[:1])[0].token_ids for one in ids]
    loaded.model.generation_config.eos_token_id = together[0][3]
    first = together[0].index(together[0][3]) + 1
    assert hf_peers.HFGenerate(loaded, None, Room(2, 64)).answer(ids, params)[0].token_ids == together[0][:first]
    lookup = hf_peers.HFPromptLookup(loaded, None, Room(2, 64)).answer(ids, params)
    assert lookup[0].token_ids == together[0][:first]
    assisted = hf_peers.HFAssisted(loaded, str(folder), Room(2, 64)).answer(ids[:1], params[:1])
    assert assisted[0].token_ids == together[0][:first]
    with pytest.raises(ConfigError, match="hf-assisted:PATH"):
        hf_peers.HFAssisted(loaded, None, Room(2, 64))
    with pytest.raises(ConfigError, match="takes no path"):
        hf_peers.HFGenerate(loaded, "x", Room(2, 64))


def test_peers_answer_fewer_prompts_and_are_compared_on_those(settings: Settings) -> None:
    result = run(replace(settings, drafters=(), peers=("hf",), peer_prompts=1, batch_sizes=(2, 1)))
    asked = {(c.system, c.category, c.batch_size): c.prompts for c in result.cells}
    assert asked["hf", "copy", 1] == ["a"] and asked["plain", "copy", 1] == ["a", "b"] == asked["hf", "copy", 2]
    cells = {c.key: c for c in result.cells if c.batch_size == 1}
    ours, hf = cells["plain", None, "copy", 1], cells["hf", None, "copy", 1]
    (row,) = (r for r in summarize(result) if (r["system"], r["category"], r["batch_size"]) == ("hf", "copy", 1))
    want = (hf.num_tokens[0] / hf.seconds[0]) / (ours.num_tokens[0] / ours.seconds[0])
    assert row["speedup"] == {key: pytest.approx(want) for key in ("value", "low", "high")}
    assert [c.split is not None for c in result.cells if c.system == "plain"] == [True, True, False, False]


def test_a_result_says_what_a_drafters_name_stood_for(settings: Settings) -> None:
    rows = summarize(run(replace(settings, drafters=("auto", "ngram+early_exit"), categories=("talk",))))
    assert [(r["system"], r["drafter"], system_name(r)) for r in rows[::2]] == [
        ("plain", "none", "plain"),
        ("auto", "ngram", "auto (ngram)"),
        ("ngram+early_exit", "ngram+early_exit", "ngram+early_exit"),
    ]


def test_an_interrupted_run_goes_on(settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, settings = tmp_path / "out.json", replace(settings, batch_sizes=(1, 2))
    whole = run(settings)
    measure = acceptance._Runner._measure
    done: list[object] = []

    def interrupted(self: Any, *args: Any) -> Any:
        if len(done) == 3:
            raise KeyboardInterrupt
        done.append(args)
        return measure(self, *args)

    monkeypatch.setattr(acceptance._Runner, "_measure", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(settings, out)
    assert len(read_result(out).cells) == 3
    monkeypatch.setattr(acceptance._Runner, "_measure", measure)
    first = out.read_text()
    result = run(settings, out, resume=True)
    assert counts(result) == counts(whole) and result.cells[:3] == read_result(out).cells[:3]
    assert json.loads(first)["cells"] == json.loads(out.read_text())["cells"][:3]
    with pytest.raises(ConfigError, match="was measured with seed 0, not 1"):
        run(replace(settings, seed=1), out, resume=True)
    elsewhere = json.loads(out.read_text())
    elsewhere["environment"]["device"] = "another"
    out.write_text(json.dumps(elsewhere))
    with pytest.raises(ConfigError, match="measured with device 'another', and here it is"):
        run(settings, out, resume=True)


def test_what_the_baseline_failed_on_is_not_compared(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    class Partly(Liar):
        def answer(self, prompts: Sequence[list[int]], params: Sequence[SamplingParams]) -> list[Answer]:
            if len(prompts) > 1:
                raise RuntimeError("out of luck")
            return self.truth.answer(prompts, params)

    monkeypatch.setitem(acceptance_peers(), "vllm", lambda: Partly)
    result = run(replace(settings, baseline="vllm", batch_sizes=(2,)))
    ours = {cell.category: cell for cell in result.cells if cell.system == "ngram"}
    assert ours["copy"].divergences is None and ours["talk"].divergences == []
    rows = {row["category"]: row for row in summarize(result) if row["system"] == "ngram"}
    assert rows["copy"]["num_different"] is None and rows["all"]["num_compared"] == len(ours["talk"].prompts)


def test_a_file_of_something_else_is_refused(settings: Settings, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    for text, message in (
        ("{", "isn't JSON"),
        ("{}", "is no result"),
        (_torn(), "no whole result"),
        (_mixed(), "no whole"),
    ):
        out.write_text(text)
        with pytest.raises(DataError, match=message):
            run(settings, out, resume=True)
    with pytest.raises(DataError, match="can't be read"):
        read_result(tmp_path)
    with pytest.raises(ConfigError, match="can't be written"):
        run(settings, tmp_path / "no" / "out.json")
    with pytest.raises(ConfigError, match="name it with --json"):
        run(settings, resume=True)


def _mixed() -> str:
    whole = asdict(Result(Settings(model="m", drafters=("ngram",)), {})) | {"reference": {"a": "1 x"}}
    return json.dumps({"format": "specdec-acceptance", "version": 2, **whole})


def _torn() -> str:
    return json.dumps({"format": "specdec-acceptance", "version": 2, "cells": []})


def test_a_failing_peer_ends_alone(settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Failing(Liar):
        def answer(self, prompts: object, params: object) -> list[Answer]:
            raise RuntimeError("out of luck")

    monkeypatch.setitem(acceptance_peers(), "vllm", lambda: Failing)
    out = tmp_path / "out.json"
    result = run(replace(settings, peers=("economize", "vllm", "hf")), out)
    assert {cell.system for cell in result.cells} == {"plain", "ngram", "hf"}
    failed = read_result(out).failures
    assert [(f.system, f.category, f.batch_size) for f in failed] == [
        ("economize", None, None), *(("vllm", c, b) for b in (2,) for c in ("copy", "talk"))
    ]  # fmt: skip
    assert "ModuleNotFoundError: No module named 'economize'" in failed[0].error
    assert failed[1].error == "RuntimeError: out of luck"


def test_a_drafter_that_cannot_be_opened_ends_alone(settings: Settings, tmp_path: Path) -> None:
    result = run(replace(settings, drafters=(f"medusa:{tmp_path}", "ngram")))
    assert [f.system for f in result.failures] == [f"medusa:{tmp_path}"]
    assert {cell.system for cell in result.cells} == {"plain", "ngram"}
    with pytest.raises(CheckpointError):
        LLM(settings.model, f"medusa:{tmp_path}", device="cpu")


@pytest.mark.parametrize(
    "changed, message",
    [
        ({"drafters": ("nrgam",)}, "did you mean 'ngram'"),
        ({"baseline": "plian"}, "did you mean 'plain'"),
        ({"peers": ("vlm",)}, "did you mean 'vllm'"),
        ({"peers": ("sglang",)}, "unknown drafter 'sglang'.*; and, beside drafters, plain, hf, .*vllm"),
        ({"categories": ("cpy",)}, "did you mean 'copy'"),
        ({"drafters": ()}, "nothing to compare"),
        ({"drafters": ("ngram", "ngram")}, "system 'ngram' is given twice"),
        ({"batch_sizes": (1, 1)}, "batch size 1 is given twice"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_runs(
    settings: Settings, changed: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        run(replace(settings, **changed, model="/nowhere"))


def test_systems_are_known_by_name() -> None:
    for name in ("plain", "hf", "hf-assisted:x", "ngram", "ngram+early_exit"):
        check_system(name)


Bench = Callable[..., Invoked]


@pytest.fixture
def bench(folder: Path, prompts: str) -> Bench:
    def invoke(*args: str) -> Invoked:
        given = ["--model", str(folder), "--device", "cpu", "--prompts", prompts, "--max-new-tokens", "12"]
        return CliRunner().invoke(main, ["bench", "acceptance", *given, *args])

    return invoke


def test_the_command_prints_tables_and_writes_the_file(bench: Bench, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    result = bench("--drafter", "ngram", "--peer", "economize", "--json", str(out), "--category", "copy")
    assert result.exit_code == 0, result.output
    assert "ngram, batch 1" in result.stdout and "copy" in result.stdout and "talk" not in result.stdout
    assert "economize: not measured: ModuleNotFoundError" in result.stderr
    value = json.loads(out.read_text())
    assert [row["category"] for row in value["summary"]] == ["copy", "all"] * 2
    assert value["environment"]["dtype"] == "float32" and value["settings"]["drafters"] == ["ngram"]


def test_the_command_fails_where_a_drafter_failed_but_keeps_the_rest(bench: Bench, tmp_path: Path) -> None:
    result = bench("--drafter", f"medusa:{tmp_path}", "--drafter", "ngram", "--batch-sizes", "2")
    assert result.exit_code == 1 and "ngram, batch 2" in result.stdout and "not measured" in result.stderr


@pytest.mark.parametrize(
    "args, message",
    [
        (["--category", "cpoy"], "did you mean 'copy'"),
        (["--prompts", "/nowhere.jsonl"], "/nowhere.jsonl"),
        (["--batch-sizes", "1,x"], "--batch-sizes takes whole numbers of at least 1"),
        (["--trees", "0"], "--trees takes whole numbers"),
        (["--resume"], "name it with --json"),
        (["--model", "/nowhere"], "/nowhere"),
    ],
)
def test_bad_input_exits_with_2(bench: Bench, args: list[str], message: str) -> None:
    result = bench(*args)
    assert (result.exit_code, message in result.stderr) == (2, True), result.output


@pytest.mark.parametrize("captures", [False, True])
def test_what_captures_answers_every_group_before_it_is_timed(
    captures: bool, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two categories, one of two groups of a prompt each, the other of one: each is answered once to be timed."""
    groups = []
    own = EngineSystem.answer

    def counting(system: EngineSystem, prompts: Sequence[list[int]], params: Sequence[SamplingParams]) -> list[Answer]:
        groups.append(len(prompts))
        return own(system, prompts, params)

    monkeypatch.setattr(EngineSystem, "answer", counting)
    monkeypatch.setattr(EngineSystem, "captures", captures)
    run(replace(settings, batch_sizes=(1,)))
    assert len(groups) == 2 * (3 + (3 if captures else 2))  # by both systems: all, or one of each category, then all
