"""An operator as a process of this machine, on a real control plane without kubelets, and the jobs that it gets.

Results are written to KESTRL_SCALE_REPORT; docs/measured/scale.json is such a file.
"""

from __future__ import annotations

import asyncio
import copy
import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from tests.e2e.cluster.client import Cluster
from tests.e2e.installation import quickstart

from kestrl_operator.apiserver.client import Api
from kestrl_operator.apiserver.kinds import JOB, STATEFUL_SET

COUNT = int(os.environ.get("KESTRL_SCALE_JOBS", "100"))
QUIET_SECONDS, LONGEST_SETTLING = 10.0, 600.0
CONTROLLERS = ("kube-scheduler", "kube-controller-manager")
PODS = 6
"""Pods of the quickstart."""
KEY = "k" * 32
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
    (folder / "key").write_text(KEY)
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


async def count(api: Api, namespace: str) -> int:
    """Number of learners' StatefulSets, which are applied last."""
    label = "app.kubernetes.io/component=learner"
    return len([mark async for mark in api.marks(STATEFUL_SET, namespace, labels=label)])


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


def report(situation: str, measured: dict[str, Any]) -> None:
    print(json.dumps({situation: measured}))  # noqa: T201 - printed for a person who runs the test with -s
    wanted = os.environ.get("KESTRL_SCALE_REPORT")
    if wanted:
        file = Path(wanted)
        known = json.loads(file.read_text()) if file.exists() else {}
        file.write_text(json.dumps({**known, situation: measured}, indent=1) + "\n")
