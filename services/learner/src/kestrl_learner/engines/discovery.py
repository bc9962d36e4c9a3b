"""How the engines of a job are found: those of the settings, of a file, or behind a name."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit

from kestrl._shared.credentials import Secret
from kestrl._shared.plan.settings.common import DNS, read_settings
from kestrl._shared.plan.settings.learner import EngineEntry, EngineList, LearnerSettings
from kestrl._shared.rpc import call, channel
from kestrl._shared.rpc.lookup import resolved
from kestrl.api.inference.v1 import inference_pb2 as pb
from kestrl.api.inference.v1 import inference_pb2_grpc as stubs
from kestrl.errors import KestrlError, UserInputError

log = logging.getLogger(__name__)
ASK_SECONDS = 2.0
"""Time limit of an agent's answer; one that has answered before stays known without it."""
LOOPBACK = frozenset({"127.0.0.1", "::1", "localhost"})


class EngineDiscovery(Protocol):
    """Finds the engines of a job."""

    seconds: float
    """Between two looks."""

    async def look(self) -> Sequence[EngineEntry] | None:
        """The present engines; None if they cannot be looked up, which does not mean that they are gone."""
        ...


class ListedEngines:
    """Engines of the settings, whose number does not change.

    Args:
        engines: All of them.
    """

    seconds = 60.0

    def __init__(self, engines: Sequence[EngineEntry]) -> None:
        self._engines = engines

    async def look(self) -> Sequence[EngineEntry]:
        return self._engines


class EnginesOfFile:
    """Engines of a file, which is replaced as a whole when one comes or goes.

    Args:
        path: The file, an `EngineList`.
    """

    seconds = 1.0

    def __init__(self, path: Path) -> None:
        self._path = path

    async def look(self) -> Sequence[EngineEntry] | None:
        try:
            return (await asyncio.to_thread(read_settings, EngineList, self._path)).engines
        except UserInputError as error:
            log.warning("the engines cannot be looked up: %s", error)
            return None


class EnginesByName:
    """Engines whose agents are the addresses of one name, such as of a headless Service. Each agent says which engine
    it has, and where others reach that.

    Args:
        name: `host:port` of the agents.
    """

    seconds = 5.0

    def __init__(self, name: str) -> None:
        self._name = name
        self._entries: dict[str, EngineEntry] = {}
        """By address of the agent, what it answered last."""
        self._noted: dict[str, str] = {}
        """By address, why its engine is not known; logged once."""

    async def look(self) -> Sequence[EngineEntry] | None:
        addresses = await resolved(self._name)
        if addresses is None:
            return None
        answers = await asyncio.gather(*(self._ask(address) for address in addresses))
        answered = {entry.agent_address: entry for entry in answers if entry is not None}
        silent = {address: self._entries[address] for address in addresses - set(answered) if address in self._entries}
        self._noted = {address: reason for address, reason in self._noted.items() if address in addresses}
        self._entries = {**silent, **answered}
        # A pod that was replaced keeps its name, and may have its old address behind the Service's name for a while.
        by_name = {entry.name: entry for entry in self._entries.values()}
        return sorted(by_name.values(), key=lambda entry: (len(entry.name), entry.name))

    async def _ask(self, address: str) -> EngineEntry | None:
        """The engine of the agent at an address; None if it does not answer, or its engine cannot be reached."""
        async with channel(address) as connection:
            try:
                answer = await call(
                    stubs.EngineAgentServiceStub(connection).GetEngine,
                    pb.GetEngineRequest(),
                    pb.GetEngineResponse,
                    timeout=ASK_SECONDS,
                    peer=f"engine agent {address}",
                    token=Secret.LEARNER_TO_INFERENCE.here(),
                )
            except KestrlError as error:
                self._note(address, str(error))
                return None
        if not answer.name or urlsplit(answer.url).hostname in LOOPBACK | {None}:
            self._note(address, f"{answer.name or 'its engine'} is at {answer.url!r}, which others cannot reach")
            return None
        self._noted.pop(address, None)
        return EngineEntry(name=answer.name, url=answer.url, agent_address=address)

    def _note(self, address: str, reason: str) -> None:
        if address not in self._entries and address not in self._noted:
            self._noted[address] = reason
            log.warning("the engine of %s is not used yet: %s", address, reason)


def discovery_of(settings: LearnerSettings) -> EngineDiscovery:
    """How the engines of a run are found."""
    if settings.engine_agents is not None:
        return EnginesByName(settings.engine_agents.removeprefix(DNS))
    if settings.engines_file is not None:
        return EnginesOfFile(Path(settings.engines_file))
    return ListedEngines(settings.engines)
