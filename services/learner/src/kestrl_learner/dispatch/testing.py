"""Conformance of a `GroupSource`: a wrapper that training uses in its place, and that checks each exchange.

A source cannot be tried without its ledger and the versions that training publishes, so that its test is a run: give
the wrapper to the run, and what it raises ends it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from kestrl.episode import PolicyVersion
from kestrl.storage.stored_groups import StoredGroup
from kestrl_learner.dispatch.group_queue import ReadyGroup
from kestrl_learner.dispatch.group_source import GroupSource
from kestrl_learner.ledger import Ledger

DRAIN_SECONDS = 60.0
"""Time within which `take` returns once the source drains."""


class CheckedSource(GroupSource):
    """A source whose groups and versions are checked.

    Args:
        source: The source.
        ledger: The ledger of its leases.

    Raises:
        AssertionError: By each method, if a property does not hold; the message names it.
    """

    def __init__(self, source: GroupSource, ledger: Ledger) -> None:
        self._source, self._ledger = source, ledger
        self._published: list[PolicyVersion] = []
        self._positions: set[int] = set()
        self._ids: set[str] = set()
        self._drained = asyncio.Event()

    def begin(self, policy: PolicyVersion, step: int) -> None:
        assert not self._published, "a source begins once"
        self._published.append(policy)
        self._source.begin(policy, step)

    async def run(self) -> None:
        assert self._published, "a source begins before it runs"
        await self._source.run()
        raise AssertionError("a source runs until it is cancelled, or raises why it cannot go on")

    async def take(self, step: int) -> list[ReadyGroup]:
        take = asyncio.create_task(self._source.take(step))
        drained = asyncio.create_task(self._drained.wait())
        try:
            await asyncio.wait([take, drained], return_when=asyncio.FIRST_COMPLETED)
            if not take.done():
                await asyncio.wait([take], timeout=DRAIN_SECONDS)
                assert take.done(), f"a source that drains lets `take` return within {DRAIN_SECONDS:g} s"
            groups = take.result()
        finally:
            drained.cancel()
            take.cancel()  # no effect on a finished one
        self._check_groups(groups)
        return groups

    def _check_groups(self, groups: Sequence[ReadyGroup]) -> None:
        for ready in groups:
            lease, group = ready.lease, ready.group
            assert lease.position not in self._positions, "a lease is taken once"
            assert group.id not in self._ids, "a group is taken once"
            assert group.scenario.ordinal == lease.ordinal, "a group is of the scenario of its lease"
            assert group.episodes, "a group has episodes"
            for episode in group.episodes:
                assert episode.failure is None, "an episode that failed is not trained"
                assert episode.policy == ready.policy, "a group names the version that its episodes began with"
            self._positions.add(lease.position)
            self._ids.add(group.id)
        finished = self._ledger.counts().get("finished", 0)
        assert finished >= len(groups), f"leases of taken groups are finished; of {len(groups)} {finished} are"

    def take_ended(self) -> list[StoredGroup]:
        ended_groups = self._source.take_ended()
        for stored in ended_groups:
            assert stored.group.id not in self._ids, "a group that was taken does not end a second time"
        return ended_groups

    def advance(self, policy: PolicyVersion) -> None:
        self._published.append(policy)
        self._source.advance(policy)

    def versions_in_use(self) -> set[str]:
        names = self._source.versions_in_use()
        unknown = names - {policy.name for policy in self._published}
        assert not unknown, f"a source uses published versions alone, not {', '.join(sorted(unknown))}"
        return names

    def accepted_from(self) -> int:
        step = self._source.accepted_from()
        assert step <= self._published[-1].step, "the newest version is accepted"
        return step

    def drain(self) -> None:
        self._source.drain()
        self._drained.set()
