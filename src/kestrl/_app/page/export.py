"""The pages as a folder of files, which any server of files shows."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import cache, lru_cache
from pathlib import Path
from urllib.parse import urlsplit

from kestrl._app.episodes.places import EpisodePlace
from kestrl._app.page.addresses import ASSETS, Link, file_link, file_of
from kestrl._app.page.library import MOST_RUNS, Library, RunFacts
from kestrl._app.page.pages import Manner, Pages
from kestrl._app.page.reader import EpisodeReader
from kestrl._app.page.rendering import FILES
from kestrl.errors import PlaceError, UserInputError

MOST_PAGES = 20_000
"""Pages of an exported folder."""


class LibrarySnapshot(Library):
    """A library whose runs are looked up once.

    Args:
        library: The runs.
    """

    def __init__(self, library: Library) -> None:
        self._names = cache(library.names)
        self._place, self._facts = lru_cache(MOST_RUNS)(library.place), lru_cache(MOST_RUNS)(library.facts)

    def names(self) -> Sequence[str]:
        return self._names()

    def place(self, name: str) -> EpisodePlace | None:
        return self._place(name)

    def facts(self, name: str) -> RunFacts:
        return self._facts(name)


def export_pages(library: Library, folder: Path) -> int:
    """Writes every page that links lead to, and returns their number.

    Args:
        library: The runs.
        folder: A folder that is missing or empty.

    Raises:
        UserInputError: The folder holds something, there are more than `MOST_PAGES` pages, or a step cannot be read.
        PlaceError: The folder cannot be written.
        StorageError: The store of a run refused.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise UserInputError(f"--export: {folder} is not empty; name a new folder")
        for name in ASSETS:
            (folder / name).write_bytes((FILES / name).read_bytes())
        return _write_pages(Pages(LibrarySnapshot(library), labels=False, reader_of=cache(EpisodeReader)), folder)
    except OSError as error:
        raise PlaceError(f"--export: {folder} cannot be written: {error.strerror}; name another folder") from error


def _write_pages(pages: Pages, folder: Path) -> int:
    seen_addresses, waiting = {"/"}, deque(["/"])
    while waiting:
        address = waiting.popleft()
        linked: list[str] = []
        content = pages.page(address, {}, Manner(link=_link(address, linked), static=True))
        path = folder / file_of(address)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content, encoding="utf-8")
        further = [target for target in dict.fromkeys(linked) if target not in seen_addresses]
        seen_addresses.update(further)
        waiting.extend(further)
        if len(seen_addresses) > MOST_PAGES:
            raise UserInputError(f"--export: there are more than {MOST_PAGES} pages; name one run")
    return len(seen_addresses)


def _link(source: str, linked: list[str]) -> Link:
    def link(target: str) -> str:
        path = urlsplit(target).path
        if path.strip("/") not in ASSETS:
            linked.append(path)
        return file_link(source, path)

    return link
