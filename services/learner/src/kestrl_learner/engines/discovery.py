"""How engines and workers are found whose number may change: listed in a file, or behind a name."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from kestrl._shared.plan.settings.common import read_settings
from kestrl._shared.plan.settings.learner import EngineEntry, EngineList, LearnerSettings
from kestrl.errors import UserInputError

log = logging.getLogger(__name__)
DNS = "dns://"


async def resolved(name: str) -> set[str] | None:
    """The present addresses of `host:port`; None if the lookup fails."""
    host, _, port = name.rpartition(":")
    try:
        addresses = await asyncio.get_running_loop().getaddrinfo(host, int(port), type=socket.SOCK_STREAM)
    except OSError as error:
        log.warning("%s cannot be looked up: %s", host, error)
        return None
    return {f"[{ip}]:{port}" if family == socket.AF_INET6 else f"{ip}:{port}" for family, *_, (ip, *_) in addresses}


class EngineDiscovery(Protocol):
    """Finds the engines of a job."""

    async def look(self) -> Sequence[EngineEntry] | None:
        """The present engines; None if they cannot be looked up, which does not mean that they are gone."""
        ...


class ListedEngines:
    """Engines of the settings, whose number does not change.

    Args:
        engines: All of them.
    """

    def __init__(self, engines: Sequence[EngineEntry]) -> None:
        self._engines = engines

    async def look(self) -> Sequence[EngineEntry]:
        return self._engines


class EnginesOfFile:
    """Engines of a file, which is replaced as a whole when one comes or goes.

    Args:
        path: The file, an `EngineList`.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    async def look(self) -> Sequence[EngineEntry] | None:
        try:
            return (await asyncio.to_thread(read_settings, EngineList, self._path)).engines
        except UserInputError as error:
            log.warning("the engines cannot be looked up: %s", error)
            return None


def discovery_of(settings: LearnerSettings) -> EngineDiscovery:
    """How the engines of a run are found."""
    if settings.engines_file is not None:
        return EnginesOfFile(Path(settings.engines_file))
    return ListedEngines(settings.engines)
