"""`specdec train medusa` over a tiny model's folder: results, refusals, exit codes."""

import importlib.util
import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from specdec import LLM, SamplingParams
from specdec.cli.examples import _kept
from specdec.cli.main import main
from specdec.drafters.heads import load_heads
from specdec.training import checkpoint


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "chats.jsonl"
    chats = [
        [
            {"role": "user", "content": f"count from {i}"},
            {"role": "assistant", "content": " ".join(map(str, range(i, i + 5)))},
        ]
        for i in range(12)
    ]
    path.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    return path


def train(folder: Path, data: Path, out: Path, *args: str) -> Result:
    sizes = ["--steps", "4", "--batch-tokens", "128", "--heads", "2", "--device", "cpu"]
    return CliRunner().invoke(
        main, ["train", "medusa", "--model", str(folder), "--data", str(data), "--out", str(out), *sizes, *args]
    )


def test_trains_resumes_and_drafts(folder: Path, data: Path, tmp_path: Path) -> None:
    out = tmp_path / "new" / "heads"
    result = train(folder, data, out, "--json", "--licence", "MIT")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert (
        found["peak_bytes"] > 1 << 20 and found["steps"] == 4 and found["out"] == str(out) and len(found["top1"]) == 2
    )
    assert "step 4" in result.stderr
    assert found["expected_tau"]["1"] == 1 <= found["expected_tau"]["2"]
    assert json.loads((out / "config.json").read_text())["tree"]
    card = (out / "README.md").read_text()
    assert f"specdec train medusa --model={folder}" in card and "the answers in chats.jsonl" in card
    assert "| 1 | " in card and "| licence | MIT |" in card and "4 steps of at most 128 tokens" in card
    prompts = ["count from 3", "hello"]
    params = SamplingParams(max_new_tokens=9)
    answers = [LLM(folder, d, device="cpu").generate(prompts, params) for d in ("none", str(out))]
    assert [c.token_ids for c in answers[0]] == [c.token_ids for c in answers[1]]
    again = train(folder, data, out)
    assert again.exit_code == 2 and "--resume" in again.output
    resumed = train(folder, data, out, "--resume")
    assert resumed.exit_code == 0 and f"heads in {out}" in resumed.stdout
    other = train(folder, data, out, "--resume", "--lr", "0.5")
    assert other.exit_code == 2 and "lr 0.001, not 0.5" in other.output


def test_heads_of_a_draft_vocabulary(folder: Path, data: Path, tmp_path: Path) -> None:
    for kind in ("medusa", "hydra"):
        out = tmp_path / kind
        result = train(folder, data, out, "--kind", kind, "--draft-vocab", "14", "--json")
        assert result.exit_code == 0, result.output
        heads = load_heads(out)
        assert heads.config.draft_vocab == 14 and heads.token_ids is not None
        assert {ord(digit) - 32 for digit in "0123456789"} <= set(heads.token_ids.tolist())
        params = SamplingParams(max_new_tokens=9)
        answers = [LLM(folder, d, device="cpu").generate("3 4 5", params) for d in ("none", str(out))]
        assert answers[0][0].token_ids == answers[1][0].token_ids
    too_many = train(folder, data, tmp_path / "other", "--draft-vocab", "97")
    assert too_many.exit_code == 2 and "draft_vocab must be a whole number from 1 to 96" in too_many.output


def invoke(folder: Path, out: Path, *args: str) -> Result:
    sizes = ["--steps", "3", "--batch-tokens", "128", "--heads", "2", "--device", "cpu", "--answer-tokens", "12"]
    return CliRunner().invoke(
        main, ["train", "medusa", "--model", str(folder), "--out", str(out), "--temperature", "1", *sizes, *args]
    )


@pytest.mark.parametrize("kind", ["hydra", "recurrent"])
def test_the_model_answers_and_heads_learn_from_it(folder: Path, data: Path, tmp_path: Path, kind: str) -> None:
    out = tmp_path / "heads"
    args = ["--data", str(data), "--self-distill", "--kind", kind, "--width", "3"]
    result = invoke(folder, out, *args)
    assert result.exit_code == 0, result.output
    assert "12 prompts, answered by the model itself" in result.stderr
    assert len((out / "answers.jsonl").read_text().splitlines()) == 12
    assert json.loads((out / "config.json").read_text())["kind"] == kind
    assert json.loads((out / "config.json").read_text())["width"] == 3
    answers = (out / "answers.jsonl").read_text()
    assert invoke(folder, out, *args, "--resume").exit_code == 0
    assert (out / "answers.jsonl").read_text() == answers, "answers were made twice"
    params = SamplingParams(max_new_tokens=9)
    texts = [LLM(folder, d, device="cpu").generate("count from 3", params)[0].token_ids for d in ("none", str(out))]
    assert texts[0] == texts[1]


def test_a_file_of_prompts_is_answered(folder: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"say {i}"}) + "\n" for i in range(6)))
    result = invoke(folder, tmp_path / "heads", "--prompts", str(prompts))
    assert result.exit_code == 0, result.output
    assert invoke(folder, tmp_path / "b", "--prompts", str(tmp_path / "none")).exit_code == 2


def test_own_prompts_texts_and_tasks_in_limited_time(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "heads"
    out.mkdir()  # so small a model writes no prompts
    (out / "prompts.jsonl").write_text("".join(json.dumps({"prompt": f"say {i}"}) + "\n" for i in range(4)))
    args = ["--prompts", "self", "--num-prompts", "20", "--tasks", "0.8", "--time-limit", "5", "--json"]
    result = invoke(folder, out, *args)
    assert result.exit_code == 0, result.output
    told = result.stderr
    assert "4 prompts, answered" in told and "4 prompts, answered" in told.split("answers: ")[1], "then the texts"
    assert "tasks could be made of the texts, not 12" in told
    assert json.loads(result.stdout)["steps"] == 3, "which ended before the time"
    answers = (out / "answers.jsonl").read_text()
    assert "for 80% of all tasks" in (out / "README.md").read_text() and answers.count('"content": "Write') >= 2
    again = invoke(folder, out, *args, "--resume")
    assert again.exit_code == 0 and (out / "answers.jsonl").read_text() == answers


def test_prompts_that_are_kept_are_taken_and_a_lack_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept = tmp_path / "prompts.jsonl"
    kept.write_text("".join(json.dumps({"prompt": f"say {i}"}) + "\n" for i in range(4)))
    assert len(_kept(kept, 3)) == 3 and not capsys.readouterr().err
    assert len(_kept(kept, 8)) == 4 and "prompts.jsonl holds 4 prompts, not 8" in capsys.readouterr().err


def test_time_that_ends_first(folder: Path, data: Path, tmp_path: Path) -> None:
    late = train(folder, data, tmp_path / "a", "--time-limit", "1e-6")
    assert late.exit_code == 2 and "--time-limit were over before the training; give more" in late.output
    none = train(folder, data, tmp_path / "a", "--time-limit", "0")
    assert none.exit_code == 2 and "time limit must be above 0" in none.output


def test_data_or_prompts_but_not_both(folder: Path, data: Path, tmp_path: Path) -> None:
    for args in ([], ["--data", str(data), "--prompts", "self"]):
        result = invoke(folder, tmp_path / "heads", *args)
        assert result.exit_code == 2 and "either --data or --prompts" in result.output
    assert not (tmp_path / "heads").exists()


def test_bad_input_has_code_2(folder: Path, data: Path, tmp_path: Path) -> None:
    assert train(folder, data, tmp_path / "a", "--steps", "0").exit_code == 2
    assert train(folder, data, tmp_path / "a", "--heads", "0").exit_code == 2
    assert train(folder, tmp_path / "none", tmp_path / "a").exit_code == 2
    assert not (tmp_path / "a" / "checkpoints").exists()
    if importlib.util.find_spec("bitsandbytes") is None:
        result = train(folder, data, tmp_path / "a", "--base-precision", "nf4")
        assert result.exit_code == 2 and "bitsandbytes" in result.output


def test_of_twenty_prompts_one_is_held_out_with_all_its_answers(folder: Path, tmp_path: Path) -> None:
    data = tmp_path / "several.jsonl"
    chats = [[("user", f"say {i % 4}"), ("assistant", "abcdefghijkl"[i // 4 :])] for i in range(40)]
    lines = [json.dumps({"messages": [{"role": role, "content": text} for role, text in chat]}) for chat in chats]
    data.write_text("\n".join(lines))
    assert train(folder, data, tmp_path / "out").exit_code == 0
    assert "30 examples" in (tmp_path / "out" / "README.md").read_text()


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--heads", "64", "num_heads must be"),
        ("--width", "3", "width is for heads with MLPs"),
        ("--draft-vocab", "97", "draft_vocab must be"),
        ("--dtype", "int8", "dtype 'int8' is unknown"),
        ("--temperature", "-1", "temperature must be"),
        ("--answer-tokens", "0", "max_new_tokens must be"),
        ("--num-prompts", "0", "--num-prompts"),
    ],
)
def test_what_is_out_of_bounds_is_said_before_anything_is_answered(
    option: str, value: str, message: str, folder: Path, data: Path, tmp_path: Path
) -> None:
    result = invoke(folder, tmp_path / "out", "--data", str(data), "--self-distill", option, value)
    assert result.exit_code == 2 and message in result.output, result.output
    assert not (tmp_path / "out" / "answers.jsonl").exists()


def test_a_large_seed_is_one(folder: Path, data: Path, tmp_path: Path) -> None:
    result = invoke(folder, tmp_path / "out", "--data", str(data), "--self-distill", "--seed", str(2**61))
    assert result.exit_code == 0, result.output


def test_a_folder_that_cannot_be_written_has_code_1(
    folder: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    result = train(folder, data, tmp_path / "file" / "out")
    assert result.exit_code == 1 and "can't be written" in result.output

    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "save_file", full)
    result = train(folder, data, tmp_path / "out")
    assert result.exit_code == 1 and "No space left" in result.output
    assert list((tmp_path / "out" / "checkpoints").iterdir()) == []
