"""The equal servers of a judge model: those of the settings, or all addresses behind a name, as of now."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from urllib.parse import urlsplit

from kestrl._shared.plan.settings.common import DNS
from kestrl._shared.rpc.lookup import resolved

LOOK_SECONDS = 5.0
"""How long the addresses behind a name are used before they are looked up again."""
AWAY_SECONDS = 10.0
"""How long a server that could not be reached is passed over while there are others."""


class Servers:
    """Base URLs, used in turn.

    Args:
        urls: Those of the settings; one as `dns://host:port/path` stands for every address of its host.
    """

    def __init__(self, urls: Sequence[str]) -> None:
        self._urls = urls
        self._present: dict[str, list[str]] = {url: [url] for url in urls if not url.startswith(DNS)}
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
        present = [url for urls in self._present.values() for url in urls]
        self._away = {url: until for url, until in self._away.items() if until > now and url in present}
        reachable = [url for url in present if url not in self._away] or present
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
