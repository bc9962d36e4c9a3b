"""Access to the page and to labels, and hostile text of episodes."""

from __future__ import annotations

import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import pytest
from starlette.testclient import TestClient
from tests.fakes.hostile_values import MARKUP_TEXTS

from kestrl._app.episodes.labels import read_labels
from kestrl._app.page.addresses import digest
from kestrl._app.page.library import RunsFolder
from kestrl._app.page.server import MOST_BYTES, page_app
from kestrl.episode import Purpose
from kestrl.storage import open_store
from kestrl.storage.episodes import EpisodeBatch, ObjectEpisodeStore, StoredGroup

HOST = "http://127.0.0.1:8123"
TOKEN = "a-token-of-the-test"
EPISODE = f"/runs/job-1/train/2/episode/{digest('g/2')}"


class Elements(HTMLParser):
    """The elements and attributes of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]


@pytest.fixture
def stranger(runs: Path) -> TestClient:
    """A browser that has not shown the token."""
    return TestClient(page_app(RunsFolder(runs), TOKEN, labels=True), base_url=HOST)


def test_a_browser_without_the_token_sees_nothing(stranger: TestClient) -> None:
    for address in ("/", EPISODE, "/page.css", "/?token=wrong", "/?token="):
        answer = stranger.get(address)
        assert answer.status_code == 403
        assert "job-1" not in answer.text
    assert stranger.get("/", headers={"cookie": "kestrl_page_8123=wrong"}).status_code == 403
    assert stranger.get("/", headers={"cookie": f"kestrl_page_8123={TOKEN}"}).status_code == 403
    assert stranger.post(f"{EPISODE}/label?token={TOKEN}", headers={"origin": HOST}).status_code == 403


def test_the_token_is_exchanged_for_a_cookie_and_leaves_the_address(stranger: TestClient) -> None:
    answer = stranger.get(f"{EPISODE}?token={TOKEN}", follow_redirects=False)
    assert (answer.status_code, answer.headers["location"]) == (303, EPISODE)
    cookie = answer.headers["set-cookie"]
    assert TOKEN not in cookie
    assert [part in cookie for part in ("HttpOnly", "SameSite=lax", "kestrl_page_8123=")] == [True] * 3
    page = stranger.get(EPISODE)
    assert page.status_code == 200
    assert TOKEN not in page.text
    away = stranger.get(f"//evil.test/?token={TOKEN}", follow_redirects=False)
    assert not away.headers.get("location", "/x").startswith("//")


@pytest.mark.parametrize("host", ["evil.test", "evil.test:8123", "127.0.0.1.evil.test", "[::2]:8123", "[", ""])
def test_another_host_is_refused(browser: TestClient, host: str) -> None:
    assert browser.get("/", headers={"host": host}).status_code == 421


def test_a_tunnel_may_have_another_port(browser: TestClient) -> None:
    answer = browser.get(f"/?token={TOKEN}", headers={"host": "localhost:9000"}, follow_redirects=False)
    assert "kestrl_page_9000=" in answer.headers["set-cookie"]


@pytest.mark.parametrize("origin", ["http://evil.test", "null", "https://127.0.0.1:8123", "http://127.0.0.1:9", None])
def test_a_label_from_another_origin_is_refused(browser: TestClient, runs: Path, origin: str | None) -> None:
    headers = {} if origin is None else {"origin": origin}
    assert browser.post(f"{EPISODE}/label", data={"label": "no"}, headers=headers).status_code == 403
    assert read_labels(open_store(str(runs / "job-1"))) == {}


def test_a_label_is_stored_shown_and_removed(browser: TestClient, runs: Path) -> None:
    store, headers = open_store(str(runs / "job-1")), {"origin": HOST}
    page = browser.post(f"{EPISODE}/label", data={"label": "no", "note": "wrong <b>shelf</b>"}, headers=headers)
    assert "no: wrong &lt;b&gt;shelf&lt;/b&gt;" in page.text
    assert read_labels(store)["g/2"].label == "no"
    assert "g/2" in browser.get("/runs/job-1/train/2/only/labelled-no").text
    browser.post(f"{EPISODE}/label", data={"label": "none"}, headers=headers)
    assert read_labels(store) == {}


def test_a_wrong_label_is_refused(browser: TestClient, runs: Path) -> None:
    headers = {"origin": HOST}
    assert browser.post(f"{EPISODE}/label", data={"label": "maybe"}, headers=headers).status_code == 400
    long = {"label": "no", "note": "x" * MOST_BYTES}
    assert browser.post(f"{EPISODE}/label", data=long, headers=headers).status_code == 413
    missing = EPISODE.replace(digest("g/2"), "0" * 16)
    assert browser.post(f"{missing}/label", data={"label": "no"}, headers=headers).status_code == 404
    assert browser.put(EPISODE, headers=headers).status_code == 405
    assert read_labels(open_store(str(runs / "job-1"))) == {}


def test_labels_are_off_without_write_access(runs: Path) -> None:
    with TestClient(page_app(RunsFolder(runs), TOKEN, labels=False), base_url=HOST) as client:
        client.get(f"/?token={TOKEN}")
        assert "<form" not in client.get(EPISODE).text
        refused = client.post(f"{EPISODE}/label", data={"label": "no"}, headers={"origin": HOST})
        assert refused.status_code == 403
    assert read_labels(open_store(str(runs / "job-1"))) == {}


@pytest.mark.parametrize("text", MARKUP_TEXTS)
def test_text_of_an_episode_stays_text(
    browser: TestClient, runs: Path, text: str, hostile: Callable[[str], StoredGroup]
) -> None:
    stores = ObjectEpisodeStore(open_store(str(runs / "job-1")), "job-1")
    plain = hostile("plain")
    stores.append(EpisodeBatch(purpose=Purpose.TRAIN, step=3, stored=[plain]))
    pages = ["/runs/job-1/train/3", "/runs/job-1/train/3/only/failed", "/runs/job-1/train/3/episode/{}"]
    expected = [Elements(browser.get(page.format(digest("plain/1"))).text).tags for page in pages]
    stores.append(EpisodeBatch(purpose=Purpose.TRAIN, step=3, stored=[hostile(text)]))
    for page, tags in zip(pages, expected, strict=True):
        shown = browser.get(page.format(digest(f"{text}/1")))
        elements = Elements(shown.text)
        assert shown.status_code == 200
        assert elements.tags == tags, "a text made or removed an element"
        names = {name for name, _ in elements.attributes}
        assert not {name for name in names if name.startswith("on") or name == "style"}
        links = [value for name, value in elements.attributes if name in {"href", "src", "action"}]
        assert all(re.match(r"/|#turn-\d+$", link) and not link.startswith("//") for link in links)
        assert not re.search("[\x00-\x08\x0b-\x1f\x7f\u202a-\u202e\u2066-\u2069\u200e\u200f]", shown.text)


def test_every_answer_forbids_scripts_of_others(browser: TestClient, stranger: TestClient) -> None:
    for answer in (browser.get("/"), browser.get(EPISODE), browser.get("/nothing"), stranger.get("/")):
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert answer.headers["referrer-policy"] == "same-origin"
        assert answer.headers["cache-control"] == "no-store"
        assert "<style" not in answer.text
        assert not re.search(r"<script(?! type=\"module\" src=\"/page.js\">)", answer.text)
