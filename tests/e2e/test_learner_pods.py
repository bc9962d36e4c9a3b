"""A job whose learner computes on ranks of two pods, on a real Kubernetes."""

from __future__ import annotations

import pytest

from .cluster.commands import eventually
from .installation import Installation, condition, is_true, small, summary

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.long]
NAME, STEPS = "ranks", 4


@pytest.mark.timeout(900)
def test_a_job_on_ranks_of_two_pods_loses_one_and_trains_on(installation: Installation) -> None:
    """The deleted pod's successor and the restarted learner form another gang, from the checkpoint."""
    cluster = installation.cluster
    with installation.place("ranks") as namespace:
        cluster.apply(small(NAME, schedule__maxSteps=STEPS, learner={"replicas": 2, "threads": 1}), namespace)
        installation.wait_for_adapter(NAME, namespace, 1, 400)
        lost = cluster.get("pod", f"{NAME}-ranks-0", namespace)["metadata"]["uid"]
        cluster.kubectl("delete", "pod", f"{NAME}-ranks-0", f"--namespace={namespace}", "--grace-period=0", "--force")

        def restarts() -> int:
            learner = cluster.get("pod", f"{NAME}-learner-0", namespace)
            return sum(item["restartCount"] for item in learner["status"].get("containerStatuses", ()))

        eventually("the learner starts again", lambda: restarts() == 1, 180)
        assert cluster.get("pod", f"{NAME}-ranks-0", namespace)["metadata"]["uid"] != lost
        done = installation.wait(NAME, namespace, is_true("Succeeded"), 400)
        report = summary(installation, done)
        assert (report["status"], report["steps"]) == ("succeeded", STEPS)
        assert report["logprob_gap"]["worst"] <= 1e-3
        assert condition(done, "CheckpointDurable")[2] == f"step {STEPS}"
        eventually("its pods are released", lambda: not cluster.list("pods", namespace), 120)
