"""Learners of many jobs: each has the progress and the service of a real one, and trains on a clock. One process, one
server and one loopback address for each."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc

from kestrl._shared.rpc.status import TOKEN_KEY
from kestrl.api.learner.v1 import learner_pb2 as pb
from kestrl.api.learner.v1 import learner_pb2_grpc as stubs
from kestrl.episode import PolicyVersion
from kestrl.runstate import events
from kestrl.runstate.history import StepCounts
from kestrl.runstate.state import EngineReport, LastStep
from kestrl.runstate.states import RunPhase, ServingState
from kestrl_learner.progress.progress import Progress
from kestrl_learner.servicer import LearnerServicer
from kestrl_operator.state.cluster import GRPC_PORT

ENGINES = ("inference-0", "inference-1")
STEP_SECONDS, PROOF_SECONDS = 30.0, 2.0
"""Duration of a step, and of its part in which engines load and prove the version of the step before."""
GROUPS = 8
"""Groups of a step."""
STEPS = 1000


@dataclass(frozen=True, slots=True)
class FakeLearner:
    """The learner of one job."""

    job: str
    address: str
    progress: Progress

    async def train(self) -> None:
        """Trains without end, from a random moment of a step on."""
        progress = self.progress
        progress.emit(events.StepsPlanned(total=STEPS))
        progress.emit(events.PhaseEntered(phase=RunPhase.TRAINING, message="the first step"))
        progress.observe(workers=1)
        self._prove(0)
        await asyncio.sleep(random.uniform(0, STEP_SECONDS))
        for step in range(1, STEPS):
            progress.begin_gathering(GROUPS)
            for group in range(GROUPS):
                await asyncio.sleep((STEP_SECONDS - PROOF_SECONDS) / GROUPS)
                reward = {"reward": random.random(), "tool_calls": 1.0}
                progress.emit(events.GroupScored(episodes=(reward,), tokens=500, seconds=group + 1.0, means=reward))
                progress.observe(groups_running=random.randrange(GROUPS))
            took = LastStep(
                tokens_per_second=random.uniform(90, 110), episodes_per_second=random.uniform(1, 2), eta_seconds=600.0
            )
            counts = StepCounts(groups=GROUPS, idle_groups=0, tool_calls=GROUPS, gradient=1.0)
            progress.emit(events.StepFinished(step=step, counts=counts, took=took, message=f"step {step}"))
            progress.emit(events.CheckpointConfirmed(step=step))
            self._publish(step)
            await asyncio.sleep(PROOF_SECONDS)
            self._prove(step)

    def _publish(self, step: int) -> None:
        version, before = self._version(step), self._version(step - 1)
        uri = f"s3://nowhere/at-all/{self.job}/{step}"
        self.progress.emit(events.VersionPublished(version=version, uri=uri, parent=before.name))
        reports = [EngineReport(name=name, policy=before, lag=1, state=ServingState.LOADING) for name in ENGINES]
        self.progress.emit(events.EnginesObserved(verified=0, reports=tuple(reports)))

    def _prove(self, step: int) -> None:
        version = self._version(step)
        if step == 0:
            self.progress.emit(events.VersionPublished(version=version, uri="s3://nowhere/at-all/0", parent=""))
        reports = [EngineReport(name=name, policy=version, state=ServingState.SERVING) for name in ENGINES]
        self.progress.emit(events.EnginesObserved(verified=len(ENGINES), reports=tuple(reports)))
        self.progress.emit(events.VersionVerified(seconds=PROOF_SECONDS))

    def _version(self, step: int) -> PolicyVersion:
        return PolicyVersion(job=self.job, step=step, sha256=f"{step:064x}")


class _Services(stubs.LearnerServiceServicer):
    """The services of all learners; the credential of a call says whose is called."""

    def __init__(self, learners: Mapping[str, FakeLearner]) -> None:
        self._services = {token: LearnerServicer(learner.progress, _ignore) for token, learner in learners.items()}

    async def WatchProgress(
        self, request: pb.WatchProgressRequest, context: Any
    ) -> AsyncIterator[pb.WatchProgressResponse]:
        token = dict(context.invocation_metadata())[TOKEN_KEY]
        async for report in self._services[token].WatchProgress(request, context):
            yield report


def _ignore() -> None:
    """No test drains them."""


def address_of(number: int) -> str:
    """A loopback address of a learner's own."""
    return f"127.251.{1 + number // 250}.{1 + number % 250}"


@asynccontextmanager
async def training(jobs: Mapping[str, str]) -> AsyncGenerator[Mapping[str, FakeLearner]]:
    """Learners that train, by job.

    Args:
        jobs: The credential of the operator's calls by job.
    """
    learners = {
        job: FakeLearner(job, address_of(number), Progress(len(ENGINES), GROUPS, offers_tools=True))
        for number, job in enumerate(sorted(jobs))
    }
    server = grpc.aio.server()
    stubs.add_LearnerServiceServicer_to_server(_Services({jobs[job]: it for job, it in learners.items()}), server)
    for learner in learners.values():
        server.add_insecure_port(f"{learner.address}:{GRPC_PORT}")
    await server.start()
    tasks = [asyncio.create_task(learner.train()) for learner in learners.values()]
    try:
        yield learners
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await server.stop(None)
