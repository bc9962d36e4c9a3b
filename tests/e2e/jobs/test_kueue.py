"""Jobs in a queue of Kueue, whose own manager admits them, lets them wait and preempts them, on real pods."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests.e2e.cluster.client import Object
from tests.e2e.cluster.commands import eventually
from tests.e2e.installation import (
    JOB,
    RELEASE,
    SYSTEM,
    Installation,
    condition,
    is_true,
    newest_adapter,
    summary,
)
from tests.e2e.test_job import trained_once

from .kueue_manager import fair_sharing, running_kueue
from .queues import (
    CHECK,
    CHECKED,
    CLUSTER_QUEUE,
    GROUP,
    PODS,
    QUEUE,
    SFT_WORKLOAD,
    URGENT,
    WORKLOAD,
    CheckController,
    cluster_object,
    cluster_queue,
    flavors,
    flavors_of,
    further_objects,
    has_updates,
    local_queue,
    pods,
    queue_of_cpus,
    queued,
    queued_sft,
    queues,
    reserves,
    takes,
    updates,
    workload,
)
from .test_sft import NAME as SFT_NAME
from .test_sft import PODS as SFT_PODS
from .test_sft import SFT_JOB, logs, sft_place

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.share(12)]
RELEASED_SECONDS, SFT_RELEASED_SECONDS = 120.0, 240.0
"""For a drain: the end of rollouts, the checkpoint and the end of all pods; that of an SFTJob's ends in 180 s."""
UPDATED = ("inference", "learner")
"""Roles whose pods get what the check adds."""


@pytest.fixture(scope="module")
def kueue(installation: Installation) -> Iterator[Installation]:
    """KestRL with `kueue.enabled`, Kueue and its ClusterQueue."""
    cluster = installation.cluster
    with running_kueue(cluster):
        eventually("Kueue's webhooks are reached", lambda: takes(cluster, queues()), 60)
        options = ("--reuse-values", "--set=kueue.enabled=true", "--wait", "--force-conflicts")
        cluster.helm("upgrade", RELEASE, str(installation.chart), f"--namespace={SYSTEM}", *options)
        try:
            yield installation
        finally:
            installation.install()
            for item in reversed(queues()):
                cluster.delete(f"{item['kind']}.{GROUP}", item["metadata"]["name"])


@pytest.fixture
def controller(kueue: Installation) -> Iterator[CheckController]:
    """A ClusterQueue with the check, whose controller is said to run."""
    cluster = kueue.cluster
    check = cluster_object("AdmissionCheck", CHECK, spec={"controllerName": "example.dev/nodes"})
    strategy = {"admissionChecks": [{"name": CHECK}]}
    with further_objects(cluster, check, cluster_queue(CHECKED, admissionChecksStrategy=strategy)):
        active = {"type": "Active", "status": "True", "reason": "Active", "message": "it runs"}
        active["lastTransitionTime"] = "2026-01-01T00:00:00Z"
        cluster.patch(f"admissioncheck.{GROUP}", CHECK, {"status": {"conditions": [active]}}, subresource="status")
        yield CheckController(cluster)


@pytest.mark.timeout(2400)
def test_kueue_admits_jobs_one_by_one_and_preempts_one_for_another_without_loss(kueue: Installation) -> None:
    cluster = kueue.cluster
    with kueue.place("queued") as namespace:
        # Without its LocalQueue, a job waits for that.
        cluster.apply(queued("first", schedule__maxSteps=1000), namespace)
        kueue.wait("first", namespace, reserves("False", "Waiting", "LocalQueue gpus doesn't exist"), 120)
        cluster.apply(local_queue(QUEUE, CLUSTER_QUEUE), namespace)
        kueue.wait("first", namespace, reserves("True", "Admitted", f"by ClusterQueue {CLUSTER_QUEUE}"), 120)
        kueue.wait_for_adapter("first", namespace, 1, 600)
        assert len(pods(cluster, "first", namespace)) == PODS

        cluster.apply(queued("second", schedule__maxSteps=2), namespace)
        waiting = kueue.wait(
            "second", namespace, reserves("False", "Waiting", "insufficient unused quota for pods"), 120
        )
        assert waiting["status"]["shown"]["phase"] == "Queued"
        assert not pods(cluster, "second", namespace)

        # One of higher priority preempts the one that runs, which drains.
        cluster.apply(queued("third", priority_class=URGENT, schedule__maxSteps=2), namespace)
        third = kueue.job("third", namespace)["metadata"]["uid"]
        kueue.wait("first", namespace, reserves("False", "Draining", f"JobUID: {third}"), 120)
        since = time.monotonic()
        kueue.wait("third", namespace, reserves("True", "Admitted"), RELEASED_SECONDS)
        assert time.monotonic() - since < RELEASED_SECONDS
        assert not pods(cluster, "first", namespace), "the quota is given back when the last pod is gone"
        evicted = kueue.wait("first", namespace, reserves("False", "Waiting"), 60)
        assert evicted["status"]["shown"]["phase"] == "Queued"
        step = newest_adapter(kueue, "first")
        done = kueue.wait("third", namespace, is_true("Succeeded"), 600)
        assert summary(kueue, done)["steps"] == 2

        # Its end lets the preempted one go on, which is older than the second.
        kueue.wait("first", namespace, reserves("True", "Admitted"), 200)
        kueue.wait_for_adapter("first", namespace, step + 1, 600)
        assert trained_once(kueue, "first"), "no step was lost, and none was trained twice"
        assert kueue.job("first", namespace)["status"].get("restarts", 0) == 0
        assert not pods(cluster, "second", namespace)

        # So does a suspension let the second run.
        cluster.patch(JOB, "first", {"spec": {"suspend": True}}, namespace)
        kueue.wait("second", namespace, reserves("True", "Admitted"), 200)
        assert not pods(cluster, "first", namespace)
        assert not cluster.exists(WORKLOAD, "first-agentrljob", namespace)
        done = kueue.wait("second", namespace, is_true("Succeeded"), 600)
        assert summary(kueue, done)["steps"] == 2
        finished = lambda: condition(workload(cluster, "second", namespace), "Finished")[0] == "True"  # noqa: E731
        eventually("its Workload is finished", finished, 120)
        kueue.wait("first", namespace, is_true("Suspended"), 60)


@pytest.mark.timeout(1500)
def test_kueue_preempts_an_sftjob_which_goes_on_from_its_checkpoint(kueue: Installation) -> None:
    cluster = kueue.cluster
    with sft_place(kueue) as namespace:

        def wait(holds: Callable[[Object], bool], seconds: float) -> Object:
            return cluster.wait_for(SFT_JOB, SFT_NAME, holds, namespace, seconds=seconds)

        cluster.apply(queued_sft(), namespace)
        waiting = wait(reserves("False", "Waiting", "LocalQueue gpus doesn't exist"), 120)
        assert waiting["status"]["shown"]["phase"] == "Queued"
        assert not cluster.list("pods", namespace, SFT_PODS)
        cluster.apply(local_queue(QUEUE, CLUSTER_QUEUE), namespace)
        wait(reserves("True", "Admitted", f"by ClusterQueue {CLUSTER_QUEUE}"), 120)
        eventually("it trains", lambda: "step 3 of" in logs(cluster, namespace), 240)

        cluster.apply(queued("urgent", priority_class=URGENT, schedule__maxSteps=1), namespace)
        wait(reserves("False", "Draining", "prioritization in the ClusterQueue"), 120)
        kueue.wait("urgent", namespace, reserves("True", "Admitted"), SFT_RELEASED_SECONDS)
        assert not pods(cluster, SFT_NAME, namespace), "the quota is given back when the pod has ended"
        assert wait(reserves("False", "Waiting"), 60)["status"]["shown"]["phase"] == "Queued"
        kueue.wait("urgent", namespace, is_true("Succeeded"), 600)

        eventually("another pod goes on", lambda: "resumed at step" in logs(cluster, namespace), 240)
        done = wait(is_true("Succeeded"), 400)
        assert done["status"].get("restarts", 0) == 0, "a pod that was preempted did not fail"
        assert condition(done, "QuotaReserved")[:2] == ("Unknown", "NotObserved")
        finished = lambda: condition(cluster.get(WORKLOAD, SFT_WORKLOAD, namespace), "Finished")[0] == "True"  # noqa: E731
        eventually("its Workload is finished", finished, 120)


@pytest.mark.long
@pytest.mark.timeout(1500)
def test_a_job_that_borrows_of_its_cohort_gives_the_quota_back_and_goes_on(kueue: Installation) -> None:
    cluster, lender, borrower = kueue.cluster, "lender", "borrower"
    owner = cluster_queue(lender, cohortName="teams", preemption={"reclaimWithinCohort": "Any"})
    without_quota = cluster_queue(borrower, 0, cohortName="teams")
    with further_objects(cluster, owner, without_quota), kueue.place("cohort") as namespace:
        cluster.apply([local_queue(name, name) for name in (lender, borrower)], namespace)
        cluster.apply(queued("guest", queue=borrower, schedule__maxSteps=1000), namespace)
        kueue.wait("guest", namespace, reserves("True", "Admitted", f"by ClusterQueue {borrower}"), 120)
        kueue.wait_for_adapter("guest", namespace, 1, 600)

        cluster.apply(queued("host", queue=lender, schedule__maxSteps=2), namespace)
        kueue.wait("guest", namespace, reserves("False", "Draining", "reclamation within the cohort"), 120)
        kueue.wait("host", namespace, reserves("True", "Admitted", f"by ClusterQueue {lender}"), RELEASED_SECONDS)
        assert not pods(cluster, "guest", namespace), "the quota is given back when the last pod is gone"
        evicted = kueue.wait("guest", namespace, reserves("False", "Waiting"), 60)
        assert evicted["status"]["shown"]["phase"] == "Queued"
        step = newest_adapter(kueue, "guest")
        done = kueue.wait("host", namespace, is_true("Succeeded"), 600)
        assert summary(kueue, done)["steps"] == 2

        kueue.wait("guest", namespace, reserves("True", "Admitted"), 200)
        kueue.wait_for_adapter("guest", namespace, step + 1, 600)
        assert trained_once(kueue, "guest"), "no step was lost, and none was trained twice"
        assert kueue.job("guest", namespace)["status"].get("restarts", 0) == 0


@pytest.mark.long
@pytest.mark.timeout(900)
def test_each_role_runs_on_the_nodes_of_its_own_flavor(kueue: Installation) -> None:
    cluster, queue = kueue.cluster, "mixed"
    with flavors(cluster, queue, {"spot": 2, "on-demand": PODS}), kueue.place("flavors") as namespace:
        cluster.apply(local_queue(QUEUE, queue), namespace)
        cluster.apply(queued("mixed", schedule__maxSteps=1000), namespace)
        kueue.wait("mixed", namespace, reserves("True", "Admitted", f"by ClusterQueue {queue}"), 120)
        sets = workload(cluster, "mixed", namespace)["status"]["admission"]["podSetAssignments"]
        assigned = {item["name"]: item["flavors"]["pods"] for item in sets}
        assert Counter(assigned.values()) == {"spot": 2, "on-demand": PODS - 2}
        kueue.wait_for_adapter("mixed", namespace, 1, 600)
        placed = {
            pod["metadata"]["labels"]["kestrl.dev/role"]: flavors_of(pod) for pod in pods(cluster, "mixed", namespace)
        }
        assert placed == {role: [flavor] for role, flavor in assigned.items()}


@pytest.mark.long
@pytest.mark.timeout(1500)
def test_a_queue_with_more_than_its_fair_share_gives_quota_back_to_another(kueue: Installation) -> None:
    """A job of one team requests 500m of a cohort's 550m, of which neither team owns any, that of another 400m."""
    cluster, teams, cohort = kueue.cluster, ("team-a", "team-b"), {"cohortName": "company"}
    shares = [queue_of_cpus(team, "0", preemption={"reclaimWithinCohort": "Any"}, **cohort) for team in teams]
    pool = queue_of_cpus("pool", "550m", **cohort)
    with fair_sharing(cluster), further_objects(cluster, pool, *shares), kueue.place("fair") as namespace:
        cluster.apply([local_queue(team, team) for team in teams], namespace)
        cluster.apply(queued("large", queue=teams[0], rollout__replicas=3, schedule__maxSteps=1000), namespace)
        kueue.wait("large", namespace, reserves("True", "Admitted", f"by ClusterQueue {teams[0]}"), 120)
        kueue.wait_for_adapter("large", namespace, 1, 600)

        cluster.apply(queued("small", queue=teams[1], schedule__maxSteps=1), namespace)
        kueue.wait("large", namespace, reserves("False", "Draining", "Fair Sharing within the cohort"), 120)
        kueue.wait("small", namespace, reserves("True", "Admitted", f"by ClusterQueue {teams[1]}"), RELEASED_SECONDS)
        assert not pods(cluster, "large", namespace), "the quota is given back when the last pod is gone"
        assert condition(workload(cluster, "large", namespace), "Preempted")[1] == "InCohortFairSharing"
        step = newest_adapter(kueue, "large")
        kueue.wait("small", namespace, is_true("Succeeded"), 600)

        kueue.wait("large", namespace, reserves("True", "Admitted"), 200)
        kueue.wait_for_adapter("large", namespace, step + 1, 600)
        assert trained_once(kueue, "large"), "no step was lost, and none was trained twice"


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_a_job_follows_an_admission_check_in_each_of_its_states(
    kueue: Installation, controller: CheckController
) -> None:
    cluster, name = kueue.cluster, "careful"
    with kueue.place("checks") as namespace:

        def answer(state: str, message: str, **fields: Any) -> None:
            controller.answer(workload(cluster, name, namespace), state, message, **fields)

        def wait(status: str, reason: str, message: str, seconds: float = 120) -> Object:
            return kueue.wait(name, namespace, reserves(status, reason, message), seconds)

        cluster.apply(local_queue(QUEUE, CHECKED), namespace)
        cluster.apply(queued(name, schedule__maxSteps=1000), namespace)
        checking = wait(
            "True", "Checking", f"ClusterQueue {CHECKED} has reserved it; admission check {CHECK} is Pending"
        )
        assert checking["status"]["shown"]["phase"] == "Queued"
        assert not pods(cluster, name, namespace)
        assert "startedAt" not in checking["status"]

        # A check to be tried again gives the quota back, and Kueue may reserve it anew at once.
        answer("Retry", "no node yet")
        wait("True", "Checking", "Reset to Pending after eviction")
        answer("Pending", "a node is made")
        wait("True", "Checking", f"admission check {CHECK} is Pending: a node is made")

        answer("Ready", "there is a node", podSetUpdates=updates(UPDATED))
        wait("True", "Admitted", f"by ClusterQueue {CHECKED}")
        kueue.wait_for_adapter(name, namespace, 1, 600)
        placed = {
            pod["metadata"]["labels"]["kestrl.dev/role"]: has_updates(pod) for pod in pods(cluster, name, namespace)
        }
        assert placed == {role: role in UPDATED for role in ("inference", "learner", "rollout", "tools", "judge")}

        # So does one that fails while the job trains, which drains.
        answer("Retry", "the node is gone")
        wait("False", "Draining", "the node is gone")
        wait("True", "Checking", f"admission check {CHECK} is Pending", 240)
        assert not pods(cluster, name, namespace)
        step = newest_adapter(kueue, name)

        # A rejection deactivates the Workload, which the job says, and how to go on: first one way, then the other.
        rejection = f'deactivated due to AdmissionCheck in Rejected state: "{CHECK}" (no such node)'
        answer("Rejected", "no such node")
        rejected = wait("False", "Inactive", rejection)
        assert rejected["status"]["shown"]["phase"] == "Queued"
        eventually("the quota is free", lambda: controller.reserving() == 0, 60)
        cluster.patch(WORKLOAD, f"{name}-agentrljob", {"spec": {"active": True}}, namespace)
        wait("True", "Checking", f"admission check {CHECK} is Pending")
        answer("Rejected", "no such node")
        wait("False", "Inactive", rejection)
        cluster.patch(JOB, name, {"spec": {"suspend": True}}, namespace)
        cluster.wait_gone(WORKLOAD, f"{name}-agentrljob", namespace)
        cluster.patch(JOB, name, {"spec": {"suspend": False}}, namespace)
        wait("True", "Checking", f"admission check {CHECK} is Pending")

        answer("Ready", "there is a node", podSetUpdates=updates(UPDATED))
        wait("True", "Admitted", f"by ClusterQueue {CHECKED}")
        kueue.wait_for_adapter(name, namespace, step + 1, 600)
        assert trained_once(kueue, name), "no step was lost, and none was trained twice"
        assert kueue.job(name, namespace)["status"].get("restarts", 0) == 0


@pytest.mark.long
@pytest.mark.timeout(900)
def test_an_sftjob_says_what_its_admission_check_says(kueue: Installation, controller: CheckController) -> None:
    cluster = kueue.cluster
    with sft_place(kueue) as namespace:

        def wait(status: str, reason: str, message: str) -> Object:
            return cluster.wait_for(SFT_JOB, SFT_NAME, reserves(status, reason, message), namespace, seconds=120)

        def only_workload() -> Object:
            (workload,) = cluster.list(WORKLOAD, namespace)
            return workload

        cluster.apply(local_queue(QUEUE, CHECKED), namespace)
        cluster.apply(queued_sft(), namespace)
        checking = wait(
            "True", "Checking", f"ClusterQueue {CHECKED} has reserved it; admission check {CHECK} is Pending"
        )
        assert checking["status"]["shown"]["phase"] == "Queued"
        controller.answer(only_workload(), "Rejected", "no such node")
        name = only_workload()["metadata"]["name"]
        wait("False", "Inactive", f'"{CHECK}" (no such node): set spec.active of Workload {name} to true')
        cluster.patch(WORKLOAD, name, {"spec": {"active": True}}, namespace)
        wait("True", "Checking", f"admission check {CHECK} is Pending")
        controller.answer(only_workload(), "Ready", "there is a node", podSetUpdates=updates(["sft"]))
        wait("True", "Admitted", f"by ClusterQueue {CHECKED}")
        eventually("its pod is made", lambda: bool(cluster.list("pods", namespace, SFT_PODS)), 60)
        (pod,) = cluster.list("pods", namespace, SFT_PODS)
        assert has_updates(pod)
