"""The training loop: what changes and what doesn't, stop and resume, and that the heads are of use."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save

from benchmarks.train_memory import main as train_memory
from specdec import LLM, SamplingParams
from specdec.drafters.draft_heads import KindName
from specdec.drafters.heads import load_heads
from specdec.errors import CheckpointError, ConfigError, TrainingError
from specdec.params import SamplingParams as Params
from specdec.training import checkpoint, metrics
from specdec.training.data import Example
from specdec.training.hidden import FrozenBase, new_heads
from specdec.training.trainer import train
from tests.engines import make_engine, outputs
from tests.engines import run as run_engine
from tests.medusa import SIZE, target_of, walking_model
from tests.training import CONFIG, base, examples, run

ROOT = Path(__file__).parent.parent


class Stop(Exception):  # noqa: N818
    pass


def stop_at(step: int) -> Any:
    def report(line: Mapping[str, Any]) -> None:
        if line["step"] == step:
            raise Stop

    return report


def weights(out: Path) -> dict[str, torch.Tensor]:
    return load_file(out / "heads.safetensors")


def assert_same_bits(a: Path, b: Path) -> None:
    first, second = weights(a), weights(b)
    assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("straight")
    run(out)
    return out


def test_only_the_heads_change(tmp_path: Path) -> None:
    model = base()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    checksum = FrozenBase(model).checksum()
    heads = new_heads(model, 2, 2, "own")
    untrained = {name: tensor.clone() for name, tensor in heads.state_dict().items()}
    run(tmp_path, model=model, heads=heads)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert FrozenBase(model).checksum() == checksum
    assert not any(p.requires_grad or p.grad is not None for p in model.parameters())
    assert all(not torch.equal(tensor, untrained[name]) for name, tensor in heads.state_dict().items())


def test_the_checksum_sees_one_bit() -> None:
    model = base()
    before = FrozenBase(model).checksum()
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.view(torch.int32)[3, 5] ^= 1
    assert FrozenBase(model).checksum() != before


def test_a_base_that_changes_is_noticed(tmp_path: Path) -> None:
    model = base()

    def spoil(line: Mapping[str, Any]) -> None:
        model.model.norm.weight.add_(1)

    with pytest.raises(TrainingError, match="base changed"):
        run(tmp_path, model=model, report=spoil)
    assert not (tmp_path / "heads.safetensors").exists()


def test_a_run_leaves_heads_metrics_and_accuracies(straight: Path) -> None:
    lines = metrics.read_metrics(straight)
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert [line["step"] for line in lines if "top1" in line] == [3, 6]
    assert all(line["tokens_per_s"] > 0 and len(line["head_losses"]) == 2 for line in lines)
    peaks = [line["peak_bytes"] for line in lines]
    assert peaks == sorted(peaks) and peaks[0] > 1 << 20
    saved = json.loads((straight / "accuracies.json").read_text())
    assert saved["accuracies"] == lines[-1]["accuracies"] and [len(head) for head in saved["accuracies"]] == [10, 10]
    assert saved["step"] == 6 and lines[-1]["top5"][0] == pytest.approx(sum(saved["accuracies"][0][:5]))
    assert sorted(p.name for p in (straight / "checkpoints").iterdir()) == ["step-00000003", "step-00000006"]
    assert load_heads(straight).config == new_heads(base(), 2, 1, "shared").config
    assert (straight / "metrics.png").exists() == metrics.can_plot()


def test_stop_and_resume_ends_with_the_same_bits(straight: Path, tmp_path: Path) -> None:
    with pytest.raises(Stop):
        run(tmp_path, report=stop_at(4))
    torch.rand(3)  # the random state is the run's, not the process's
    run(tmp_path, resume=True)
    assert_same_bits(tmp_path, straight)
    kept = ("step", "loss", "head_losses", "lr", "accuracies")
    lines, others = ([{k: x.get(k) for k in kept} for x in metrics.read_metrics(p)] for p in (tmp_path, straight))
    assert lines == others  # step 4 stands there once
    result = run(tmp_path, resume=True)  # nothing left to do
    assert result.evaluation is not None and result.evaluation.accuracies == lines[-1]["accuracies"]
    assert_same_bits(tmp_path, straight)


def test_resume_without_a_checkpoint_starts_from_the_start(straight: Path, tmp_path: Path) -> None:
    with pytest.raises(Stop):
        run(tmp_path, report=stop_at(2))
    run(tmp_path, resume=True)
    assert_same_bits(tmp_path, straight)


@pytest.mark.parametrize("seed", [7, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(4))])
def test_killed_at_random_moments_ends_with_the_same_bits(seed: int, tmp_path: Path) -> None:
    out, whole = tmp_path / "killed", tmp_path / "whole"
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-W", "ignore", "-m", "tests.training", str(tmp_path), "5", str(seed)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and done.stdout == "5\n", done.stderr
    assert_same_bits(out, whole)
    assert [line["step"] for line in metrics.read_metrics(out)] == list(range(1, 41))
    assert sorted(p.name for p in (out / "checkpoints").iterdir()) == ["step-00000039", "step-00000040"]


def test_two_processes_learn_what_one_learns(straight: Path, tmp_path: Path) -> None:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    launch = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*launch, "-m", "tests.training", "--once", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    for name, tensor in weights(straight).items():
        torch.testing.assert_close(weights(tmp_path)[name], tensor, atol=1e-4, rtol=1e-3)
    lines, others = metrics.read_metrics(tmp_path), metrics.read_metrics(straight)
    for key in ("step", "loss", "lr"):  # each line is written once
        assert [line[key] for line in lines] == pytest.approx([line[key] for line in others], rel=1e-5)
    with pytest.raises(ConfigError, match="had 2 processes, not 1"):
        run(tmp_path, resume=True)


def test_a_run_ends_when_its_time_is_spent_and_goes_on_where_it_was(tmp_path: Path) -> None:
    config = replace(CONFIG, steps=1 << 40, save_every=2)
    shares = iter([0.1, 0.25, 0.5, 0.75])
    with pytest.raises(Stop):
        run(tmp_path, config, report=stop_at(3), spent=lambda: next(shares))
    left = iter([0.5, 1.0, 2.0])
    result = run(tmp_path, config, resume=True, spent=lambda: next(left))
    lines = metrics.read_metrics(tmp_path)
    assert result.steps == 4 and [line["step"] for line in lines] == [1, 2, 3, 4]
    spent = [0, 0.1, 0.25, 0.25 + 0.75 * 0.5]  # before each step; the second call had 0.75 of the time left to give
    assert [line["lr"] for line in lines] == [config.lr_at(step, share) for step, share in enumerate(spent)]
    assert "top1" in lines[-1] and json.loads((tmp_path / "accuracies.json").read_text())["step"] == 4
    bits = weights(tmp_path)
    again = run(tmp_path, config, resume=True, spent=lambda: 0.0)  # its time was spent
    assert again.steps == 4 and all(torch.equal(bits[name], tensor) for name, tensor in weights(tmp_path).items())


def test_another_run_is_not_resumed(straight: Path) -> None:
    for change, reason in (
        ({"config": replace(CONFIG, lr=0.5)}, "lr 0.01, not 0.5"),
        ({"data": examples(12, 5)}, "other examples"),
        ({"heads": new_heads(base(), 3, 1, "shared")}, "num_heads 2, not 3"),
    ):
        with pytest.raises(ConfigError, match=reason):
            run(straight, resume=True, **change)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="--resume"):
        run(straight)


def test_a_damaged_checkpoint_is_named(tmp_path: Path) -> None:
    run(tmp_path, replace(CONFIG, steps=1))
    file = tmp_path / "checkpoints/step-00000001/optimizer.safetensors"
    file.write_bytes(file.read_bytes()[:-9])
    with pytest.raises(CheckpointError, match="step-00000001"):
        run(tmp_path, replace(CONFIG, steps=1), resume=True)


@pytest.mark.parametrize(
    ("file", "data"),
    [
        ("checkpoints/step-00000001/state.json", b"\xff"),
        ("checkpoints/step-00000001/state.json", b"\x00"),
        ("checkpoints/step-00000001/state.json", b'{"step": "x"}'),
        ("checkpoints/step-00000001/optimizer.safetensors", save({"rng": torch.zeros(3)})),
        ("checkpoints/step-00000001/optimizer.safetensors", save({"rng": torch.get_rng_state(), "x": torch.zeros(3)})),
        ("metrics.jsonl", b"\xff\n"),
        ("metrics.jsonl", b"\x00\x00\n"),
        ("metrics.jsonl", b"[]\n"),
        ("metrics.jsonl", b'{"step": null}\n'),
    ],
)
def test_whatever_is_damaged_is_named(file: str, data: bytes, tmp_path: Path) -> None:
    run(tmp_path, replace(CONFIG, steps=1))
    (tmp_path / file).write_bytes(data)
    with pytest.raises(CheckpointError, match=f"{Path(file).parts[-2] if '/' in file else file}.*is damaged"):
        run(tmp_path, replace(CONFIG, steps=1), resume=True)


@pytest.mark.parametrize("kind", ["hydra", "recurrent"])
def test_a_seed_gives_the_same_heads_whatever_was_drawn_before(kind: KindName) -> None:
    model = base()
    one = new_heads(model, 2, 0, "shared", kind).state_dict()
    after = torch.rand(3)
    same, other = (new_heads(model, 2, 0, "shared", kind, seed=seed).state_dict() for seed in (0, 1))
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert any(not torch.equal(one[name], other[name]) for name in one)
    torch.manual_seed(5)
    before = torch.rand(3)
    torch.manual_seed(5)
    new_heads(model, 2, 0, "shared", kind)
    assert torch.equal(torch.rand(3), before) and not torch.equal(after, before), "the random state is the caller's"


def test_a_loss_that_is_not_finite_stops_with_its_batch_saved(tmp_path: Path) -> None:
    model = base()
    heads = new_heads(model, 2, 1, "shared")
    with torch.no_grad():
        heads.blocks[0].bias[1, 3] = torch.nan
    with pytest.raises(TrainingError, match="step 1 is nan.*nonfinite-step-1"):
        run(tmp_path, model=model, heads=heads)
    batch = load_file(tmp_path / "nonfinite-step-1.safetensors")
    assert batch["labels"].shape[1] == 2 and batch["input_ids"].shape == batch["attention_mask"].shape
    assert not heads.blocks[0].weight.any()  # the step wasn't taken
    assert not (tmp_path / "heads.safetensors").exists()


def test_a_full_disk_leaves_nothing_partial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(tensors: object, path: Path) -> None:
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "save_file", full)
    with pytest.raises(TrainingError, match="No space left"):
        run(tmp_path)
    assert list((tmp_path / "checkpoints").iterdir()) == []
    assert sorted(p.name for p in tmp_path.iterdir()) == ["checkpoints", "metrics.jsonl"]
    monkeypatch.undo()
    run(tmp_path, resume=True)


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(TrainingError, match="can't be written"):
        run(tmp_path / "file" / "out")


def test_trained_heads_draft_what_the_model_says(tmp_path: Path) -> None:
    model = walking_model()
    params = [Params(max_new_tokens=20)] * 16
    prompts = [[(7 * i) % SIZE, (11 * i + 3) % SIZE] for i in range(16)]
    answers = outputs(run_engine(make_engine(model), prompts, params))
    data = [
        Example((*prompt, *answer), (False,) * 2 + (True,) * 20)
        for prompt, answer in zip(prompts, answers, strict=True)
    ]
    # A head adds to a hidden state of one entry, 9.8, and must outdo it: that takes weights above 1.
    config = replace(CONFIG, steps=60, batch_tokens=200, lr=0.1, eval_every=1000, save_every=1000)
    heads = new_heads(model, 2, 1, "shared")
    untrained = train(
        model,
        new_heads(model, 2, 1, "shared"),
        data,
        data[:3],
        replace(config, steps=1, lr=1e-9),
        tmp_path / "untrained",
    ).evaluation
    trained = train(model, heads, data[3:], data[:3], config, tmp_path / "out", dtype=torch.bfloat16).evaluation
    assert trained is not None and untrained is not None
    assert trained.top(1)[0] > untrained.top(1)[0] + 0.5
    plain = LLM(model, "none").generate(prompts, SamplingParams(max_new_tokens=20))
    drafted = LLM(model, str(tmp_path / "out")).generate(prompts, SamplingParams(max_new_tokens=20))
    assert [c.token_ids for c in drafted] == [c.token_ids for c in plain] == answers
    assert min(c.stats.mean_acceptance_length for c in drafted) > 1.5
    assert load_heads(tmp_path / "out", target_of(model)).config.base_fingerprint
    assert weights(tmp_path / "out")["blocks.0.weight"].dtype == torch.bfloat16


def test_the_memory_benchmark_runs_at_a_tiny_shape(tmp_path: Path) -> None:
    path = tmp_path / "memory.json"
    shape = ["--hidden-size", "128", "--layers", "1", "--vocab-size", "60", "--heads", "2", "--device", "cpu"]
    sizes = ["--steps", "2", "--batch-tokens", "64", "--length", "16", "--json", str(path)]
    done = CliRunner().invoke(train_memory, [*shape, *sizes])
    assert done.exit_code == 0, done.output
    rows = json.loads(path.read_text())["rows"]
    assert [row["kind"] for row in rows] == ["medusa", "hydra"]
    assert all(row["tokens_a_step"] == 64 and row["peak_gb"] > row["base_gb"] for row in rows)
