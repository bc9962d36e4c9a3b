"""Condition Tracked: what becomes of a run at its MLflow server, and that no decision looks at it."""

from __future__ import annotations

from typing import Any

import pytest
from tests.unit.operator.samples import condition, ended, job, pod, snapshot, status, waiting

from kestrl._shared.plan.components import Role
from kestrl_operator.status.build import status_of
from kestrl_operator.status.lifecycle import decide

SERVER = "http://mlflow.tracking.svc:8080"
TRACKED = job(f"telemetry.mlflow={{uri: '{SERVER}'}}")
SILENT = ended("mlflow", message=f"MLflow at {SERVER} does not answer")


def tracked(**changes: Any) -> tuple[str, str, str]:
    seen = snapshot(**({"job": TRACKED} | changes))
    conditions = status_of(seen, decide(seen))["conditions"]
    item = next(item for item in conditions if item["type"] == "Tracked")
    return item["status"], item["reason"], item["message"]


@pytest.mark.parametrize(
    ("follower", "expected"),
    [
        (pod(Role.MLFLOW), ("True", "Sending", f"to {SERVER}")),
        (pod(Role.MLFLOW, ready=False), ("False", "Starting", "")),
        (waiting(Role.MLFLOW, unscheduled="0/3 nodes"), ("False", "Starting", "0/3 nodes")),
        (
            pod(Role.MLFLOW, ready=False, ended=(SILENT,), restarts=2),
            ("False", "Failing", f"email-search-mlflow-0: {SILENT} (restarted 2 times)"),
        ),
        (
            waiting(Role.MLFLOW, unstartable="mlflow: CreateContainerConfigError: no secret"),
            ("False", "Failing", "email-search-mlflow-0: mlflow: CreateContainerConfigError: no secret"),
        ),
    ],
)
def test_the_condition_says_what_became_of_the_run(follower: Any, expected: tuple[str, str, str]) -> None:
    assert tracked(followers=[follower]) == expected


def test_a_job_without_a_server_says_so() -> None:
    assert tracked(job=job()) == ("Unknown", "NotObserved", "the job names no MLflow server")


def test_what_was_not_sent_stays_reported_after_the_end() -> None:
    suspended = job(f"telemetry.mlflow={{uri: '{SERVER}'}}", "suspend=true")
    at_rest: dict[str, Any] = {"job": suspended, "pods": [], "followers": [], "last_report": None}
    assert tracked(**at_rest)[:2] == ("Unknown", "NotObserved")
    failing = condition("Tracked", "False", "Failing", message="it does not answer")
    assert tracked(**at_rest, status=status(failing)) == ("False", "Failing", "it does not answer")


@pytest.mark.parametrize(
    "follower",
    [
        pod(Role.MLFLOW, ready=False, ended=(SILENT,), restarts=50),
        waiting(Role.MLFLOW, unscheduled="no node", made=0.0),
        waiting(Role.MLFLOW, scheduled=True, unstartable="mlflow: ErrImagePull: none", made=0.0),
    ],
)
def test_no_decision_depends_on_it(follower: Any) -> None:
    strict = job(
        f"telemetry.mlflow={{uri: '{SERVER}'}}",
        "pendingDeadline=1m",
        "failurePolicy.rules=[{reason: '*', action: Fail}]",
    )
    alone, beside = snapshot(job=strict), snapshot(job=strict, followers=[follower])
    assert decide(beside) == decide(alone)
    ready = {item["type"]: item["status"] for item in status_of(beside, decide(beside))["conditions"]}
    assert (ready["Ready"], ready["Scheduled"], ready["Tracked"]) == ("True", "True", "False")
