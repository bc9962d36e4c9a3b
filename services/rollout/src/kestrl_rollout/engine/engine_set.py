"""The engines that serve each policy version, as the learner last reported them: they come and go while groups run."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Generator, Iterable, Mapping
from contextlib import contextmanager

from kestrl_rollout.engine.client import EngineAddress
from kestrl_rollout.engine.sessions import SessionsByEngine

EARLY = 16
"""Versions whose lists are kept before a group samples from them."""


class EngineSet:
    """The engines of one policy version.

    Args:
        engines: Engines that have verified it.
        revision: Number of the list; a list with a smaller one is older.
    """

    def __init__(self, engines: Iterable[EngineAddress], revision: int = 0) -> None:
        self._engines = {engine.name: engine for engine in engines}
        self._revision = revision
        self._changed = asyncio.Event()

    def update(self, engines: Iterable[EngineAddress], revision: int) -> None:
        """Replaces the engines, unless the list is older than the present one."""
        if revision < self._revision:
            return
        self._revision = revision
        self._engines = {engine.name: engine for engine in engines}
        self._changed.set()
        self._changed = asyncio.Event()

    @property
    def revision(self) -> int:
        """Number of the list, which grows with every change."""
        return self._revision

    @property
    def addresses(self) -> Mapping[str, EngineAddress]:
        """Addresses by name."""
        return self._engines

    async def without(self, drained: Collection[str]) -> None:
        """Waits until there is another engine than those that drain, or the learner names none of them any more."""
        while self._engines and self._engines.keys() <= set(drained):
            await self._changed.wait()

    async def available(self) -> Mapping[str, EngineAddress]:
        """Addresses by name, at least one; waits while no engine serves the version."""
        while not self._engines:
            await self._changed.wait()
        return self._engines


class EngineSets:
    """The sets of all policy versions that running groups sample from."""

    def __init__(self) -> None:
        self.sessions = SessionsByEngine()
        """Sessions of all groups, by engine."""
        self._sets: dict[str, EngineSet] = {}
        self._early: dict[str, tuple[Iterable[EngineAddress], int]] = {}
        """Lists that have overtaken the first group of their version."""
        self._groups: dict[str, int] = {}

    def __getitem__(self, policy: str) -> EngineSet:
        return self._sets[policy]

    @contextmanager
    def opened(self, policy: str, engines: Iterable[EngineAddress], revision: int) -> Generator[None]:
        """Keeps the set of a version while a group samples from it; the newer of the group's list and the known one
        counts.
        """
        if policy in self._sets:
            self._sets[policy].update(engines, revision)
        else:
            self._sets[policy] = EngineSet(engines, revision)
        if policy in self._early:
            self._sets[policy].update(*self._early.pop(policy))
        self._groups[policy] = self._groups.get(policy, 0) + 1
        try:
            yield
        finally:
            self._groups[policy] -= 1
            if self._groups[policy] == 0:
                del self._groups[policy], self._sets[policy]

    def update(self, policy: str, engines: Iterable[EngineAddress], revision: int) -> None:
        """Replaces the engines of a version; those of the last few versions without a group are kept for the next."""
        if policy in self._sets:
            self._sets[policy].update(engines, revision)
            return
        self._early.pop(policy, None)
        self._early[policy] = tuple(engines), revision
        if len(self._early) > EARLY:
            del self._early[next(iter(self._early))]
