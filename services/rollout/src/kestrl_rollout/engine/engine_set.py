"""The engines that serve each policy version, as the learner last reported them: they come and go while groups run.

Groups that continue over an update sample from the newest version: `NewestEngines` is its set, whichever it is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from kestrl.episode import PolicyVersion
from kestrl_rollout.engine.client import EngineAddress
from kestrl_rollout.engine.sessions import SessionsByEngine

EARLY = 16
"""Versions whose lists are kept before a group samples from them."""


class EngineSet:
    """The engines of one policy version.

    Args:
        policy: Name of the version in the engines.
        engines: Engines that have verified it.
        revision: Number of the list; a list with a smaller one is older.
    """

    def __init__(self, policy: str, engines: Iterable[EngineAddress], revision: int = 0) -> None:
        self._policy = policy
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
    def policy(self) -> str:
        """Name of the version in the engines."""
        return self._policy

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

    @contextmanager
    def turn(self) -> Generator[asyncio.Event | None]:
        """A turn that the version samples, with an event that is set once the version is too old for it; None: the
        version is served as long as a group samples from it.
        """
        yield None


@dataclass(frozen=True, slots=True, kw_only=True)
class Continuation:
    """The newest version, from which the groups that continue over an update sample the turns that begin."""

    newest: PolicyVersion
    engines: tuple[EngineAddress, ...]
    """Engines that have verified it."""
    max_age: int
    """Largest number of steps by which the version of a running turn may be behind the newest one."""


def is_too_old(step: int, newest_step: int, max_age: int) -> bool:
    """Whether a running turn is cut: the version that samples it, of this step, is more than `max_age` steps behind the
    newest one.
    """
    return step < newest_step - max_age


class NewestEngines(EngineSet):
    """The engines of the newest version, whichever it is.

    Args:
        continuation: The version and its engines.
        revision: Number of the list.
    """

    def __init__(self, continuation: Continuation, revision: int) -> None:
        super().__init__(continuation.newest.name, continuation.engines, revision)
        self._step, self.max_age = continuation.newest.step, continuation.max_age
        self._turns: dict[asyncio.Event, int] = {}
        """Step of the version that each running turn is sampled by."""

    def renew(self, version: PolicyVersion, engines: Iterable[EngineAddress], revision: int) -> None:
        """Replaces version and engines, unless the list is older than the present one; ends the turns whose version is
        now too old.
        """
        if revision < self.revision:
            return
        self._policy, self._step = version.name, version.step
        self.update(engines, revision)
        for retired, step in self._turns.items():
            if is_too_old(step, version.step, self.max_age):
                retired.set()

    @contextmanager
    def turn(self) -> Generator[asyncio.Event | None]:
        """A turn that the newest version samples, with an event that is set once that is too old for it."""
        retired = asyncio.Event()
        self._turns[retired] = self._step
        try:
            yield retired
        finally:
            del self._turns[retired]


class EngineSets:
    """The sets of all policy versions that running groups sample from."""

    def __init__(self) -> None:
        self.sessions = SessionsByEngine()
        """Sessions of all groups, by engine."""
        self._sets: dict[str, EngineSet] = {}
        self._early: dict[str, tuple[Iterable[EngineAddress], int]] = {}
        """Lists that have overtaken the first group of their version."""
        self._groups: dict[str, int] = {}
        self._newest: NewestEngines | None = None
        """For groups that continue; None before the first."""

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
            self._sets[policy] = EngineSet(policy, engines, revision)
        if policy in self._early:
            self._sets[policy].update(*self._early.pop(policy))
        self._groups[policy] = self._groups.get(policy, 0) + 1
        try:
            yield
        finally:
            self._groups[policy] -= 1
            if self._groups[policy] == 0:
                del self._groups[policy], self._sets[policy]

    def newest(self, continuation: Continuation, revision: int) -> EngineSet:
        """The set of the newest version, for a group that continues over updates; the newer one of the group's and the
        known one counts.
        """
        if self._newest is None or self._newest.max_age != continuation.max_age:
            self._newest = NewestEngines(continuation, revision)
        self._newest.renew(continuation.newest, continuation.engines, revision)
        return self._newest

    def renew(self, version: PolicyVersion, engines: Iterable[EngineAddress], revision: int) -> None:
        """Replaces the newest version and its engines, if there was a group that continues."""
        if self._newest is not None:
            self._newest.renew(version, engines, revision)

    def update(self, policy: str, engines: Iterable[EngineAddress], revision: int) -> None:
        """Replaces the engines of a version; those of the last few versions without a group are kept for the next."""
        if policy in self._sets:
            self._sets[policy].update(engines, revision)
            return
        self._early.pop(policy, None)
        self._early[policy] = tuple(engines), revision
        if len(self._early) > EARLY:
            del self._early[next(iter(self._early))]
