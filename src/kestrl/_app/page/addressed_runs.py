"""The runs below an address of object storage, such as `s3://bucket/runs`, as jobs of a cluster store them."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import NamedTuple

from kestrl._app.episodes.places import EpisodePlace
from kestrl._app.page.library import MOST_RUNS, Library, RunFacts, facts_at
from kestrl.errors import KestrlError
from kestrl.storage import ObjectStore, open_store
from kestrl.storage.layout import ADAPTERS, CHECKPOINTS, METRICS, SUMMARY
from kestrl.storage.objects import FolderListing

EPISODES = "episodes"
LISTED_SECONDS = 30.0
"""Time for which what lies in a folder is remembered."""
LISTERS = 16
"""Folders that are listed at a time."""


class RunFolder(NamedTuple):
    """What is known of a folder of the address."""

    listed_at: float
    """When it was listed, by the monotonic clock."""
    is_run: bool
    at: float
    """When its newest object was written, in Unix seconds: for a run that has ended, its result."""
    result: str
    """Version of its result; empty if it has none."""


def holds_run(listing: FolderListing) -> bool:
    """Whether a folder is that of a run: one has episodes, metrics, adapters or a result."""
    return SUMMARY in listing.objects or bool({EPISODES, METRICS, ADAPTERS, CHECKPOINTS} & set(listing.folders))


class AddressedRuns(Library):
    """The runs below an address, each in a folder of its own.

    Args:
        store: The address.
    """

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self._folders: dict[str, RunFolder] = {}
        self._facts: dict[str, tuple[str, RunFacts]] = {}
        """Version of the result and facts of each run, by name."""

    def names(self) -> Sequence[str]:
        folders = self._store.folder().folders
        self._look(folders)
        runs = [name for name in folders if self._folders[name].is_run]
        return sorted(runs, key=lambda name: (-self._folders[name].at, name))[:MOST_RUNS]

    def place(self, name: str) -> EpisodePlace | None:
        if name not in self.names():  # a name from a URL never becomes an address by itself
            return None
        return EpisodePlace(open_store(self._store.address(name), create=False), None)

    def facts(self, name: str) -> RunFacts:
        folder = self._folders.get(name)
        result = "" if folder is None else folder.result
        read_result, facts = self._facts.get(name, ("", None))
        if facts is None or not result or result != read_result:
            facts = facts_at(name, open_store(self._store.address(name), create=False))
            self._facts[name] = result, facts
        return facts

    def _look(self, folders: Sequence[str]) -> None:
        """Lists the folders that are new or were listed a while ago, and forgets those that are gone."""
        now = time.monotonic()
        current = {
            name: folder
            for name in folders
            if (folder := self._folders.get(name)) and now < folder.listed_at + LISTED_SECONDS
        }
        due = [name for name in folders if name not in current]
        self._folders = current | dict(zip(due, self._listed(due, now), strict=True))
        self._facts = {name: facts for name, facts in self._facts.items() if name in self._folders}

    def _listed(self, names: Sequence[str], now: float) -> Iterable[RunFolder]:
        if not names:
            return []
        with ThreadPoolExecutor(LISTERS) as threads:
            return list(threads.map(partial(self._listed_one, now), names))

    def _listed_one(self, now: float, name: str) -> RunFolder:
        try:
            listing = self._store.folder(name)
        except KestrlError:  # it is shown, and its facts say why it cannot be read
            return RunFolder(now, is_run=True, at=0.0, result="")
        result = listing.objects.get(SUMMARY)
        newest = max((version.modified for version in listing.objects.values()), default=0.0)
        return RunFolder(now, holds_run(listing), newest, "" if result is None else result.tag)


def library_at(target: str) -> Library | None:
    """The runs below an address; None if it is that of one run.

    Raises:
        UserInputError: The address cannot be opened.
        StorageError: It cannot be listed.
    """
    store = open_store(target, create=False)
    if holds_run(store.folder()):
        return None
    runs = AddressedRuns(store)
    return runs if runs.names() else None
