"""The documents are true: the file map is complete and README's Python runs."""

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def test_the_file_map_names_every_file_once() -> None:
    mapped = re.findall(r"^\| [\d–] \| `([^`]+)` \|", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE)
    found = []
    for folder in ("specdec", "kernels", "cache", "verifier", "drafters", "training", "benchmarks", "tests"):
        for path in (ROOT / folder).rglob("*.py"):
            name = str(path.relative_to(ROOT))
            linked = folder == "specdec" and (ROOT / folder / path.relative_to(ROOT / folder).parts[0]).is_symlink()
            if not linked and not name.startswith("tests/test_") and name != "tests/__init__.py":
                found.append(name)
    assert sorted(mapped) == sorted([*found, "tests/test_*.py"])


@pytest.mark.model
def test_readme_python_runs(capsys: pytest.CaptureFixture[str], real_model_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert blocks
    for block in blocks:
        exec(compile(block, "README.md", "exec"), {})
    assert len(capsys.readouterr().out) > 40


def demo_table() -> str:
    """README's table, from the committed result of the demo."""
    lines = ["| prompt | tokens | = HF | HF tok/s | plain | speculative | × | τ |", "|---|---|---|---|---|---|---|---|"]
    for r in json.loads((ROOT / "benchmarks/results/demo_cpu.json").read_text())["rows"]:
        speeds = " | ".join(f"{r[key]:.1f}" for key in ("hf", "plain", "speculative"))
        same = "yes" if r["identical"] else "no"
        ratio, tau = r["speculative"] / r["hf"], r["mean_acceptance_length"]
        lines.append(f"| {r['prompt']} | {r['num_tokens']} | {same} | {speeds} | {ratio:.2f} | {tau:.2f} |")
    return "\n".join(lines)


def test_the_table_in_the_readme_is_the_committed_result() -> None:
    assert demo_table() in (ROOT / "README.md").read_text()


@pytest.mark.parametrize("file", ["cache_quality.json", "cache_quality_gemma.json"])
def test_the_readme_shows_the_committed_cache_quality(file: str) -> None:
    (model,) = json.loads((ROOT / "benchmarks/results" / file).read_text())["models"]
    groups = {"int8": 64, "fp8": model["head_dim"], "int4": 64}
    change = {(row["kv_cache_dtype"], row["group"]): row["change_percent"] for row in model["rows"]}
    shown = [f"{change[name, group]:+.2f}% with {name}" for name, group in groups.items()]
    assert f"{shown[0]}, {shown[1]} and {shown[2]}" in " ".join((ROOT / "README.md").read_text().split())


def throughput_row(model: str, file: str) -> str:
    """The README's line of a model's speeds on a GPU."""
    rows = json.loads((ROOT / "benchmarks/results" / file).read_text())["rows"]
    speeds = {row["batch"]: row["tok_s"] for row in rows if row["deterministic"]}
    return f"| {model} | " + " | ".join(f"{speeds[batch]:,.0f}" for batch in (1, 8, 64)) + " |"


def test_the_readme_shows_the_committed_throughput() -> None:
    readme = (ROOT / "README.md").read_text()
    assert throughput_row("SmolLM2-135M-Instruct", "throughput_smollm2_h100.json") in readme
    assert throughput_row("Llama-3-8B's shape, random weights", "throughput_8b_h100.json") in readme


def test_the_readme_shows_the_committed_gain_of_the_drop_in() -> None:
    rows = json.loads((ROOT / "benchmarks/results/dropin_cpu.json").read_text())["rows"]
    gains = sorted(row["speedup"] for row in rows)
    assert all(row["identical"] for row in rows)
    assert f"{gains[0]:.2f} to {gains[-1]:.2f} times as fast" in (ROOT / "README.md").read_text()
