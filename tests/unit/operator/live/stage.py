"""The setting of these tests: a fake API server, real operators that run against it in this process, and fake learners
over real gRPC."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml
from tests.fakes.kubernetes import Controllers, FakeKubernetes
from tests.fakes.ports import free_port

from kestrl._shared import rpc
from kestrl._shared.credentials import Secret
from kestrl._shared.rpc.codec import run_phase_to_proto
from kestrl._shared.rpc.run_report import state_of
from kestrl._shared.spec.crd import crd, sft_crd
from kestrl.api.common.v1 import common_pb2
from kestrl.api.learner.v1 import learner_pb2 as pb
from kestrl.api.learner.v1 import learner_pb2_grpc as stubs
from kestrl.errors import StorageError
from kestrl.runstate.states import RunPhase
from kestrl_operator.apiserver.client import Api
from kestrl_operator.apiserver.kinds import Kind
from kestrl_operator.config import LeaseSettings, OperatorConfig
from kestrl_operator.controllers.learner_stream import LearnerStream
from kestrl_operator.credentials import derive
from kestrl_operator.operator import Operator
from kestrl_operator.state.chart_values import read_cluster
from kestrl_operator.state.cluster import GRPC_PORT
from kestrl_operator.watch.streams import WATCHED

Object = dict[str, Any]
ROOT = Path(__file__).parents[4]
QUICKSTART = ROOT / "examples" / "email-search" / "quickstart.yaml"
KEY = b"0123456789abcdef0123456789abcdef"
NAMESPACE, JOB = "team-a", "email-search"
UNSEEN = {"observedGeneration": -1}
"""Status of a job that no operator has seen."""
VALUES: Object = {
    "images": {
        "engine": {"cpu": "r/engine-cpu:1", "cuda": "r/engine-cuda:1", "npu": "r/engine-npu:1"},
        "learner": {"cpu": "r/learner-cpu:1", "cuda": "r/learner-cuda:1", "npu": "r/learner-npu:1"},
        "agent": "r/agent:1",
        "rollout": "r/rollout:1",
        "tools": "r/tools:1",
        "judge": "r/judge:1",
    },
    "storage": {"uri": "s3://bucket/runs"},
}
CHILDREN = ("secrets", "configmaps", "serviceaccounts", "services", "poddisruptionbudgets", "networkpolicies")
WORKLOADS = ("statefulsets", "deployments")
SELECTORS = {kind.plural: labels for kind, labels in WATCHED.items()}
LEASE_SECONDS = 15.0
"""Long enough for a busy machine, on which an operator may renew late; tests of the lease itself use a shorter one."""
DEFINITION = crd()


SOON = 0.25
"""Seconds within which a due pass is waited for; the next retries and rechecks are later."""


class Followed(Operator):
    """An operator that records which state of each object its streams have delivered."""

    def __init__(self, config: OperatorConfig, api: Api) -> None:
        super().__init__(config, api)
        self.delivered: dict[str, int] = {}
        """The newest resourceVersion by uid; of a deletion, the deletion's."""

    def _take(self, kind: Kind, body: Mapping[str, Any], deleted: bool) -> None:
        super()._take(kind, body, deleted)
        metadata = body["metadata"]
        newest = max(int(metadata["resourceVersion"]), self.delivered.get(metadata["uid"], 0))
        self.delivered[metadata["uid"]] = newest


class Running:
    """An operator in this process."""

    def __init__(self, user: str, config: OperatorConfig) -> None:
        self.user, self.api, self.namespaces = user, Api(), config.namespaces
        self.operator = Followed(config, self.api)
        self.port = int(config.health_listen.rpartition(":")[2])
        self.task = asyncio.create_task(self.operator.run(), name=f"operator-{user}")

    async def stop(self) -> None:
        """Stops it like SIGTERM."""
        self.task.cancel()
        with suppress(asyncio.CancelledError):
            await self.task
        await self.api.close()

    def jobs(self) -> set[str]:
        """Names of the jobs in its store, which its metric kestrl_operator_jobs counts."""
        return {key.name for key in self.operator._store.jobs}

    def sft_jobs(self) -> set[str]:
        """Names of the SFTJobs in its store."""
        return {key.name for key in self.operator._controllers[1].store.jobs}

    def has_nothing_to_do(self, cluster: FakeKubernetes, learners: Mapping[str, FakeLearner], *, leads: bool) -> bool:
        """Whether everything that happened was delivered and, if it leads, processed, and no pass is due soon."""
        queues = [controller.queue for controller in self.operator._controllers]
        soon = asyncio.get_running_loop().time() + SOON
        return (
            self.has_delivered(cluster)
            and all(self._has_newest_report(stream, learners) for stream in self.operator._states._streams())
            and not (leads and any(queue._taken or any(due <= soon for due in queue._due.values()) for queue in queues))
        )

    def has_delivered(self, cluster: FakeKubernetes) -> bool:
        """Whether each stream that is not frozen has delivered the newest state of each of its objects. A stream that
        begins after a deletion never mentions it; an object that an audit has listed before is forgotten by then.
        """
        newest = {
            change.after["metadata"]["uid"]: change
            for change in cluster.objects.history
            if not change.lost and cluster.is_watched(change, SELECTORS, self.namespaces)
        }
        seen, known = self.operator.delivered, frozenset[str]().union(*self.operator._store.known())
        return all(
            change.version <= seen.get(uid, change.version if change.type == "DELETED" and uid not in known else 0)
            for uid, change in newest.items()
        )

    def _has_newest_report(self, stream: LearnerStream, learners: Mapping[str, FakeLearner]) -> bool:
        learner = learners.get(stream.address)
        if stream.awaits_first_report or learner is None or stream.unreachable:
            return not stream.awaits_first_report
        return stream.report is not None and stream.report.state == state_of(learner.newest)

    async def asked(self, path: str = "healthz") -> tuple[int, str]:
        """Status and text that a probe of the kubelet gets."""
        async with (
            aiohttp.ClientSession() as session,
            session.get(f"http://127.0.0.1:{self.port}/{path}") as answer,
        ):
            return answer.status, await answer.text()


class Stage:
    """The cluster with its operators, and the queries of tests."""

    def __init__(self, cluster: FakeKubernetes, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.cluster, self.folder, self.patch = cluster, folder, patch
        self.running: list[Running] = []
        self.learners: dict[str, FakeLearner] = {}
        """Fake learners by address."""
        self.lease_seconds = LEASE_SECONDS
        (folder / "key").write_bytes(KEY)

    def config(self, values: Mapping[str, Any] | None = None, **changes: Any) -> OperatorConfig:
        plain = LeaseSettings(namespace="kestrl-system", seconds=changes.pop("lease_seconds", self.lease_seconds))
        return OperatorConfig(
            jobs=read_cluster({**VALUES, **(values or {})}),
            key_file=self.folder / "key",
            lease=changes.pop("lease", plain),
            health_listen=f"127.0.0.1:{free_port()}",
            **changes,
        )

    def begin(self, user: str = "a", values: Mapping[str, Any] | None = None, **changes: Any) -> Running:
        """Starts an operator; its requests are logged under this user."""
        self.patch.setenv("KUBECONFIG", str(self.cluster.write_kubeconfig(self.folder, user=user)))
        self.patch.setenv("POD_NAME", user)
        running = Running(user, self.config(values, **changes))
        self.running.append(running)
        return running

    async def operator(self, user: str = "a", values: Mapping[str, Any] | None = None, **changes: Any) -> Running:
        """Starts an operator and waits until it watches, and until it leads if nobody else does."""
        running = self.begin(user, values, **changes)
        await self.until(lambda: self.watches(user), f"{user} watches")
        if len(self.running) == 1:
            await self.until(lambda: self.holder() == user, f"{user} leads")
        return running

    def watches(self, user: str) -> bool:
        return {item.resource for item in self.cluster.requests("watch", user=user)} >= {
            kind.plural for kind in WATCHED
        }

    async def stop(self, running: Running) -> None:
        self.running.remove(running)
        await running.stop()

    async def until(self, holds: Callable[[], Any], what: str, *, seconds: float = 30.0) -> Any:
        """Waits for a condition; if an operator ends meanwhile, its error is raised."""

        def looked() -> Any:
            for running in self.running:
                if running.task.done():
                    running.task.result()
                    raise AssertionError(f"{running.user} has ended")
                assert not running.operator._workers.passes["bug"], "a pass raised an unexpected error; see the log"
            return holds()

        return await self.cluster.until(looked, what, seconds=seconds)

    async def until_asked(self, running: Running, code: int, *, seconds: float = 30.0) -> str:
        """Waits until /healthz answers with this status; returns its text."""
        async with asyncio.timeout(seconds):
            while (answer := await running.asked())[0] != code:  # noqa: ASYNC110 - a probe can only be polled
                await asyncio.sleep(0.02)
        return answer[1]

    def job(self, name: str = JOB, namespace: str = NAMESPACE, **spec: Any) -> Object:
        """Applies the quickstart with changes."""
        made = yaml.safe_load(QUICKSTART.read_text())
        made["metadata"] = {"name": name, "namespace": namespace}
        made["spec"] |= spec
        return self.cluster.create("agentrljobs", made)

    def uid(self, name: str = JOB) -> str:
        return self.cluster.get("agentrljobs", NAMESPACE, name)["metadata"]["uid"]

    def status(self, name: str = JOB) -> Object:
        found = self.cluster.find("agentrljobs", NAMESPACE, name)
        return {} if found is None else found.get("status", {})

    def condition(self, kind: str, name: str = JOB) -> tuple[str, str, str]:
        """Status, reason and message."""
        for item in self.status(name).get("conditions", ()):
            if item["type"] == kind:
                return item["status"], item["reason"], item["message"]
        return "", "", ""

    def phase(self, name: str = JOB) -> str:
        return self.status(name).get("shown", {}).get("phase", "")

    def children(self, name: str = JOB) -> list[str]:
        """The objects of a job, as `kind/name`."""
        return sorted(
            f"{item['kind']}/{item['metadata']['name']}"
            for plural in (*CHILDREN, *WORKLOADS)
            for item in self.cluster.list(plural, NAMESPACE, labels=f"app.kubernetes.io/instance={name}")
        )

    def pods(self, role: str, name: str = JOB) -> list[Object]:
        return self.cluster.list("pods", NAMESPACE, labels=f"kestrl.dev/job={name},kestrl.dev/role={role}")

    def learner(self, name: str = JOB) -> Object | None:
        """The learner's StatefulSet, which is created last."""
        return self.cluster.find("statefulsets", NAMESPACE, f"{name}-learner")

    def holder(self) -> str:
        found = self.cluster.find("leases", "kestrl-system", "kestrl-operator")
        return "" if found is None else found["spec"].get("holderIdentity") or ""

    def writes(self, user: str | None = None) -> list[str]:
        """Successful writes by operators, as `verb resource/name`."""
        return [
            f"{item.verb} {item.resource}/{item.name}"
            for item in self.cluster.writes(user=user)
            if 200 <= item.status < 300
        ]

    async def applied(self, name: str = JOB) -> None:
        await self.until(lambda: self.learner(name), f"{name} is applied")
        await self.until(lambda: self.phase(name), f"{name} has a status")

    async def settled(self) -> None:
        """Waits until each operator has received and processed everything that happened, and has written about it.

        What it has not written by then, it does not write without another event, or a wait of more than `SOON`.
        """

        def settled() -> bool:
            holder = self.holder()
            return all(
                running.has_nothing_to_do(self.cluster, self.learners, leads=running.user == holder)
                for running in self.running
            )

        await self.until(settled, "operators have nothing to do", seconds=30.0)

    def events(self, reason: str = "") -> list[Object]:
        return [item for item in self.cluster.list("events.events.k8s.io", NAMESPACE) if reason in {"", item["reason"]}]


@asynccontextmanager
async def staged(folder: Path, patch: pytest.MonkeyPatch) -> AsyncGenerator[Stage]:
    """A stage without an operator; all operators end with it."""
    async with FakeKubernetes() as cluster:
        for definition in (DEFINITION, sft_crd()):
            cluster.create("customresourcedefinitions", definition)
        stage = Stage(cluster, folder, patch)
        try:
            yield stage
        finally:
            await asyncio.gather(*(running.stop() for running in stage.running))


def ready(controllers: Controllers, pod: Object) -> None:
    """Runs a pod as soon as it is created; the address of a learner's is set by a test."""
    if pod["metadata"]["labels"]["kestrl.dev/role"] != "learner":
        controllers.run(pod)


ENGINES = ("engine-0", "engine-1")


def version(step: int) -> common_pb2.PolicyVersion:
    return common_pb2.PolicyVersion(job=JOB, step=step, sha256=f"{step:064x}")


def report(phase: str = "training", step: int = 0, **fields: Any) -> pb.WatchProgressResponse:
    """A learner's report: by default, every engine has verified the newest version, which is the step's."""
    made = pb.WatchProgressResponse(
        phase=run_phase_to_proto(RunPhase(phase)),
        step=step,
        total_steps=26,
        engines_total=len(ENGINES),
        engines_converged=len(ENGINES),
        policy=version(step),
        policy_uri=f"s3://bucket/runs/policies/{step}",
        workers=1,
        engines=[
            pb.EngineProgress(name=name, policy=version(step), state=pb.SERVING_STATE_SERVING) for name in ENGINES
        ],
    )
    for name, value in fields.items():
        if isinstance(value, Mapping):
            getattr(made, name).update(value)
        elif isinstance(value, list):
            made.ClearField(name)
            getattr(made, name).extend(value)
        elif hasattr(value, "SerializeToString"):
            getattr(made, name).CopyFrom(value)
        else:
            setattr(made, name, value)
    return made


class FakeLearner(stubs.LearnerServiceServicer):
    """A learner that sends the reports of a test, on an address of its own at the port that the operator calls."""

    def __init__(self, address: str, first: pb.WatchProgressResponse) -> None:
        self.address = address
        self.drains = 0
        self.watchers = 0
        self._report = first
        self._changed = asyncio.Event()
        self._breaks = 0

    @property
    def newest(self) -> pb.WatchProgressResponse:
        return self._report

    def report(self, report: pb.WatchProgressResponse) -> None:
        self._report = report
        self._ring()

    def break_streams(self) -> None:
        """Ends all open streams with an error."""
        self._breaks += 1
        self._ring()

    def _ring(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def WatchProgress(self, request: Any, context: Any) -> Any:
        self.watchers += 1
        breaks = self._breaks
        try:
            while breaks == self._breaks:
                changed = self._changed
                yield self._report
                await changed.wait()
            raise StorageError("broken")
        finally:
            self.watchers -= 1

    async def Drain(self, request: Any, context: Any) -> pb.DrainResponse:
        self.drains += 1
        return pb.DrainResponse()


def addresses() -> Iterator[str]:
    """Loopback addresses that are unlikely to be in use, since the port is fixed."""
    while True:
        yield f"127.{random.randint(1, 250)}.{random.randint(1, 250)}.{random.randint(2, 250)}"


@asynccontextmanager
async def learning(stage: Stage, token: str, first: pb.WatchProgressResponse) -> AsyncGenerator[FakeLearner]:
    """A fake learner that accepts calls with this credential."""
    learner = FakeLearner(next(addresses()), first)
    stop = asyncio.Event()
    listen = f"{learner.address}:{GRPC_PORT}"
    stage.learners[listen] = learner
    with stage.patch.context() as there:
        there.setenv(Secret.CONTROLLER_TO_LEARNER.value, token)
        server = asyncio.create_task(
            rpc.serve(
                "learner-0",
                listen,
                lambda made: stubs.add_LearnerServiceServicer_to_server(learner, made),
                until=stop.wait(),
                grace=0.05,
            )
        )
        async with rpc.channel(listen) as connection:
            assert await rpc.connected(connection, seconds=30.0)
    try:
        yield learner
    finally:
        stop.set()
        await server


def learner_token(uid: str) -> str:
    return derive(KEY, uid)[Secret.CONTROLLER_TO_LEARNER.value]
