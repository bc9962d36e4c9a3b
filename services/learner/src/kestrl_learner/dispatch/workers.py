"""The rollout workers: their capacity, and running a group on one of them.

Capacity is counted in episodes, not in groups: a straggler holds one slot, a slow judge none. A group is sent to a
worker as soon as one slot is free; its other episodes wait there for further slots, so that no slot is idle meanwhile.

A worker whose stream breaks gets no group until it has reported its capacity again, so that a killed or draining worker
neither uses up scenarios nor stops the run. While no worker answers, groups wait, and after `start_seconds` the run
fails.

An address is `host:port`, or `dns://host:port` for one worker per address of that name (a headless Service). New
addresses are used; a removed one gets no further group and is closed when its last group has ended.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from kestrl._shared.credentials import Secret
from kestrl._shared.plan.settings.common import DNS
from kestrl._shared.plan.settings.learner import LearnerSettings
from kestrl._shared.rpc import Channel, call, channel, connected, stream
from kestrl._shared.rpc.codec import sandboxes_from_proto
from kestrl._shared.rpc.lookup import resolved
from kestrl._shared.telemetry import ids_of, span
from kestrl._shared.telemetry.names import Attr, SpanName
from kestrl.api.common.v1 import common_pb2 as common_pb
from kestrl.api.rollout.v1 import rollout_pb2 as pb
from kestrl.api.rollout.v1 import rollout_pb2_grpc as stubs
from kestrl.episode import Group, Scenario
from kestrl.episode.codec import group_from_proto, policy_to_proto
from kestrl.errors import KestrlError
from kestrl_learner.concurrency import Listeners, Signal
from kestrl_learner.dispatch.group_assignment import GroupAssignment, engine_messages, run_group_request
from kestrl_learner.engines.serving import Serving
from kestrl_learner.progress.progress import Progress

log = logging.getLogger(__name__)
GRACE_SECONDS = 15.0
"""Time beyond twice the group's deadline after which the stream is cancelled here: episodes may wait for slots for one
deadline."""
POLL_SECONDS = 5.0
RETRY_SECONDS = 0.5
"""Poll interval for workers that do not answer."""
CALL_SECONDS = 5.0
CONNECT_SECONDS = 2.0


def _ignored(count: int) -> None:
    """The default callback for ended episodes."""


class NoWorker(KestrlError):
    """No rollout worker answers."""

    code = "no_worker"


class WorkerAway(KestrlError):
    """A worker could not be reached before it got the group; not a failure of the scenario."""

    code = "worker_away"
    retryable = True


class EnginesAway(KestrlError):
    """No engine served the version when its group was about to begin; not a failure of the scenario."""

    code = "engines_away"
    retryable = True


class MalformedGroup(KestrlError):
    """A worker's answer is not a group."""

    code = "malformed_group"
    retryable = True


class BrokenStream(KestrlError):
    """A worker ended a group's stream without the group."""

    code = "stream_broken"
    retryable = True


@dataclass(slots=True)
class _Worker:
    address: str
    stub: Any
    connection: Channel
    capacity: int = 0
    """Last reported capacity; 0 while the worker does not answer or drains."""
    used: int = 0
    """Unfinished episodes of this learner on the worker."""
    revision: int = 0
    """Revision of the engines that it was sent last."""
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    watching: asyncio.Task[None] | None = None
    leaving: bool = False
    """Its address was removed: it finishes its groups and is closed."""

    @property
    def free(self) -> int:
        """Free slots."""
        return max(0, self.capacity - self.used)


class Workers:
    """All rollout workers of the job, each used up to its reported capacity. `watch` must be running.

    Args:
        settings: The run's settings.
        progress: Where the number of workers is shown.
        serving: Engines of each version; running groups are sent every change.
        verify_tools: Awaited with the digests of tool servers' lists, by name, of each group before it is returned.
    """

    def __init__(
        self,
        settings: LearnerSettings,
        progress: Progress,
        serving: Serving,
        verify_tools: Callable[[Mapping[str, str]], Awaitable[None]],
    ) -> None:
        self._settings, self._progress, self._serving = settings, progress, serving
        self._verify_tools = verify_tools
        serving.changes.add(self._wake_busy)
        self._workers: list[_Worker] = []
        self._changed = Signal()
        self.changes = Listeners()
        """Called when the capacity of a worker has changed."""
        self._names = [name.removeprefix(DNS) for name in settings.rollout_addresses if name.startswith(DNS)]
        for address in settings.rollout_addresses:
            if not address.startswith(DNS):
                self._add(address)

    def _add(self, address: str) -> _Worker:
        connection = channel(address)
        worker = _Worker(address, stubs.RolloutServiceStub(connection), connection)
        self._workers.append(worker)
        return worker

    async def close(self) -> None:
        for worker in self._workers:
            await worker.connection.close()

    async def connect(self) -> None:
        """Waits until a worker reports its capacity.

        Raises:
            NoWorker: No worker did within `start_seconds`.
        """
        seconds = self._settings.start_seconds
        try:
            async with asyncio.timeout(seconds):
                await self._changed.wait_for(lambda: any(worker.capacity for worker in self._workers))
        except TimeoutError:
            addresses = ", ".join(self._settings.rollout_addresses)
            raise NoWorker(f"no rollout worker answered for {seconds:g} s ({addresses})") from None

    async def watch(self) -> None:
        """Polls the capacity of every worker and resolves every `dns://` name, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for worker in self._workers:
                self._begin(worker, tasks)
            for name in self._names:
                tasks.create_task(self._discover(name, tasks), name=f"discover-{name}")

    def _begin(self, worker: _Worker, tasks: asyncio.TaskGroup) -> None:
        worker.watching = tasks.create_task(self._watch(worker), name=f"watch-{worker.address}")

    async def _discover(self, name: str, tasks: asyncio.TaskGroup) -> None:
        workers: dict[str, _Worker] = {}
        while True:
            addresses = await resolved(name)
            if addresses is not None:  # a failed lookup does not mean that workers are gone
                for address in addresses - set(workers):
                    workers[address] = self._add(address)
                    self._begin(workers[address], tasks)
                    log.info("rollout worker %s of %s added", address, name)
                for address in set(workers) - addresses:
                    leaver = workers.pop(address)
                    leaver.leaving, leaver.capacity = True, 0
                    self._publish_status()
                    log.info("rollout worker %s of %s removed", address, name)
            await self._remove_departed()
            await asyncio.sleep(POLL_SECONDS)

    async def _remove_departed(self) -> None:
        """Closes the connections of leaving workers whose last group has ended."""
        for worker in [worker for worker in self._workers if worker.leaving and worker.used == 0]:
            self._workers.remove(worker)
            if worker.watching is not None:
                worker.watching.cancel()
                await asyncio.wait([worker.watching])
            await worker.connection.close()
            self._changed.notify()

    async def _watch(self, worker: _Worker) -> None:
        while True:
            worker.wake.clear()
            before = worker.capacity
            worker.capacity = await self._query_capacity(worker)
            if worker.capacity != before:
                self._publish_status()
                self._changed.notify()
                self.changes.notify()
            if worker.used and worker.revision != self._serving.revision:
                await self._update_engines(worker)
            with suppress(TimeoutError):
                async with asyncio.timeout(POLL_SECONDS if worker.capacity else RETRY_SECONDS):
                    await worker.wake.wait()

    def _wake_busy(self) -> None:
        """Lets workers with groups know at once which engines there are."""
        for worker in self._workers:
            if worker.used:
                worker.wake.set()

    async def _update_engines(self, worker: _Worker) -> None:
        """Sends a worker the engines of every version; what fails is tried again at the next look."""
        # One list: it may be replaced while it is sent.
        revision, newest_version, versions = self._serving.revision, self._serving.newest, self._serving.engines
        try:
            for policy, engines in versions.items():
                await call(
                    worker.stub.UpdateEngines,
                    pb.UpdateEnginesRequest(
                        policy=policy_to_proto(policy),
                        engines=engine_messages(engines),
                        engines_revision=revision,
                        newest=policy == newest_version,
                    ),
                    pb.UpdateEnginesResponse,
                    timeout=CALL_SECONDS,
                    peer=f"rollout worker {worker.address}",
                    token=Secret.LEARNER_TO_ROLLOUT.here(),
                )
        except KestrlError as error:
            log.warning("the engines of running groups are not updated, retrying: %s", error)
        else:
            worker.revision = revision

    def _publish_status(self) -> None:
        self._progress.observe(workers=len([worker for worker in self._workers if worker.capacity]))

    async def _query_capacity(self, worker: _Worker) -> int:
        try:
            answer = await call(
                worker.stub.GetCapacity,
                pb.GetCapacityRequest(),
                pb.GetCapacityResponse,
                timeout=CALL_SECONDS,
                peer=f"rollout worker {worker.address}",
                token=Secret.LEARNER_TO_ROLLOUT.here(),
            )
        except KestrlError as error:
            if worker.capacity:
                log.warning("%s", error)
            return 0
        self._progress.report_sandboxes(sandboxes_from_proto(answer.sandboxes))
        return 0 if answer.draining or worker.leaving else answer.concurrency

    @property
    def capacity(self) -> int:
        """Episodes that all workers together take at once."""
        return sum(worker.capacity for worker in self._workers)

    def room(self, size: int) -> int:
        """Groups of `size` episodes that could start now."""
        return sum(math.ceil(worker.free / size) for worker in self._workers)

    async def run(self, request: GroupAssignment, on_end: Callable[[int], None] = _ignored) -> Group:
        """Runs a group on the worker with the most free slots; waits while there is none.

        Args:
            request: The group to run.
            on_end: Called with the number of episodes that no longer need a slot; covers all of them when this returns.

        Raises:
            KestrlError: The group as a whole failed.
        """
        worker = await self._acquire(request.size)
        episodes_left = request.size

        def free(count: int) -> None:
            nonlocal episodes_left
            count = min(count, episodes_left)
            episodes_left -= count
            worker.used -= count
            self._progress.idle.count_episodes(-count)
            on_end(count)
            self._changed.notify()

        try:
            attributes = {Attr.GROUP_ID: request.group_id, Attr.POLICY: request.policy.name}
            with span(SpanName.GROUP, attributes, root=ids_of(request.group_id)):
                group = await self._stream(worker, request, free)
                self._progress.work.add(group)
                return group
        except EnginesAway:
            raise
        except KestrlError:
            # Gone, draining or failing: its capacity is polled before it gets another group.
            worker.capacity = 0
            self._publish_status()
            worker.wake.set()
            raise
        finally:
            free(episodes_left)

    def _best(self) -> _Worker | None:
        return max((worker for worker in self._workers if worker.free), key=lambda worker: worker.free, default=None)

    async def _acquire(self, size: int) -> _Worker:
        while (best := self._best()) is None:
            await self.connect()
            await self._changed.wait_for(lambda: self._best() or not any(worker.capacity for worker in self._workers))
        if best.used == 0:
            best.revision = self._serving.revision  # groups are sent the engines with their request
        best.used += size
        self._progress.idle.count_episodes(size)
        return best

    async def _stream(self, worker: _Worker, request: GroupAssignment, on_end: Callable[[int], None]) -> Group:
        timeout = 2 * self._settings.deadlines.group + GRACE_SECONDS
        peer = f"rollout worker {worker.address}"
        if not await connected(worker.connection, seconds=CONNECT_SECONDS):
            raise WorkerAway(f"{peer} cannot be reached")
        if not self._serving.engines.get(request.policy):
            raise EnginesAway(f"no engine serves {request.policy.name} now")
        message, token = run_group_request(request, self._settings, self._serving), Secret.LEARNER_TO_ROLLOUT.here()
        answers = stream(worker.stub.RunGroup, message, pb.RunGroupResponse, timeout=timeout, peer=peer, token=token)
        async for answer in answers:
            if answer.HasField("group"):
                await self._verify_tools(answer.tool_digests)
                return _decoded(answer.group, request.scenario, peer)
            on_end(answer.ended)
        raise BrokenStream(f"{peer} ended the stream of {request.group_id} without its group")


def _decoded(message: common_pb.Group, scenario: Scenario, peer: str) -> Group:
    """Decodes a group. Its scenario is the one that was requested, and only decoded if it is another one.

    Raises:
        MalformedGroup: It holds invalid values, such as an unknown stop reason or a truncated token id.
    """
    try:
        if (message.scenario.id, message.scenario.ordinal) != (scenario.id, scenario.ordinal):
            return group_from_proto(message)
        message.ClearField("scenario")
        return replace(group_from_proto(message), scenario=scenario)
    except (ValueError, TypeError, KeyError) as error:
        raise MalformedGroup(f"{peer} answered with a malformed group: {error}") from error
