"""A model of object storage in a volume that pods share: one of a job downloads it, the others read it there."""

from __future__ import annotations

import json
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import obstore
import pytest
from tests.e2e.cluster.commands import CommandFailed
from tests.e2e.installation import BUCKET, Installation, is_true, small, summary

from kestrl_demo_models.tiny import tiny

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
NAME, CLAIM, MODEL = "cached-model", "models", "models/tiny"
CACHE = "/kestrl/cache"
READERS = {"inference": "engine", "learner": "learner"}
"""The containers that load the model, by role."""


@contextmanager
def caching(installation: Installation, folder: Path, cache: dict[str, str]) -> Generator[None]:
    """The installation with `jobs.modelCache`."""
    chart_values = json.loads(installation.values.read_text())
    chart_values["jobs"]["modelCache"] = cache
    path = folder / "values.json"
    path.write_text(json.dumps(chart_values))
    replace(installation, values=path).install()
    try:
        yield
    finally:
        installation.install()


def assert_shared(installation: Installation, namespace: str, folder: Callable[[], Path]) -> None:
    """Runs a job whose engines and learner read one copy of a model, in this folder of the node."""
    cluster = installation.cluster
    changes = {"model__base": f"s3://{BUCKET}/{MODEL}", "inference__replicas": 2, "schedule__maxSteps": 2}
    cluster.apply(small(NAME, **changes), namespace)
    installation.wait_for_adapter(NAME, namespace, 1, 420)
    models: list[str] = []
    for pod in cluster.list("pods", namespace, f"kestrl.dev/job={NAME}"):
        name, role = pod["metadata"]["name"], pod["metadata"]["labels"]["kestrl.dev/role"]
        if role in READERS:
            place = {"namespace": namespace, "container": READERS[role]}
            models.append(cluster.exec(name, "readlink", "-f", "/kestrl/model", **place).strip())
            with pytest.raises(CommandFailed, match="Read-only"):
                cluster.exec(name, "touch", f"{CACHE}/mine", **place)
    assert len(models) == 3, "two engines and a learner"
    (kept,) = (path for path in (folder() / "stored").iterdir() if path.is_dir())
    assert set(models) == {f"{CACHE}/stored/{kept.name}"}
    assert {path.name: path.read_bytes() for path in kept.iterdir()} == {
        path.name: path.read_bytes() for path in tiny().iterdir()
    }
    done = installation.wait(NAME, namespace, is_true("Succeeded"), 420)
    assert summary(installation, done)["status"] == "succeeded"


@pytest.mark.share(6)
@pytest.mark.timeout(900)
def test_the_pods_of_a_job_share_a_model_in_a_claim(installation: Installation, tmp_path: Path) -> None:
    cluster = installation.cluster
    put_model(installation)
    claim = {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": CLAIM},
        "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}},
    }

    def folder() -> Path:
        volume: str = cluster.get("pvc", CLAIM, namespace)["spec"]["volumeName"]
        return cluster.node.layout.volumes / volume

    with caching(installation, tmp_path, {"claim": CLAIM}), installation.place() as namespace:
        cluster.apply(claim, namespace)
        assert_shared(installation, namespace, folder)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_the_pods_of_a_job_share_a_model_in_a_folder_of_their_node(installation: Installation, tmp_path: Path) -> None:
    """The kubelet makes the namespace's folder, with the rights of the folder around it."""
    put_model(installation)
    models = installation.cluster.node.layout.volumes / "models"
    models.mkdir()
    models.chmod(0o1777)
    with caching(installation, tmp_path, {"nodePath": str(models)}), installation.place() as namespace:
        assert_shared(installation, namespace, lambda: models / namespace)


def put_model(installation: Installation) -> None:
    for path in tiny().iterdir():
        obstore.put(installation.bucket, f"{MODEL}/{path.name}", path.read_bytes())
