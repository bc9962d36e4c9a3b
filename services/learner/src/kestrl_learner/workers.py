"""The rollout workers: who has room, and one group run on one of them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kestrl.api.rollout.v1 import rollout_pb2 as pb
from kestrl.api.rollout.v1 import rollout_pb2_grpc as stubs
from kestrl.episode import Group, PolicyVersion, Scenario
from kestrl.errors import KestrlError
from kestrl.plan.settings import EngineEntry, LearnerSettings
from kestrl.rpc import Channel, call, channel, stream
from kestrl.rpc.codec import group_from_proto, policy_to_proto, scenario_to_proto
from kestrl.telemetry import span
from kestrl.telemetry.names import Attr, SpanName

log = logging.getLogger(__name__)
GRACE_SECONDS = 15.0
"""What the stream may take beyond the group's own deadline before it is given up from this side."""


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
    capacity: int
    used: int = 0


class Workers:
    """All rollout workers of the job, each used up to the capacity it tells."""

    def __init__(self, settings: LearnerSettings) -> None:
        self._settings = settings
        self._workers: list[_Worker] = []
        self._room = asyncio.Condition()

    async def connect(self) -> None:
        """Waits until every worker tells its capacity.

        Raises:
            FailureError: One did not come up in time.
        """
        for address in self._settings.rollout_addresses:
            connection = channel(address)
            stub: Any = stubs.RolloutServiceStub(connection)
            answer = await call(
                stub.GetCapacity,
                pb.GetCapacityRequest(),
                pb.GetCapacityResponse,
                timeout=self._settings.start_seconds,
                peer=f"rollout worker {address}",
                wait=True,
            )
            self._workers.append(_Worker(address, stub, connection, answer.concurrency))

    async def close(self) -> None:
        for worker in self._workers:
            await worker.connection.close()

    def room(self, size: int) -> int:
        """Groups of a size that could start now."""
        return sum(max(0, worker.capacity - worker.used) // size for worker in self._workers)

    async def run(self, order: Order) -> Group:
        """Runs a group on the worker with the most room, waiting for room if there is none.

        Raises:
            KestrlError: The group as a whole failed; typed.
        """
        worker = await self._take(order.size)
        try:
            with span(SpanName.GROUP, {Attr.GROUP_ID: order.group_id, Attr.POLICY: order.policy.name}):
                return await self._stream(worker, order)
        finally:
            worker.used -= order.size
            async with self._room:
                self._room.notify_all()

    async def _take(self, size: int) -> _Worker:
        async with self._room:
            while True:
                best = max(self._workers, key=lambda worker: worker.capacity - worker.used)
                if best.capacity - best.used >= size:
                    best.used += size
                    return best
                await self._room.wait()

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

    async def _stream(self, worker: _Worker, order: Order) -> Group:
        timeout = self._settings.group_seconds + GRACE_SECONDS
        answers = stream(
            worker.stub.RunGroup, self._request(order), pb.RunGroupResponse, timeout=timeout, peer=worker.address
        )
        async for answer in answers:
            if answer.HasField("group"):
                return group_from_proto(answer.group)
        raise KestrlError(f"{worker.address} ended the stream of {order.group_id} without its group", retryable=True)
