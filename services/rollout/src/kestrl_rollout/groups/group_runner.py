"""Running groups: the concurrent episodes of one scenario, then their scores."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from kestrl._shared.telemetry import Unended, span
from kestrl._shared.telemetry.metrics import observe
from kestrl._shared.telemetry.names import Attr, Metric, SpanName
from kestrl.api.common.v1 import common_pb2 as common
from kestrl.episode import Episode, Json, PolicyVersion
from kestrl.episode.codec import dump_json, episode_to_proto
from kestrl.errors import KestrlError
from kestrl.tools import SandboxInUse
from kestrl_rollout.deadlines import GroupClock
from kestrl_rollout.engine.client import EngineAddress
from kestrl_rollout.groups.episodes import EpisodeRunner
from kestrl_rollout.groups.scoring import Judge, outcomes
from kestrl_rollout.metrics import Counts
from kestrl_rollout.requests import GroupRequest

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """Capacity of the worker."""

    concurrency: int
    running: int
    """Accepted episodes that have not ended, including those waiting for a slot."""
    draining: bool


class _Ended:
    """Counts ended episodes of a group that are not reported yet. Episodes that end together are reported together."""

    def __init__(self) -> None:
        self.more = asyncio.Event()
        self._count = 0

    def one(self) -> None:
        self._count += 1
        self.more.set()

    @property
    def reported(self) -> bool:
        return self._count == 0

    async def taken(self) -> int:
        """Waits for ended episodes; returns and resets their count."""
        await self.more.wait()
        self.more.clear()
        count, self._count = self._count, 0
        return count


def _encoded(request: GroupRequest, episodes: Iterable[Episode], tools: Sequence[Mapping[str, Json]]) -> common.Group:
    """The played group. Its scenario, with the ground truth, is passed on as the learner encoded it."""
    return common.Group(
        id=request.id,
        scenario=request.encoded_scenario,
        episodes=[episode_to_proto(episode) for episode in episodes],
        tools_json=dump_json(list(tools)) if tools else "",
    )


class GroupRunner:
    """Runs groups until it drains."""

    def __init__(self, *, episodes: EpisodeRunner, judge: Judge, concurrency: int, drain_seconds: float) -> None:
        self._episodes = episodes
        self._judge = judge
        self._concurrency = concurrency
        self._drain_seconds = drain_seconds
        self._groups: set[asyncio.Task[common.Group]] = set()
        self._running = 0
        self._draining = False
        self._counts = Counts()
        observe(Metric.EPISODES_RUNNING, lambda: self._running)
        observe(Metric.EPISODES_LIMIT, lambda: self._concurrency)

    @property
    def capacity(self) -> Capacity:
        return Capacity(concurrency=self._concurrency, running=self._running, draining=self._draining)

    @property
    def tool_digests(self) -> Mapping[str, str]:
        """SHA-256 of what each tool server lists, by its name; empty until the tools were listed."""
        return self._episodes.tool_digests

    @property
    def sandboxes(self) -> Mapping[str, SandboxInUse]:
        """Sandboxes of tools that run code, by tool; empty until the tools were listed."""
        return self._episodes.sandboxes

    async def run(self, request: GroupRequest) -> AsyncGenerator[int | common.Group]:
        """Yields counts of newly ended episodes, then the scored group, encoded. Closing the generator early cancels
        the group.

        Raises:
            KestrlError: With code `draining` if no group is accepted any more, `drained` if the worker stopped before
                the group was finished; both are retryable on another worker.
        """
        if self._draining:
            raise KestrlError("the worker is draining and accepts no new group", code="draining", retryable=True)
        counter = _Ended()
        task = asyncio.create_task(self._run(request, counter.one), name=f"group-{request.id}")
        self._groups.add(task)
        task.add_done_callback(self._groups.discard)
        task.add_done_callback(lambda _: counter.more.set())
        try:
            while not (task.done() and counter.reported):
                if count := await counter.taken():
                    yield count
            if task.cancelled():
                raise KestrlError(
                    f"the worker stopped before group {request.id} was finished", code="drained", retryable=True
                )
            yield task.result()
        finally:
            task.cancel()
            await asyncio.wait([task])

    async def _run(self, request: GroupRequest, count_one: Callable[[], None]) -> common.Group:
        clock = GroupClock(request.deadlines.group)
        attributes = {
            Attr.GROUP_ID: request.id,
            Attr.SCENARIO_ID: request.scenario.id,
            Attr.POLICY: request.policy_name,
        }
        engines = self._episodes.engine_sets.opened(request.policy_name, request.engines, request.engines_revision)
        with span(SpanName.GROUP, attributes), engines, Unended() as spans:
            async with asyncio.TaskGroup() as tasks:
                episodes = [
                    tasks.create_task(
                        self._episode(request, index, clock, count_one, spans), name=f"{request.id}/{index}"
                    )
                    for index in range(request.size)
                ]
            tools = await self._episodes.described_tools(request.scenario)
            group = _encoded(request, [task.result() for task in episodes], tools)
            await self._judge.score(group, max_turns=request.limits.max_turns, ends=clock.ends)
            if spans.recorded:
                for episode_id, outcome in outcomes(group).items():
                    spans.set(episode_id, outcome)
            return group

    async def _episode(
        self, request: GroupRequest, index: int, clock: GroupClock, count_one: Callable[[], None], spans: Unended
    ) -> Episode:
        self._running += 1
        try:
            episode = await self._episodes.run(request, index, clock, spans)
        finally:
            self._running -= 1
        self._counts.add(episode)
        count_one()
        return episode

    def update_engines(self, policy: str, engines: Iterable[EngineAddress], revision: int) -> None:
        """Replaces the engines of a version for the groups that sample from it."""
        self._episodes.engine_sets.update(policy, engines, revision)

    def renew_newest(self, version: PolicyVersion, engines: Iterable[EngineAddress], revision: int) -> None:
        """Replaces the newest version for the groups that continue over updates."""
        self._episodes.engine_sets.renew(version, engines, revision)

    async def drain(self) -> None:
        """Accepts no new group, waits for those in flight up to a bound, then ends them with a typed failure."""
        self._draining = True
        groups = set(self._groups)
        if groups:
            log.info("draining: %d groups in flight", len(groups))
            _, late = await asyncio.wait(groups, timeout=self._drain_seconds)
            for task in late:
                task.cancel()
            if late:
                log.warning("drained: %d groups were cancelled after %g s", len(late), self._drain_seconds)
                await asyncio.wait(late)
        await self._episodes.closed()
