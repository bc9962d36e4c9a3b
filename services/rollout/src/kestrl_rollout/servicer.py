"""The gRPC service of a rollout worker; the work is done in `groups`."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import grpc

from kestrl._shared.rpc.codec import sandboxes_to_proto
from kestrl.api.rollout.v1 import rollout_pb2 as pb
from kestrl.api.rollout.v1 import rollout_pb2_grpc as stubs
from kestrl.episode import BASE_MODEL_NAME
from kestrl.episode.codec import policy_from_proto
from kestrl_rollout.groups.group_runner import GroupRunner
from kestrl_rollout.requests import addresses, read_request

Context = grpc.aio.ServicerContext[Any, Any]


class RolloutServicer(stubs.RolloutServiceServicer):
    """RunGroup, UpdateEngines, GetCapacity."""

    def __init__(self, groups: GroupRunner, *, context_length: int) -> None:
        self._groups = groups
        self._context_length = context_length

    async def RunGroup(
        self,
        request: pb.RunGroupRequest,
        context: Context,  # noqa: ARG002 - gRPC's signature
    ) -> AsyncGenerator[pb.RunGroupResponse]:
        group_request = read_request(request, context_length=self._context_length)
        async with aclosing(self._groups.run(group_request)) as events:
            async for event in events:
                if isinstance(event, int):
                    yield pb.RunGroupResponse(ended=event)
                else:
                    yield pb.RunGroupResponse(group=event, tool_digests=self._groups.tool_digests)

    async def UpdateEngines(self, request: pb.UpdateEnginesRequest, context: Context) -> pb.UpdateEnginesResponse:  # noqa: ARG002 - gRPC's name and signature
        policy = policy_from_proto(request.policy)
        name = BASE_MODEL_NAME if policy is None else policy.name
        engines = addresses(request.engines)
        self._groups.update_engines(name, engines, request.engines_revision)
        if request.newest and policy is not None:
            self._groups.renew_newest(policy, engines, request.engines_revision)
        return pb.UpdateEnginesResponse()

    async def GetCapacity(self, request: pb.GetCapacityRequest, context: Context) -> pb.GetCapacityResponse:  # noqa: ARG002 - gRPC's name and signature
        capacity = self._groups.capacity
        return pb.GetCapacityResponse(
            concurrency=capacity.concurrency,
            running=capacity.running,
            draining=capacity.draining,
            sandboxes=sandboxes_to_proto(self._groups.sandboxes),
        )
