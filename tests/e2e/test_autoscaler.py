"""A job's workers, scaled by Kubernetes' own autoscaler."""

from __future__ import annotations

from typing import Any

import pytest

from .installation import JOB, Installation, condition, small

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300), pytest.mark.share]


def autoscaler(least: int, most: int) -> dict[str, Any]:
    """The autoscaler of docs/operations.md."""
    cpu = {"name": "cpu", "target": {"type": "Utilization", "averageUtilization": 70}}
    return {
        "apiVersion": "autoscaling/v2",
        "kind": "HorizontalPodAutoscaler",
        "metadata": {"name": "elastic"},
        "spec": {
            "scaleTargetRef": {"apiVersion": "kestrl.dev/v1alpha1", "kind": "AgentRLJob", "name": "elastic"},
            "minReplicas": least,
            "maxReplicas": most,
            "metrics": [{"type": "Resource", "resource": cpu}],
        },
    }


def test_an_autoscaler_scales_a_jobs_workers_and_the_operator_lets_it(installation: Installation) -> None:
    """There are no metrics here, so only its bounds change the count; that it requests metrics of the workers' pods
    shows that it finds them."""
    cluster = installation.cluster
    # Engines that never start: only the number of workers matters here.
    job = small("elastic", inference__accelerator={"profile": "nvidia", "count": 64}, rollout__replicas=None)
    with installation.place("elastic") as namespace:

        def workers(count: int) -> None:
            cluster.wait_for(
                "deployment", "elastic-rollout", lambda found: found["spec"]["replicas"] == count, namespace, seconds=90
            )

        cluster.apply(job, namespace)
        workers(1)
        cluster.apply(autoscaler(2, 3), namespace)
        workers(2)
        assert installation.job("elastic", namespace)["spec"]["rollout"]["replicas"] == 2
        seen = cluster.wait_for(
            JOB, "elastic", lambda found: found["status"].get("rolloutReplicas") == 2, namespace, seconds=90
        )
        assert condition(seen, "Scheduled")[1] == "Unsatisfiable"
        asked = cluster.wait_for(
            "horizontalpodautoscaler",
            "elastic",
            lambda found: condition(found, "ScalingActive")[1] == "FailedGetResourceMetric",
            namespace,
            seconds=90,
        )
        assert condition(asked, "AbleToScale")[0] == "True"
        cluster.apply(autoscaler(1, 1), namespace)
        workers(1)
