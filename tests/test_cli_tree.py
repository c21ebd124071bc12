"""`specdec tree`: what it stores in the heads' folder, what it prints, and what it refuses."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result

from specdec import LLM
from specdec.build import cost_key
from specdec.cli.main import main
from specdec.drafters.heads import HeadsConfig, MedusaHeads, base_fingerprint, load_heads, save_heads
from specdec.drafters.medusa import MedusaDrafter
from specdec.engine.cost import save_table
from specdec.hub.load import load
from specdec.models.load import make_target
from tests.costs import KEY, make_table

Invoke = Callable[..., Result]


@pytest.fixture
def heads(folder: Path, tmp_path: Path) -> Path:
    """Untrained heads of the tiny model: each says what the base says next."""
    model = load(folder, dtype=torch.float32, device="cpu").model
    config = HeadsConfig(
        num_heads=3,
        num_layers=1,
        hidden_size=32,
        vocab_size=96,
        projection="shared",
        base_fingerprint=base_fingerprint(model),
    )
    save_heads(MedusaHeads(config), tmp_path / "heads")
    return tmp_path / "heads"


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "held.jsonl"
    turns = [("hi", "abcabcabcabcabc" * 4, "letters"), ("and now?", "so it goes " * 6, "songs")]
    lines = [([{"role": "user", "content": u}, {"role": "assistant", "content": a}], c) for u, a, c in turns]
    path.write_text("".join(json.dumps({"messages": m, "category": c}) + "\n" for m, c in lines))
    return path


@pytest.fixture
def invoke(folder: Path, heads: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Invoke:
    monkeypatch.setenv("SPECDEC_CACHE", str(tmp_path / "cache"))

    def run(*args: str | Path) -> Result:
        options = ["--heads", str(heads), "--model", str(folder), "--device", "cpu"]
        return CliRunner().invoke(main, ["tree", *options, *map(str, args)])

    return run


def facts_of(result: Result) -> dict[str, Any]:
    assert result.exit_code == 0, result.output
    facts: dict[str, Any] = json.loads(result.stdout)
    return facts


def test_a_tree_is_measured_checked_stored_and_used(invoke: Invoke, heads: Path, data: Path, folder: Path) -> None:
    facts = facts_of(invoke("--data", data, "--nodes", "24", "--check", "--json"))
    assert facts["nodes"] == 24 and len(facts["tree"]) == 23 and facts["cost_table"] is None
    assert list(facts["expected_tau"]) == ["1", "2", "4", "8", "16", "24", "32", "64"]
    assert list(facts["expected_tau"].values()) == sorted(facts["expected_tau"].values())
    assert facts["positions"] == 60 - 3 + 66 - 3 and len(facts["accuracies"]) == 3
    assert abs(facts["check"]["difference"]) < 0.01 and facts["check"]["num_tokens"] > 60
    by_category = facts["check"]["by_category"]
    card = (heads / "README.md").read_text()
    assert (
        all(f"| {c} | {by_category[c]:.2f} |" in card for c in ("letters", "songs")) and "24 nodes, on 2 held" in card
    )
    stored = load_heads(heads).config.tree
    assert stored is not None and [list(choice) for choice in stored] == facts["tree"]
    drafter = LLM(folder, str(heads), device="cpu").engine.drafter
    assert isinstance(drafter, MedusaDrafter) and drafter.choices == stored, "the whole tree, by default"


def test_default_size_and_what_is_printed(invoke: Invoke, heads: Path, data: Path) -> None:
    result = invoke("--data", data, "--check")
    assert result.exit_code == 0, result.output
    assert f"16 nodes, expected τ 1.{result.stdout.split('expected τ 1.')[1][:2]}; stored in {heads}" in result.stdout
    assert "so few positions" in result.stdout
    assert "120 held-out positions" in result.stdout and "τ predicted" in result.stdout and "←" in result.stdout


def test_the_size_is_what_the_cost_table_makes_fastest(
    invoke: Invoke, heads: Path, folder: Path, tmp_path: Path
) -> None:
    accuracies = tmp_path / "accuracies.json"
    accuracies.write_text(json.dumps([[0.8, 0.1], [0.7, 0.1], [0.6, 0.1]]))
    model = load(folder, dtype=torch.float32, device="cpu").model
    key = cost_key(model, prepacked=make_target(model, prepack=None).prepacked)

    def steps_at(dear: int) -> Path:
        return save_table(make_table(lambda s, n, c: 100.0 if n <= dear else 1e4, key=key), tmp_path / str(dear))

    facts = facts_of(invoke("--accuracies", accuracies, "--device-costs", steps_at(4), "--json"))
    assert facts["nodes"] == 4 and facts["tree"] == [[0], [0, 0], [0, 0, 0]] and facts["cost_table"]["device"]
    assert facts["expected_tau"]["4"] == pytest.approx(1 + 0.8 + 0.56 + 0.336)
    assert facts["tokens_per_second"]["4"] == pytest.approx(facts["expected_tau"]["4"] / 100, rel=0.01)
    assert (
        facts_of(invoke("--accuracies", accuracies, "--device-costs", steps_at(4), "--nodes", "3", "--json"))["nodes"]
        == 3
    )
    save_table(make_table(lambda s, n, c: 100.0 if n == 1 else 1e4, key=key))
    before = (heads / "config.json").read_bytes()
    result = invoke("--accuracies", accuracies)
    assert result.exit_code == 0 and "no tree was stored" in result.stdout, "auto finds what was measured"
    assert (heads / "config.json").read_bytes() == before
    again = tmp_path / "again.json"
    again.write_text(invoke("--accuracies", accuracies, "--json").stdout)
    assert facts_of(invoke("--accuracies", again, "--json"))["accuracies"] == json.loads(accuracies.read_text())


def test_what_is_refused(invoke: Invoke, heads: Path, data: Path, tmp_path: Path) -> None:
    bad, few, text = tmp_path / "bad.json", tmp_path / "few.json", tmp_path / "plain.txt"
    bad.write_text("[[2.0]]")
    few.write_text("[[0.5]]")
    text.write_text("just some text without any prompt")
    other = save_table(make_table(lambda s, n, c: 1.0, key=KEY), tmp_path)
    for args, message in (
        ((), "--data"),
        (("--data", data, "--accuracies", few), "--data"),
        (("--accuracies", few, "--check"), "--check"),
        (("--data", data, "--nodes", "65"), "65"),
        (("--data", tmp_path / "none.jsonl"), "none.jsonl"),
        (("--accuracies", tmp_path / "none.json"), "none.json"),
        (("--accuracies", bad), "chances from 0 to 1"),
        (("--accuracies", few), "1 heads"),
        (("--data", data, "--device-costs", other), "another model"),
        (("--data", data, "--device-costs", tmp_path / "none.json"), "none.json"),
        (("--data", text, "--check"), "no held-out text has a prompt"),
        (("--data", data, "--heads", tmp_path), "holds no heads.safetensors"),
    ):
        before = (heads / "config.json").read_bytes()
        result = invoke(*args)
        assert (result.exit_code, message in result.stderr) == (2, True), result.output
        assert (heads / "config.json").read_bytes() == before, "nothing was changed"


def test_a_disk_that_cannot_be_written_changes_nothing(
    invoke: Invoke, heads: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError("No space left on device")

    before = {path.name: path.read_bytes() for path in heads.iterdir()}
    monkeypatch.setattr("os.fsync", full)
    result = invoke("--data", data)
    assert result.exit_code == 2 and "No space left" in result.stderr
    assert {path.name: path.read_bytes() for path in heads.iterdir()} == before


def test_heads_of_another_base_are_refused(invoke: Invoke, heads: Path, data: Path) -> None:
    save_heads(MedusaHeads(replace(load_heads(heads).config, base_fingerprint="0" * 16)), heads)
    result = invoke("--data", data)
    assert result.exit_code == 2 and "base_fingerprint" in result.stderr
