"""The page in a real Chromium: what is read, pressed and seen. `KESTRL_SCREENSHOTS` names a folder for its pictures."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.browser import Browser, chromium
from tests.fakes.hostile_values import MARKUP_TEXTS
from tests.mcp_servers import npm_package

from kestrl._app.episodes.labels import read_labels
from kestrl._app.page.addresses import digest
from kestrl.episode import Purpose
from kestrl.storage import open_store
from kestrl.storage.episodes import EpisodeBatch, ObjectEpisodeStore, StoredGroup

pytestmark = [pytest.mark.servers, pytest.mark.timeout(240)]

STEP = "/runs/job-1/train/2"
PAGES = {
    "runs": "/",
    "run": "/runs/job-1",
    "step": STEP,
    "filter": f"{STEP}/only/failed",
    "episode": f"{STEP}/episode/{digest('g/2')}",
    "tokens": f"{STEP}/episode/{digest('g/0')}/tokens",
}
WINDOWS = {"desktop": (1280, 900), "narrow": (390, 844)}
AXE = "axe-core@4.14.1"


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Browser]:
    window = Browser(chromium(), tmp_path / "profile")
    yield window
    window.close()


@pytest.fixture
def serve() -> Iterator[Callable[..., str]]:
    """Starts `kestrl ui` and gives the address that it prints."""
    servers: list[subprocess.Popen[str]] = []

    def start(*arguments: str | Path) -> str:
        command = [sys.executable, "-m", "kestrl._app.cli.main", "ui", *map(str, arguments)]
        server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        servers.append(server)
        assert server.stdout is not None
        return server.stdout.readline().strip()

    yield start
    for server in servers:
        server.terminate()
        server.communicate()


@pytest.fixture
def site(browser: Browser, serve: Callable[..., str], runs: Path) -> str:
    """The server of a folder of runs, whose printed address the browser has opened."""
    printed = serve(runs)
    browser.open(printed)
    return printed.partition("/?")[0]


def test_pages_fit_both_windows_in_light_and_dark_without_a_barrier(
    browser: Browser, site: str, tmp_path: Path
) -> None:
    """axe-core finds nothing: contrast, names of controls and images, landmarks, the order of headings."""
    axe = (npm_package(AXE) / "axe.min.js").read_text()
    barriers = dict[str, str]()
    pictures = Path(os.environ.get("KESTRL_SCREENSHOTS", tmp_path / "pictures"))
    for window, (width, height) in WINDOWS.items():
        for scheme in ("light", "dark"):
            browser.show(width, height, scheme)
            for name, address in PAGES.items():
                browser.open(site + address)
                browser.picture(pictures / f"{name}-{window}-{scheme}.png")
                assert browser.run("document.documentElement.scrollWidth <= innerWidth"), (name, window)
                browser.run(axe + ";0")
                report = json.loads(browser.run("axe.run().then((report) => JSON.stringify(report.violations))"))
                barriers |= dict.fromkeys(_words(report), f"{name}, {window}, {scheme}")
    assert not barriers
    assert not browser.problems
    assert len(list(pictures.glob("*.png"))) >= len(PAGES) * 4


def _words(barriers: Sequence[dict[str, Any]]) -> list[str]:
    return [f"{each['id']}: {node['html']} {node['failureSummary']}" for each in barriers for node in each["nodes"]]


def focused(browser: Browser) -> str:
    """The text of what has the focus; empty of the page itself."""
    return browser.run("document.activeElement === document.body ? '' : document.activeElement.textContent.trim()")


def go_to(browser: Browser, text: str) -> None:
    """Presses `j` until what begins with the text has the focus."""
    seen = [focused(browser)]
    while not seen[-1].startswith(text):
        browser.press("j")
        seen.append(focused(browser))
        assert seen[-1] != seen[-2], f"nothing begins with {text!r}; {seen}"


def follow(browser: Browser, text: str) -> None:
    go_to(browser, text)
    browser.press("Enter")
    browser.loaded()


def test_the_reason_of_a_failure_is_three_links_away_by_keyboard(browser: Browser, site: str) -> None:
    follow(browser, "job-1")
    follow(browser, "2")
    follow(browser, "g/1")
    assert browser.run("location.href") == f"{site}{STEP}/episode/{digest('g/1')}"
    shown = browser.run("document.querySelector('.verdict').innerText")
    assert "a tool failed" in shown
    assert "the shelf is locked" in shown
    opened = browser.run("[...document.querySelectorAll('details[open] > summary')].map((each) => each.innerText)")
    assert any("count" in each for each in opened), "the turn that the verdict names"


def test_keys_move_fold_search_and_label(browser: Browser, site: str, runs: Path) -> None:
    store = open_store(str(runs / "job-1"))
    browser.open(f"{site}{STEP}/episode/{digest('g/1')}")
    go_to(browser, "turn 1")
    first = focused(browser)
    browser.press("j")
    assert focused(browser) != first
    browser.press("k")
    assert focused(browser) == first
    unfolded = browser.run("document.activeElement.parentElement.open")
    browser.press("Enter")
    assert browser.run("document.activeElement.parentElement.open") is not unfolded
    browser.run("document.querySelectorAll('details').forEach((each) => { each.open = false; })")
    browser.press("/")
    browser.type("7 BOXES")
    browser.press("Enter")
    assert browser.run("getSelection().toString()") == "7 boxes"
    assert not browser.dialogs
    opened = browser.run("[...document.querySelectorAll('details[open]')].map((each) => each.textContent)")
    assert opened
    assert all("7 boxes" in each for each in opened)
    for key, label in (("y", "yes"), ("n", "no")):
        browser.press(key)
        browser.loaded()
        assert read_labels(store)["g/1"].label == label
    browser.press("]")
    browser.loaded()
    assert browser.run("document.querySelector('h1').innerText") == "g/2"
    browser.press("[")
    browser.loaded()
    assert browser.run("document.querySelector('h1').innerText") == "g/1"
    assert not browser.problems


def test_keys_are_text_in_a_field(browser: Browser, site: str, runs: Path) -> None:
    browser.open(f"{site}{STEP}/episode/{digest('g/1')}")
    browser.run("document.querySelector('input[name=note]').focus()")
    for key in ("j", "y", "n", "/"):
        browser.press(key)
    assert browser.run("document.querySelector('input[name=note]').value") == "jyn/"
    assert not read_labels(open_store(str(runs / "job-1")))
    browser.run("document.activeElement.blur()")
    browser.press("/")
    for key in ("j", "Escape"):
        browser.press(key)
    assert browser.run("document.querySelector('form.search').hidden")


def test_a_page_is_not_loaded_again_while_something_is_typed(
    browser: Browser, serve: Callable[..., str], runs: Path
) -> None:
    browser.open(serve((runs / "job-1").as_uri()))
    browser.hold_fetches()
    browser.open(browser.run("location.origin") + "/runs/job-1")
    files = runs / "job-1" / "episodes" / "train"
    (files / "step=000003.parquet").write_bytes((files / "step=000002.parquet").read_bytes())
    fetch = browser.held_fetch()
    browser.press("/")
    browser.type("count")
    browser.let_go(fetch)
    fetch = browser.held_fetch()
    assert browser.run("document.activeElement.value") == "count"
    browser.press("Escape")
    browser.let_go(fetch)
    browser.loaded()
    assert browser.run("document.querySelector('a.item').innerText") == "3"


@pytest.mark.parametrize("polls", [0, 2])
def test_a_page_follows_what_is_stored(browser: Browser, serve: Callable[..., str], runs: Path, polls: int) -> None:
    """It is loaded again when something is stored, before its first poll or later, and not before."""
    browser.open(serve((runs / "job-1").as_uri()))
    browser.hold_fetches()
    browser.open(browser.run("location.origin") + "/runs/job-1")
    browser.run("window.kept = true")
    for _ in range(polls):
        browser.let_go(browser.held_fetch())
    fetch = browser.held_fetch()
    assert browser.run("window.kept")
    files = runs / "job-1" / "episodes" / "train"
    (files / "step=000003.parquet").write_bytes((files / "step=000002.parquet").read_bytes())
    browser.let_go(fetch)
    browser.loaded()
    assert browser.run("document.querySelector('a.item').innerText") == "3"


def test_texts_of_episodes_run_nothing_and_load_nothing(
    browser: Browser, site: str, runs: Path, hostile: Callable[[str], StoredGroup]
) -> None:
    groups = [hostile(text) for text in MARKUP_TEXTS]
    batch = EpisodeBatch(purpose=Purpose.TRAIN, step=3, stored=groups)
    ObjectEpisodeStore(open_store(str(runs / "job-1")), "job-1").append(batch)
    step = "/runs/job-1/train/3"
    pages = [step, f"{step}/only/failed", "/runs/job-1"]
    for text in MARKUP_TEXTS:
        pages += [f"{step}/episode/{digest(f'{text}/1')}", f"{step}/episode/{digest(f'{text}/1')}/tokens"]
    for page in pages:
        browser.open(site + page)
        assert browser.run("document.querySelectorAll('main, footer').length") == 2, page
        assert browser.run("document.querySelectorAll('iframe, img, base, object').length") == 0, page
    assert not browser.dialogs
    assert not browser.problems
    assert all(address.startswith(f"{site}/") for address in browser.requested if address != "about:blank")
