"""What `kubectl get` shows of a job in each situation, and what kstatus makes of its status."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
from tests.unit.operator.samples import (
    all_pods,
    condition,
    ended,
    engine,
    failed,
    job,
    learner_report,
    over,
    pod,
    report,
    snapshot,
    status,
    version,
    waiting,
    workloads,
)

from kestrl._shared.plan.components import Role
from kestrl._shared.spec.crd import crd, sft_crd
from kestrl.episode.codec import policy_to_proto
from kestrl_operator.status.build import status_of
from kestrl_operator.status.lifecycle import decide

TRAINED = status_of(snapshot(), decide(snapshot()))
"""Status of a job that trains at step 14 with version 14 on both engines."""
OOM = ended("learner", "OOMKilled", 137)
BEGUN_AGAIN = report(
    step=0, policy=policy_to_proto(version(0)), engines=[engine(0, 0), engine(1, None, lag=1)], engines_converged=1
)


class Line(NamedTuple):
    """A situation, what the columns show, and what kstatus says."""

    situation: str
    given: dict[str, Any]
    phase: str
    policy: str
    converged: str
    lag: int | None
    verdict: str


LINES = [
    Line("it starts", {"last_report": None, "pods": []}, "Pending", "", "", None, "InProgress"),
    Line(
        "engines load for the first time",
        {
            "last_report": learner_report(
                report("starting", step=0, engines=[engine(0, None, lag=15), engine(1, None, lag=15)])
            )
        },
        "Starting", "", "0/2", None, "InProgress",
    ),
    Line("it trains", {}, "Running", "v14", "2/2", 0, "Current"),
    Line(
        "one of two engines is gone",
        {
            "status": TRAINED,
            "pods": all_pods(waiting(Role.INFERENCE)),
            "last_report": learner_report(report(engines=[engine(0, 13, lag=1), engine(1, None, lag=15)])),
        },
        "Degraded", "v14", "0/2", 1, "InProgress",
    ),
    Line(
        "the node of an engine is gone",
        {
            "status": TRAINED,
            "pods": all_pods(pod(Role.INFERENCE, ready=False, node="gpu-7")),
            "lost_nodes": {"gpu-7": "Kubelet stopped posting node status."},
        },
        "Degraded", "v14", "2/2", 0, "InProgress",
    ),
    Line(
        "storage is away",
        {"status": TRAINED, "last_report": learner_report(report(storage_wait="no answer since 21:03:10Z"))},
        "Degraded", "v14", "2/2", 0, "InProgress",
    ),
    Line(
        "the learner is killed for memory again and again",
        {"status": TRAINED, "pods": all_pods(pod(Role.LEARNER, ready=False, ended=(OOM,))), "last_report": None},
        "Restarting", "v14", "", None, "InProgress",
    ),
    Line(
        "the learner waits for a node after a drain",
        {"status": TRAINED, "pods": all_pods(waiting(Role.LEARNER)), "last_report": None},
        "Pending", "v14", "", None, "InProgress",
    ),
    Line(
        "the learner began again from step 0",
        {"status": TRAINED, "last_report": learner_report(BEGUN_AGAIN)},
        "Running", "", "1/2", 0, "Current",
    ),
    Line(
        "a secret is missing",
        {
            "pods": all_pods(waiting(Role.LEARNER, unstartable='learner: CreateContainerConfigError: "s3" not found')),
            "last_report": None,
        },
        "WaitingFor", "", "", None, "InProgress",
    ),
    Line(
        "the manifest is invalid",
        {"job": None, "problem": "spec.rewards: is required", "pods": [], "last_report": None},
        "Rejected", "", "", None, "Failed",
    ),
    Line(
        "it trains on with the spec before a refused one",
        {"status": TRAINED, "problem": "exceeded quota"},
        "Running", "v14", "2/2", 0, "Failed",
    ),
    Line("it drains", {"status": TRAINED, "job": job("suspend=true")}, "Suspending", "v14", "2/2", 0, "InProgress"),
    Line(
        "it is suspended",
        {"status": TRAINED, "job": job("suspend=true"), "pods": [], "last_report": None},
        "Suspended", "v14", "", None, "Current",
    ),
    Line(
        "it is resumed, and its learner is not there yet",
        {
            "status": {**TRAINED, "conditions": [condition("Scheduled", "False", "Released")]},
            "pods": all_pods(pod(Role.LEARNER, ready=False)),
            "last_report": None,
        },
        "Resuming", "v14", "", None, "InProgress",
    ),
    Line(
        "it is resumed after a preemption, and its learner loads its checkpoint",
        {
            "status": {**TRAINED, "conditions": [condition("Ready", "False", "Resuming")]},
            "last_report": learner_report(report("starting")),
        },
        "Resuming", "v14", "2/2", 0, "InProgress",
    ),
    Line(
        "it was resumed, and its learner failed then",
        {
            "status": {**TRAINED, "conditions": [condition("Ready", "False", "Resuming")]},
            "pods": all_pods(pod(Role.LEARNER, ready=False, ended=(OOM,))),
            "last_report": None,
        },
        "Restarting", "v14", "", None, "InProgress",
    ),
    Line(
        "it begins after it waited in its queue",
        {
            "status": {"conditions": [condition("Scheduled", "False", "Released")]},
            "pods": all_pods(pod(Role.LEARNER, ready=False)),
            "last_report": None,
        },
        "Starting", "", "", None, "InProgress",
    ),
    Line(
        "it succeeds with a version that not every engine has verified",
        {"status": TRAINED, "last_report": learner_report(over("succeeded", policy=policy_to_proto(version(26))))},
        "Succeeded", "v26", "", None, "Current",
    ),
    Line(
        "it succeeded, and its manifest is invalid now",
        {
            "status": status(condition("Succeeded", "True", "Completed"), condition("Accepted", "True", "Valid")),
            "job": None, "problem": "spec.bogus: unknown field", "pods": [], "last_report": None,
        },
        "Succeeded", "", "", None, "Current",
    ),
    Line(
        "it failed",
        {
            "status": TRAINED,
            "last_report": learner_report(failed()),
            "workloads": workloads(3),
            "pods": all_pods(pod(Role.LEARNER, attempts=3)),
        },
        "Failed", "v14", "", None, "Failed",
    ),
]  # fmt: skip
IDS = [line.situation for line in LINES]


def written(line: Line) -> dict[str, Any]:
    seen = snapshot(**line.given)
    return status_of(seen, decide(seen))


@pytest.mark.parametrize("line", LINES, ids=IDS)
def test_each_column_says_what_is_so(line: Line) -> None:
    shown = written(line)["shown"]
    assert (shown["phase"], shown["policy"], shown["converged"], shown.get("lag")) == line[2:6]


@pytest.mark.parametrize("line", LINES, ids=IDS)
def test_a_job_is_there_on_its_way_or_stuck(line: Line) -> None:
    found = {item["type"]: item["status"] for item in written(line)["conditions"]}
    verdict = (
        "InProgress" if found["Reconciling"] == "True" else "Failed" if found["Stalled"] == "True" else found["Ready"]
    )
    assert verdict == {"Current": "True"}.get(line.verdict, line.verdict)


def test_a_job_that_no_operator_has_seen_is_marked_so() -> None:
    for definition in (crd(), sft_crd()):
        schema = definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
        assert schema["properties"]["status"]["default"] == {"observedGeneration": -1}
