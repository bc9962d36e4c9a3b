"""A thousand jobs that train: what their learners' reports cost the operator, and how soon a change of state is in a
status. Only the API server, its etcd and the operator run; the learners are progress and service of real ones."""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest
from tests.e2e.cluster.client import Cluster

from kestrl._shared.credentials import Secret
from kestrl.runstate import events
from kestrl_operator.apiserver.client import Api
from kestrl_operator.apiserver.kinds import JOB
from kestrl_operator.credentials import derive

from .learners import FakeLearner, training
from .operating import COUNT, KEY, Process, fill, held, operating, places, report
from .pods import run_pods

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.slow, pytest.mark.timeout(2400)]
NAMESPACE = "reporting"
SECONDS, CHANGES = 90.0, 20
GOAL_SHARE, GOAL_WRITES, GOAL_DELAY = 0.3, 100.0, 2.0
"""Share of a core and writes a second with a thousand jobs, and seconds until a change of state is in the status."""
LONGEST_START = 600.0
COLUMNS = '{.metadata.name} {.status.shown.phase} {.status.conditions[?(@.type=="LearnerProgressing")].reason}{"\\n"}'


class Statuses:
    """The statuses of all jobs, as a watch delivers them."""

    def __init__(self) -> None:
        self.writes = 0
        self.phases: dict[str, str] = {}
        self._awaited: dict[tuple[str, str], asyncio.Future[float]] = {}

    def take(self, line: str) -> None:
        """Takes one line of the watch."""
        self.writes += 1
        job, phase, reason = [*line.split(" "), "", ""][:3]
        self.phases[job] = phase
        future = self._awaited.pop((job, reason), None)
        if future is not None:
            future.set_result(time.monotonic())

    def seen(self, job: str, reason: str) -> asyncio.Future[float]:
        """The time at which condition LearnerProgressing of a job has a reason."""
        return self._awaited.setdefault((job, reason), asyncio.get_running_loop().create_future())

    def running(self) -> int:
        """Number of jobs in phase Running."""
        return sum(phase == "Running" for phase in self.phases.values())


@asynccontextmanager
async def watched(cluster: Cluster) -> AsyncGenerator[Statuses]:
    """The statuses of the jobs, followed by kubectl."""
    statuses = Statuses()
    command = [cluster.kubectl_program, f"--kubeconfig={cluster.kubeconfig}", "get", "agentrljobs.kestrl.dev"]
    more = [f"--namespace={NAMESPACE}", "--watch", f"--output=jsonpath={COLUMNS}"]
    process = await asyncio.create_subprocess_exec(*command, *more, stdout=asyncio.subprocess.PIPE)

    async def read() -> None:
        assert process.stdout is not None
        async for line in process.stdout:
            statuses.take(line.decode().rstrip("\n"))

    reading = asyncio.create_task(read())
    try:
        yield statuses
    finally:
        process.terminate()
        await process.wait()
        reading.cancel()
        with suppress(asyncio.CancelledError):
            await reading


async def credentials() -> Mapping[str, str]:
    """The credential of the operator's calls to each job's learner."""
    api = Api()
    try:
        uids = {item.name: item.uid async for item in api.marks(JOB, NAMESPACE)}
    finally:
        await api.close()
    return {job: derive(KEY.encode(), uid)[Secret.CONTROLLER_TO_LEARNER.value] for job, uid in uids.items()}


async def measured(cluster: Cluster, operator: Process) -> dict[str, float]:
    """What the operator costs while all jobs train, and how late changes of state are."""
    async with training(await credentials()) as learners, watched(cluster) as statuses:
        api = Api()
        try:
            await run_pods(api, NAMESPACE, {job: learner.address for job, learner in learners.items()})
        finally:
            await api.close()
        async with asyncio.timeout(LONGEST_START):
            while statuses.running() < len(learners):  # noqa: ASYNC110 - every line of the watch would be another event
                await asyncio.sleep(1)
        await asyncio.sleep(15)  # no event says that the starts are over
        cpu, writes, passes, began = operator.cpu(), statuses.writes, operator.passes(), time.monotonic()
        delays = [await changed(learner, statuses) for learner in chosen(learners)]
        await asyncio.sleep(max(0.0, began + SECONDS - time.monotonic()))  # the cost over a time is what is measured
        seconds = time.monotonic() - began
        return {
            "jobs": len(learners),
            "share_of_a_core": round((operator.cpu() - cpu) / seconds, 3),
            "status_writes_per_second": round((statuses.writes - writes) / seconds, 1),
            "passes_per_second": round((operator.passes() - passes) / seconds, 1),
            "median_delay": round(statistics.median(delays), 2),
            "longest_delay": round(max(delays), 2),
            "operator_peak_mib": operator.peak(),
        }


def chosen(learners: Mapping[str, FakeLearner]) -> Iterator[FakeLearner]:
    yield from random.sample(list(learners.values()), min(CHANGES, len(learners)))


async def changed(learner: FakeLearner, statuses: Statuses) -> float:
    """Seconds from a change of a learner's state until it is in the job's status."""
    began, written = time.monotonic(), statuses.seen(learner.job, "StorageUnavailable")
    learner.progress.emit(events.StorageAwaited(reason="s3://nowhere does not answer"))
    async with asyncio.timeout(60):
        delay = await written - began
    learner.progress.emit(events.StorageAwaited(reason=""))
    return delay


def test_learners_that_report_cost_the_operator_little(by_token: Cluster, tmp_path: Path) -> None:
    if by_token.own is None:
        pytest.skip("the controllers of a cluster that is not the harness's own cannot be held")
    with places(by_token, NAMESPACE), held(by_token), operating(tmp_path) as operator:
        asyncio.run(fill(NAMESPACE))
        cost = asyncio.run(measured(by_token, operator))
    report("learners_reporting", cost)
    thousands = COUNT / 1000
    assert cost["share_of_a_core"] <= GOAL_SHARE * thousands + 0.03
    assert cost["status_writes_per_second"] <= GOAL_WRITES * thousands
    assert cost["longest_delay"] <= GOAL_DELAY
