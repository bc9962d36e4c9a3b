"""What a job with a Workload of Kueue does and reports, in each state of that Workload."""

from __future__ import annotations

from typing import Any

import pytest
from tests.unit.operator.samples import NOW, all_pods, at, job, learner_report, over, pod, snapshot

from kestrl._shared.plan.components import Role
from kestrl_operator.state.admission import CheckState, Quota, QuotaRequest, WorkloadAdmission
from kestrl_operator.state.snapshot import QUEUE_LABEL
from kestrl_operator.status.build import status_of
from kestrl_operator.status.conditions import NOT_OBSERVED
from kestrl_operator.status.lifecycle import Stage, decide
from kestrl_operator.status.quota import QuotaStep, quota_step, quota_use, released

LABELS = {QUEUE_LABEL: "gpus"}
REQUEST = QuotaRequest(queue="gpus", priority_class="", pod_sets=[], digest="d")
GONE: dict[str, Any] = {"pods": [], "last_report": None}
UP, OVER = {"QuotaReserved": "True", "Admitted": "True"}, learner_report(over("suspended"))
PREEMPTED = {**UP, "Evicted": "True"}


REJECTED = "DeactivatedDueToAdmissionCheck"
CHECKS = [CheckState("image", "Ready"), CheckState("nodes", "Pending", "they are made")]


def asked(
    conditions: dict[str, str] | None = None, reason: str = "Preempted", *, refused: str = "", **changes: Any
) -> dict[str, Any]:
    """A queued job whose Workload has these conditions; None for no Workload."""
    admission = None
    if conditions is not None:
        written = [
            {"type": kind, "status": status, "reason": reason, "message": "for m", "lastTransitionTime": at(-60)}
            for kind, status in conditions.items()
        ]
        plain: dict[str, Any] = {"name": "w", "uid": "w-1", "version": "7", "request": "d", "cluster_queue": "all"}
        fields: dict[str, Any] = {**plain, "conditions": written, **changes}
        admission = WorkloadAdmission(**fields)
    return {"labels": LABELS, "quota": Quota(request=REQUEST, admission=admission, refused=refused)}


def unready() -> dict[str, Any]:
    return {"pods": [*all_pods()[1:], pod(Role.INFERENCE, ready=False)]}


TABLE: list[tuple[str, dict[str, Any], Stage, QuotaStep | None, tuple[str, str, str]]] = [
    ("nothing is asked for yet", {**asked(), **GONE}, Stage.QUEUED, QuotaStep.APPLY, ("False", "Waiting", "gpus")),
    ("Kueue has not looked yet", {**asked({}), **GONE}, Stage.QUEUED, None, ("False", "Waiting", "not answered")),
    (
        "there is no quota",
        {**asked({"QuotaReserved": "False"}), **GONE},
        Stage.QUEUED,
        None,
        ("False", "Waiting", "queue gpus: for m"),
    ),
    (
        "an admission check is not done",
        {**asked({"QuotaReserved": "True", "Admitted": "False"}, checks=CHECKS), **GONE},
        Stage.QUEUED,
        None,
        ("True", "Checking", "ClusterQueue all has reserved it; admission check nodes is Pending: they are made"),
    ),
    (
        "all admission checks are done",
        {**asked({"QuotaReserved": "True"}, checks=CHECKS[:1]), **GONE},
        Stage.QUEUED,
        None,
        ("True", "Checking", "has reserved it; the admission follows"),
    ),
    (
        "an admission check is to be tried again",
        {**asked({"QuotaReserved": "True", "Evicted": "True"}, "AdmissionCheck", checks=CHECKS), **GONE},
        Stage.QUEUED,
        QuotaStep.RELEASE,
        ("False", "Waiting", "takes the quota back: AdmissionCheck: for m"),
    ),
    (
        "an admission check has rejected it",
        {**asked({"QuotaReserved": "False", "Evicted": "True"}, REJECTED, active=False, checks=CHECKS), **GONE},
        Stage.QUEUED,
        None,
        ("False", "Inactive", "for m: set spec.active of Workload w to true, or suspend the job and resume it"),
    ),
    ("it is refused", {**asked(refused="no"), **GONE}, Stage.QUEUED, QuotaStep.APPLY, ("False", "Refused", "no")),
    (
        "it is deactivated",
        {**asked({"QuotaReserved": "False"}, active=False), **GONE},
        Stage.QUEUED,
        None,
        ("False", "Inactive", "the Workload is deactivated: set spec.active of Workload w"),
    ),
    (
        "it is deactivated after a preemption",
        {**asked({"QuotaReserved": "False", "Evicted": "True"}, active=False), **GONE},
        Stage.QUEUED,
        None,
        ("False", "Inactive", "the Workload is deactivated: set spec.active of Workload w"),
    ),
    ("it is admitted", {**asked(UP), **unready()}, Stage.RUNNING, None, ("True", "Admitted", "ClusterQueue all")),
    ("all its pods are ready", asked(UP), Stage.RUNNING, QuotaStep.READY, ("True", "Admitted", "")),
    ("Kueue knows", asked({**UP, "PodsReady": "True"}), Stage.RUNNING, None, ("True", "Admitted", "")),
    ("it is evicted", asked(PREEMPTED), Stage.DRAINING, None, ("False", "Draining", "Preempted: for m")),
    (
        "its learner has drained",
        {**asked(PREEMPTED), "last_report": OVER},
        Stage.RELEASING,
        None,
        ("False", "Draining", "takes the quota back"),
    ),
    (
        "its pods are gone",
        {**asked(PREEMPTED), **GONE},
        Stage.QUEUED,
        QuotaStep.RELEASE,
        ("False", "Waiting", "takes the quota back: Preempted: for m"),
    ),
    (
        "it has given the quota back",
        {**asked({"QuotaReserved": "False", "Admitted": "False", "Evicted": "True"}), **GONE},
        Stage.QUEUED,
        None,
        ("False", "Waiting", "queue gpus"),
    ),
    ("its Workload was deleted", asked(), Stage.DRAINING, QuotaStep.APPLY, ("False", "Waiting", "")),
    ("it needs another quota", asked(UP, request="c"), Stage.DRAINING, None, ("False", "Draining", "something else")),
    (
        "it needs another quota, without pods",
        {**asked(UP, request="c"), **GONE},
        Stage.QUEUED,
        QuotaStep.DELETE,
        ("False", "Waiting", ""),
    ),
    (
        "it waits, and needs another quota",
        {**asked({"QuotaReserved": "False"}, request="c"), **GONE},
        Stage.QUEUED,
        QuotaStep.APPLY,
        ("False", "Waiting", ""),
    ),
    (
        "it is suspended and drains",
        {**asked(UP), "job": job("suspend=true")},
        Stage.DRAINING,
        None,
        ("True", "Admitted", ""),
    ),
    (
        "it is suspended",
        {**asked(UP), "job": job("suspend=true"), **GONE},
        Stage.RELEASED,
        QuotaStep.DELETE,
        ("Unknown", NOT_OBSERVED, "suspended"),
    ),
    (
        "it has succeeded, and its pods end",
        {**asked(UP), "last_report": learner_report(over("succeeded"))},
        Stage.ENDED,
        None,
        ("Unknown", NOT_OBSERVED, "ended"),
    ),
]


@pytest.mark.parametrize(
    ("given", "stage", "step", "claim"), [line[1:] for line in TABLE], ids=[line[0] for line in TABLE]
)
def test_a_job_follows_its_workload(
    given: dict[str, Any], stage: Stage, step: QuotaStep | None, claim: tuple[str, str, str]
) -> None:
    seen = snapshot(**given)
    decision = decide(seen)
    assert (decision.stage, quota_step(quota_use(seen, decision))) == (stage, step)
    conditions = {item["type"]: item for item in status_of(seen, decision)["conditions"]}
    condition = conditions["QuotaReserved"]
    assert (condition["status"], condition["reason"]) == claim[:2]
    assert claim[2] in condition["message"]


def test_no_deadline_runs_while_it_waits() -> None:
    late = job("pendingDeadline=30m", "activeDeadline=1h")
    queued = {"conditions": [{"type": "QuotaReserved", "status": "False", "reason": "Waiting"}], "startedAt": at(-9000)}
    waiting = decide(snapshot(**asked({"QuotaReserved": "False"}), **GONE, job=late, status=queued))
    assert (waiting.stage, waiting.ended) == (Stage.QUEUED, None)
    queued["conditions"] = [{"type": "QuotaReserved", "status": "True", "reason": "Checking"}]
    waiting = decide(snapshot(**asked({"QuotaReserved": "True"}, checks=CHECKS), **GONE, job=late, status=queued))
    assert (waiting.stage, waiting.ended) == (Stage.QUEUED, None)
    running = decide(snapshot(**asked(UP), job=late, status={"startedAt": at(-9000)}))
    assert running.ended is not None
    assert running.ended[0] == "DeadlineExceeded"


def test_given_back_quota_is_written_as_kueue_does() -> None:
    quota = asked(PREEMPTED)["quota"]
    status = released(quota.admission, NOW)
    conditions = {item["type"]: (item["status"], item["reason"]) for item in status["conditions"]}
    assert status["admission"] is None
    assert conditions == {
        "QuotaReserved": ("False", "Pending"),
        "Admitted": ("False", "NoReservation"),
        "Evicted": ("True", "Preempted"),
        "Requeued": ("True", "Preempted"),
        "PodsReady": ("False", "WaitForStart"),
    }


def test_a_workload_that_kueue_has_deactivated_can_be_activated() -> None:
    """Kueue lets one with `Requeued=False` queue again for this reason alone, not for those that it appends to it."""
    rejected = {"QuotaReserved": "True", "Evicted": "True"}
    status = released(asked(rejected, REJECTED, active=False)["quota"].admission, NOW)
    conditions = {item["type"]: (item["status"], item["reason"]) for item in status["conditions"]}
    assert (conditions["Requeued"], conditions["Evicted"]) == (("False", "Deactivated"), ("True", REJECTED))
