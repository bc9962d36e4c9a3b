"""The gRPC service of the learner; what it reports is in `progress`."""
# ruff: noqa: ARG002 - gRPC hands each method a request and a context

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import Any

from kestrl.api.learner.v1 import learner_pb2 as pb
from kestrl.api.learner.v1 import learner_pb2_grpc as stubs
from kestrl_learner.progress.progress import Progress


class LearnerServicer(stubs.LearnerServiceServicer):
    """WatchProgress, Drain."""

    def __init__(self, progress: Progress, drain: Callable[[], None]) -> None:
        self._progress, self._drain = progress, drain

    async def WatchProgress(
        self,
        request: pb.WatchProgressRequest,
        context: Any,
    ) -> AsyncIterator[pb.WatchProgressResponse]:
        progress, sent = self._progress, None
        while True:
            # There is no await between reading the progress and waiting for its next change, so that no change is
            # missed. Messages are compared as bytes, in which NaN equals itself.
            while (seen := (message := progress.to_proto()).SerializeToString(deterministic=True)) == sent:
                if progress.ended:
                    return
                await progress.changed()
            sent, next_at = seen, asyncio.get_running_loop().time() + request.min_interval_seconds
            yield message
            if request.min_interval_seconds > 0:
                await self._hold(next_at)

    async def _hold(self, until: float) -> None:
        """Waits until a time of the loop's clock or the end of the run."""
        with suppress(TimeoutError):
            async with asyncio.timeout_at(until):
                while not (self._progress.final or self._progress.ended):
                    await self._progress.changed()

    async def Drain(self, request: pb.DrainRequest, context: Any) -> pb.DrainResponse:
        self._drain()
        return pb.DrainResponse()
