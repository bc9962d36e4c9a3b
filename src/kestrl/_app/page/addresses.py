"""Addresses of the pages, and links between them: in a server by path, in an exported folder by file. Pure."""

from __future__ import annotations

import posixpath
from collections.abc import Callable
from hashlib import sha256
from urllib.parse import quote

from kestrl._app.episodes.reading import Batch
from kestrl.episode import Purpose

PURPOSES = {"train": Purpose.TRAIN, "eval": Purpose.EVALUATION}
NAMES = {purpose: name for name, purpose in PURPOSES.items()}
ASSETS = ("page.css", "page.js", "icon.svg")
Link = Callable[[str], str]
"""Makes the address of a page a link from the page that is rendered."""


def digest(episode: str) -> str:
    """An episode in an address: the beginning of its id's SHA-256, the same in every file that stores it."""
    return sha256(episode.encode()).hexdigest()[:16]


def run_page(run: str) -> str:
    return f"/runs/{quote(run, safe='')}"


def step_page(run: str, batch: Batch) -> str:
    return f"{run_page(run)}/{NAMES[batch.purpose]}/{batch.step}"


def filter_page(run: str, batch: Batch, name: str) -> str:
    return f"{step_page(run, batch)}/only/{name}"


def episode_page(run: str, batch: Batch, episode: str) -> str:
    return f"{step_page(run, batch)}/episode/{digest(episode)}"


def file_of(address: str) -> str:
    """The file of a page or asset in an exported folder. Percent signs would be decoded by browsers."""
    path = address.strip("/").replace("%", "~")
    return path if path in ASSETS else posixpath.join(path, "index.html")


def file_link(source: str, target: str) -> str:
    """A link from one page of an exported folder to another."""
    return posixpath.relpath(file_of(target), posixpath.dirname(file_of(source)) or ".")
