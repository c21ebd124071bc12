"""Every Python block of README and docs runs, page by page, and every command line has options that exist."""

import re
import shlex
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import click
import pytest

from benchmarks.tables import ROOT, documents
from specdec.cli.main import main
from specdec.drafters.heads import save_heads
from specdec.drafters.registry import DRAFTERS
from specdec.hub.load import load
from specdec.kernels.formats import FORMATS
from specdec.models.families import FAMILIES
from specdec.training.hidden import new_heads
from tests.server import Served, served, tiny_llm

REAL = ("README.md", "dropin.md")
"""Pages whose blocks are also run with the model that they name."""
SERVER = "http://127.0.0.1:8000"
"""Where pages expect a server."""


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


PAGES = [page for page in documents() if blocks(page, "python")]


def run_page(page: Path, server: Served | None = None) -> None:
    """Run a page's blocks one after the other, as a reader would in one session."""
    names: dict[str, Any] = {}
    for number, block in enumerate(blocks(page, "python"), 1):
        if server is not None:
            block = block.replace(SERVER, server.url)
        exec(compile(block, f"{page.name}, block {number}", "exec"), names)


@pytest.fixture(scope="module")
def heads(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that holds heads of the tiny model as "heads"."""
    path = tmp_path_factory.mktemp("reader")
    save_heads(new_heads(load(folder, dtype="auto", device="cpu").model, 3, 1, "shared"), path / "heads")
    return path


@pytest.fixture
def registries() -> Iterator[None]:
    """What tutorials add is gone afterwards."""
    tables: list[dict[str, Any]] = [DRAFTERS, FAMILIES, FORMATS]
    before = [dict(table) for table in tables]
    yield
    for table, entries in zip(tables, before, strict=True):
        table.clear()
        table.update(entries)


@pytest.mark.usefixtures("registries")
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_blocks_run_over_a_tiny_model(
    page: Path, folder: Path, heads: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The default model's name stands for the tiny one; a page that asks a server has one."""
    monkeypatch.setattr("specdec.hub.fetch.pull", lambda name: folder)
    monkeypatch.chdir(heads)
    asks = SERVER in page.read_text(encoding="utf-8")
    with served(tiny_llm(), model_name="smollm2-135m") if asks else nullcontext() as server:
        run_page(page, server)


@pytest.mark.model
@pytest.mark.xdist_group("real model")
@pytest.mark.parametrize("page", [p for p in PAGES if p.name in REAL], ids=lambda page: page.name)
def test_python_blocks_run(page: Path, capsys: pytest.CaptureFixture[str], real_model_path: Path) -> None:
    run_page(page)
    assert len(capsys.readouterr().out) > 40


def commands(page: Path) -> Iterator[list[str]]:
    """The words of each `specdec` command, in blocks and in sentences, and of each `make`."""
    lines = [line for block in blocks(page, "sh") for line in block.splitlines()]
    lines += re.findall(r"`((?:specdec|make) [^`]*)`", page.read_text(encoding="utf-8"))
    for line in lines:
        words = shlex.split(line, comments=True)
        if words and words[0] in ("specdec", "make"):
            yield words


@pytest.mark.parametrize("page", [p for p in documents() if any(commands(p))], ids=lambda page: page.name)
def test_commands_and_their_options_exist(page: Path) -> None:
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    for program, *words in commands(page):
        if program == "make":
            assert words[0] in targets, words
            continue
        command: click.Command = main
        while isinstance(command, click.Group) and words:
            found = command.get_command(click.Context(command), words.pop(0))
            assert found is not None, f"specdec has no command {words}"
            command = found
        command.make_parser(click.Context(command)).parse_args(words)  # refuses unknown options
