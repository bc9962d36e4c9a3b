"""A thousand jobs on a real control plane without kubelets: the time until every object of each exists, and their cost
at rest.

Twice. With Kubernetes' own controllers stopped, only the API server, its etcd and the operator run, and the operator is
measured. With them running, most of the time on few cores is theirs, for the pods, slices and events that they create.
The limit in the same run is a loop that knows all these objects and applies them, with the same concurrency, to as many
jobs. KubeRay publishes 258 s for a thousand clusters. Results are written to KESTRL_SCALE_REPORT;
docs/measured/scale.json is such a file.
"""

from __future__ import annotations

import asyncio
import copy
import json
import os
import secrets
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from kestrl_operator.apiserver.client import Api
from kestrl_operator.apiserver.kinds import JOB, POD, STATEFUL_SET
from kestrl_operator.config import Config, read_config
from kestrl_operator.controllers.manifests import Manifests
from kestrl_operator.state.store import Key
from kestrl_operator.status.lifecycle import Decision, Stage

from .cluster.client import Cluster
from .installation import quickstart

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.slow, pytest.mark.timeout(2400)]
COUNT = int(os.environ.get("KESTRL_SCALE_JOBS", "100"))
GOAL_MIB, GOAL_REQUESTS = 400, 40
QUIET_SECONDS, LONGEST_SETTLING = 10.0, 600.0
REST_SECONDS = 330.0 if COUNT >= 1000 else 90.0
"""With a thousand jobs a whole round of audits, of which the fifth lists everything; the shorter test has no time for
that."""
CONTROLLERS = ("kube-scheduler", "kube-controller-manager")
PODS = 6
"""Pods of the quickstart."""
Object = dict[str, Any]
METRICS, HEALTH = "127.0.0.1:19564", "127.0.0.1:19580"
IMAGES = {
    "engine": {"cpu": "none:1"},
    "learner": {"cpu": "none:1"},
    **dict.fromkeys(("agent", "rollout", "tools", "judge"), "none:1"),
}


class Process:
    """The operator as a process of this machine, and the resources it has used."""

    def __init__(self, pid: int) -> None:
        self._pid = pid

    def cpu(self) -> float:
        """CPU seconds, user and system."""
        fields = Path(f"/proc/{self._pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def peak(self) -> int:
        """Peak memory in MiB."""
        status = Path(f"/proc/{self._pid}/status").read_text()
        return int(status.partition("VmHWM:")[2].split()[0]) // 1024

    def requests(self) -> int:
        """Requests to the API server, without watches."""
        return self._counted("kestrl_operator_requests_total")

    def passes(self) -> int:
        """Passes over jobs."""
        return self._counted("kestrl_operator_reconciles_total")

    def _counted(self, metric: str) -> int:
        text = urllib.request.urlopen(f"http://{METRICS}/metrics", timeout=5).read().decode()
        return int(sum(float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith(metric)))

    def rest(self) -> None:
        """Waits until almost nothing happens any more: the scheduler and the controllers continue long after all pods
        are created."""
        deadline, before = time.monotonic() + LONGEST_SETTLING, self.passes()
        while time.monotonic() < deadline:
            time.sleep(QUIET_SECONDS)  # there is no event to await for nothing happening
            passes = self.passes()
            if passes - before <= COUNT // 100:
                return
            before = passes
        raise TimeoutError(f"the operator still looks at jobs {LONGEST_SETTLING:g} s after their pods were made")


@contextmanager
def operating(folder: Path) -> Iterator[Process]:
    """A ready operator on the cluster of KUBECONFIG."""
    (folder / "key").write_text("k" * 32)
    config = {
        "jobs": {"images": IMAGES, "storage": {"uri": "s3://nowhere/at-all"}},
        "keyFile": str(folder / "key"),
        "lease": {"name": "scale", "namespace": "default", "seconds": 15},
        "healthListen": HEALTH,
        "metricsListen": METRICS,
        "workers": 8,
    }
    (folder / "operator.yaml").write_text(yaml.safe_dump(config))
    command = [sys.executable, "-m", "kestrl_operator", "--config", str(folder / "operator.yaml")]
    with (folder / "log").open("wb") as log, subprocess.Popen(command, stderr=log) as process:
        try:
            _await_ready(process, folder / "log")
            yield Process(process.pid)
        finally:
            process.terminate()
            process.wait(30)


def _await_ready(process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            urllib.request.urlopen(f"http://{HEALTH}/readyz", timeout=2)
            return
        except OSError:
            if process.poll() is not None:
                break
            time.sleep(0.2)  # there is no event for an open port
    raise RuntimeError(f"the operator is not ready: {log.read_text()[-2000:]}")


def jobs(namespace: str) -> Iterator[Object]:
    """The quickstart, many times; it is read once, since reading is not measured."""
    read = quickstart()
    for number in range(COUNT):
        job = copy.deepcopy(read)
        job["metadata"].update(name=f"job-{number:04d}", namespace=namespace)
        yield job


async def fill(namespace: str) -> float:
    """Creates the jobs; returns the seconds until every object of each exists."""
    api = Api()
    began = time.monotonic()
    try:
        for job in jobs(namespace):
            await api.create(JOB, job)
        while await count(api, namespace) < COUNT:  # noqa: ASYNC110 - as below
            await asyncio.sleep(1)  # polled: a watch would add to what is measured
        return time.monotonic() - began
    finally:
        await api.close()


async def fill_barely(namespace: str, config: Config) -> float:
    """Applies the rendered objects of as many jobs in a plain loop; returns the seconds."""
    api, manifests = Api(), Manifests(config.jobs, config.key())
    began = time.monotonic()

    async def one(job: Object) -> None:
        async with slots:
            made = await api.create(JOB, job)
            key, uid = Key(namespace, job["metadata"]["name"]), made["metadata"]["uid"]
            running = Decision(stage=Stage.RUNNING, parked=False)
            for item in manifests.objects(key, uid, manifests.read(key, made), running):
                await api.apply(item)

    slots = asyncio.Semaphore(config.workers)
    try:
        await asyncio.gather(*(one(job) for job in jobs(namespace)))
        return time.monotonic() - began
    finally:
        await api.close()


async def count(api: Api, namespace: str) -> int:
    """Number of learners' StatefulSets, which are applied last."""
    label = "app.kubernetes.io/component=learner"
    return len([mark async for mark in api.marks(STATEFUL_SET, namespace, labels=label)])


async def settled(namespace: str) -> None:
    """Waits until every pod is created and every status is written."""
    api = Api()
    try:
        while True:
            pods = len([item async for item in api.list(POD, namespace, labels="kestrl.dev/job")])
            listed = [item async for item in api.list(JOB, namespace)]
            if pods == COUNT * PODS and all(item.get("status", {}).get("observedGeneration") for item in listed):
                return
            await asyncio.sleep(2)  # as above
    finally:
        await api.close()


@contextmanager
def places(cluster: Cluster, *names: str) -> Iterator[None]:
    """Namespaces, which are deleted with their objects."""
    for name in names:
        cluster.kubectl("create", "namespace", name)
    try:
        yield
    finally:
        for name in names:
            cluster.kubectl("delete", "namespace", name, "--wait=false")


@contextmanager
def held(cluster: Cluster) -> Iterator[None]:
    """Stops Kubernetes' own controllers."""
    for name in CONTROLLERS:
        cluster.node.stop(name)
    try:
        yield
    finally:
        cluster.node.revive()


@pytest.fixture
def by_token(control_plane_with_crds: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    """The control plane, called by the operator and the loop beside it with a service account's token, as from a pod.

    (An administrator's certificate is verified at each request, which takes a fifteenth of the API server's time here.)
    """
    cluster, name = control_plane_with_crds, f"scale-{secrets.token_hex(4)}"
    cluster.kubectl("create", "serviceaccount", name, "--namespace=default")
    cluster.kubectl(
        "create", "clusterrolebinding", name, "--clusterrole=cluster-admin", f"--serviceaccount=default:{name}"
    )
    config = yaml.safe_load(cluster.kubeconfig.read_text())
    config["users"][0]["user"] = {
        "token": cluster.kubectl("create", "token", name, "--namespace=default", "--duration=2h").strip()
    }
    own = tmp_path / "kubeconfig"
    own.write_text(yaml.safe_dump(config))
    monkeypatch.setenv("KUBECONFIG", str(own))
    return cluster


def compared(seconds: float, bare: float, cpu: float, requests: int) -> dict[str, Any]:
    """The results measured in both situations."""
    return {
        "jobs": COUNT,
        "seconds": round(seconds, 1),
        "bare_seconds": round(bare, 1),
        "ratio": round(seconds / bare, 2),
        "operator_cpu_seconds": round(cpu, 1),
        "requests_per_job": round(requests / COUNT, 1),
    }


def report(situation: str, measured: dict[str, Any]) -> None:
    print(json.dumps({situation: measured}))  # noqa: T201 - printed for a person who runs the test with -s
    wanted = os.environ.get("KESTRL_SCALE_REPORT")
    if wanted:
        file = Path(wanted)
        known = json.loads(file.read_text()) if file.exists() else {}
        file.write_text(json.dumps({**known, situation: measured}, indent=1) + "\n")


def test_many_jobs_are_created_quickly(by_token: Cluster, tmp_path: Path) -> None:
    if by_token.own is None:
        pytest.skip("the controllers of a cluster that is not the harness's own cannot be held")
    with places(by_token, "alone", "alone-bare"), held(by_token):
        with operating(tmp_path) as operator:
            before = operator.cpu(), operator.requests()
            seconds = asyncio.run(fill("alone"))
            busy, asked = operator.cpu() - before[0], operator.requests() - before[1]
            peak = operator.peak()
        bare = asyncio.run(fill_barely("alone-bare", read_config(tmp_path / "operator.yaml")))
    measured = {**compared(seconds, bare, busy, asked), "operator_peak_mib": peak}
    report("controllers_held", measured)
    assert measured["operator_peak_mib"] <= GOAL_MIB
    assert measured["requests_per_job"] <= GOAL_REQUESTS


def test_many_jobs_cost_next_to_nothing_at_rest(by_token: Cluster, tmp_path: Path) -> None:
    with places(by_token, "scale", "scale-bare"):
        with operating(tmp_path) as operator:
            before = operator.cpu(), operator.requests()
            seconds = asyncio.run(fill("scale"))
            busy, asked = operator.cpu() - before[0], operator.requests() - before[1]
            asyncio.run(settled("scale"))
            operator.rest()
            resting = operator.cpu()
            time.sleep(REST_SECONDS)  # there is no event to await for nothing happening
            idle = (operator.cpu() - resting) / REST_SECONDS
            peak = operator.peak()
        bare = asyncio.run(fill_barely("scale-bare", read_config(tmp_path / "operator.yaml")))
    measured = {
        **compared(seconds, bare, busy, asked),
        "operator_peak_mib": peak,
        "idle_share_of_a_core": round(idle, 4),
    }
    report("controllers_running", measured)
    assert measured["operator_peak_mib"] <= GOAL_MIB
    assert measured["requests_per_job"] <= GOAL_REQUESTS
