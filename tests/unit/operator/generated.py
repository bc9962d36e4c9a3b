"""Hypothesis strategies for snapshots, for properties that must hold for each of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import strategies as st
from tests.unit.operator.samples import (
    NOW,
    at,
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
    version,
    waiting,
)

from kestrl._shared.plan.components import Role
from kestrl.api.learner.v1 import learner_pb2 as pb
from kestrl.episode.codec import policy_to_proto
from kestrl.errors import Boundary
from kestrl_operator.state.snapshot import ATTEMPTS, QUEUE_LABEL, RESTARTS, Memory, Pod, Snapshot, Workload
from kestrl_operator.status.conditions import NOT_OBSERVED, REASONS, ConditionStatus

JOBS = (
    None,
    job(),
    job("suspend=true"),
    job("failurePolicy={backoffLimit: 0}"),
    job("failurePolicy={rules: [{reason: OOMKilled, action: RestartJob}, {role: learner, action: Fail}]}"),
    job("failurePolicy={backoffLimit: 1000000000, rules: [{action: RestartJob}]}"),
    job("failurePolicy={rules: [{reason: 'engine/*', action: Ignore}]}", "suspend=true"),
    job("failurePolicy={rules: [{action: Ignore}]}"),
    job("activeDeadline=1h", "pendingDeadline=10m", "ttlAfterFinished=1m"),
)
ROLES = tuple(role for role in Role if role is not Role.ENGINE)
OOM = ended("engine", "OOMKilled", 137)
PODS = (
    pod(Role.TOOLS),
    pod(Role.TOOLS, ready=False),
    pod(Role.TOOLS, ready=False, ended=(OOM, ended("prepare", code=2, message="no model")), restarts=3),
    pod(Role.TOOLS, ready=False, ended=(ended("tools", "Unknown", 255),), restarts=1),
    pod(Role.TOOLS, phase="Failed", ended=(OOM,)),
    pod(Role.TOOLS, phase="Succeeded"),
    pod(Role.TOOLS, phase="Unknown", ready=False),
    pod(Role.TOOLS, deleting=True, ended=(OOM,)),
    waiting(Role.TOOLS),
    waiting(Role.TOOLS, made=NOW - 5000, unscheduled="0/3 nodes are available"),
    waiting(Role.TOOLS, made=NOW - 5000, gated=True),
    waiting(Role.TOOLS, scheduled=True, unstartable="prepare: CreateContainerConfigError: secret not found"),
    waiting(Role.TOOLS, scheduled=True, ended=(ended("prepare", code=1),)),
)
COUNTS = (0, 1, 2, 3, 999_999_999)
MARKS = (*("0", "1", "2", "3") * 2, "999999999", "²", "-1", "")
NUMBERS = (0.0, 0.5, 1.0, -2.0, 1e300, float("nan"), float("inf"), float("-inf"))
MOMENTS = (0, -1, -59, -60, -600, -5000)
REPORTS = (
    *(report(phase) for phase in ("", "starting", "evaluating", "training", "draining")),
    *(over(phase) for phase in ("succeeded", "failed", "suspended")),
    *(failed(boundary, "invalid_input") for boundary in Boundary),
    failed(Boundary.ENGINE, "logprob_gap"),
    report(failure=failed().failure),
)
PROVED = (14, "serving", 0, "")
ENGINES = [
    *(PROVED for _ in range(12)),
    (14, "away", 0, ""),
    (13, "loading", 1, ""),
    (13, "quarantined", 1, "x" * 3000),
    (None, "starting", 15, ""),
]
"""Verified version and state of an engine: mostly healthy, so that sometimes all of them are."""
STANDING = [
    condition(str(kind), str(status), reason, seconds)
    for kind, reasons in REASONS.items()
    for status in ConditionStatus
    for reason in ((NOT_OBSERVED,) if status is ConditionStatus.UNKNOWN else reasons)
    for seconds in (-5000, -60)
]
TEXTS = ("", "it went wrong", "ü" * 10_000)


@st.composite
def pods(draw: Any) -> Pod:
    role, number = draw(st.sampled_from(ROLES)), draw(st.integers(0, 1))
    return replace(
        draw(st.sampled_from(PODS)),
        role=role,
        name=f"email-search-{role}-{number}",
        uid=f"{role}-{number}",
        attempts=draw(st.sampled_from(COUNTS)),
        job_restarts=draw(st.sampled_from(COUNTS)),
    )


@st.composite
def reports(draw: Any) -> pb.WatchProgressResponse:
    made = pb.WatchProgressResponse()
    made.CopyFrom(draw(st.sampled_from(REPORTS)))
    engines = [draw(st.sampled_from(ENGINES)) for _ in range(draw(st.sampled_from([2, 2, 2, 0, 1, 3])))]
    progress = [
        engine(number, proved, state=state, lag=lag, message=message)
        for number, (proved, state, lag, message) in enumerate(engines)
    ]
    del made.engines[:]
    made.engines.extend(progress)
    made.engines_total, made.engines_converged = (draw(st.sampled_from([2, 2, 2, 0, 1, 3])) for _ in range(2))
    newest = draw(st.sampled_from([14, 14, 14, 13, None]))
    made.ClearField("policy")
    if newest is not None:
        made.policy.CopyFrom(policy_to_proto(version(newest)))
    number = draw(st.sampled_from(NUMBERS))
    made.tokens_per_second = made.episodes_per_second = made.eta_seconds = number
    means = {"reward": number, "answer_correct": -number} if draw(st.booleans()) else {}
    made.means.clear()
    made.means.update(means)
    made.failures.update({f"judge/late_{index}": index + 1 for index in range(draw(st.sampled_from([0, 2, 100])))})
    made.message = made.storage_failure = draw(st.sampled_from(TEXTS))
    made.workers, made.degenerate = draw(st.integers(0, 1)), draw(st.booleans())
    if draw(st.booleans()):
        made.ClearField("checkpoint_step")
    return made


@st.composite
def statuses(draw: Any) -> dict[str, Any]:
    found = draw(st.lists(st.sampled_from(STANDING), max_size=4, unique_by=lambda item: item["type"]))
    made: dict[str, Any] = {"conditions": found}
    for field in ("startedAt", "finishedAt"):
        moment = draw(st.sampled_from([None, *MOMENTS]))
        if moment is not None:
            made[field] = at(moment)
    if draw(st.booleans()):
        policy = {"version": version(13).name, "step": 13, "sha256": version(13).sha256}
        made |= {"policy": policy, "history": [policy] * draw(st.sampled_from([1, 10]))}
        made |= {"engines": [{"name": "engine-0", "lag": 2, "state": "loading", "message": ""}]}
    return made


@st.composite
def snapshots(draw: Any) -> Snapshot:
    found = draw(st.lists(pods(), max_size=4))
    marks = {ATTEMPTS: draw(st.sampled_from(MARKS)), RESTARTS: draw(st.sampled_from(MARKS))}
    learner = Workload(role=Role.LEARNER, replicas=draw(st.sampled_from([1, 1, 0])), annotations=marks)
    if draw(st.sampled_from([True, True, False])):
        found.append(pod(Role.LEARNER, attempts=learner.count(ATTEMPTS), job_restarts=learner.count(RESTARTS)))
    latest = learner_report(
        draw(reports()),
        stepped=NOW + draw(st.sampled_from(MOMENTS)),
        connected=draw(st.sampled_from([True, True, False])),
    )
    first_seen = st.sampled_from([None, *(NOW + moment for moment in MOMENTS)])
    return snapshot(
        generation=draw(st.integers(1, 5)),
        job=draw(st.sampled_from(JOBS)),
        problem=draw(st.sampled_from(TEXTS)),
        labels=draw(st.sampled_from([{}, {QUEUE_LABEL: "gpus"}])),
        status=draw(statuses()),
        pods=list({item.name: item for item in found}.values()),
        workloads=draw(st.sampled_from([{Role.LEARNER: learner}, {Role.LEARNER: learner}, {}])),
        last_report=draw(st.sampled_from([latest, latest, latest, None])),
        not_created=draw(st.sampled_from([None, (NOW - 100, "exceeded quota: gpus")])),
        unsatisfiable=draw(st.sampled_from(["", "no node has 2 of nvidia.com/gpu"])),
        memory=Memory(draining=draw(first_seen), failed=draw(first_seen), refused=draw(first_seen)),
    )
