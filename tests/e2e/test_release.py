"""The Helm release: its notes, its test, the remains of an uninstall, and the next install."""

from __future__ import annotations

import json

import pytest

from .cluster.client import Cluster
from .cluster.commands import eventually
from .installation import CRDS, JOB, RELEASE, SYSTEM, TEAM, Installation, at_step, credentials, is_true, small, stored

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
OURS = f"app.kubernetes.io/instance={RELEASE},app.kubernetes.io/managed-by=Helm"


def test_helm_notes_name_the_next_steps_and_the_release_is_valid(installation: Installation) -> None:
    notes = installation.cluster.helm("get", "notes", RELEASE, f"--namespace={SYSTEM}")
    assert "kubectl" in notes
    assert len(installation.operators()) == 2


def log_lines(cluster: Cluster, pod: str) -> list[str]:
    """The log of an operator, which after a start has no lines yet."""
    eventually(f"{pod} has logged", lambda: bool(cluster.logs(pod, SYSTEM)), 60)
    return cluster.logs(pod, SYSTEM).splitlines()


def test_the_release_has_the_labels_objects_and_log_of_its_values(installation: Installation) -> None:
    cluster = installation.cluster
    assert installation.cluster.get("configmap", f"{RELEASE}-notes", SYSTEM)
    labelled = cluster.kubectl(
        "get", "deployments,crds", f"--namespace={SYSTEM}", f"--selector={OURS},{TEAM}=platform", "--output=name"
    )
    crds = {f"customresourcedefinition.apiextensions.k8s.io/{path.stem}" for path in CRDS}
    assert set(labelled.split()) == {f"deployment.apps/{RELEASE}-operator", *crds}
    for pod in installation.operators():
        assert pod["metadata"]["labels"][TEAM] == "platform"
        lines = log_lines(cluster, pod["metadata"]["name"])
        assert all(json.loads(line).keys() >= {"time", "level", "logger", "message"} for line in lines)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_helm_test_runs_a_job_to_its_success(installation: Installation) -> None:
    """In the release's own namespace, by a pod of the operator's image whose only right is to create, read and delete a
    job."""
    cluster = installation.cluster
    cluster.apply(credentials(installation.store, SYSTEM))
    output = cluster.helm("test", RELEASE, f"--namespace={SYSTEM}", "--logs", "--timeout=540s", seconds=560)
    assert "phase Running" in output
    assert output.count("phase Succeeded") == 1, "its log is printed once"
    assert "step 2/2" in output
    assert cluster.list(JOB, SYSTEM) == [], "it deletes its job"
    eventually("its pods are gone", lambda: not cluster.list("pods", SYSTEM, "kestrl.dev/job"), 120)


def left(cluster: Cluster) -> set[str]:
    """All objects of the release, of any kind."""
    kinds = cluster.kubectl("api-resources", "--verbs=list", "--output=name").split()
    asked = ",".join(kind for kind in kinds if not kind.startswith(("events", "componentstatuses")))
    return set(
        cluster.kubectl(
            "get", asked, "--all-namespaces", f"--selector={OURS}", "--output=name", "--ignore-not-found", seconds=120
        ).split()
    )


@pytest.mark.long
@pytest.mark.timeout(900)
def test_jobs_survive_an_uninstall_until_the_next_install(installation: Installation) -> None:
    cluster = installation.cluster
    with installation.place() as namespace:
        cluster.apply(small("survivor", schedule__maxSteps=40), namespace)
        seen = installation.wait("survivor", namespace, at_step(2), 300)["status"]["progress"]["step"]
        installation.uninstall()
        try:
            assert left(cluster) == {
                f"customresourcedefinition.apiextensions.k8s.io/{JOB}",
                "customresourcedefinition.apiextensions.k8s.io/sftjobs.kestrl.dev",
                f"secret/{RELEASE}-operator-key",
            }
            eventually("the operator's pods are gone", lambda: not installation.operators(), 60)
            assert installation.job("survivor", namespace)["status"]["progress"]["step"] >= seen
            later = f"/adapters/{seen + 5:06d}-"
            eventually("it trains on", lambda: any(later in path for path in stored(installation, "survivor")), 180)
        finally:
            installation.install()
        done = installation.wait("survivor", namespace, is_true("Succeeded"), 300)
        assert done["status"]["shown"]["step"] == "40/40"
        assert done["status"]["restarts"] == 0, "the next install restarted the job"
