"""Reports: the schema, the page, plots with the same bytes every time."""

import json
import re
import subprocess
import sys
from dataclasses import asdict, replace
from importlib import resources
from pathlib import Path
from xml.etree import ElementTree

import jsonschema
import pytest
from click.testing import CliRunner

from benchmarks import tables
from benchmarks.figures import main as draw_figures
from specdec.bench.mechanisms import Row
from specdec.bench.page import page, trees, write_page
from specdec.bench.plots import load_plot, save_png, tree_places
from specdec.bench.results import Cell, Divergence, Failure, Result, Settings, Split, read_result, write_json
from specdec.bench.summary import summarize
from specdec.bench.tables import failures
from specdec.cli.main import main
from specdec.errors import ConfigError
from specdec.outputs import SpeculationStats

ROOT = Path(__file__).parent.parent
TREE = [([0], 8, 4), ([0, 0], 4, 1), ([1], 8, 2)]


def cell(system: str, category: str, seconds: list[float], stats: SpeculationStats | None, split: bool) -> Cell:
    parts = Split(1.0, 6.0, 1.0, 2.0, 2, TREE if system == "ngram" else []) if split else None
    different = [Divergence("chat-02", 3, 1e-5)] if system == "hf" else []
    ids = [f"{category}-{i:02d}" for i in range(len(seconds))]
    compared = None if system == "plain" else different
    drafter, tokens = {"ngram": "ngram", "plain": "none"}.get(system), [10] * len(seconds)
    return Cell(system, drafter, None, category, 1, ids, seconds, tokens, stats, compared, parts, 5_000_000)


@pytest.fixture
def result() -> Result:
    plain = SpeculationStats(30, 30)
    fast = SpeculationStats(20, 30, 12, 16, 10, tried_by_depth=[12, 6], accepted_by_depth=[8, 2])
    settings = Settings(model="some <model>", drafters=("ngram",), peers=("hf",))
    cells = [
        cell("plain", "chat", [1.0, 2.0, 4.0], plain, True),
        cell("plain", "code", [1.0, 1.0, 1.0], plain, True),
        cell("ngram", "chat", [0.5, 1.0, 1.0], fast, True),
        cell("ngram", "code", [1.0, 0.5, 0.5], fast, True),
        cell("hf", "chat", [2.0, 4.0, 8.0], None, False),
    ]
    environment = {
        "command": "specdec bench acceptance", "measured": "2026-01-01T00:00:00+00:00", "specdec": "0", "commit": None,
        "python": "3", "packages": {"torch": "2"}, "device": "cpu", "dtype": "float32", "threads": 1,
    }  # fmt: skip
    failed = [Failure("vllm", None, None, None, "ModuleNotFoundError: No module named 'vllm'")]
    return Result(settings, environment, cells, failed, {"chat-00": [1, 2], "chat-01": []})


def check_schema(value: object) -> None:
    schema = json.loads((resources.files("specdec.bench") / "acceptance.schema.json").read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(value, schema)


def test_a_result_fits_its_schema_and_comes_back(result: Result, tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    write_json(path, result.as_json(summarize(result)))
    check_schema(json.loads(path.read_text()))
    assert read_result(path) == replace(result, cells=[_listed(c) for c in result.cells])
    with pytest.raises(jsonschema.ValidationError):
        check_schema(result.as_json(summarize(result)) | {"more": 1})


def _listed(one: Cell) -> Cell:
    """JSON knows no tuples."""
    return one if one.split is None else replace(one, split=replace(one.split, tree=[list(n) for n in one.split.tree]))


def test_a_measured_result_fits_the_schema(folder: Path, tmp_path: Path) -> None:
    prompts, out, html = tmp_path / "p.jsonl", tmp_path / "out.json", tmp_path / "out.html"
    prompts.write_text('{"prompt": "one two one two one two"}\n')
    args = ["--model", str(folder), "--device", "cpu", "--prompts", str(prompts), "--max-new-tokens", "8"]
    files = ["--json", str(out), "--html", str(html), "--peer", "hf", "--trees", "4"]
    ran = CliRunner().invoke(main, ["bench", "acceptance", *args, *files])
    assert ran.exit_code == 0, ran.output
    check_schema(json.loads(out.read_text()))
    assert "<svg" in html.read_text()


def test_the_summary_is_what_follows_from_the_cells(result: Result) -> None:
    rows = {(row["system"], row["category"]): row for row in summarize(result)}
    assert list(rows)[:3] == [("plain", "chat"), ("plain", "code"), ("plain", "all")]
    chat, whole, hf = rows["ngram", "chat"], rows["ngram", "all"], rows["hf", "all"]
    assert chat["speedup"] == {"value": pytest.approx(7 / 2.5), "low": 2.0, "high": 3.0}
    assert chat["tokens_per_second"]["value"] == 30 / 2.5
    assert (
        whole["speedup"]["value"] == pytest.approx((60 / 4.5) / (60 / 10)) and rows["plain", "all"]["speedup"] is None
    )
    assert hf["speedup"]["value"] == 0.5  # on the category that it has
    assert (whole["mean_acceptance_length"], whole["mean_accepted_drafts"]) == (1.5, 0.5)
    assert whole["acceptance_by_depth"] == [8 / 12, 2 / 6] and whole["cumulative_by_depth"] == [0.4, 0.1]
    assert whole["accepted_lengths"] == [24, 12, 4] and "accepted_lengths" not in hf
    assert whole["time_shares"] == {"draft": 0.1, "forward": 0.6, "accept": 0.1, "host": 0.2}
    assert (hf["num_different"], hf["num_compared"], hf["largest_margin"]) == (1, 3, 1e-5)
    assert rows["plain", "all"]["num_different"] is None and whole["num_different"] == 0


def test_the_page_stands_alone(result: Result, tmp_path: Path) -> None:
    text = page(result)
    assert text == page(result)
    assert "some &lt;model&gt;" in text and "some <model>" not in text
    assert "Trees of ngram" in text and failures(result)[0].replace("'", "&#39;") in text
    assert not re.search(r"<script|<link|src=|url\(http|@import", text)
    svgs = re.findall(r"<svg.*?</svg>", text, re.DOTALL)
    assert len(svgs) == 4
    for svg in svgs:
        ElementTree.fromstring(svg)
    write_page(text, tmp_path / "x.html")
    assert (tmp_path / "x.html").read_text() == text
    with pytest.raises(ConfigError, match="can't be written"):
        write_page(text, tmp_path / "no" / "x.html")


def test_lists_of_plain_values_stand_on_one_line(tmp_path: Path) -> None:
    value = {"a": [1, 2.5, None], "tree": [[[0], 8, 4], [[0, 0], 4, 1]], "rows": [{"x": []}, {}], "é": "[{", "t": (1,)}
    write_json(tmp_path / "x.json", value)
    text = (tmp_path / "x.json").read_text(encoding="utf-8")
    assert json.loads(text) == {**value, "t": [1]}
    assert text.splitlines()[1:5] == [' "a": [1, 2.5, null],', ' "tree": [', "  [[0], 8, 4],", "  [[0, 0], 4, 1]"]


def test_trees_of_all_cells_are_added(result: Result) -> None:
    assert trees(result) == {"ngram": [([0], 16, 8), ([0, 0], 8, 2), ([1], 16, 4)]}


def test_parents_stand_above_the_middle_of_their_children() -> None:
    places = tree_places([(0,), (0, 0), (0, 1), (1,), (0, 1, 0)])
    assert places == {
        (0, 0): (0, -2),
        (0, 1, 0): (1, -3),
        (0, 1): (1, -2),
        (0,): (0.5, -1),
        (1,): (2, -1),
        (): (1.25, 0),
    }


def test_figures_have_the_same_bytes_in_every_process(result: Result, tmp_path: Path) -> None:
    (tmp_path / "results").mkdir()
    write_json(tmp_path / "results" / "acceptance_x.json", result.as_json(summarize(result)))
    (tmp_path / "results" / "other.json").write_text('{"rows": []}')
    arguments = [[str(tmp_path / "results"), str(tmp_path / name)] for name in ("one", "two")]
    assert CliRunner().invoke(draw_figures, arguments[0]).exit_code == 0
    subprocess.run([sys.executable, str(ROOT / "benchmarks/figures.py"), *arguments[1]], check=True)
    made = [{path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} for name in ("one", "two")]
    assert made[0] == made[1]
    assert sorted(made[0]) == [f"acceptance_x-{name}.png" for name in ("depth", "speedup", "tree-ngram")]
    assert all(data.startswith(b"\x89PNG") for data in made[0].values())


def test_committed_results_are_shown_in_the_documents(
    result: Result, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, ours = tmp_path / "benchmarks/results", result.as_json(summarize(result))
    folder.mkdir(parents=True)
    monkeypatch.setattr(tables, "RESULTS", folder)
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    for show in (tables.acceptance, tables.acceptance_at_once, tables.seeds, tables.serve_agreement):
        assert "No such result" in show()
    write_json(folder / "acceptance_x.json", ours)
    assert "playground" in tables.picture()
    files = [str(folder), str(tmp_path / "docs/figures")]
    assert CliRunner().invoke(draw_figures, files).exit_code == 0
    assert "![Speed-up by kind of work](docs/figures/acceptance_x-speedup.png)" in tables.picture()
    shown = tables.acceptance()
    assert "| chat | 2.80× (τ 1.50) | 0.50×, 1 of 3 differ |" in shown and "| code | 1.50× (τ 1.50) | – |" in shown
    assert "on cpu, temperature 0" in shown and "(figures/acceptance_x-depth.png)" in shown
    rows = [Row("paged pool", 30.0, 20.0, "tok/s", "how"), Row("captured steps", None, None, "", "not available")]
    seeds = {"format": "specdec-seeds", "model": "m", "environment": ours["environment"] | {"device": "NVIDIA X"}}
    write_json(folder / "seeds_x.json", seeds | {"rows": [asdict(row) | {"ratio": row.ratio} for row in rows]})
    assert "| paged pool | 30 | 20 | tok/s | 1.50 | how |" in tables.seeds() and "captured" not in tables.seeds()
    ratios = dict.fromkeys(("ttft_ms", "inter_token_ms", "e2el_ms", "total_input_tokens", "total_output_tokens"), 1.01)
    run = {"request_rate": 2.0, "completed": 9, "against_server": ratios}
    serve = {"format": "specdec-serve", "command": "c", "torch": "2", "threads": 1, "runs": [run]}
    write_json(folder / "serve_x.json", serve)
    assert "| `serve_x.json` | 2.0 | 9 | 1.010 |" in tables.serve_agreement()
    assert [line.split(" | ")[2] for line in tables.provenance().splitlines()[2:]] == [
        "CPU, 1 thread", "NVIDIA X", "CPU, 1 thread",
    ]  # fmt: skip


def test_latency_is_drawn_against_load(tmp_path: Path) -> None:
    ms = {"median": 1.0, "p99": 2.0}
    runs = [{"request_throughput": rate, "ttft_ms": ms, "tpot_ms": ms} for rate in (1.0, 2.0)]
    save_png(load_plot(runs), tmp_path / "a.png")
    assert (tmp_path / "a.png").stat().st_size > 1000
