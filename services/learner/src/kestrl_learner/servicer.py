"""The gRPC service of the learner; what it reports is in `progress`."""
# ruff: noqa: ARG002 - gRPC hands each method a request and a context

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import Any

from kestrl._shared.rpc.run_report import report_of
from kestrl.api.learner.v1 import learner_pb2 as pb
from kestrl.api.learner.v1 import learner_pb2_grpc as stubs
from kestrl_learner.progress.progress import Progress
from kestrl_learner.progress.watched import is_news

SHORTEST_INTERVAL = 0.1
"""Seconds between two looks at a progress of which only numbers have changed."""


class LearnerServicer(stubs.LearnerServiceServicer):
    """WatchProgress, Drain."""

    def __init__(self, progress: Progress, drain: Callable[[], None]) -> None:
        self._progress, self._drain = progress, drain

    async def WatchProgress(
        self,
        request: pb.WatchProgressRequest,
        context: Any,
    ) -> AsyncIterator[pb.WatchProgressResponse]:
        progress, sent_content, state, clock = self._progress, None, None, asyncio.get_running_loop().time
        numbers_at = clock()
        while True:
            # There is no await between reading the progress and waiting for its next change, so that no change is
            # missed. Messages are compared as bytes, in which NaN equals itself.
            while (
                content := (message := report_of(progress.state)).SerializeToString(deterministic=True)
            ) == sent_content:
                if progress.ended:
                    return
                await progress.changed()
            now, ends = clock(), progress.final or progress.ended
            if state is not None and now < numbers_at and not ends and not is_news(state, progress.state):
                # A state that changes within the shorter interval is seen at its end.
                await self._hold(min(numbers_at, now + max(request.min_interval_seconds, SHORTEST_INTERVAL)))
                continue
            sent_content, state, numbers_at = content, progress.state, now + request.numbers_interval_seconds
            yield message
            if request.min_interval_seconds > 0:
                await self._hold(now + request.min_interval_seconds)

    async def _hold(self, until: float) -> None:
        """Waits until a time of the loop's clock or the end of the run."""
        with suppress(TimeoutError):
            async with asyncio.timeout_at(until):
                while not (self._progress.final or self._progress.ended):
                    await self._progress.changed()

    async def Drain(self, request: pb.DrainRequest, context: Any) -> pb.DrainResponse:
        self._drain()
        return pb.DrainResponse()
