"""The rollout workers: who has room, and one group run on one of them.

Room is counted in episodes, not in groups: one straggler, or a judge that takes its time, holds one slot or none. A group goes to a
worker as soon as one slot is free; its other episodes wait there for the next, so that no slot stands idle until there are enough.

A worker whose stream breaks gets nothing more until it has told its capacity again, so that one that was killed, or is draining,
neither eats scenarios nor stops the run; while none answers, groups wait, and after `start_seconds` the run fails.

An address is `host:port`, or `dns://host:port` for as many workers as that name has addresses (a headless Service's): who comes is used,
who goes gets nothing more and is forgotten when its last group has ended.
"""

from __future__ import annotations

import asyncio
import logging
import math
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from kestrl.api.common.v1 import common_pb2 as common_pb
from kestrl.api.rollout.v1 import rollout_pb2 as pb
from kestrl.api.rollout.v1 import rollout_pb2_grpc as stubs
from kestrl.credentials import Secret
from kestrl.episode import Group, PolicyVersion, Scenario
from kestrl.errors import KestrlError
from kestrl.plan.settings import EngineEntry, LearnerSettings
from kestrl.rpc import Channel, call, channel, connected, stream
from kestrl.rpc.codec import group_from_proto, policy_to_proto, scenario_to_proto
from kestrl.telemetry import span
from kestrl.telemetry.names import Attr, SpanName
from kestrl_learner.aio import Signal
from kestrl_learner.progress import Progress

log = logging.getLogger(__name__)
GRACE_SECONDS = 15.0
"""What the stream may take beyond the group's own deadline, twice, before it is given up from this side: its episodes may wait for
their slots once as long."""
DNS = "dns://"
LOOK_SECONDS = 5.0
RETRY_SECONDS = 0.5
"""Between looks at a worker that does not answer."""
CALL_SECONDS = 5.0
CONNECT_SECONDS = 2.0


def _nobody() -> None:
    """Nobody listens yet."""


def _ignored(count: int) -> None:
    """Nobody counts."""


class NoWorker(KestrlError):
    """No rollout worker answers."""

    code = "no_worker"


class WorkerAway(KestrlError):
    """A worker went away before it was given the group: the scenario has not failed."""

    code = "worker_away"
    retryable = True


class MalformedGroup(KestrlError):
    """A worker's answer is not a group."""

    code = "malformed_group"
    retryable = True


class BrokenStream(KestrlError):
    """A worker ended a group's stream without the group."""

    code = "stream_broken"
    retryable = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """One group to run."""

    group_id: str
    scenario: Scenario
    size: int
    policy: PolicyVersion
    engines: Sequence[EngineEntry]
    temperature: float
    seed: int
    purpose: str


@dataclass(slots=True)
class _Worker:
    address: str
    stub: Any
    connection: Channel
    capacity: int = 0
    """As it last told; 0 while it does not answer or drains."""
    used: int = 0
    """Episodes of ours that it has; those that ended in a group that has not are none."""
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    watching: asyncio.Task[None] | None = None
    leaving: bool = False
    """Its name has gone: it ends what it has and is forgotten."""

    @property
    def free(self) -> int:
        """Slots for which no episode is there."""
        return max(0, self.capacity - self.used)


async def resolved(name: str) -> set[str] | None:
    """The addresses that `host:port` stands for now; None when the question cannot be answered."""
    host, _, port = name.rpartition(":")
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, int(port), type=socket.SOCK_STREAM)
    except OSError as error:
        log.warning("rollout workers: %s cannot be looked up: %s", host, error)
        return None
    return {f"[{ip}]:{port}" if family == socket.AF_INET6 else f"{ip}:{port}" for family, *_, (ip, *_) in found}


class Workers:
    """All rollout workers of the job, each used up to the capacity it tells. `watch` must be running."""

    def __init__(self, settings: LearnerSettings, progress: Progress) -> None:
        self._settings, self._progress = settings, progress
        self._workers: list[_Worker] = []
        self._changed = Signal()
        self.on_change: Callable[[], None] = _nobody
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
        """Waits until a worker tells its capacity.

        Raises:
            NoWorker: None did for `start_seconds`.
        """
        seconds = self._settings.start_seconds
        try:
            async with asyncio.timeout(seconds):
                await self._changed.wait_for(lambda: any(worker.capacity for worker in self._workers))
        except TimeoutError:
            addresses = ", ".join(self._settings.rollout_addresses)
            raise NoWorker(f"no rollout worker answered for {seconds:g} s ({addresses})") from None

    async def watch(self) -> None:
        """Asks every worker for its capacity again and again, and every name for its workers."""
        async with asyncio.TaskGroup() as tasks:
            for worker in self._workers:
                self._begin(worker, tasks)
            for name in self._names:
                tasks.create_task(self._discover(name, tasks), name=f"discover-{name}")

    def _begin(self, worker: _Worker, tasks: asyncio.TaskGroup) -> None:
        worker.watching = tasks.create_task(self._watch(worker), name=f"watch-{worker.address}")

    async def _discover(self, name: str, tasks: asyncio.TaskGroup) -> None:
        known: dict[str, _Worker] = {}
        while True:
            found = await resolved(name)
            if found is not None:  # a name server that is away says nothing of the workers
                for address in found - set(known):
                    known[address] = self._add(address)
                    self._begin(known[address], tasks)
                    log.info("rollout worker %s of %s has come", address, name)
                for address in set(known) - found:
                    gone = known.pop(address)
                    gone.leaving, gone.capacity = True, 0
                    self._tell()
                    log.info("rollout worker %s of %s has gone", address, name)
            await self._forget_idle()
            await asyncio.sleep(LOOK_SECONDS)

    async def _forget_idle(self) -> None:
        """Of those that are leaving, the ones whose last group has ended."""
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
            worker.capacity = await self._ask(worker)
            if worker.capacity != before:
                self._tell()
                self._changed.notify()
                self.on_change()
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_SECONDS if worker.capacity else RETRY_SECONDS):
                    await worker.wake.wait()

    def _tell(self) -> None:
        self._progress.update(workers=len([worker for worker in self._workers if worker.capacity]))

    async def _ask(self, worker: _Worker) -> int:
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
        return 0 if answer.draining or worker.leaving else answer.concurrency

    @property
    def capacity(self) -> int:
        """Episodes that all workers together take at once."""
        return sum(worker.capacity for worker in self._workers)

    def room(self, size: int) -> int:
        """Groups of a size that could start now, as far as is known."""
        return sum(math.ceil(worker.free / size) for worker in self._workers)

    async def run(self, order: Order, ended: Callable[[int], None] = _ignored) -> Group:
        """Runs a group on the worker with the most room, waiting for room if there is none.

        Args:
            order: What to run.
            ended: Called with how many more of its episodes need no slot any more; for all of them by the time this ends.

        Raises:
            KestrlError: The group as a whole failed; typed.
        """
        worker = await self._take(order.size)
        left = order.size

        def free(count: int) -> None:
            nonlocal left
            count = min(count, left)
            left -= count
            worker.used -= count
            ended(count)
            self._changed.notify()

        try:
            with span(SpanName.GROUP, {Attr.GROUP_ID: order.group_id, Attr.POLICY: order.policy.name}):
                return await self._stream(worker, order, free)
        except KestrlError:
            # Gone, draining, or in trouble: it is asked before it gets more.
            worker.capacity = 0
            self._tell()
            worker.wake.set()
            raise
        finally:
            free(left)

    def _best(self) -> _Worker | None:
        return max((worker for worker in self._workers if worker.free), key=lambda worker: worker.free, default=None)

    async def _take(self, size: int) -> _Worker:
        while (best := self._best()) is None:
            await self.connect()
            await self._changed.wait_for(lambda: self._best() or not any(worker.capacity for worker in self._workers))
        best.used += size
        return best

    def _request(self, order: Order) -> pb.RunGroupRequest:
        settings = self._settings
        return pb.RunGroupRequest(
            group_id=order.group_id,
            scenario=scenario_to_proto(order.scenario),
            size=order.size,
            policy=policy_to_proto(order.policy),
            engines=[pb.Engine(name=engine.name, url=engine.url) for engine in order.engines],
            sampling=pb.Sampling(
                temperature=order.temperature,
                max_tokens=settings.max_tokens,
                max_turns=settings.max_turns,
                max_tokens_per_turn=settings.max_tokens_per_turn,
            ),
            deadlines=pb.Deadlines(
                tool=settings.tool_seconds,
                turn=settings.turn_seconds,
                episode=settings.episode_seconds,
                group=settings.group_seconds,
            ),
            seed=order.seed,
            purpose=order.purpose,
        )

    async def _stream(self, worker: _Worker, order: Order, ended: Callable[[int], None]) -> Group:
        timeout = 2 * self._settings.group_seconds + GRACE_SECONDS
        peer = f"rollout worker {worker.address}"
        if not await connected(worker.connection, seconds=CONNECT_SECONDS):
            raise WorkerAway(f"{peer} is not there")
        request, token = self._request(order), Secret.LEARNER_TO_ROLLOUT.here()
        answers = stream(worker.stub.RunGroup, request, pb.RunGroupResponse, timeout=timeout, peer=peer, token=token)
        async for answer in answers:
            if answer.HasField("group"):
                return _decoded(answer.group, peer)
            ended(answer.ended)
        raise BrokenStream(f"{peer} ended the stream of {order.group_id} without its group")


def _decoded(message: common_pb.Group, peer: str) -> Group:
    """A group from the wire.

    Raises:
        MalformedGroup: It holds what no group can hold, such as an unknown stop reason or half a token id.
    """
    try:
        return group_from_proto(message)
    except (ValueError, TypeError, KeyError) as error:
        raise MalformedGroup(f"{peer} answered with a malformed group: {error}") from error
