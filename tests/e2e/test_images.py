"""The images of `Dockerfiles/`, as run by pods of a job and of the operator."""

from __future__ import annotations

import pytest

from .installation import SYSTEM, Installation, is_true, small

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
LOOK = "import os, kestrl; print(os.getuid(), kestrl.__file__)"
OURS = {"agent": "inference", "rollout": "rollout", "tools": "tools", "judge": "judge"}
"""Images, and the roles that run them."""


@pytest.mark.timeout(600)
def test_a_job_runs_in_the_images_of_this_checkout(installation: Installation) -> None:
    """Without the developer's environment: what is missing in an image is missing here, too."""
    cluster = installation.cluster
    if not cluster.built:
        pytest.skip("no images were built: KESTRL_E2E_IMAGES names no archive of tests/e2e/kit/images")
    assert cluster.built == {"operator", *OURS}
    with installation.place("images") as namespace:
        cluster.apply(small("images", schedule__maxSteps=2), namespace)
        installation.wait("images", namespace, is_true("EnginesReady"), 400)
        for name, role in OURS.items():
            pod = cluster.list("pods", namespace, f"kestrl.dev/role={role}")[0]
            run = {item["name"]: item["image"] for item in pod["spec"]["containers"]}
            assert run[role] == cluster.image_of(name) != cluster.image
            seen = cluster.exec(pod["metadata"]["name"], "python", "-c", LOOK, namespace=namespace, container=role)
            assert seen.split() == ["10001", "/opt/kestrl/lib/python3.11/site-packages/kestrl/__init__.py"]
        installation.wait("images", namespace, is_true("Succeeded"), 400)
    operator = installation.operators()[0]["metadata"]["name"]
    assert "/opt/kestrl/" in cluster.exec(operator, "python", "-c", LOOK, namespace=SYSTEM)
