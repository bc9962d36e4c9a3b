"""A job that trains goes on over `helm upgrade` from an earlier commit, with the CRDs, the operator and the images of
this one."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest
import yaml
from tests.e2e.cluster import objects
from tests.e2e.cluster.choice import Unavailable, facade, usable_kit
from tests.e2e.cluster.client import Cluster
from tests.e2e.cluster.commands import eventually
from tests.e2e.cluster.layout import default_name
from tests.e2e.cluster.up import bring_up
from tests.e2e.installation import (
    BUCKET,
    CRDS,
    JOB,
    RELEASE,
    SYSTEM,
    Installation,
    condition,
    is_true,
    newest_adapter,
    packaged_chart,
    small,
    stored,
    summary,
    values,
)
from tests.e2e.test_killed import GROUPS, volume_of, work
from tests.fakes.s3 import S3Server, serving_s3

from .earlier_version import EarlierVersion, earlier_version, is_in_history

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.long]
COMMITS = ("cf80a83", "eff29a4d")
"""The first one began with the second edition of the example mails and an older ledger, the second one with neither."""
NAME = "story"
ROLES = ("inference", "judge", "learner", "rollout", "tools")
STEPS_BEFORE, STEPS_AFTER = 2, 3
ROLLED_SECONDS = 420.0
"""For the drain, its checkpoint, and the start of an engine on a busy machine."""


def give_up(reason: str) -> NoReturn:
    """Skips the test, or fails it where a cluster is required."""
    if os.environ.get("KESTRL_E2E_REQUIRED") == "1":
        pytest.fail(reason)
    pytest.skip(reason)


@pytest.fixture
def earlier(request: pytest.FixtureRequest) -> EarlierVersion:
    """The version of the commit that is the test's parameter."""
    commit: str = request.param
    if not is_in_history(commit):
        give_up(f"the history here has no {commit}: is it a shallow clone?")
    return earlier_version(commit)


@pytest.fixture
def upgraded_cluster(earlier: EarlierVersion) -> Iterator[Cluster]:
    """A cluster of its own, in which the definitions of two versions meet, with the images of both."""
    if "E2E_KUBECONFIG" in os.environ:
        pytest.skip("two versions need a node of the harness's own, which has the files of both")
    try:
        kit = usable_kit()
    except Unavailable as error:
        give_up(str(error))
    node = bring_up(kit, name=f"{default_name()}-upgrade-{os.getpid()}", ends_with_parent=True)
    try:
        cluster = facade(node)
        earlier.put_on(cluster)
        yield cluster
    finally:
        node.down()


@pytest.fixture
def upgrade_store(upgraded_cluster: Cluster, tmp_path: Path) -> Iterator[S3Server]:
    """A real S3 server beside that cluster."""
    with serving_s3(tmp_path / "s3", host=upgraded_cluster.host_address) as server:
        yield server


def installed_versions(earlier: EarlierVersion, cluster: Cluster, store: S3Server, folder: Path) -> list[Installation]:
    """The releases of the earlier version and of this checkout, of which none is installed yet."""
    chart_values = values(cluster, store)
    bucket = store.create_bucket(BUCKET)
    place = {"metadata": {"name": SYSTEM, "labels": {objects.LABEL: "true"}}}
    cluster.apply({"apiVersion": "v1", "kind": "Namespace", **place})
    releases = {earlier.chart: earlier.values(chart_values), packaged_chart(cluster, folder): chart_values}
    installations: list[Installation] = []
    for number, (chart, content) in enumerate(releases.items()):
        path = folder / f"values-{number}.json"
        path.write_text(json.dumps(content))
        installations.append(Installation(cluster, store, bucket, chart, path))
    return installations


def pods_by_role(cluster: Cluster, namespace: str) -> Counter[str]:
    """How many pods the job has had, by their role, from the events of the scheduler."""
    scheduled = {
        (event["regarding"]["name"], event["regarding"]["uid"])
        for event in cluster.list("events.events.k8s.io", namespace)
        if event["reason"] == "Scheduled"
    }
    return Counter(name.removeprefix(f"{NAME}-").partition("-")[0] for name, _ in scheduled)


def uids(cluster: Cluster, namespace: str) -> set[str]:
    return {pod["metadata"]["uid"] for pod in cluster.list("pods", namespace)}


def spec_fields(crd: dict[str, Any]) -> set[str]:
    """Fields of `spec` in a CRD's first version."""
    schema = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    return set(schema["properties"]["spec"]["properties"])


def last_step(log: str) -> int:
    return max(int(step) for step in re.findall(r"kestrl_learner\S* step (\d+): ", log))


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("earlier", COMMITS, indirect=True)
def test_a_live_job_goes_on_over_an_upgrade(
    earlier: EarlierVersion, upgraded_cluster: Cluster, upgrade_store: S3Server, tmp_path: Path
) -> None:
    """Each of its pods is replaced once, no step is lost or trained twice, and it ends after the steps that were
    asked for."""
    cluster = upgraded_cluster
    before, after = installed_versions(earlier, cluster, upgrade_store, tmp_path)
    before.install()
    quickstart = earlier.checkout / "examples" / "email-search" / "quickstart.yaml"
    manifest = small(NAME, manifest=quickstart, schedule__maxSteps=1000, schedule__epochs=10)
    with after.place() as namespace:
        cluster.apply(manifest, namespace)
        before.wait_for_adapter(NAME, namespace, STEPS_BEFORE, 600)
        began = before.job(NAME, namespace)["status"]["startedAt"]
        older = uids(cluster, namespace)
        with cluster.following(f"{NAME}-learner-0", namespace, "learner") as log:
            cluster.helm(
                *("upgrade", RELEASE, str(after.chart), f"--namespace={SYSTEM}", f"--values={after.values}", "--wait")
            )
            eventually("all pods are new", lambda: older.isdisjoint(uids(cluster, namespace)), ROLLED_SECONDS)
            left_at = last_step(log.read_text())
        for crd in CRDS:
            assert spec_fields(cluster.get("crd", crd.stem)) == spec_fields(yaml.safe_load(crd.read_text()))
        cluster.kubectl(
            *("apply", "--server-side", "--force-conflicts", "--dry-run=server", f"--namespace={namespace}", "-f", "-"),
            given=json.dumps(manifest),
        )

        after.wait_for_adapter(NAME, namespace, left_at + 1, ROLLED_SECONDS)
        resumed = re.findall(
            r"resumed at step (\d+)", cluster.logs(f"{NAME}-learner-0", namespace, container="learner")
        )
        assert resumed == [str(left_at)], "one learner took over, after the last step of the one before"
        assert pods_by_role(cluster, namespace) == dict.fromkeys(ROLES, 2)
        steps = newest_adapter(after, NAME) + STEPS_AFTER
        cluster.patch(JOB, NAME, {"spec": {"schedule": {"maxSteps": steps}}}, namespace)
        done = after.wait(NAME, namespace, is_true("Succeeded"), 600)

        status = done["status"]
        assert (status["startedAt"], status["restarts"]) == (began, 0)
        assert status["shown"]["step"] == f"{steps}/{steps}"
        assert condition(done, "Accepted")[:2] == ("True", "Valid")
        assert condition(done, "CheckpointDurable") == ("True", "Confirmed", f"step {steps}")
        report = summary(after, done)
        assert (report["status"], report["steps"], report["failures"]) == ("succeeded", steps, {})
        assert status["result"] == report["policy"]

        rows = work(volume_of(cluster, NAME, namespace), tmp_path)
        trained = Counter(step for _, state, step, _ in rows if state == "trained")
        assert trained == dict.fromkeys(range(1, steps + 1), GROUPS)
        adapters = sorted(path.split("/")[3] for path in stored(after, NAME) if path.endswith("/manifest.json"))
        assert [int(name[:6]) for name in adapters if re.fullmatch(r"\d{6}-[0-9a-f]+", name)] == list(range(steps + 1))
