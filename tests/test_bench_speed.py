"""`bench latency`, `throughput`, `kernels` and `seeds` over a tiny model: what is counted, refused and left out."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result

from specdec import LLM, SamplingParams
from specdec.bench import mechanisms
from specdec.bench.dataset import Prompt
from specdec.bench.kernels import Roofline, Timed, measure_kernels, measure_roofline, timed
from specdec.bench.mechanisms import Bench, Row, compare
from specdec.bench.seeds import ROWS, measure_rows
from specdec.bench.speed import Work, make_work, measure_latency, measure_throughput
from specdec.bench.systems import PEERS, load_target, make_llm
from specdec.cli.main import main
from specdec.kernels.ops import TORCH_OPS
from specdec.models.decoder import Decoder
from specdec.models.load import make_target
from tests.conftest import tiny_llama

TEXTS = ["one two one two one two", "hello there, hello", "x", "abcabcabcabc"]
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def work(folder: Path) -> Work:
    prompts = [Prompt(str(i), "c", text=text) for i, text in enumerate(TEXTS)]
    return make_work(load_target(str(folder), "cpu", "auto"), prompts, 6, ignore_eos=True)


@pytest.fixture
def bench(folder: Path, tmp_path: Path) -> Callable[..., Result]:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in TEXTS))

    def run(command: str, *args: str) -> Result:
        prompts = [] if command == "kernels" else ["--prompts", str(path), "--max-new-tokens", "4"]
        return CliRunner().invoke(main, ["bench", command, "--model", str(folder), "--device", "cpu", *prompts, *args])

    return run


def test_latency_counts_tokens_and_chunks(work: Work) -> None:
    plain, ngram = measure_latency(work, ["plain", "ngram"], lambda doing: None)
    for row in (plain, ngram):
        assert (row["num_requests"], row["output_tokens"]) == (4, 24)
        assert 0 < row["ttft_ms"]["median"] < row["e2el_ms"]["median"]
    assert plain["inter_token_ms"] == plain["inter_chunk_ms"]  # one token a chunk


def test_throughput_counts_what_was_answered(work: Work) -> None:
    rows = measure_throughput(work, ["plain", "ngram", "hf", "economize"], [1, 3], lambda doing: None)
    assert [(row["system"], row["batch_size"]) for row in rows][:3] == [("plain", 1), ("plain", 3), ("ngram", 1)]
    assert all(row["output_tokens"] == 24 and row["num_requests"] == 4 for row in rows[:6])
    assert [row.get("speedup") is not None for row in rows] == [False] * 2 + [True] * 4 + [False] * 2
    one = rows[2]
    assert one["output_tokens_per_second"] == pytest.approx(24 / one["seconds"])
    assert one["speedup"] == pytest.approx(one["output_tokens_per_second"] / rows[0]["output_tokens_per_second"])
    assert all("ModuleNotFoundError" in row["error"] for row in rows[6:])


def test_an_llm_that_measures_knows_no_prompt_from_before(work: Work) -> None:
    llm = make_llm(work.loaded, "ngram", work.room(2))
    assert not llm.engine.config.enable_prefix_caching
    assert llm.engine.limits.num_blocks * 16 >= 2 * work.room(2).max_len


def test_a_kernel_is_timed_against_what_the_device_does_at_best() -> None:
    assert Roofline(10.0, 100.0).seconds(20, 100) == 2.0 and Roofline(10.0, 100.0).seconds(20, 400) == 4.0
    assert Timed("o", 1, 0, 4.0, 1.0).as_json()["share_of_roofline"] == 0.25
    calls: list[int] = []
    assert timed([lambda: calls.append(1), lambda: calls.append(2)], CPU, repeats=3) > 0
    assert calls == [1, 2] * 4  # the first run is a warm-up
    best = measure_roofline(CPU, torch.float32)
    assert best.bytes_per_second > 1e8 and best.flops_per_second > 1e8


def test_all_ops_of_a_layer_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specdec.bench.kernels._MOST_COPIES", 3)
    target = make_target(tiny_llama(dtype=torch.float32))
    assert isinstance(target, Decoder)
    found = list(measure_kernels(target.weights, TORCH_OPS, Roofline(1e10, 1e11), [1, 5], [40]))
    assert [(t.op, t.rows, t.context) for t in found if t.rows == 5] == [
        *((name, 5, 0) for name in ("qkv", "o", "down", "head", "gate_up")), ("attention", 5, 40)
    ]  # fmt: skip
    assert len(found) == 12 and all(t.microseconds > 0 for t in found)
    gate_up = next(t for t in found if t.op == "gate_up" and t.rows == 5)
    num_bytes = 4 * (96 * 32 + 5 * 32 + 5 * 48)  # tiny_llama: hidden 32, intermediate 48
    assert gate_up.roofline_microseconds == pytest.approx(1e6 * max(num_bytes / 1e10, 2 * 5 * 96 * 32 / 1e11))


def test_each_mechanism_is_measured_on_and_off_or_says_why_not(work: Work, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mechanisms, "REPEATS", 1)
    rows = dict(zip(ROWS, measure_rows(Bench(work, 2, "medusa"), (), lambda doing: None), strict=True))
    always = {"continuous-batching", "packed-prefill", "paged-pool", "fused-operators", "ngram-drafts"}
    for name in always | {"prefix-reuse", "overlapped-tokenizing", "quantized-pages"}:
        assert rows[name].on and rows[name].off and rows[name].ratio == rows[name].on / rows[name].off
    for name, why in (
        ("captured-steps", "not by Triton kernels"),
        ("device-sampling", "torch ops"),
        ("draft-heads", "no heads come with the package"),
    ):
        assert rows[name].ratio is None and rows[name].on is None and why in rows[name].how
        assert rows[name].how.startswith("not available: ")


def test_prompts_of_all_parts_run_together(work: Work) -> None:
    assert Bench(work, 2, "").together == [work.prompts[0], work.prompts[2]]
    assert Bench(work, 9, "").together == work.prompts
    lengths = [p.max_new_tokens for p in Bench(work, 2, "").lengths()]
    assert len(set(lengths)) > 1 and max(lengths) <= 6 and len(lengths) == 4


def test_both_sides_run_by_turns_after_a_warm_up() -> None:
    order: list[str] = []

    def side(name: str, values: list[float]) -> Callable[[], float]:
        def run() -> float:
            order.append(name)
            return values.pop(0)

        return run

    row = compare("x", "tok/s", "how", side("on", [9, 1, 2, 6]), side("off", [9, 4, 4, 4]))
    assert row == Row("x", 2, 4, "tok/s", "how") and row.ratio == 0.5
    assert order == ["on", "off"] * 4


def test_padded_and_packed_prompts_are_counted_alike(work: Work) -> None:
    llm = LLM(work.loaded.model, "none", tokenizer=work.loaded.tokenizer)
    seen: list[Any] = []
    original = llm.generate
    llm.generate = lambda prompts, params: seen.append((prompts, params)) or original(prompts, params)  # type: ignore
    assert mechanisms.prompt_tokens_per_second(llm, work.prompts, 100) > 0
    assert seen == [(work.prompts, SamplingParams(max_new_tokens=1))]


@pytest.mark.parametrize(
    "command, args, shown",
    [
        ("latency", ["--drafter", "ngram"], "ttft"),
        ("throughput", ["--batch-sizes", "2", "--peer", "hf", "--peer", "vllm"], "requests/s"),
        ("kernels", ["--rows", "2", "--contexts", "32"], "roofline"),
        ("seeds", ["--only", "packed-prefill", "--only", "captured-steps"], "mechanism"),
    ],
)
def test_the_commands_print_a_table_and_write_a_file(
    bench: Callable[..., Result], command: str, args: list[str], shown: str, tmp_path: Path
) -> None:
    out = tmp_path / "out.json"
    result = bench(command, *args, "--json", str(out))
    assert result.exit_code == 0, result.output
    assert shown in result.stdout
    value = json.loads(out.read_text())
    assert value["format"] == f"specdec-{command}" and value["rows"] and value["environment"]["dtype"] == "float32"
    assert command != "throughput" or "vllm, batch 2: not measured: ModuleNotFoundError" in result.stderr
    assert command != "seeds" or "captured steps: not available: the model runs by torch ops" in result.stdout


@pytest.mark.parametrize(
    "command, args, message",
    [
        ("latency", ["--drafter", "hf"], "unknown drafter 'hf'"),
        ("latency", ["--drafter", "ngram", "--drafter", "ngram"], "given twice"),
        ("throughput", ["--peer", "vlm"], "did you mean 'vllm'"),
        ("throughput", ["--batch-sizes", "0"], "--batch-sizes takes whole numbers"),
        ("kernels", ["--rows", "x"], "--rows takes whole numbers"),
        ("seeds", ["--only", "luck"], "there is no row 'luck'"),
    ],
)
def test_bad_input_exits_with_2(bench: Callable[..., Result], command: str, args: list[str], message: str) -> None:
    result = bench(command, *args)
    assert (result.exit_code, message in result.stderr) == (2, True), result.output


def test_a_drafter_that_fails_fails_the_command(bench: Callable[..., Result], tmp_path: Path) -> None:
    result = bench("throughput", "--drafter", f"medusa:{tmp_path}", "--batch-sizes", "1")
    assert result.exit_code == 1 and "not measured: CheckpointError" in result.stderr and "plain" in result.stdout


def test_peers_are_imported_when_they_are_asked_for() -> None:
    for name in ("hf", "hf-compiled", "hf-prompt-lookup", "hf-assisted", "vllm", "economize", "flashspec"):
        assert callable(PEERS[name]())
