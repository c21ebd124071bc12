"""The playground in headless Chromium: `pytest -m browser`, with the `browser` extra and Debian's chromium.

With SPECDEC_SCREENSHOTS=docs/images the pictures of the documents are made anew, with the real model.
"""

import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from specdec import LLM
from tests.server import Served, served, tiny_llm

pytestmark = pytest.mark.browser
DESKTOP, PHONE = {"width": 1280, "height": 760}, {"width": 390, "height": 800}
SCREENSHOTS = os.environ.get("SPECDEC_SCREENSHOTS")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    path = shutil.which("chromium")
    assert path, "install Debian's chromium to run these tests"
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served(tiny_llm()) as running:
        yield running


@pytest.fixture(params=[DESKTOP, PHONE], ids=["desktop", "phone"])
def page(request: pytest.FixtureRequest, browser: Any, server: Served) -> Iterator[Any]:
    """The open playground; anything that it asks of others, or complains about, fails the test."""
    opened = browser.new_page(viewport=request.param)
    foreign: list[str] = []
    opened.on("request", lambda r: foreign.append(r.url) if not r.url.startswith((server.url, "data:")) else None)
    opened.on("console", lambda m: foreign.append(m.text) if m.type == "error" and "400" not in m.text else None)
    opened.on("pageerror", lambda error: foreign.append(str(error)))
    opened.goto(server.url)
    opened.wait_for_selector("#model:has-text('drafter')")
    yield opened
    assert not foreign
    opened.close()


def ended(page: Any) -> None:
    page.wait_for_selector("#send:not([disabled])", timeout=20_000)


def test_it_streams_an_answer_and_colours_the_drafted_tokens(page: Any, server: Served) -> None:
    page.fill("#max_tokens", "80")
    page.fill("#temperature", "0")
    page.focus("#prompt")
    page.keyboard.type("hello")
    page.keyboard.press("Enter")
    ended(page)
    answer = page.text_content("#lane-main .turn.assistant")
    usage = server.chat("hello", max_tokens=80, seed=1).json()
    assert answer == usage["choices"][0]["message"]["content"]
    report = usage["usage"]["speculation"]
    assert page.locator("#lane-main .token.drafted").count() == report["num_accepted_tokens"] > 0
    assert page.locator("#lane-main .token").count() == 80
    assert page.inner_text("#lane-main .tau") == f"{report['mean_acceptance_length']:.2f}"
    assert page.locator("#depths li").count() == len(report["acceptance_by_depth"])
    assert "ngram" in page.inner_text("#legend")
    assert page.inner_text("#running").isdecimal() and page.inner_text("#cache-text").endswith("%")


def test_a_race_shows_both_and_their_texts_are_the_same(page: Any) -> None:
    page.fill("#max_tokens", "40")
    page.fill("#prompt", "race")
    page.click("#race")
    ended(page)
    texts = [page.text_content(f"#lane-{lane} .turn.assistant") for lane in ("main", "plain")]
    assert texts[0] == texts[1] and len(texts[0]) > 0
    assert "times as fast. The two texts are the same." in page.inner_text("#status")
    assert page.locator("#lane-plain .token.drafted").count() == 0 and page.inner_text("#lane-plain .tau") == "1.00"


def test_escape_stops_and_clear_forgets(page: Any, server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    propose = server.engine.drafter.propose
    monkeypatch.setattr(server.engine.drafter, "propose", lambda queries: time.sleep(0.05) or propose(queries))
    page.fill("#max_tokens", "240")
    page.fill("#prompt", "long")
    page.keyboard.press("Enter")
    page.wait_for_selector("#lane-main .token")
    page.keyboard.press("Escape")
    ended(page)
    assert page.inner_text("#status") == "Stopped."
    server.until_idle()
    page.click("#clear")
    assert page.locator(".turn").count() == 0


def test_errors_are_shown(page: Any) -> None:
    page.fill("#system", "no")  # this model's template knows no system messages
    page.fill("#prompt", "x")
    page.keyboard.press("Enter")
    ended(page)
    assert "chat template" in page.inner_text(".turn.error")


def test_it_can_be_used_by_keyboard_and_fits_its_width(page: Any) -> None:
    reached = []
    page.focus("#lane-main .log")
    for _ in range(14):
        page.keyboard.press("Tab")
        reached.append(page.evaluate("document.activeElement.id"))
    assert {"temperature", "max_tokens", "seed", "key", "system", "prompt", "send", "race", "clear"} <= set(reached)
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")


@pytest.mark.model
@pytest.mark.skipif(SCREENSHOTS is None, reason="SPECDEC_SCREENSHOTS names no folder")
def test_screenshots(browser: Any, real_model_path: Path) -> None:
    folder = Path(str(SCREENSHOTS))
    folder.mkdir(parents=True, exist_ok=True)
    with served(LLM("smollm2-135m"), model_name="smollm2-135m") as server:
        for name, viewport in (("playground", DESKTOP), ("playground_phone", PHONE)):
            page = browser.new_page(viewport=viewport)
            page.goto(server.url)
            page.fill("#max_tokens", "90")
            text = "Rewrite in capitals: the quick brown fox jumps over the lazy dog and runs into the deep green wood."
            page.fill("#prompt", text)
            page.click("#race" if name == "playground" else "#send")
            page.wait_for_selector("#send:not([disabled])", timeout=120_000)
            page.screenshot(path=folder / f"{name}.png")
            page.close()
            assert (folder / f"{name}.png").stat().st_size < 150_000
