"""The status of an SFTJob: each condition from what its Job and its pods show."""

from __future__ import annotations

from typing import Any

import pytest
from tests.unit.operator.sft_samples import RESULT, batch_job, container_state, ended_with, sft_pod

from kestrl_operator.state.admission import Quota, QuotaHolder, QuotaRequest, QuotaUse, WorkloadAdmission
from kestrl_operator.state.jobs import Key
from kestrl_operator.state.sft import batch_of, sft_pod_of
from kestrl_operator.status.conditions import REASONS, SFT_REASONS
from kestrl_operator.status.sft import SFTSnapshot, has_ended, sft_status, with_sft_failure

NOW = "2026-01-01T02:00:00Z"
DONE = container_state("prepare", ended_with(0, reason="Completed"))
RUNS = container_state("sft", {"running": {}})
UNBOUND = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/1 nodes are available"}


def seen(*pods: dict[str, Any], batch: dict[str, Any] | None = None, **given: Any) -> SFTSnapshot:
    found = None if batch is None else batch_of(batch)
    return SFTSnapshot(generation=1, now=NOW, batch=found, pods=[sft_pod_of(pod) for pod in pods], **given)


def shown(snapshot: SFTSnapshot, before: dict[str, Any] | None = None) -> dict[str, tuple[str, str, str]]:
    found = sft_status(before or {}, snapshot)
    return {item["type"]: (item["status"], item["reason"], item["message"]) for item in found["conditions"]}


def test_reasons_are_a_part_of_those_of_an_agentrljob() -> None:
    assert all(reasons.keys() <= REASONS[kind].keys() for kind, reasons in SFT_REASONS.items())


RUNNING = batch_job(ready=1)
SHORT = "insufficient unused quota for nvidia.com/gpu in flavor default, 4 more needed"
RESUMED = {"type": "Suspended", "status": "False", "reason": "JobResumed"}


def use(occupied: bool, *conditions: tuple[str, str, str], refused: str = "", **fields: Any) -> QuotaUse:
    """What the job does with its quota: the type, reason and message of true conditions of its Workload, but for
    QuotaReserved where that has a message.
    """
    items = [
        {"type": kind, "status": "False" if kind == "QuotaReserved" and message else "True"}
        | {"reason": reason, "message": message}
        for kind, reason, message in conditions
    ]
    plain: dict[str, Any] = {"name": "w", "uid": "w-1", "version": "1", "request": "d", "cluster_queue": "all"}
    admission = None if refused else WorkloadAdmission(**{**plain, "conditions": items, **fields})
    request = QuotaRequest(queue="gpus", priority_class="", pod_sets=[], digest="d")
    return QuotaUse(
        holder=QuotaHolder(kind="SFTJob", key=Key("team-a", "warm-up"), uid="u-1"),
        now=0.0,
        queue="gpus",
        quota=Quota(request=request, admission=admission, refused=refused),
        occupied=occupied,
        ready=False,
    )


ADMITTED = (("QuotaReserved", "", ""), ("Admitted", "", ""))
HELD = batch_job(suspend=True, held=True)


CASES: list[tuple[str, SFTSnapshot, str, dict[str, tuple[str, str, str]]]] = [
    (
        "a wrong manifest",
        seen(problem="spec.data: wrong"),
        "Rejected",
        {"Accepted": ("False", "Invalid", "spec.data: wrong"), "Ready": ("False", "NotReady", "not Accepted")},
    ),
    (
        "no pod yet",
        seen(batch=batch_job(), not_created="exceeded quota: pods"),
        "Pending",
        {"Accepted": ("True", "Valid", ""), "Scheduled": ("False", "Pending", "exceeded quota: pods")},
    ),
    (
        "no node",
        seen(sft_pod(DONE, node="", conditions=[UNBOUND]), batch=batch_job()),
        "Pending",
        {"Scheduled": ("False", "Pending", "warm-up-sft-00: 0/1 nodes are available")},
    ),
    (
        "no node ever",
        seen(sft_pod(DONE, node=""), batch=batch_job(), unsatisfiable="no node offers nvidia.com/gpu"),
        "Pending",
        {"Scheduled": ("False", "Unsatisfiable", "no node offers nvidia.com/gpu")},
    ),
    (
        "no such model",
        seen(sft_pod(container_state("prepare", ended_with(2, "error: spec.model.base: no model"))), batch=batch_job()),
        "WaitingFor",
        {"Accepted": ("False", "Unresolvable", "spec.model.base: no model")},
    ),
    (
        "no such secret",
        seen(
            sft_pod(
                container_state(
                    "prepare", {"waiting": {"reason": "CreateContainerConfigError", "message": 'secret "s" not found'}}
                )
            ),
            batch=batch_job(),
        ),
        "WaitingFor",
        {
            "Accepted": (
                "False", "Unresolvable", 'warm-up-sft-00: prepare: CreateContainerConfigError: secret "s" not found',
            )
        },
    ),
    (
        "in its queue",
        seen(batch=HELD, queue="gpus", use=use(False, ("QuotaReserved", "", SHORT))),
        "Queued",
        {
            "QuotaReserved": ("False", "Waiting", f"queue gpus: {SHORT}"),
            "Scheduled": ("False", "Released", ""),
            "Ready": ("False", "NotReady", "it waits for quota"),
        },
    ),
    (
        "in a queue of which Kueue has said nothing",
        seen(batch=HELD, queue="gpus", use=use(False)),
        "Queued",
        {"QuotaReserved": ("False", "Waiting", "queue gpus has not answered yet")},
    ),
    (
        "of a priority that does not exist",
        seen(batch=HELD, queue="gpus", use=use(False, refused="no such class")),
        "Queued",
        {"QuotaReserved": ("False", "Refused", "no such class")},
    ),
    (
        "rejected by an admission check",
        seen(
            batch=HELD,
            queue="gpus",
            use=use(False, ("Evicted", "DeactivatedDueToAdmissionCheck", "no nodes"), active=False),
        ),
        "Queued",
        {"QuotaReserved": ("False", "Inactive", "no nodes: set spec.active of Workload w to true")},
    ),
    (
        "its queue takes the quota back",
        seen(
            sft_pod(DONE, RUNS),
            batch=batch_job(suspend=True, held=True, ready=1),
            queue="gpus",
            use=use(True, *ADMITTED, ("Evicted", "Preempted", "for another")),
        ),
        "Running",
        {"QuotaReserved": ("False", "Draining", "queue gpus takes the quota back: Preempted: for another")},
    ),
    (
        "it has its quota",
        seen(sft_pod(DONE, RUNS), batch=batch_job(held=True, ready=1), queue="gpus", use=use(True, *ADMITTED)),
        "Running",
        {"QuotaReserved": ("True", "Admitted", "by ClusterQueue all")},
    ),
    (
        "held for quota that an operator without Kueue does not ask for",
        seen(batch=HELD, queue="gpus"),
        "Queued",
        {
            "QuotaReserved": (
                "False", "Waiting",
                "its Job waits for quota, which needs kueue.enabled of the chart; set that, or resume the Job",
            )
        },
    ),
    (
        "in a queue of Kueue's own integration of Jobs",
        seen(batch=batch_job(queue="gpus", suspend=True), queue="gpus"),
        "Queued",
        {
            "QuotaReserved": (
                "False", "Waiting",
                "queue gpus: `kubectl get workloads -l kueue.x-k8s.io/job-uid=b-1` shows its answer",
            )
        },
    ),
    (
        "that integration takes the quota back",
        seen(sft_pod(DONE, RUNS), batch=batch_job(queue="gpus", suspend=True, ready=1), queue="gpus"),
        "Running",
        {"QuotaReserved": ("False", "Draining", "its Job is suspended")},
    ),
    (
        "a failed pod from before the preemption",
        seen(
            sft_pod(DONE, container_state("sft", ended_with(137, reason="OOMKilled"))),
            batch=batch_job(queue="gpus", suspend=True, failed=1),
            queue="gpus",
        ),
        "Queued",
        {"Scheduled": ("False", "Released", "")},
    ),
    (
        "admitted",
        seen(
            sft_pod(DONE, RUNS),
            batch=batch_job(queue="gpus", suspend=False, ready=1, conditions=[RESUMED]),
            queue="gpus",
        ),
        "Running",
        {"QuotaReserved": ("True", "Admitted", "by queue gpus")},
    ),
    (
        "a queue that nobody serves",
        seen(sft_pod(DONE, RUNS), batch=batch_job(queue="gpus", ready=1), queue="gpus"),
        "Running",
        {
            "QuotaReserved": (
                "Unknown", "NotObserved", "no queue controller holds its Job: does any serve queue gpus?",
            )
        },
    ),
    (
        "a label that came later",
        seen(sft_pod(DONE, RUNS), batch=RUNNING, queue="gpus"),
        "Running",
        {
            "QuotaReserved": (
                "Unknown", "NotObserved",
                "the job names no queue; the label now names 'gpus', which counts for a new SFTJob only",
            )
        },
    ),
    (
        "suspended without a queue",
        seen(batch=batch_job(suspend=True)),
        "Queued",
        {
            "QuotaReserved": (
                "False", "Waiting",
                "its Job is suspended, though the job names no queue: Kueue may manage jobs without one",
            )
        },
    ),
    (
        "training",
        seen(sft_pod(DONE, RUNS), batch=RUNNING),
        "Running",
        {
            "Scheduled": ("True", "PodsScheduled", ""),
            "Ready": ("True", "Training", "warm-up-sft-00"),
            "Succeeded": ("False", "Running", ""),
        },
    ),
    (
        "a second pod after a failure",
        seen(
            sft_pod(DONE, container_state("sft", ended_with(137, reason="OOMKilled"))),
            sft_pod(DONE, RUNS, made="2026-01-01T00:05:00Z"),
            batch=batch_job(ready=1, failed=1),
        ),
        "Running",
        {"Ready": ("True", "Training", "warm-up-sft-05")},
    ),
    (
        "the adapter is there",
        seen(sft_pod(DONE, container_state("sft", ended_with(0, RESULT, "Completed"))), batch=batch_job("Complete")),
        "Succeeded",
        {
            "Succeeded": ("True", "Completed", "s3://bucket/warm-up-5f000000/adapters/000040-3f0c"),
            "Ready": ("True", "Completed", ""),
            "Scheduled": ("False", "Released", ""),
        },
    ),
    (
        "the pod with the result is gone",
        seen(batch=batch_job("Complete")),
        "Succeeded",
        {
            "Succeeded": (
                "True",
                "Completed",
                "the pod that reported the result's address is gone; summary.json in the job's storage has it",
            )
        },
    ),
    (
        "the program refuses its input",
        seen(
            sft_pod(DONE, container_state("sft", ended_with(2, "error: spec.data.train: none of 3 conversations"))),
            batch=batch_job("Failed", "PodFailurePolicy"),
        ),
        "Failed",
        {
            "Accepted": ("False", "Invalid", "spec.data.train: none of 3 conversations"),
            "Succeeded": (
                "False", "LearnerFailed", "sft ended with Error (2): spec.data.train: none of 3 conversations",
            ),
        },
    ),
    (
        "too many failures",
        seen(
            sft_pod(DONE, container_state("sft", ended_with(137, reason="OOMKilled"))),
            batch=batch_job("Failed", "BackoffLimitExceeded", failed=4),
        ),
        "Failed",
        {"Succeeded": ("False", "BackoffExceeded", "sft ended with OOMKilled (137)")},
    ),
    (
        "failed, and its pods are gone",
        seen(batch=batch_job("Failed", "BackoffLimitExceeded")),
        "Failed",
        {"Succeeded": ("False", "BackoffExceeded", "as Kubernetes says")},
    ),
    (
        "a refused object beside a running pod",
        seen(sft_pod(DONE, RUNS), batch=RUNNING, problem="Kubernetes refuses"),
        "Running",
        {"Accepted": ("False", "Invalid", "Kubernetes refuses"), "Ready": ("True", "Training", "warm-up-sft-00")},
    ),
]  # fmt: skip


@pytest.mark.parametrize(("snapshot", "phase", "expected"), [case[1:] for case in CASES], ids=[it[0] for it in CASES])
def test_each_state_is_observed(snapshot: SFTSnapshot, phase: str, expected: dict[str, tuple[str, str, str]]) -> None:
    status = sft_status({}, snapshot)
    assert shown(snapshot).items() >= expected.items()
    assert status["shown"]["phase"] == phase
    assert [item["type"] for item in status["conditions"]] == [str(kind) for kind in SFT_REASONS]
    assert {item["observedGeneration"] for item in status["conditions"]} == {1}
    assert has_ended(status) == (phase in {"Succeeded", "Failed"})


def test_the_result_is_what_a_job_starts_from_and_stays() -> None:
    finished = sft_pod(DONE, container_state("sft", ended_with(0, RESULT, "Completed")))
    status = sft_status({}, seen(finished, batch=batch_job("Complete", failed=1)))
    assert status["result"]["uri"] == "s3://bucket/warm-up-5f000000/adapters/000040-3f0c"
    assert (status["result"]["version"], status["result"]["sha256"]) == ("warm-up.40.3f0c", "3f0c")
    assert (status["startedAt"], status["finishedAt"]) == ("2026-01-01T00:00:00Z", "2026-01-01T01:00:00Z")
    assert status["restarts"] == 1
    assert sft_status(status, seen(batch=batch_job("Complete")))["result"] == status["result"]


@pytest.mark.parametrize("message", ["", "not JSON", '{"uri": "s3://x"}'])
def test_a_message_that_is_no_result_gives_none(message: str) -> None:
    pod = sft_pod(DONE, container_state("sft", ended_with(0, message, "Completed")))
    assert "result" not in sft_status({}, seen(pod, batch=batch_job("Complete")))


def test_transition_times_change_with_the_status_only() -> None:
    before = sft_status({}, seen(sft_pod(DONE, RUNS), batch=RUNNING))
    later = SFTSnapshot(generation=1, now="2026-01-01T03:00:00Z", batch=batch_of(batch_job()), pods=[])
    times = {item["type"]: item["lastTransitionTime"] for item in sft_status(before, later)["conditions"]}
    changed = {"Scheduled", "Ready", "Reconciling"}
    assert times == {str(kind): later.now if kind in changed else NOW for kind in SFT_REASONS}


def test_a_failed_pass_is_in_condition_ready_beside_the_others() -> None:
    before = sft_status({}, seen(sft_pod(DONE, RUNS), batch=RUNNING))
    after = with_sft_failure(before, seen(problem="the API server is gone"), "OperatorFailed")
    conditions = {item["type"]: (item["reason"], item["message"]) for item in after["conditions"]}
    assert conditions["Ready"] == ("OperatorFailed", "the API server is gone")
    assert conditions["Scheduled"] == ("PodsScheduled", "")


@pytest.mark.parametrize("text", ["", "nonsense", "[]", "null", '{"spec": {}}', '{"metadata": 1, "spec": {}}'])
def test_what_others_write_into_a_job_is_not_taken_for_its_template(text: str) -> None:
    batch = batch_job(suspend=True)
    batch["metadata"]["annotations"]["kestrl.dev/unplaced"] = text
    assert batch_of(batch).unplaced is None
