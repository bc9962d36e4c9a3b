"""The worker on the wire: messages in, messages out, nothing else."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import grpc

from kestrl.api.common.v1 import common_pb2
from kestrl.api.rollout.v1 import rollout_pb2 as pb
from kestrl.api.rollout.v1 import rollout_pb2_grpc as stubs
from kestrl.episode import Episode
from kestrl.rpc.codec import failure_to_proto
from kestrl_rollout.groups import GroupRunner
from kestrl_rollout.requests import read_request

Context = grpc.aio.ServicerContext[Any, Any]


def ended(episode: Episode) -> common_pb2.Episode:
    """That an episode ended, and how. What it holds comes with its group: it would be encoded twice."""
    return common_pb2.Episode(
        id=episode.id,
        group_id=episode.group_id,
        index=episode.index,
        stop_reason=episode.stop_reason,
        failure=None if episode.failure is None else failure_to_proto(episode.failure),
        seconds=episode.seconds,
    )


class RolloutServicer(stubs.RolloutServiceServicer):
    """Implements `kestrl.api.rollout.v1.RolloutService`."""

    def __init__(self, groups: GroupRunner, *, context_length: int) -> None:
        self._groups = groups
        self._context_length = context_length

    async def RunGroup(
        self,
        request: pb.RunGroupRequest,
        context: Context,  # noqa: ARG002 - gRPC's signature
    ) -> AsyncGenerator[pb.RunGroupResponse]:
        asked = read_request(request, context_length=self._context_length)
        async with aclosing(self._groups.run(asked)) as events:
            async for event in events:
                if isinstance(event, Episode):
                    yield pb.RunGroupResponse(episode=ended(event))
                else:
                    yield pb.RunGroupResponse(group=event)

    async def GetCapacity(self, request: pb.GetCapacityRequest, context: Context) -> pb.GetCapacityResponse:  # noqa: ARG002 - gRPC's name and signature
        capacity = self._groups.capacity
        return pb.GetCapacityResponse(
            concurrency=capacity.concurrency, running=capacity.running, draining=capacity.draining
        )
