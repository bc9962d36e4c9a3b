"""The equal servers of a judge model: those of the settings, or all behind a name or in a file, as of now."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import unquote, urlsplit

from kestrl._shared.plan.settings.common import DNS, FILE, read_settings
from kestrl._shared.plan.settings.learner import EngineList
from kestrl._shared.rpc.lookup import resolved
from kestrl.errors import UserInputError

log = logging.getLogger(__name__)
LOOK_SECONDS = 5.0
"""How long the addresses behind a name are used before they are looked up again."""
AWAY_SECONDS = 10.0
"""How long a server that could not be reached is passed over while there are others."""


class Servers:
    """Base URLs, used in turn.

    Args:
        urls: Those of the settings. One as `dns://host:port/path` stands for every address of its host, and one as
            `file:///FILE#PATH` for every engine that the file lists.
    """

    def __init__(self, urls: Sequence[str]) -> None:
        self._urls = urls
        self._present: dict[str, list[str]] = {url: [url] for url in urls if not url.startswith((DNS, FILE))}
        """URLs of servers by that of the settings."""
        self._looked: float | None = None
        self._away: dict[str, float] = {}
        """Until when each is passed over, by the loop's clock."""
        self._turn = 0
        self._look = asyncio.Lock()

    async def next(self) -> str | None:
        """The URL of the next server; None while a name has no address."""
        now = asyncio.get_running_loop().time()
        async with self._look:
            if self._looked is None or now >= self._looked + LOOK_SECONDS:
                await self._look_up()
                self._looked = now
        server_urls = [url for urls in self._present.values() for url in urls]
        self._away = {url: until for url, until in self._away.items() if until > now and url in server_urls}
        reachable = [url for url in server_urls if url not in self._away] or server_urls
        self._turn += 1
        return reachable[self._turn % len(reachable)] if reachable else None

    def unreachable(self, url: str) -> None:
        """Passes a server over for a while."""
        self._away[url] = asyncio.get_running_loop().time() + AWAY_SECONDS

    async def _look_up(self) -> None:
        for url in self._urls:
            if url.startswith(DNS):
                parts = urlsplit(url)
                addresses = await resolved(parts.netloc)
                if addresses is not None:  # a failed lookup does not mean that servers are gone
                    self._present[url] = [f"http://{address}{parts.path}" for address in sorted(addresses)]
            elif url.startswith(FILE):
                listing = await asyncio.to_thread(_listed, url)
                if listing is not None:
                    self._present[url] = listing


def _listed(url: str) -> list[str] | None:
    """The servers of the engines in a file; None if it cannot be read."""
    parts = urlsplit(url)
    try:
        engines = read_settings(EngineList, Path(unquote(parts.path))).engines
    except UserInputError as error:
        log.warning("the engines cannot be looked up: %s", error)
        return None
    return [f"{engine.url}{parts.fragment}" for engine in engines]
