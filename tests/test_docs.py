"""The documents are true: the file map is complete, figures are those of the results, links lead somewhere."""

import inspect
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.tables import PLACE, RESULTS, ROOT, TABLES, documents, fill, made, provenance, read
from specdec.cache.pages import KVLayout
from specdec.drafters.registry import DRAFTERS, drafts_on_device
from specdec.engine.capturable import EAGER_PARAMETERS
from specdec.hf.fields import NOT_FOLLOWED
from specdec.server.fields import REFUSED

DOCS = ROOT / "docs"


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


@pytest.mark.parametrize("page", documents(), ids=lambda page: page.name)
def test_figures_are_those_of_the_committed_results(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert fill(text) == text, "run `make tables`"
    assert text.count("<!-- measured:") == text.count("<!-- end -->") == len(PLACE.findall(text))


def test_each_table_is_shown() -> None:
    shown = {name for page in documents() for _, name, *_ in PLACE.findall(page.read_text(encoding="utf-8"))}
    assert shown == set(TABLES)


def test_scripts_that_results_are_made_by_do_something_when_run() -> None:
    """They can be imported all the same, without the lines at their end."""
    commands = {made(read(path.stem)).get("command", "") for path in RESULTS.glob("*.json")}
    scripts = {name for command in commands for name in re.findall(r"python (?:-m )?benchmarks[/.](\w+)", command)}
    assert len(scripts) > 10
    for name in scripts:
        text = (ROOT / "benchmarks" / f"{name}.py").read_text(encoding="utf-8")
        assert 'if __name__ == "__main__":' in text, name


@pytest.mark.parametrize("page", documents(), ids=lambda page: page.name)
def test_links_lead_to_files_and_headings(page: Path) -> None:
    """Anchors of the reference are checked where the site is built, which makes them."""
    text = re.sub(r"^```.*?^```|`[^`\n]*`", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        path, _, anchor = target.partition("#")
        if path.startswith("https://"):
            continue
        file = page.parent / path if path else page
        assert file.exists(), f"{page.name} links to {target}"
        if anchor and file.parent.name != "reference":
            headings = re.findall(r"^#+ (.*)$", file.read_text(encoding="utf-8"), re.MULTILINE)
            slugs = {re.sub(r"\s+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower()) for heading in headings}
            assert anchor in slugs, f"{page.name} links to {target}"


def ngram_rows() -> dict[str, dict[str, Any]]:
    return {r["prompt"]: r for r in read("demo_cpu")["rows"] if r.get("drafter", "ngram") == "ngram"}


def test_what_the_pages_say_about_the_figures_is_so() -> None:
    """Sentences in README, `drafters.md` and `limits.md`: where these fail, the sentences must change."""
    demo, gpu = ngram_rows(), {r["prompt"]: r["ratio"] for r in read("speculation_smollm2_h100")["rows"]}
    assert demo["story"]["speculative"] < 1.05 * demo["story"]["plain"]
    for ratios in ({prompt: r["mean_acceptance_length"] for prompt, r in demo.items()}, gpu):
        assert set(sorted(ratios, key=ratios.__getitem__)[-2:]) == {"rewriting", "extraction"}
    default = {r["prompt"]: r for r in read("demo_cpu")["rows"] if r["drafter"] == "ngram+recurrent"}
    story = default["story"]
    assert 1 < story["speculative"] / story["plain"] < story["plain"] / story["hf"]
    assert read("acceptance_cpu")["settings"]["peer_prompts"] == 2
    cards = {made(read(path.stem)).get("card", "CPU") for path in RESULTS.glob("*.json")}
    assert cards == {"CPU", "NVIDIA H100 80GB HBM3", "NVIDIA H200"}


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*_*00.json")), ids=lambda path: path.stem)
def test_results_are_shown_as_of_the_gpu_that_their_name_says(path: Path) -> None:
    gpu = path.stem.rpartition("_")[2].upper()
    (row,) = [line for line in provenance().splitlines() if line.startswith(f"| `{path.name}`")]
    assert f"| NVIDIA {gpu}" in row


def test_nobody_is_told_to_install_another_project() -> None:
    """The package index has another `specdec`: extras are named by their packages, or installed from a checkout."""
    pages = [*documents(), ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]
    for path in [*pages, *(ROOT / "specdec").rglob("*.py"), *(ROOT / "training").rglob("*.py")]:
        assert not re.search(r"install (-\S+ )*['\"]?specdec|specdec\[", path.read_text(encoding="utf-8")), path


def drafter_rows(columns: int) -> dict[str, list[str]]:
    """Rows of the tables of `drafters.md` with that many columns, by the drafters that they are of."""
    rows = [line.strip("| ").split(" | ") for line in (DOCS / "drafters.md").read_text().splitlines()]
    found = [row for row in rows if len(row) == columns and row[0].startswith("`")]
    return {name.partition(":")[0]: row for row in found for name in re.findall(r"`([^`]+)`", row[0])}


def test_the_page_of_drafters_knows_all_of_them_and_where_they_draft() -> None:
    rows = drafter_rows(4)
    assert set(rows) - {"ngram+X"} == set(DRAFTERS) - {"shipped"}  # `auto` is that, or n-grams
    for name, row in rows.items():
        if "+" in name:
            captured = drafts_on_device("ngram+shipped") and not drafts_on_device("ngram+draft_model")
            assert captured and row[3] == "yes, where X is heads"
        else:
            assert (row[3] == "yes") == (name == "auto" or drafts_on_device(name)), name


def test_the_page_of_drafters_names_options_that_exist() -> None:
    for name, row in drafter_rows(2).items():
        for option in re.findall(r"`(\w+)`", row[1]):
            if option in DRAFTERS:  # what follows is of that drafter alone
                break
            assert option in inspect.signature(DRAFTERS[name]()).parameters, (name, option)


def test_the_page_of_limits_names_what_is_refused_or_runs_otherwise() -> None:
    named = re.findall(r"`(\w+)`", (DOCS / "limits.md").read_text())
    assert {*EAGER_PARAMETERS, *NOT_FOLLOWED, *REFUSED} <= set(named)


def test_the_page_of_memory_says_what_formats_take() -> None:
    layout = KVLayout(1, 1, 128, torch.bfloat16)
    sizes = [layout.stored_as(name).bytes_per_head for name in ("auto", "fp8", "int8", "int4")]
    assert f"| {' | '.join(map(str, sizes))} |" in (DOCS / "memory.md").read_text(encoding="utf-8")


@pytest.mark.docs
def test_the_site_builds_without_warnings(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0 and "WARNING" not in done.stderr, done.stderr
    for page in tmp_path.rglob("*.html"):
        assert "Sentinel.UNSET" not in page.read_text(encoding="utf-8"), page
