"""KestRL installed by its chart, with an S3 server beside the cluster for its runs."""

from __future__ import annotations

import copy
import json
import re
import sys
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any
from uuid import uuid4

import obstore
import yaml
from obstore.store import S3Store
from tests.fakes.s3 import SECRET_KEY, S3Server

from . import judge_model
from .cluster import objects
from .cluster.client import Cluster
from .cluster.commands import eventually, run

ROOT = Path(__file__).parents[2]
CHART = ROOT / "charts" / "kestrl"
CRDS = sorted((CHART / "files").glob("*.kestrl.dev.yaml"))
QUICKSTART = ROOT / "examples" / "email-search" / "quickstart.yaml"
SYSTEM = "kestrl-system"
RELEASE = "kestrl"
TEAM = "example.dev/team"
"""Label of all objects of the release."""
BUCKET = "runs"
STORE_SECRET = "runs-credentials"
COLLECTOR_PORT = 4318
"""Port of a telemetry collector that jobs may reach."""
JOB = "agentrljobs.kestrl.dev"
Object = dict[str, Any]


def quickstart(name: str = "email-search", *, manifest: Path = QUICKSTART, **changes: Any) -> Object:
    """The README's job, with fields changed by their path: `schedule__maxSteps=4`."""
    job: Object = yaml.safe_load(manifest.read_text())
    job["metadata"]["name"] = name
    for path, value in changes.items():
        put(job["spec"], path.split("__"), value)
    return job


def small(name: str, *, manifest: Path = QUICKSTART, **changes: Any) -> Object:
    """A job of few, short steps: one engine, groups of four, no held-out questions."""
    return quickstart(
        name,
        manifest=manifest,
        **{
            "data__validation": None,
            "data__train__size": 400,
            "algorithm__groupSize": 4,
            "algorithm__groupsPerStep": 4,
            "schedule__maxSteps": 4,
            "schedule__checkpointEvery": 1,
            "inference__replicas": 1,
            **changes,
        },
    )


def put(place: Object, path: list[str], value: Any) -> None:
    """Sets a field; None removes it."""
    for part in path[:-1]:
        place = place.setdefault(part, {})
    if value is None:
        place.pop(path[-1], None)
    else:
        place[path[-1]] = copy.deepcopy(value)


@dataclass(frozen=True)
class Installation:
    """The chart's release, and namespaces for jobs of tests."""

    cluster: Cluster
    store: S3Server
    bucket: S3Store
    chart: Path
    """The chart's archive, as a release has it."""
    values: Path
    """File with the chart's values."""

    def install(self) -> None:
        """`helm upgrade --install`, until all of the operator's pods are ready."""
        # Another test may have applied the CRDs by hand, as users may.
        options = [
            f"--namespace={SYSTEM}",
            f"--values={self.values}",
            "--wait",
            "--take-ownership",
            "--force-conflicts",
        ]
        self.cluster.helm("upgrade", "--install", RELEASE, str(self.chart), *options)

    def uninstall(self) -> None:
        self.cluster.helm("uninstall", RELEASE, f"--namespace={SYSTEM}", "--ignore-not-found", "--wait")

    def operators(self) -> list[Object]:
        return self.cluster.list("pods", SYSTEM, "app.kubernetes.io/name=kestrl-operator")

    def leader(self) -> str:
        """The name of the leading operator pod."""
        return self.cluster.get("lease", f"{RELEASE}-operator", SYSTEM)["spec"].get("holderIdentity", "")

    @contextmanager
    def place(self, prefix: str = "jobs") -> Generator[str]:
        """A namespace for jobs, with the credentials of their storage."""
        with self.cluster.namespace(prefix) as name:
            self.cluster.apply(credentials(self.store, name))
            try:
                yield name
            finally:
                self.cluster.kubectl("delete", JOB, "--all", f"--namespace={name}", "--wait=true")

    def job(self, name: str, namespace: str) -> Object:
        return self.cluster.get(JOB, name, namespace)

    def wait(self, name: str, namespace: str, holds: Callable[[Object], object], seconds: float) -> Object:
        """Waits until a condition holds for a job; returns the job. Raises at once if the job has failed."""

        def seen(found: Object) -> bool:
            if holds(found):
                return True
            status, reason, message = condition(found, "Succeeded")
            if status == "False" and reason != "Running":
                raise AssertionError(f"{name} ended: {reason}: {message}\n{self.cluster.describe(namespace)}")
            return False

        return self.cluster.wait_for(JOB, name, seen, namespace, seconds=seconds)

    def wait_for_adapter(self, name: str, namespace: str, step: int, seconds: float) -> None:
        """Waits until the adapter of a step or of a later one is in storage.

        A job's status has its step twice a minute, when a job of a few short steps may have ended.
        """
        try:
            eventually(f"{name} has trained step {step}", lambda: step <= newest_adapter(self, name), seconds)
        except TimeoutError as error:
            raise AssertionError(f"{error}\n{self.cluster.describe(namespace)}") from error


def credentials(store: S3Server, namespace: str, *, secret: str = SECRET_KEY) -> Object:
    """The Secret with the storage's credentials."""
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": STORE_SECRET, "namespace": namespace},
        "stringData": store.environment(secret=secret),
    }


def condition(job: Mapping[str, Any], kind: str) -> tuple[str, str, str]:
    """Status, reason and message of a condition; Unknown if it was never written."""
    for item in job.get("status", {}).get("conditions", ()):
        if item["type"] == kind:
            return item["status"], item["reason"], item.get("message", "")
    return "Unknown", "", ""


def is_true(kind: str) -> Callable[[Object], bool]:
    return lambda job: condition(job, kind)[0] == "True"


def at_step(least: int) -> Callable[[Object], bool]:
    return lambda job: job.get("status", {}).get("progress", {}).get("step", 0) >= least


def summary(installation: Installation, job: Object) -> Object:
    """The summary that the learner wrote at the end of its run."""
    content: Object = json.loads(bytes(obstore.get(installation.bucket, f"e2e/{run_of(job)}/summary.json").bytes()))
    return content


def run_of(job: Object) -> str:
    """The folder of a job's run in its storage."""
    return f"{job['metadata']['name']}-{job['metadata']['uid'].partition('-')[0]}"


def stored(installation: Installation, job: str) -> list[str]:
    """The objects of a job's run in object storage."""
    paths = [item["path"] for page in obstore.list(installation.bucket, "e2e") for item in page]
    return [path for path in paths if path.startswith(f"e2e/{job}-")]


def newest_adapter(installation: Installation, job: str) -> int:
    """Step of the newest adapter of a job in object storage; 0 without one."""
    steps = (re.search(r"/adapters/(\d{6})-", path) for path in stored(installation, job))
    return max((int(match[1]) for match in steps if match), default=0)


def values(cluster: Cluster, store: S3Server) -> Object:
    """The chart's values for pods that run the cluster's images, and whose policies allow the store.

    Engines run their environment on this machine and learners the checkout's: their images need torch's own index, or
    gigabytes.
    """
    image = cluster.image
    return {
        "jobs": {
            "images": {
                "engine": dict.fromkeys(("cpu", "cuda", "npu"), cluster.engine_image),
                "learner": dict.fromkeys(("cpu", "cuda", "npu"), image),
                **{name: cluster.image_of(name) for name in ("agent", "rollout", "tools", "judge")},
                "pullPolicy": "Never",
            },
            # The drivers of fake devices do not exist; a folder that every node has stands for them.
            "accelerators": {"ascend": {"hostMounts": [{"path": "/opt"}]}},
            "egressPorts": [store.ports["proxy"], judge_model.PORT, COLLECTOR_PORT],
            "storage": {"uri": f"s3://{BUCKET}/e2e", "secret": STORE_SECRET},
        },
        "operator": {"image": cluster.image_of("operator"), "pullPolicy": "Never", "leaseSeconds": 6},
    }


def full_values(cluster: Cluster, store: S3Server) -> Object:
    """These values and those that concern all objects: names of images begin with a registry that does not exist, which
    `global.registry` replaces.
    """
    registry = f"{cluster.image.partition('/')[0]}/"
    mirrored = json.dumps(values(cluster, store)).replace(f'"{registry}', '"registry.invalid/')
    chart_values: Object = json.loads(mirrored)
    chart_values["operator"]["logs"] = {"format": "json"}
    notes = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "{{ .Release.Name }}-notes"}}
    return {
        **chart_values,
        "global": {"registry": registry},
        "commonLabels": {TEAM: "platform"},
        "extraObjects": [notes],
    }


def packaged_chart(cluster: Cluster, folder: Path) -> Path:
    """The chart's archive: that of the release whose wheels are in the cluster's images, and without such images
    packaged as `make release` does."""
    if cluster.release is not None:
        return cluster.release / f"kestrl-{version('kestrl')}.tgz"
    out = folder / f"chart-{uuid4().hex[:6]}"
    run(
        sys.executable,
        ROOT / "scripts" / "release.py",
        "--chart",
        f"--out={out}",
        env={"KESTRL_HELM": cluster.helm_program},
    )
    (chart,) = out.glob("kestrl-*.tgz")
    return chart


def install(cluster: Cluster, store: S3Server, folder: Path, chart_values: Object | None = None) -> Installation:
    """An installation that stays; with `values`, unless others are named."""
    path = folder / f"values-{uuid4().hex[:6]}.json"
    path.write_text(json.dumps(chart_values or values(cluster, store)))
    cluster.apply(
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": SYSTEM, "labels": {objects.LABEL: "true"}}}
    )
    installation = Installation(cluster, store, store.create_bucket(BUCKET), packaged_chart(cluster, folder), path)
    installation.install()
    return installation


@contextmanager
def installed(cluster: Cluster, store: S3Server, folder: Path) -> Generator[Installation]:
    """An installation, which is uninstalled with the block."""
    installation = install(cluster, store, folder, full_values(cluster, store))
    try:
        yield installation
    finally:
        installation.uninstall()
        cluster.delete("namespace", SYSTEM)
