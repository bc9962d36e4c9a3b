"""The images of `Dockerfiles/`, as run by pods of a job and of the operator."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest

from .cluster.client import Cluster
from .cluster.commands import eventually
from .installation import SYSTEM, Installation, is_true, small

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
LOOK = "import os, kestrl; print(os.getuid(), kestrl.__file__)"
FILES = """
import base64, hashlib, json
from importlib.metadata import distribution
digests = {}
for path in distribution("NAME").files:
    digest = hashlib.sha256(path.locate().read_bytes()).digest()
    digests[str(path)] = "sha256=" + base64.urlsafe_b64encode(digest).decode().rstrip("=")
print(json.dumps(digests))
"""
"""Prints the digest of every file of the installed distribution NAME, as a wheel's RECORD has it."""
ORPHAN = """
import os
reads, writes = os.pipe()
if os.fork() == 0:
    if os.fork() == 0:
        os.write(writes, str(os.getpid()).encode())
    os._exit(0)
os.wait()
print(os.read(reads, 20).decode())
"""
"""Prints the number of a process that ends as a child of process 1."""
OURS = {"agent": "inference", "rollout": "rollout", "tools": "tools", "judge": "judge"}
"""Images, and the roles that run them."""
DISTRIBUTIONS = {
    "agent": "kestrl-inference",
    "rollout": "kestrl-rollout",
    "tools": "kestrl-tools",
    "judge": "kestrl-judge",
}
ROLES = (*OURS.values(), "engine", "learner")
"""Containers of a job that have an init."""


def recorded(release: Path, distribution: str) -> dict[str, str]:
    """The digest of every file that a release's wheel of a distribution installs, by its path."""
    (path,) = release.glob(f"{distribution.replace('-', '_')}-[0-9]*.whl")
    with ZipFile(path) as wheel:
        (record,) = (name for name in wheel.namelist() if name.endswith(".dist-info/RECORD"))
        rows = (line.rsplit(",", 2) for line in wheel.read(record).decode().splitlines())
        return {name: digest for name, digest, _ in rows if digest}


def pod_of(cluster: Cluster, namespace: str, container: str) -> str:
    """The name of a pod of a job with a container."""
    role = "inference" if container == "engine" else container
    (pod,) = cluster.list("pods", namespace, f"kestrl.dev/role={role}")
    name: str = pod["metadata"]["name"]
    return name


def installed(cluster: Cluster, distribution: str, pod: str, **place: Any) -> dict[str, str]:
    """The digest of every file of a distribution in a pod, by its path."""
    output = cluster.exec(pod, "python", "-c", FILES.replace("NAME", distribution), **place)
    digests: dict[str, str] = json.loads(output)
    return digests


@pytest.mark.timeout(600)
def test_a_job_runs_in_images_of_the_wheels_of_a_release(installation: Installation) -> None:
    """Without the developer's environment: what is missing in a wheel or an image is missing here, too."""
    cluster = installation.cluster
    if not cluster.built:
        pytest.skip("no images were built: KESTRL_E2E_IMAGES names no archive of tests/e2e/kit/images")
    assert cluster.built == {"operator", *OURS}
    assert cluster.release is not None
    assert installation.chart.parent == cluster.release
    with installation.place("images") as namespace:
        cluster.apply(small("images", schedule__maxSteps=2), namespace)
        installation.wait("images", namespace, is_true("EnginesReady"), 400)
        for name, role in OURS.items():
            pod = cluster.list("pods", namespace, f"kestrl.dev/role={role}")[0]
            run = {item["name"]: item["image"] for item in pod["spec"]["containers"]}
            assert run[role] == cluster.image_of(name) != cluster.image
            place = {"namespace": namespace, "container": role}
            printed = cluster.exec(pod["metadata"]["name"], "python", "-c", LOOK, **place)
            assert printed.split() == ["10001", "/opt/kestrl/lib/python3.11/site-packages/kestrl/__init__.py"]
            for distribution in ("kestrl", DISTRIBUTIONS[name]):
                digests = recorded(cluster.release, distribution)
                assert len(digests) > 4
                assert digests.items() <= installed(cluster, distribution, pod["metadata"]["name"], **place).items()
        installation.wait("images", namespace, is_true("Succeeded"), 400)
    operator = installation.operators()[0]["metadata"]["name"]
    assert "/opt/kestrl/" in cluster.exec(operator, "python", "-c", LOOK, namespace=SYSTEM)
    digests = recorded(cluster.release, "kestrl-operator")
    assert digests.items() <= installed(cluster, "kestrl-operator", operator, namespace=SYSTEM).items()


@pytest.mark.timeout(600)
def test_process_1_of_a_container_reaps_orphans(installation: Installation) -> None:
    cluster = installation.cluster
    with installation.place("orphans") as namespace:
        cluster.apply(small("orphans", schedule__maxSteps=40), namespace)
        installation.wait("orphans", namespace, is_true("EnginesReady"), 400)
        for container in ROLES:
            pod, place = pod_of(cluster, namespace, container), {"namespace": namespace, "container": container}
            program = cluster.exec(pod, "cat", "/proc/1/cmdline", **place)
            assert re.split(r"\W", program)[0] == "catatonit", container
            orphan = cluster.exec(pod, "python", "-c", ORPHAN, **place).strip()
            present = ("sh", "-c", f"test -e /proc/{orphan} && echo there || echo gone")
            eventually(
                f"the orphan in {container} is reaped",
                lambda pod=pod, place=place, present=present: cluster.exec(pod, *present, **place).strip() == "gone",
                30,
            )
