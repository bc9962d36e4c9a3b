"""Every lifecycle rule, as tables of snapshots and decisions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.operator.generated import snapshots
from tests.unit.operator.samples import (
    NOW,
    all_pods,
    at,
    condition,
    ended,
    failed,
    job,
    learner_report,
    over,
    pod,
    report,
    snapshot,
    status,
    waiting,
    workloads,
)

from kestrl._shared.plan.components import Role
from kestrl._shared.plan.planning import group_seconds
from kestrl.errors import Boundary
from kestrl_operator.state.snapshot import QUEUE_LABEL, Memory, Pod, Snapshot
from kestrl_operator.status.build import status_of
from kestrl_operator.status.conditions import REASONS, Type
from kestrl_operator.status.failures import BACKOFF, STABLE_STEPS, backoff
from kestrl_operator.status.lifecycle import Decision, Stage, decide, pending, short_of_pods_since, waits_for_admission

SUSPEND = "suspend=true"
LONGEST_DRAIN = 180.0 + group_seconds(job().spec)
SUCCEEDED = condition("Succeeded", "True", "Completed")
FAILED = condition("Succeeded", "False", "LearnerFailed")


def rules(*given: str, limit: int = 3) -> tuple[str, ...]:
    """Overrides for a failure policy of these rules."""
    return (f"failurePolicy={{backoffLimit: {limit}, rules: [{', '.join(given)}]}}",)


def wanted(decision: Decision) -> dict[str, Any]:
    """The decision, without default values."""
    plain = Decision(stage=decision.stage, parked=decision.parked)
    fields = type(decision).__dataclass_fields__
    return {name: getattr(decision, name) for name in fields if getattr(decision, name) != getattr(plain, name)}


LIFE: list[tuple[str, dict[str, Any], Stage, bool, dict[str, Any]]] = [
    ("no job", {"job": None, "problem": "spec: is required"}, Stage.REJECTED, False, {}),
    ("nothing exists yet", {"pods": [], "workloads": {}, "last_report": None}, Stage.RUNNING, False, {}),
    ("it starts", {"last_report": learner_report(report("starting"))}, Stage.RUNNING, False, {}),
    ("it trains", {}, Stage.RUNNING, False, {}),
    ("it evaluates", {"last_report": learner_report(report("evaluating"))}, Stage.RUNNING, False, {}),
    (
        "the learner does not report",
        {"last_report": learner_report(report(), connected=False)},
        Stage.RUNNING,
        False,
        {},
    ),
    (
        "it was restarted before",
        {"workloads": workloads(2, 1), "pods": all_pods(pod(Role.LEARNER, attempts=2))},
        Stage.RUNNING,
        False,
        {"attempts": 2, "restarts": 1},
    ),
    (
        "suspended while it trains",
        {"job": job(SUSPEND)},
        Stage.DRAINING,
        False,
        {"drain": True, "memory": Memory(draining=NOW), "requeue_after": LONGEST_DRAIN},
    ),
    (
        "suspended while it evaluates",
        {"job": job(SUSPEND), "last_report": learner_report(report("evaluating"))},
        Stage.DRAINING,
        False,
        {"drain": True, "memory": Memory(draining=NOW), "requeue_after": LONGEST_DRAIN},
    ),
    (
        "its update takes long",
        {"job": job(SUSPEND, "learner.terminationGrace=1h")},
        Stage.DRAINING,
        False,
        {"drain": True, "memory": Memory(draining=NOW), "requeue_after": LONGEST_DRAIN + 3600 - 180},
    ),
    (
        "it drains for a minute",
        {"job": job(SUSPEND), "last_report": learner_report(report("draining")), "memory": Memory(draining=NOW - 60)},
        Stage.DRAINING,
        False,
        {"drain": True, "memory": Memory(draining=NOW - 60), "requeue_after": LONGEST_DRAIN - 60},
    ),
    (
        "it drains for too long",
        {"job": job(SUSPEND), "memory": Memory(draining=NOW - LONGEST_DRAIN)},
        Stage.RELEASING,
        True,
        {},
    ),
    (
        "it has drained",
        {"job": job(SUSPEND), "last_report": learner_report(over("suspended"))},
        Stage.RELEASING,
        True,
        {},
    ),
    (
        "suspended while the learner starts, so that there is nothing to save",
        {"job": job(SUSPEND), "last_report": learner_report(report("starting"))},
        Stage.RELEASING,
        True,
        {},
    ),
    (
        "suspended while the learner does not report",
        {"job": job(SUSPEND), "last_report": learner_report(report(), connected=False)},
        Stage.RELEASING,
        True,
        {},
    ),
    (
        "suspended after it failed",
        {"job": job(SUSPEND), "last_report": learner_report(failed())},
        Stage.RELEASING,
        True,
        {},
    ),
    (
        "it was released and its pods still end",
        {"job": job(SUSPEND), "workloads": workloads(learner_replicas=0)},
        Stage.RELEASING,
        True,
        {},
    ),
    (
        "its last pod terminates",
        {"job": job(SUSPEND), "last_report": None, "pods": [pod(Role.ROLLOUT, deleting=True)]},
        Stage.RELEASING,
        True,
        {},
    ),
    ("every pod is gone", {"job": job(SUSPEND), "last_report": None, "pods": []}, Stage.RELEASED, True, {}),
    (
        "every pod is gone but one that was evicted and not collected",
        {"job": job(SUSPEND), "last_report": None, "pods": [pod(Role.ROLLOUT, phase="Failed")]},
        Stage.RELEASED,
        True,
        {},
    ),
    ("suspended from the start", {"job": job(SUSPEND), "pods": [], "last_report": None}, Stage.RELEASED, True, {}),
    (
        "resumed while it drains: the drain is completed",
        {"last_report": learner_report(report("draining"))},
        Stage.RUNNING,
        False,
        {},
    ),
    (
        "resumed when it had drained, before the pod was deleted",
        {"last_report": learner_report(over("suspended"))},
        Stage.RUNNING,
        False,
        {"remove": (("email-search-learner-0", "learner-0"),)},
    ),
    (
        "resumed when it had drained: another learner's pod is left alone",
        {"last_report": learner_report(over("suspended")), "pods": [pod(Role.LEARNER, 1), pod(Role.LEARNER)]},
        Stage.RUNNING,
        False,
        {"remove": (("email-search-learner-0", "learner-0"),)},
    ),
    (
        "resumed after everything was released",
        {"last_report": None, "pods": [], "workloads": workloads(learner_replicas=0)},
        Stage.RUNNING,
        False,
        {},
    ),
    (
        "it has succeeded",
        {"last_report": learner_report(over("succeeded", step=26))},
        Stage.ENDED,
        True,
        {"ended": ("Completed", "26 steps; the adapter is s3://bucket/email-search/adapters/14")},
    ),
    (
        "it succeeded while it was to be suspended",
        {"job": job(SUSPEND), "last_report": learner_report(over("succeeded", step=26))},
        Stage.ENDED,
        True,
        {"ended": ("Completed", "26 steps; the adapter is s3://bucket/email-search/adapters/14")},
    ),
    ("it succeeded before", {"status": status(SUCCEEDED)}, Stage.ENDED, True, {}),
    ("it failed before", {"status": status(FAILED)}, Stage.ENDED, True, {}),
    (
        "it ended, and its learner trains again: it stays ended",
        {"status": status(FAILED, finishedAt=at(-60))},
        Stage.ENDED,
        True,
        {},
    ),
    (
        "it ended, and its manifest is invalid now",
        {"status": status(SUCCEEDED), "job": None},
        Stage.ENDED,
        True,
        {},
    ),
    (
        "it has not ended",
        {"status": status(condition("Succeeded", "False", "Running"))},
        Stage.RUNNING,
        False,
        {},
    ),
    (
        "its time to live has not passed",
        {"status": status(SUCCEEDED, finishedAt=at(-60)), "job": job("ttlAfterFinished=100s")},
        Stage.ENDED,
        True,
        {"requeue_after": 40.0},
    ),
    (
        "its time to live has passed",
        {"status": status(FAILED, finishedAt=at(-100)), "job": job("ttlAfterFinished=100s")},
        Stage.ENDED,
        True,
        {"delete": True},
    ),
    (
        "its time to live is 0",
        {"status": status(FAILED, finishedAt=at(0)), "job": job("ttlAfterFinished=0s")},
        Stage.ENDED,
        True,
        {"delete": True},
    ),
    (
        "it has no time to live",
        {"status": status(FAILED, finishedAt=at(-(10**7)))},
        Stage.ENDED,
        True,
        {},
    ),
]


@pytest.mark.parametrize(
    ("given", "stage", "parked", "rest"), [line[1:] for line in LIFE], ids=[line[0] for line in LIFE]
)
def test_each_snapshot_has_one_stage_and_its_actions(
    given: dict[str, Any], stage: Stage, parked: bool, rest: dict[str, Any]
) -> None:
    assert decide(snapshot(**given)) == Decision(stage=stage, parked=parked, **rest)


def failing(*overrides: str, attempts: int = 0, since: float | None = None, **changes: Any) -> Snapshot:
    """A job whose learner of this attempt reported a failure `since` seconds ago."""
    plain: dict[str, Any] = {
        "job": job(*overrides),
        "last_report": learner_report(failed(**changes)),
        "workloads": workloads(attempts),
        "pods": all_pods(pod(Role.LEARNER, attempts=attempts)),
        "memory": Memory(failed=None if since is None else NOW - since),
    }
    return snapshot(**plain)


LEARNER, WHOLE = "the learner is restarted", "the whole job is restarted"


@pytest.mark.parametrize(
    ("overrides", "attempts", "since", "done"),
    [
        ((), 0, None, {"retry": f"{LEARNER} in 10 s, for time 1 of 3", "requeue_after": 10.0}),
        ((), 0, 4.0, {"retry": f"{LEARNER} in 6 s, for time 1 of 3", "requeue_after": 6.0}),
        ((), 0, 10.0, {"retry": f"{LEARNER}, for time 1 of 3", "attempts": 1}),
        ((), 2, 0.0, {"retry": f"{LEARNER} in 40 s, for time 3 of 3", "requeue_after": 40.0, "attempts": 2}),
        ((), 2, 50.0, {"retry": f"{LEARNER}, for time 3 of 3", "attempts": 3}),
        (rules("{action: RestartComponent}"), 0, 10.0, {"retry": f"{LEARNER}, for time 1 of 3", "attempts": 1}),
        (
            rules("{action: RestartJob}"),
            1,
            5.0,
            {"retry": f"{WHOLE} in 15 s, for time 2 of 3", "requeue_after": 15.0, "attempts": 1},
        ),
        (
            rules("{action: RestartJob}"),
            1,
            20.0,
            {"retry": f"{WHOLE}, for time 2 of 3", "attempts": 2, "restarts": 1},
        ),
        (
            rules("{action: Ignore}"),
            0,
            9.0,
            {"retry": f"{LEARNER} in 1 s; this failure does not count", "requeue_after": 1.0},
        ),
        (
            rules("{action: Ignore}"),
            3,
            80.0,
            {
                "retry": f"{LEARNER}; this failure does not count",
                "remove": (("email-search-learner-0", "learner-0"),),
                "attempts": 3,
            },
        ),
        (("activeDeadline=1h",), 0, 0.0, {"retry": f"{LEARNER} in 10 s, for time 1 of 3", "requeue_after": 10.0}),
    ],
    ids=[
        "at first", "in the wait", "after the wait", "later waits are longer", "the last time", "a rule says the same",
        "the whole job waits too", "the whole job", "ignored, in the wait", "ignored, after the wait",
        "with a deadline",
    ],
)  # fmt: skip
def test_a_failure_is_retried_by_its_rule(
    overrides: tuple[str, ...], attempts: int, since: float | None, done: dict[str, Any]
) -> None:
    decision = decide(failing(*overrides, attempts=attempts, since=since))
    assert decision.stage is Stage.RUNNING
    found = wanted(decision)
    memory = found.pop("memory", None)
    assert found == done
    assert memory == (Memory(failed=NOW - (since or 0.0)) if "requeue_after" in done else None)


def test_the_backoff_doubles_up_to_its_maximum() -> None:
    waits = [backoff(attempts) for attempts in range(8)]
    assert waits == [10, 20, 40, 80, 160, 300, 300, 300]
    assert backoff(10**8) == BACKOFF.limit


@pytest.mark.parametrize("code", ["storage_unavailable", "storage_inaccessible"])
def test_storage_that_cannot_be_used_counts_against_no_limit(code: str) -> None:
    away = {"boundary": Boundary.INFRASTRUCTURE, "code": code}
    decision = decide(failing(attempts=3, since=80.0, **away))
    assert decision.stage is Stage.RUNNING
    assert (decision.attempts, decision.remove) == (3, (("email-search-learner-0", "learner-0"),))
    counted = rules(f"{{reason: infrastructure/{code}, action: RestartComponent}}")
    assert decide(failing(*counted, attempts=3, since=80.0, **away)).ended is not None


@pytest.mark.parametrize(
    ("gained", "attempts", "of_pod", "forgiven"),
    [(STABLE_STEPS, 2, 2, 2), (STABLE_STEPS - 1, 2, 2, 0), (STABLE_STEPS, 2, 1, 0), (STABLE_STEPS, 0, 0, 0)],
    ids=["after enough steps", "one step too few", "steps of the start before", "nothing to forgive"],
)
def test_stable_steps_reset_restarts(gained: int, attempts: int, of_pod: int, forgiven: int) -> None:
    seen = snapshot(
        pods=all_pods(pod(Role.LEARNER, attempts=of_pod)),
        workloads=workloads(attempts=attempts),
        last_report=learner_report(report(), gained=gained),
    )
    decision = decide(seen)
    assert (decision.attempts, decision.forgiven) == (attempts, forgiven)


def test_forgiven_restarts_do_not_count_or_delay() -> None:
    seen = failing(attempts=3, since=0.0)
    forgiven = replace(seen, workloads=workloads(attempts=3, forgiven=2))
    decision = decide(forgiven)
    assert decision.retry == "the learner is restarted in 20 s, for time 2 of 3"
    assert (decision.attempts, decision.forgiven) == (3, 2)
    over = decide(replace(failing(attempts=5), workloads=workloads(attempts=5, forgiven=2)))
    assert over.ended is not None
    assert over.ended[1].startswith(f"the learner failed 4 times since {STABLE_STEPS} successful steps in a row,")


LIMIT = "failurePolicy.backoffLimit is"
WRONG = "[engine/no_engine_proved] it went wrong"


@pytest.mark.parametrize(
    ("overrides", "attempts", "changes", "end"),
    [
        ((), 3, {}, ("BackoffExceeded", f"the learner failed 4 times, {LIMIT} 3; the last time: {WRONG}")),
        (
            rules(limit=0),
            0,
            {},
            ("BackoffExceeded", f"the learner failed 1 times, {LIMIT} 0; the last time: {WRONG}"),
        ),
        (
            rules("{action: RestartJob}", limit=1),
            1,
            {},
            ("BackoffExceeded", f"the learner failed 2 times, {LIMIT} 1; the last time: {WRONG}"),
        ),
        (rules("{action: Fail}"), 0, {}, ("LearnerFailed", WRONG)),
        (rules("{action: Ignore}"), 9, {}, None),
        ((), 0, {"code": "logprob_gap"}, ("LearnerFailed", "[engine/logprob_gap] it went wrong")),
        (rules("{reason: engine/logprob_gap, action: RestartComponent}"), 0, {"code": "logprob_gap"}, None),
        (rules("{reason: Error, action: Fail}"), 0, {}, None),
        (rules("{role: tools, action: Fail}"), 0, {}, None),
        (rules("{reason: engine/*, action: Fail}"), 0, {}, ("LearnerFailed", WRONG)),
        (rules("{reason: engine/no_engine, action: Fail}"), 0, {}, None),
        (rules("{reason: infrastructure/*, action: Fail}"), 0, {}, None),
        (
            rules("{reason: engine/no_engine_proved, action: Ignore}", "{action: Fail}"),
            0,
            {},
            None,
        ),
        (
            rules("{reason: engine/other, action: Ignore}", "{role: learner, action: Fail}"),
            0,
            {},
            ("LearnerFailed", WRONG),
        ),
    ],
    ids=[
        "too often", "no second time", "too often for the whole job", "a rule fails it",
        "what is ignored is never too often",
        "the gap alarm", "the gap alarm, but the user's rule comes first", "a rule of containers' ends",
        "a rule of another part", "a rule of a boundary", "a rule of a code that is longer",
        "a rule of another boundary",
        "the first rule that fits counts", "a rule that does not fit is passed over",
    ],
)  # fmt: skip
def test_a_failure_ends_the_job_by_its_rule(
    overrides: tuple[str, ...], attempts: int, changes: dict[str, Any], end: tuple[str, str] | None
) -> None:
    decision = decide(failing(*overrides, attempts=attempts, **changes))
    assert decision.ended == end
    assert (decision.stage, decision.parked) == ((Stage.ENDED, True) if end else (Stage.RUNNING, False))
    assert (decision.attempts, decision.restarts) == (attempts, 0)


def test_a_learner_that_failed_without_a_reason_is_retried() -> None:
    seen = snapshot(last_report=learner_report(over("failed")), memory=Memory(failed=NOW - 10))
    assert decide(seen).attempts == 1
    assert decide(replace(seen, job=job(*rules("{reason: infrastructure/internal, action: Fail}")))).ended is not None


@pytest.mark.parametrize(
    ("learner", "counts"),
    [(pod(Role.LEARNER, attempts=1), True), (pod(Role.LEARNER, attempts=0), False), (pod(Role.LEARNER, 1), False)],
    ids=["of this attempt", "of an earlier attempt", "of another pod"],
)
def test_a_failure_is_counted_once(learner: Pod, counts: bool) -> None:
    seen = snapshot(
        pods=[learner], workloads=workloads(1), last_report=learner_report(failed()), memory=Memory(failed=NOW - 60)
    )
    assert decide(seen).attempts == (2 if counts else 1)


OOM = ended("tools", "OOMKilled", 137)
KILLED = "tools: tools ended with OOMKilled (137)"


def with_end(*overrides: str, attempts: int = 0, restarts: int = 0, **changes: Any) -> Snapshot:
    """A job whose tools container was killed for memory."""
    tools = pod(Role.TOOLS, **({"ready": False, "ended": (OOM,), "restarts": 1} | changes))
    learner = pod(Role.LEARNER, attempts=attempts)
    return snapshot(job=job(*overrides), pods=all_pods(tools, learner), workloads=workloads(attempts, restarts))


@pytest.mark.parametrize(
    ("overrides", "changes", "done"),
    [
        ((), {}, {}),
        (rules("{reason: OOMKilled, action: Ignore}"), {}, {}),
        (rules("{reason: OOMKilled, action: RestartComponent}"), {}, {}),
        (rules("{reason: OOMKilled, action: RestartJob}"), {}, {"attempts": 1, "restarts": 1}),
        (rules("{reason: OOMKilled, action: RestartJob}"), {"attempts": 2, "restarts": 2, "job_restarts": 2},
         {"attempts": 3, "restarts": 3}),
        (rules("{reason: OOMKilled, action: RestartJob}"), {"attempts": 1, "restarts": 1, "job_restarts": 0},
         {"attempts": 1, "restarts": 1}),
        (rules("{reason: OOMKilled, action: RestartJob}"), {"attempts": 3, "restarts": 3, "job_restarts": 3},
         {"attempts": 3, "restarts": 3,
          "ended": ("BackoffExceeded", f"a component failed 4 times, {LIMIT} 3; the last time: {KILLED}")}),
        (rules("{reason: OOMKilled, action: Fail}"), {}, {"ended": ("BackoffExceeded", KILLED)}),
        (rules("{role: tools, action: Fail}"), {}, {"ended": ("BackoffExceeded", KILLED)}),
        (rules("{role: judge, action: Fail}"), {}, {}),
        (rules("{reason: Error, action: Fail}"), {}, {}),
        (rules("{action: Fail}"), {"deleting": True}, {}),
        (rules("{action: Fail}"), {"phase": "Failed"}, {}),
        (rules("{action: Fail}"), {"ended": (ended("tools", "ContainerStatusUnknown", 137),)}, {}),
        (rules("{action: Fail}"), {"ended": (ended("tools", "Unknown", 255),)}, {}),
        (rules("{reason: tool/*, action: Fail}"), {}, {}),
        (rules("{reason: OOMKilled, action: Ignore}", "{action: Fail}"), {}, {}),
    ],
    ids=[
        "no rule", "ignored", "restarted in its pod", "the whole job", "the whole job again",
        "the whole job was restarted for it already", "the whole job too often", "a rule ends it",
        "a rule of its role ends it",
        "a rule of another role", "another reason", "a pod that is being deleted", "an evicted pod",
        "a container that the kubelet lost",
        "a node that restarted", "a rule for reported failures", "the first rule counts",
    ],
)  # fmt: skip
def test_a_container_failure_is_handled_by_its_rule(
    overrides: tuple[str, ...], changes: dict[str, Any], done: dict[str, Any]
) -> None:
    decision = decide(with_end(*overrides, **changes))
    assert wanted(decision) == done
    assert decision.stage is (Stage.ENDED if "ended" in done else Stage.RUNNING)


def test_a_rule_for_the_learners_container_ends_the_job_as_learner_failed() -> None:
    learner = pod(Role.LEARNER, ready=False, ended=(ended("learner", "OOMKilled", 137),))
    seen = snapshot(job=job(*rules("{role: learner, action: Fail}")), pods=all_pods(learner), last_report=None)
    assert decide(seen).ended == ("LearnerFailed", "learner: learner ended with OOMKilled (137)")


def test_a_suspended_job_is_not_restarted_for_a_container_failure() -> None:
    seen = with_end(SUSPEND, *rules("{reason: OOMKilled, action: RestartJob}", limit=0))
    assert (decide(seen).stage, decide(seen).attempts) == (Stage.DRAINING, 0)


HOUR = "activeDeadline=1h"


@pytest.mark.parametrize(
    ("overrides", "standing", "end", "requeue_after"),
    [
        ((HOUR,), {}, False, None),
        ((HOUR,), {"startedAt": at(-3599)}, False, 1.0),
        ((HOUR,), {"startedAt": at(-3600)}, True, None),
        ((HOUR, SUSPEND), {"startedAt": at(-7200)}, False, LONGEST_DRAIN),
        ((HOUR,), {"startedAt": at(-7200), "conditions": [condition("Suspended", "True", "Released")]}, False, None),
        ((HOUR,), {"startedAt": at(-7200), "conditions": [condition("Suspended", "False", "Running")]}, True, None),
        ((), {"startedAt": at(-(10**7))}, False, None),
    ],
    ids=[
        "not begun", "a second left", "past", "not while suspended", "it starts again when it is resumed",
        "resumed and past",
        "no deadline",
    ],
)  # fmt: skip
def test_the_active_deadline_does_not_run_while_suspended(
    overrides: tuple[str, ...], standing: dict[str, Any], end: bool, requeue_after: float | None
) -> None:
    decision = decide(snapshot(job=job(*overrides), status=standing))
    assert decision.ended == (("DeadlineExceeded", "activeDeadline (3600 s) passed") if end else None)
    assert decision.requeue_after == requeue_after


UNSCHEDULED = "0/3 nodes are available: 3 Insufficient nvidia.com/gpu."
LONG = {"made": NOW - 900}
STUCK = "for longer than pendingDeadline (600 s)"
TOO_LONG = f"{STUCK}: email-search-inference-1: "


@pytest.mark.parametrize(
    ("one", "why"),
    [
        (waiting(Role.INFERENCE, 1, **LONG, unscheduled=UNSCHEDULED), TOO_LONG + UNSCHEDULED),
        (waiting(Role.INFERENCE, 1, **LONG), f"{TOO_LONG}it is not scheduled"),
        (
            waiting(Role.INFERENCE, 1, **LONG, scheduled=True, unstartable="engine: ErrImagePull: no such image"),
            f"{TOO_LONG}engine: ErrImagePull: no such image",
        ),
        (
            waiting(Role.INFERENCE, 1, **LONG, scheduled=True, ended=(ended("prepare", code=2, message="no model"),)),
            f"{TOO_LONG}prepare ended with Error (2): no model",
        ),
        (waiting(Role.INFERENCE, 1, made=NOW - 599.5), None),
        (
            waiting(Role.INFERENCE, 1, **LONG, scheduled=True),
            f"{TOO_LONG}its containers are not created; see its events",
        ),
        (waiting(Role.INFERENCE, 1, **LONG, scheduled=True, begun=True), None),
        (waiting(Role.INFERENCE, 1, **LONG, gated=True), None),
        (waiting(Role.INFERENCE, 1, **LONG, deleting=True), None),
        (pod(Role.INFERENCE, 1, **LONG, ready=False, unstartable="engine: ErrImagePull: busy"), None),
        (pod(Role.INFERENCE, 1, **LONG, phase="Failed", scheduled=False), None),
    ],
    ids=[
        "no node", "no message of the scheduler", "no image", "a preparation that fails", "not long enough",
        "no volume",
        "it prepares",        "its queue holds it back", "it is being deleted",
        "it ran before and its image is pulled again", "it was evicted",
    ],
)  # fmt: skip
def test_the_pending_deadline_bounds_the_start_of_pods(one: Pod, why: str | None) -> None:
    decision = decide(snapshot(job=job("pendingDeadline=10m"), pods=all_pods(one)))
    assert decision.ended == (None if why is None else ("PendingTooLong", why))
    without = decide(snapshot(pods=all_pods(one)))
    assert (without.ended, without.requeue_after) == (None, None)


def test_waiting_in_a_queue_does_not_count_against_deadlines() -> None:
    queued = {"job": job("pendingDeadline=10m", "activeDeadline=1h"), "labels": {QUEUE_LABEL: "gpus"}}
    started = status(startedAt=at(-30))
    gated = snapshot(**queued, pods=all_pods(waiting(Role.LEARNER, **LONG, gated=True)), status={})
    admitted = snapshot(**queued, pods=all_pods(waiting(Role.LEARNER, **LONG)), status={})
    waits_on = replace(admitted, status=started)
    refused = replace(gated, pods=[], not_created=(NOW - 900, "email-search-tools: exceeded quota"))
    assert [waits_for_admission(seen) for seen in (gated, admitted, waits_on, refused)] == [True, False, False, False]
    assert decide(refused).ended == ("PendingTooLong", f"{STUCK}: email-search-tools: exceeded quota")
    since = [waited and waited[0] for waited in map(pending, (gated, admitted, waits_on))]
    assert since == [None, NOW, NOW - 30]
    assert [decide(seen).ended for seen in (gated, admitted, waits_on)] == [None, None, None]
    assert ["startedAt" in status_of(seen, decide(seen)) for seen in (gated, admitted)] == [False, True]


@pytest.mark.parametrize(
    ("changes", "since"),
    [
        ({}, None),
        ({"pods": all_pods(waiting(Role.ROLLOUT, made=NOW - 70, scheduled=True))}, NOW - 70),
        ({"pods": all_pods(waiting(Role.ROLLOUT, made=NOW - 70))}, None),
        ({"pods": all_pods(waiting(Role.ROLLOUT, made=NOW - 70, scheduled=True, begun=True))}, None),
        ({"not_created": (NOW - 90, "email-search-learner: no service account")}, NOW - 90),
    ],
    ids=["all run", "containers are not created", "no node", "it prepares", "pods are not created"],
)
def test_pods_that_cannot_start_may_need_a_missing_object(changes: dict[str, Any], since: float | None) -> None:
    assert short_of_pods_since(snapshot(**changes)) == since


@pytest.mark.parametrize(
    ("since", "end"),
    [
        (NOW - 599, None),
        (NOW - 600, ("PendingTooLong", "for longer than pendingDeadline (600 s): exceeded quota: gpus")),
    ],
)
def test_the_pending_deadline_covers_pods_that_are_not_created(since: float, end: tuple[str, str] | None) -> None:
    """The deadline counts from when pods were first missing: the job may have run for hours before."""
    made = status(startedAt=at(9999))
    not_created = (since, "exceeded quota: gpus")
    seen = snapshot(job=job("pendingDeadline=10m"), pods=[], last_report=None, not_created=not_created, status=made)
    assert decide(seen).ended == end
    assert decide(replace(seen, job=job())).ended is None


def test_the_pending_deadline_is_of_the_pod_that_waits_longest() -> None:
    pods = all_pods(waiting(Role.INFERENCE, 0, made=NOW - 100), waiting(Role.INFERENCE, 1, made=NOW - 400))
    decision = decide(snapshot(job=job("pendingDeadline=10m"), pods=pods))
    assert (decision.stage, decision.requeue_after) == (Stage.RUNNING, 200.0)


def test_of_two_times_the_earlier_is_waited_for() -> None:
    started = status(startedAt=at(-3500))
    pods = all_pods(waiting(Role.ROLLOUT, 0, made=NOW - 590))
    both = snapshot(job=job("pendingDeadline=10m", HOUR), pods=pods, status=started)
    assert decide(both).requeue_after == 10.0
    assert decide(replace(both, pods=all_pods())).requeue_after == 100.0
    failed_too = replace(both, last_report=learner_report(failed()), memory=Memory(failed=NOW - 3))
    assert decide(failed_too).requeue_after == 7.0


def test_a_resumed_drain_has_its_whole_time() -> None:
    drained = decide(snapshot(job=job(SUSPEND), memory=Memory(draining=NOW - 100)))
    running = decide(snapshot(memory=drained.memory))
    assert running.memory == Memory()


@given(snapshots())
def test_any_snapshot_has_a_decision_and_counts_only_grow(seen: Snapshot) -> None:
    decision = decide(seen)
    assert seen.attempts <= decision.attempts <= seen.attempts + 1
    assert seen.restarts <= decision.restarts <= decision.attempts - seen.attempts + seen.restarts
    assert decision.parked == (decision.stage in {Stage.RELEASING, Stage.RELEASED, Stage.ENDED})
    assert decision.requeue_after is None or decision.requeue_after >= 0
    assert decision.drain == (decision.stage is Stage.DRAINING)
    assert set(decision.remove) <= {(item.name, item.uid) for item in seen.of(Role.LEARNER)}
    if decision.ended is not None:
        assert decision.stage is Stage.ENDED
        assert decision.ended[0] in set(REASONS[Type.SUCCEEDED]) - {"Running"}
    if decision.delete:
        assert decision.stage is Stage.ENDED
    if decision.stage is Stage.RELEASED:
        assert not seen.present


@given(snapshots(), st.sampled_from([SUCCEEDED, FAILED]))
def test_an_ended_job_stays_ended(seen: Snapshot, end: dict[str, Any]) -> None:
    stands = [item for item in seen.status.get("conditions", ()) if item["type"] != "Succeeded"]
    decision = decide(replace(seen, status={**seen.status, "conditions": [*stands, end]}))
    assert (decision.stage, decision.parked, decision.ended) == (Stage.ENDED, True, None)
