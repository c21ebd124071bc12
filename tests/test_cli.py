"""The command line over a tiny model's folder: outputs, JSON, exit codes."""

import json
import shlex
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import pytest
import torch
from click.testing import CliRunner, Result

from specdec import LLM, SamplingParams, __version__
from specdec.cache.pages import KVLayout
from specdec.cli.demo_prompts import PROMPTS
from specdec.cli.main import main
from specdec.cli.options import given_command
from specdec.engine.capturable import EAGER_PARAMETERS
from specdec.engine.cost import CostTable
from specdec.errors import DownloadError, OutOfBlocks
from specdec.kernels.formats import FORMATS
from specdec.kernels.ops import triton_ops
from specdec.kernels.prepack import can_prepack
from specdec.models.decoder import Decoder
from specdec.outputs import Completion

Invoke = Callable[..., Result]

PREPACKED = can_prepack(torch.device("cpu"), torch.float32)


@pytest.fixture
def invoke(folder: Path) -> Invoke:
    def run(*args: str, **kwargs: str | bytes) -> Result:
        model = ["--model", str(folder)] if args[0] not in ("pull", "--version", "--help") else []
        if args[0] in ("generate", "chat", "demo", "tune") and "--device" not in args:
            model += ["--device", "cpu"]  # also on a machine with a GPU: what is compared was made on a CPU
        return CliRunner().invoke(main, [*args, *model], **kwargs)  # type: ignore[arg-type]

    return run


@pytest.fixture(scope="module")
def answers(folder: Path) -> list[str]:
    completions = LLM(folder, drafter="none", device="cpu").generate(
        ["hello", "world"], SamplingParams(max_new_tokens=9)
    )
    return [c.text for c in completions]


def test_generate_prints_one_text_a_prompt_and_a_report(invoke: Invoke, answers: list[str]) -> None:
    result = invoke("generate", "hello", "world", "--max-new-tokens", "9")
    assert result.exit_code == 0
    assert result.stdout == "".join(f"{text}\n" for text in answers)
    assert "9 tokens in" in result.stderr and "τ" in result.stderr


def test_generate_json_is_one_object_a_prompt(invoke: Invoke, answers: list[str]) -> None:
    result = invoke("generate", "hello", "world", "--max-new-tokens", "9", "--json", "--drafter", "ngram")
    objects = [json.loads(line) for line in result.stdout.splitlines()]
    assert [o["text"] for o in objects] == answers
    assert [o["prompt"] for o in objects] == ["hello", "world"]
    for o in objects:
        assert (len(o["token_ids"]), len(o["proposers"]), o["finish_reason"]) == (9, 9, "length")
        assert o["stats"]["mean_acceptance_length"] == 9 / o["stats"]["num_forwards"]


def test_generate_streams_and_reads_standard_input(invoke: Invoke, answers: list[str]) -> None:
    result = invoke("generate", "-", "--stream", "--max-new-tokens", "9", input="hello")
    assert result.stdout == answers[0] + "\n"


def test_generate_sampling_is_repeatable(invoke: Invoke, answers: list[str]) -> None:
    args = ("generate", "hello", "--max-new-tokens", "9", "--temperature", "1.5", "--top-p", "0.9", "--seed", "3")
    first, second = invoke(*args).stdout, invoke(*args, "--drafter", "none").stdout
    assert first == second != answers[0] + "\n"


def test_generate_chat_wraps_the_prompt(invoke: Invoke, folder: Path) -> None:
    (want,) = LLM(folder, device="cpu").chat([{"role": "user", "content": "hi"}], SamplingParams(max_new_tokens=5))
    assert invoke("generate", "hi", "--chat", "--max-new-tokens", "5").stdout == want.text + "\n"


def test_chat_keeps_the_conversation(invoke: Invoke, folder: Path) -> None:
    result = invoke("chat", "--system", "", "--max-new-tokens", "5", input="hi\nagain\n\n")
    assert result.exit_code == 0, result.output
    llm, params = LLM(folder, device="cpu"), SamplingParams(max_new_tokens=5)
    (first,) = llm.chat([{"role": "user", "content": "hi"}], params)
    history = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": first.text}]
    (second,) = llm.chat([*history, {"role": "user", "content": "again"}], params)
    assert first.text in result.stdout and second.text in result.stdout
    assert invoke("chat", input="").exit_code == 0


def test_info_names_versions_device_and_reasons(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    facts = json.loads(invoke("info", "--json").stdout)
    assert facts["specdec"] == __version__ and facts["torch"] == torch.__version__
    assert "float32" in facts["dtype"] and "ngram" in facts["drafters"] and "llama" in facts["model"]
    assert "ngram" in invoke("info").stdout


def test_info_says_what_would_be_captured(invoke: Invoke, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SPECDEC_CACHE", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    facts = json.loads(invoke("info", "--json").stdout)
    assert facts["kernels"].startswith("torch: ") and facts["kernels"].endswith("need a GPU")
    assert facts["steps"].startswith("eager: ") and str(tmp_path / "costs") in facts["cost table"]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "H100")
    monkeypatch.setattr("specdec.kernels.gpu.launch.on_hopper", lambda device: True)
    facts = json.loads(invoke("info", "--json").stdout)
    assert facts["device"] == "cuda (H100)" and facts["steps"].startswith("captured")
    assert facts["kernels"] == "triton: a token's bits don't depend on its batch"
    assert all(name in facts["eager"] for name in EAGER_PARAMETERS) and "rule typical" in facts["eager"]
    assert (
        "drafters none, ngram, medusa, hydra, recurrent, shipped, ngram+shipped; rule coupled" in facts["captured"]
        and "llama" in facts["captured"]
    )
    assert "drafters draft_model, early_exit, ngram+draft_model;" in facts["eager"]
    facts = json.loads(invoke("info", "--json", "--no-deterministic").stdout)
    assert facts["kernels"].startswith("triton, not deterministic: ") and "--no-deterministic" in facts["cost table"]
    facts = json.loads(invoke("info", "--json", "--dtype", "float64").stdout)
    assert "need one of float32, float16, bfloat16" in facts["kernels"] and facts["steps"].startswith("eager: ")
    for room, what in ((99 << 10, "float16 or bfloat16 on this GPU"), (227 << 10, "don't depend on its batch")):
        monkeypatch.setattr("specdec.kernels.gpu.launch.shared_memory", lambda device, room=room: room)
        assert what in json.loads(invoke("info", "--json", "--dtype", "float32").stdout)["kernels"]
    assert json.loads(invoke("info", "--json", "--device", "cpu").stdout)["device"] == "cpu (as asked for)"


def test_info_plans_the_memory(invoke: Invoke) -> None:
    plan = ("info", "--json", "--plan", "--device", "cpu", "--kv-cache-dtype", "int8", "--max-model-len", "60")
    facts = json.loads(invoke(*plan, "--kv-cache-memory", "4MiB").stdout)
    assert facts["bytes a token"] == "120 (int8, 8 values a scale)"  # 3 layers, keys and values, 2 heads of 8 + 2 bytes
    assert facts["kv cache"] == "4.00 MiB: 2,184 blocks of 16 tokens"
    assert facts["fits"] == "34,944 tokens: 546 requests of 60; max_num_seqs lets 16 run at once"
    assert facts["graphs"].startswith("none: ") and "29,408 parameters" in facts["weights"]
    assert facts["weights"].endswith(", and their matrices once more, prepacked") is PREPACKED
    plain = json.loads(invoke(*plan, "--kv-cache-memory", "4MiB", "--no-prepack").stdout)
    assert plain["weights"].endswith(" parameters")
    refused = invoke(*plan, "--kv-cache-memory", "5KiB")
    assert refused.exit_code == 2 and "at least 4 blocks (7.50 KiB) or a max_model_len of at most 32" in refused.output


def test_info_checks_what_formats_do_to_the_model(invoke: Invoke) -> None:
    facts = json.loads(invoke("info", "--json", "--check-cache", "--device", "cpu").stdout)
    assert facts["int8 cache"].startswith("int8 g8: KL ") and "unchanged over 256 tokens" in facts["int8 cache"]
    assert facts["int4 cache"].startswith("int4 needs a head_dim that one of 32, 64, 128 divides")


def test_generate_takes_quantized_pages(invoke: Invoke) -> None:
    result = invoke("generate", "hello", "--max-new-tokens", "9", "--kv-cache-dtype", "int8", "--kv-group-size", "8")
    assert result.exit_code == 0, result.output
    assert "kv_group_size" in invoke("generate", "hello", "--kv-group-size", "8").output


def test_tune_measures_once_and_info_names_the_file(
    invoke: Invoke, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPECDEC_CACHE", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "none: run `specdec tune`" in json.loads(invoke("info", "--json").stdout)["cost table"]
    args = ("tune", "--max-seqs", "2", "--contexts", "64,16", "--repeats", "1")
    result = invoke(*args, "--json")
    assert result.exit_code == 0, result.output
    table = json.loads(result.stdout)
    assert (table["num_seqs"], table["contexts"], table["num_nodes"][-1]) == ([1, 2], [16, 64], 64)
    assert "--contexts=64,16" in table["command"] and table["key"]["dtype"] == "float32" + "-prepacked" * PREPACKED
    assert [str(path) for path in (tmp_path / "costs").iterdir()] == [table["file"]]
    fact = json.loads(invoke("info", "--json").stdout)["cost table"]
    assert fact == f"{table['file']}, measured {table['measured']}"
    llm = LLM(folder, device="cpu")
    assert llm.engine.node_budget.table is not None
    assert llm.engine.node_budget.table.measured == table["measured"]
    shown = invoke(*args)
    assert "measuring eager steps, because the model runs by torch ops" in shown.stdout
    assert (
        "context" in shown.stdout and shown.stdout.count("×1.00") >= 4 and f"written to {table['file']}" in shown.stdout
    )
    other = json.loads(invoke(*args, "--no-deterministic", "--json").stdout)
    assert other["key"] == table["key"] | {"deterministic": False} and other["file"] != table["file"]
    assert "--no-deterministic" in other["command"] and "--deterministic" in table["command"]
    llm = LLM(folder, device="cpu", deterministic=False)
    assert llm.engine.node_budget.table is not None and not llm.engine.node_budget.table.key.deterministic
    assert table["file"] in json.loads(invoke("info", "--json").stdout)["cost table"]
    assert other["file"] in json.loads(invoke("info", "--json", "--no-deterministic").stdout)["cost table"]
    asked = json.loads(invoke("info", "--json", "--prepack").stdout)["cost table"]
    named = table["file"] if PREPACKED else "none: run `specdec tune --prepack`"  # measured anew by the second `tune`
    assert asked.startswith(named)
    missing = json.loads(invoke("info", "--json", "--no-prepack").stdout)["cost table"]
    assert missing.startswith("none: run `specdec tune --no-prepack`") is PREPACKED
    plain = json.loads(invoke(*args, "--no-prepack", "--json").stdout)
    assert plain["key"]["dtype"] == "float32" and (plain["file"] != table["file"]) is PREPACKED
    assert plain["file"] in json.loads(invoke("info", "--json", "--no-prepack").stdout)["cost table"]
    assert table["file"] in json.loads(invoke("info", "--json").stdout)["cost table"]
    quantized = ("--kv-cache-dtype", "int8", "--kv-group-size", "8")
    missing = json.loads(invoke("info", "--json", *quantized).stdout)["cost table"]
    assert missing.startswith("none: run `specdec tune --kv-cache-dtype int8 --kv-group-size 8`")
    assert json.loads(invoke(*args, *quantized, "--json").stdout)["key"]["kv_cache"] == "int8-g8"
    assert "kv-int8-g8" in json.loads(invoke("info", "--json", *quantized).stdout)["cost table"]
    Path(table["file"]).write_text("{")
    assert "run `specdec tune` again" in json.loads(invoke("info", "--json").stdout)["cost table"]
    result = invoke("generate", "hello")
    assert (result.exit_code, "run `specdec tune` again" in result.stderr) == (2, True)


def test_tune_measures_captured_steps_where_there_are_any(monkeypatch: pytest.MonkeyPatch, invoke: Invoke) -> None:
    made: list[Decoder] = []
    layouts: list[KVLayout] = []

    class Fake:
        def __init__(self, model: Decoder, grid: object, layout: KVLayout) -> None:
            made.append(model)
            layouts.append(layout)

        def __call__(self, num_seqs: int, num_nodes: int, context: int) -> float:
            return 0.5

    monkeypatch.setattr(
        "specdec.models.load.choose_ops", lambda device, dtype, deterministic: triton_ops(deterministic)
    )
    monkeypatch.setattr("specdec.engine.measure.CapturedStep", Fake)
    monkeypatch.setattr("specdec.engine.cost.save_table", lambda table: Path("nowhere"))
    result = invoke("tune", "--no-deterministic")
    assert result.exit_code == 0 and "measuring captured steps" in result.stdout
    assert made[0].ops.name == "triton, not deterministic" and layouts[0].format is None
    saved: list[CostTable] = []
    monkeypatch.setattr("specdec.engine.cost.save_table", lambda table: saved.append(table) or Path("nowhere"))
    assert invoke("tune", "--kv-cache-dtype", "int8", "--kv-group-size", "8").exit_code == 0
    assert (layouts[1].format, saved[0].key.kv_cache) == (
        FORMATS["int8"].of_head_dim(layouts[1].head_dim, 8),
        "int8-g8",
    )


def test_tune_that_does_not_fit_names_the_fix(monkeypatch: pytest.MonkeyPatch, invoke: Invoke) -> None:
    def fail(*args: object) -> None:
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr("specdec.engine.measure.EngineStep", fail)
    result = invoke("tune")
    assert (result.exit_code, "give smaller --max-seqs or --contexts" in result.stderr) == (2, True)


def test_pull_prints_the_folder(monkeypatch: pytest.MonkeyPatch, invoke: Invoke, tmp_path: Path) -> None:
    monkeypatch.setattr("specdec.hub.fetch.pull", lambda name: tmp_path / name)
    assert invoke("pull", "smollm2-135m").stdout == f"{tmp_path / 'smollm2-135m'}\n"


def test_demo_shows_one_table_and_writes_json(invoke: Invoke, tmp_path: Path) -> None:
    path = tmp_path / "demo.json"
    result = invoke("demo", "--max-new-tokens", "8", "--json", str(path))
    assert result.exit_code == 0, result.output
    assert "= HF" in result.stdout and "guessed in green" in result.stdout
    assert all(f"{name} " in result.stdout for name in PROMPTS)
    rows = json.loads(path.read_text())["rows"]
    assert [row["prompt"] for row in rows] == list(PROMPTS)
    assert all(row["identical"] or row["margin"] < 1e-3 for row in rows)
    assert all(row["hf"] > 0 and row["plain"] > 0 and row["speculative"] > 0 for row in rows)


def test_a_demo_whose_drafts_change_tokens_fails(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    generate = LLM.generate

    def wrong(self: LLM, *args: Any) -> list[Completion]:
        completions = generate(self, *args)
        if self.engine.drafter.name != "none":
            completions[0].token_ids[0] += 1
        return completions

    monkeypatch.setattr(LLM, "generate", wrong)
    result = invoke("demo", "--max-new-tokens", "4")
    assert (result.exit_code, "please report it" in result.stderr) == (1, True)
    assert invoke("demo", "--max-new-tokens", "4", "--dtype", "bfloat16").exit_code == 0, (
        "bits depend on the rows there"
    )


@pytest.mark.parametrize("command", [["demo"], ["bench", "latency"]])
def test_a_file_that_cannot_be_written_is_told_before_the_work(invoke: Invoke, command: list[str]) -> None:
    result = invoke(*command, "--json", "/nowhere/at/all.json")
    assert (result.exit_code, "the folder '/nowhere/at' doesn't exist" in result.stderr) == (2, True)


@pytest.mark.parametrize("command", [["generate", "-"], ["chat"]])
def test_input_that_is_no_text_is_named(invoke: Invoke, command: list[str]) -> None:
    result = invoke(*command, input=b"caf\xe9\n")
    assert (result.exit_code, "standard input isn't text in utf-8" in result.stderr) == (2, True)


@pytest.mark.parametrize(
    "args, message",
    [
        (["generate", ""], "the prompt is empty"),
        (["generate", "x", "--temperature", "-1"], "temperature must be a number at least 0"),
        (["generate", "x", "--max-new-tokens", "0"], "max_new_tokens must be a whole number, at least 1"),
        (["generate", "x", "--drafter", "nrgam"], "did you mean 'ngram'"),
        (["generate", "x", "--drafter", "medusa:/nowhere"], "/nowhere"),
        (["generate", "x" * 1200], "the context limit is 1024"),
        (["generate", "x", "--json", "--stream"], "exclude each other"),
        (["generate"], "Missing argument"),
        (["generate", "x", "--nonsense"], "No such option"),
        (["generate", "x", "--device", "gpu"], "device 'gpu' is unknown"),
        (["pull", "gpt-9"], "gpt-9"),
        (["tune", "--contexts", "1,x"], "--contexts takes whole numbers with commas, such as 128,1024, not '1,x'"),
        (["tune", "--contexts", "1000"], "context 1000 is out of bounds: give 1 to 958"),
        (["tune", "--max-seqs", "0"], "--max-seqs"),
    ],
)
def test_bad_input_exits_with_2_and_one_message(args: list[str], message: str, invoke: Invoke) -> None:
    result = invoke(*args)
    assert result.exit_code == 2
    assert message in result.stderr
    assert "Traceback" not in result.output and result.stdout == ""


def test_an_unknown_model_exits_with_2() -> None:
    result = CliRunner().invoke(main, ["generate", "x", "--model", "/no/such/model"])
    assert (result.exit_code, "/no/such/model" in result.stderr) == (2, True)


@pytest.mark.parametrize("error", [DownloadError("the disk is full"), OutOfBlocks("too small")])
def test_other_failures_exit_with_1(error: Exception, monkeypatch: pytest.MonkeyPatch, invoke: Invoke) -> None:
    def fail(name: str) -> Path:
        raise error

    monkeypatch.setattr("specdec.hub.fetch.pull", fail)
    result = invoke("pull", "smollm2-135m")
    assert (result.exit_code, result.stderr) == (1, f"Error: {error}\n")


def test_version_and_help() -> None:
    assert __version__ in CliRunner().invoke(main, ["--version"]).stdout
    text = CliRunner().invoke(main, ["--help"]).stdout
    assert all(name in text for name in ("generate", "chat", "pull", "info", "tune", "demo"))
    assert isinstance(main, click.Group)


def commands(group: click.Group, path: str = "specdec") -> Iterator[tuple[str, click.Command]]:
    """All commands below a group, by what is typed."""
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from commands(command, f"{path} {name}")
        else:
            yield f"{path} {name}", command


@pytest.mark.parametrize("path", dict(commands(main)))
def test_help_names_each_default_once(path: str) -> None:
    command = dict(commands(main))[path]
    context = click.Context(command, show_default=True)
    for option in command.params:
        shown = option.get_help_record(context)
        assert shown is None or shown[1].count("[default: ") <= 1, shown


def test_an_address_that_is_taken_is_told_before_the_model_is_opened() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = CliRunner().invoke(main, ["serve", "--model", "nowhere", "--port", str(port)])
    assert result.exit_code == 2 and f"can't listen on 127.0.0.1:{port}: Address already in use" in result.stderr
    result = CliRunner().invoke(main, ["serve", "--model", "nowhere", "--host", "192.0.2.1"])
    assert result.exit_code == 2 and "can't listen on 192.0.2.1:8000" in result.stderr
    result = CliRunner().invoke(main, ["serve", "--model", "nowhere", "--host", "localhost", "--port", "0"])
    assert result.exit_code != 0 and "nowhere" in result.stderr and "listen" not in result.stderr


def test_the_server_names_the_packages_that_it_lacks() -> None:
    code = "import sys; sys.modules['fastapi'] = None; from specdec.cli.main import main; main(['serve'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "the server needs fastapi" in done.stderr
    assert "pip install fastapi uvicorn prometheus_client" in done.stderr and "Traceback" not in done.stderr


def test_a_command_is_told_as_a_shell_takes_it_back() -> None:
    seen: list[dict[str, object]] = []

    @click.command()
    @click.argument("folders", nargs=-1)
    @click.option("--temperature", multiple=True, type=float)
    @click.option("--openings/--no-openings", default=True)
    @click.option("--resume", is_flag=True)
    @click.option("--out", default="heads")
    @click.option("--steps", default=3)
    def probe(**options: object) -> None:
        seen.append(options)
        click.echo(given_command())

    given = ["a b", "--temperature", "0", "--temperature", "0.7", "--no-openings", "--resume", "--out", "", "--", "-x"]
    told = CliRunner().invoke(probe, given).output
    again = CliRunner().invoke(probe, shlex.split(told)[1:]).output
    assert again == told and seen[0] == seen[1], told
    assert "--steps" not in told, "a default isn't told"
