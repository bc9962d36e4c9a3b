"""The pages by address. Each is rendered from storage at each request; a server keeps points of curves alone."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from urllib.parse import unquote

from kestrl._app.episodes.places import EpisodePlace
from kestrl._app.episodes.reading import Batch
from kestrl._app.page.addresses import PURPOSES, Link
from kestrl._app.page.episode_page import EpisodeAddress, episode_facts, token_facts
from kestrl._app.page.library import Library
from kestrl._app.page.reader import EpisodeReader
from kestrl._app.page.rendering import render
from kestrl._app.page.run_page import run_facts
from kestrl._app.page.step_page import filtered_facts, step_facts
from kestrl._app.page.steps import Points
from kestrl.storage.objects import ObjectStore

Query = Mapping[str, str]
STEP = r"/runs/(?P<run>[^/]+)/(?P<purpose>train|eval)/(?P<step>\d{1,9})"
EPISODE = STEP + r"/episode/(?P<digest>[0-9a-f]{16})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Manner:
    """How pages are rendered."""

    link: Link
    static: bool = False
    """Whether the pages are files: without labels, tokens and refreshes."""


class PageNotFound(Exception):
    """There is no such page."""


class Pages:
    """The pages of a library.

    Args:
        library: The runs.
        labels: Whether labels may be written.
        reader_of: Makes the reader of a run's episodes for a page.
    """

    def __init__(
        self, library: Library, *, labels: bool, reader_of: Callable[[ObjectStore], EpisodeReader] = EpisodeReader
    ) -> None:
        self._library, self._labels, self._points, self._reader_of = library, labels, Points(), reader_of
        self._routes: list[tuple[re.Pattern[str], Callable[[re.Match[str], Query, Manner], str]]] = [
            (re.compile(r"/"), self._runs),
            (re.compile(r"/runs/(?P<run>[^/]+)(?:/until/(?P<until>\d{1,9}))?"), self._run),
            (re.compile(STEP + r"(?:/from/(?P<begin>\d{1,9}))?"), self._step),
            (re.compile(STEP + r"/only/(?P<filter>[a-z_-]+)(?:/from/(?P<begin>\d{1,9}))?"), self._filtered),
            (re.compile(EPISODE + r"(?P<earlier>/earlier)?"), self._episode),
            (re.compile(EPISODE + r"/tokens"), self._tokens),
        ]

    def page(self, address: str, query: Query, manner: Manner) -> str:
        """The page at an address.

        Raises:
            PageNotFound: There is none.
            UserInputError, StorageError: What it shows cannot be read.
        """
        for pattern, handler in self._routes:
            if parts := pattern.fullmatch(address):
                return handler(parts, query, manner)
        raise PageNotFound

    def episode_at(self, address: str) -> tuple[ObjectStore, str]:
        """The storage and id of the episode of a page.

        Raises:
            PageNotFound: There is none.
        """
        parts = re.fullmatch(EPISODE, address)
        if parts is None:
            raise PageNotFound
        place, episode_address = (
            self._place(parts),
            EpisodeAddress(unquote(parts["run"]), _batch(parts), parts["digest"]),
        )
        episode = episode_address.id_in(place.store)
        if episode is None:
            raise PageNotFound
        return place.store, episode

    def _place(self, parts: re.Match[str]) -> EpisodePlace:
        place = self._library.place(unquote(parts["run"]))
        if place is None:
            raise PageNotFound
        return place

    def _runs(self, parts: re.Match[str], query: Query, manner: Manner) -> str:
        del parts, query
        runs = [self._library.facts(name) for name in self._library.names()]
        return render("runs.html", manner=manner, runs=runs, live=True)

    def _run(self, parts: re.Match[str], query: Query, manner: Manner) -> str:
        del query
        place, name = self._place(parts), unquote(parts["run"])
        until = None if parts["until"] is None else int(parts["until"])
        facts = self._library.facts(name)
        page_facts = run_facts(place.store, self._points, until)
        return render("run.html", manner=manner, run=facts, live=facts.live and until is None, **page_facts)

    def _step(self, parts: re.Match[str], query: Query, manner: Manner) -> str:
        del query
        place, name, batch = self._place(parts), unquote(parts["run"]), _batch(parts)
        page_facts = step_facts(place.store, batch, int(parts["begin"] or 0))
        if page_facts is None:
            raise PageNotFound
        return render("step.html", manner=manner, name=name, batch=batch, live=place.live, **page_facts)

    def _filtered(self, parts: re.Match[str], query: Query, manner: Manner) -> str:
        place, name, batch = self._place(parts), unquote(parts["run"]), _batch(parts)
        begin = int(parts["begin"] or 0)
        page_facts = filtered_facts(place.store, batch, parts["filter"], query.get("above"), begin)
        if page_facts is None:
            raise PageNotFound
        return render("filtered.html", manner=manner, name=name, batch=batch, live=False, **page_facts)

    def _episode(self, parts: re.Match[str], query: Query, manner: Manner) -> str:
        del query
        place, episode_address = (
            self._place(parts),
            EpisodeAddress(unquote(parts["run"]), _batch(parts), parts["digest"]),
        )
        page_facts = episode_facts(
            self._reader_of(place.store), episode_address, beside_earlier=parts["earlier"] is not None
        )
        if page_facts is None:
            raise PageNotFound
        labels = self._labels and not manner.static
        return render("episode.html", manner=manner, named=episode_address, may_label=labels, live=False, **page_facts)

    def _tokens(self, parts: re.Match[str], query: Query, manner: Manner) -> str:
        place, episode_address = (
            self._place(parts),
            EpisodeAddress(unquote(parts["run"]), _batch(parts), parts["digest"]),
        )
        page_facts = token_facts(place, episode_address, _whole(query.get("row")), _whole(query.get("from")))
        if page_facts is None or manner.static:
            raise PageNotFound
        engines = self._library.facts(episode_address.run).engines
        return render("tokens.html", manner=manner, named=episode_address, live=False, engines=engines, **page_facts)


def _batch(parts: re.Match[str]) -> Batch:
    return Batch(PURPOSES[parts["purpose"]], int(parts["step"]))


def _whole(text: str | None) -> int:
    if text is None:
        return 0
    if not re.fullmatch(r"[0-9]{1,9}", text):
        raise PageNotFound
    return int(text)
