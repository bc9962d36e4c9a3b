"""The status of a job, from its snapshot: conditions, progress, lineage and what `kubectl get` prints. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, cast

from kestrl._shared.plan.components import Role
from kestrl._shared.spec.status import (
    Condition,
    CrashStatus,
    EngineStatus,
    JobStatus,
    PolicyStatus,
    ProgressStatus,
    RestStatus,
    ResultStatus,
    SandboxStatus,
    Shown,
)
from kestrl.runstate.state import EngineReport, RunState
from kestrl.runstate.states import RunPhase, ServingState
from kestrl_operator.render.network import selector
from kestrl_operator.state.snapshot import NOTHING, LearnerReport, Memory, Rest, Snapshot, number, seconds_of
from kestrl_operator.status.conditions import (
    QUARANTINED,
    ConditionStatus,
    Observation,
    Type,
    joined,
    phase,
    shortened,
)
from kestrl_operator.status.lifecycle import Decision, Stage, has_ended, running_since, waits_for_admission
from kestrl_operator.status.observations import observed, verified_by_all
from kestrl_operator.status.reason import reason as reason_of
from kestrl_operator.status.summary import left_alone

HISTORY = 10
ENGINES_SHOWN = 100
"""Engines listed in the status; all are counted. Kubernetes limits the size of an object."""
LONGEST_MESSAGE = 1000
"""Maximum characters of an engine's message."""
FAILURES_SHOWN = 64
"""Kinds of failures listed, the most frequent first: as many as the CRD allows."""
SANDBOXES_SHOWN = 64
"""Tools whose sandbox is listed: as many as the CRD allows."""
LONGEST_ETA = 1e9
NUMBERS = frozenset({"conditions", "engines", "shown", "progress", "policy", "history"})
"""Fields of a status that change while a job trains as it should, or contain such fields."""
UNKNOWN = "unknown"
"""State of an engine that is not reported."""


def status_of(snapshot: Snapshot, decision: Decision) -> dict[str, Any]:
    """The complete status to write.

    Args:
        snapshot: The snapshot of the job.
        decision: The decision about it.
    """
    before = JobStatus.model_validate(dict(snapshot.status))
    now = written(snapshot.now)
    conditions = joined(before.conditions, observed(snapshot, decision), generation=snapshot.generation, now=now)
    live = snapshot.live_report
    policy, history = _lineage(before, snapshot, now)
    running = decision.stage is Stage.RUNNING
    status = JobStatus(
        observed_generation=snapshot.generation,
        conditions=conditions,
        progress=before.progress if live is None else _progress(live),
        policy=policy,
        result=_result(before, snapshot, decision),
        history=history,
        engines=[] if decision.parked else _engines(snapshot, before),
        sandboxes=before.sandboxes if live is None else _sandboxes(live),
        rollout_replicas=len(snapshot.of(Role.ROLLOUT)),
        rollout_selector=",".join(f"{name}={value}" for name, value in selector(snapshot.name, Role.ROLLOUT).items()),
        started_at=_started(snapshot, before, running=running, now=now),
        finished_at=before.finished_at if has_ended(snapshot) else now if decision.ended else None,
        restarts=decision.attempts,
        installation=before.installation,
        last_crash=_last_crash(snapshot) or before.last_crash,
        rest=_rest(decision.memory.rest),
    )
    status = status.model_copy(update={"shown": _shown(status, conditions, live)})
    return status.model_dump(by_alias=True, exclude_none=True)


def with_failure(
    status: Mapping[str, Any], message: str, *, generation: int, now: float, reason: str = "OperatorFailed"
) -> dict[str, Any]:
    """The current status with a failed reconciliation in condition Ready, and no other change. Pure.

    Args:
        status: The current status.
        message: Message for the user.
        generation: Generation of the spec for which it failed.
        now: Seconds since 1970.
        reason: Reason of condition Ready.
    """
    before = JobStatus.model_validate(dict(status))
    quarantined = reason == QUARANTINED
    failed = [Observation(type=Type.READY, status=ConditionStatus.FALSE, reason=reason, message=message)]
    observations = left_alone(message) if quarantined else failed
    conditions = joined(before.conditions, observations, generation=generation, now=written(now))
    after = before.model_copy(
        update={
            "conditions": conditions,
            "shown": before.shown.model_copy(update={"phase": phase(conditions), "reason": reason_of(conditions)}),
            # A quarantine is the operator's whole answer to this spec; after another failure, one follows.
            "observed_generation": generation if quarantined else before.observed_generation,
        }
    )
    return after.model_dump(by_alias=True, exclude_none=True)


def states_in(status: Mapping[str, Any]) -> object:
    """What of a status is written at once. The rest are numbers, and the messages of conditions, which contain some."""
    conditions = [
        (item["type"], item["status"], item["reason"], item.get("observedGeneration"))
        for item in status.get("conditions", ())
    ]
    engines = [(item["name"], _state(item), item.get("message")) for item in status.get("engines", ())]
    columns = status.get("shown", {})
    stable = {name: value for name, value in status.items() if name not in NUMBERS}
    return conditions, engines, columns.get("phase"), stable


def _state(engine: Mapping[str, Any]) -> object:
    """The state of an engine. That it loads the version after the one that it serves changes nothing."""
    state, lag = engine.get("state"), engine.get("lag")
    return str(ServingState.SERVING) if state == ServingState.LOADING and lag == 1 else state


def without_empties(mapping: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of a map without empty values: a missing value means the same, and can always be applied. Pure."""
    nonempty: dict[str, Any] = {}
    for name, value in mapping.items():
        content = without_empties(cast("dict[str, Any]", value)) if isinstance(value, dict) else value
        if content not in ({}, []):
            nonempty[name] = content
    return nonempty


def remembered(status: Mapping[str, Any]) -> Memory:
    """What an earlier process has written into a status for the next one."""
    rest = status.get("rest")
    if rest is None:
        return NOTHING
    since, until = seconds_of(rest["since"]), seconds_of(rest["until"])
    assert since is not None
    assert until is not None
    return Memory(
        rest=Rest(generation=rest["generation"], since=since, until=until, times=rest["times"], why=rest["why"])
    )


def _last_crash(snapshot: Snapshot) -> CrashStatus | None:
    """The newest failure of a container in the pods of the learner that are there; None if there is none."""
    crashes = [
        (item.at, pod.name, item)
        for pod in snapshot.pods
        for item in pod.ended
        if pod.role in {Role.LEARNER, Role.RANKS} and item.at
    ]
    if not crashes:
        return None
    at, pod, item = max(crashes, key=lambda crash: crash[:2])
    return CrashStatus(pod=pod, container=item.container, reason=item.reason, code=item.code, at=at, log=item.log)


def _rest(rest: Rest | None) -> RestStatus | None:
    if rest is None:
        return None
    reason = shortened(rest.why, LONGEST_MESSAGE)
    return RestStatus(
        generation=rest.generation, since=written(rest.since), until=written(rest.until), times=rest.times, why=reason
    )


def _started(snapshot: Snapshot, before: JobStatus, *, running: bool, now: str) -> str | None:
    begins = (
        running
        and running_since(snapshot) is None
        and not waits_for_admission(snapshot)
        and (not snapshot.problem or bool(snapshot.workloads))
    )
    return now if begins else before.started_at


def written(seconds: float) -> str:
    """A timestamp in Kubernetes' format."""
    return datetime.fromtimestamp(int(seconds), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _progress(live: LearnerReport) -> ProgressStatus:
    state, last = live.state, live.state.last_step
    return ProgressStatus(
        step=state.steps.done,
        total_steps=state.steps.total,
        reward=live.mean("reward"),
        answer_correct=live.mean("answer_correct"),
        episodes_per_second=number(last.episodes_per_second, 2) or None,
        tokens_per_second=number(last.tokens_per_second, 1) or None,
        eta_seconds=int(last.eta_seconds) or None if 0 < last.eta_seconds < LONGEST_ETA else None,
        failures=dict(sorted(state.history.failures.items(), key=lambda item: (-item[1], item[0]))[:FAILURES_SHOWN]),
    )


def _sandboxes(live: LearnerReport) -> list[SandboxStatus]:
    sandboxes = sorted(live.state.tools.sandboxes.items())[:SANDBOXES_SHOWN]
    return [SandboxStatus(tool=tool, backend=item.backend, isolation=item.isolation) for tool, item in sandboxes]


def _result(before: JobStatus, snapshot: Snapshot, decision: Decision) -> ResultStatus | None:
    """The adapter of the run, from the moment the job succeeds."""
    live = snapshot.live_report
    if decision.ended is None or decision.ended[0] != "Completed" or live is None or live.policy is None:
        return before.result
    return ResultStatus(version=live.policy.name, sha256=live.policy.sha256, uri=live.state.policy.uri)


def _lineage(before: JobStatus, snapshot: Snapshot, now: str) -> tuple[PolicyStatus | None, list[PolicyStatus]]:
    """The newest version that every engine has verified, or the result of the run, and the previous ones; a version is
    dated when it was first seen verified.
    """
    live = snapshot.live_report
    live_policy = None if live is None else live.policy
    if live is None or live_policy is None or snapshot.job is None:
        return before.policy, before.history
    if before.policy is not None and before.policy.version == live_policy.name:
        return before.policy, before.history
    verified = verified_by_all(snapshot, snapshot.job.spec)
    if not verified and live.phase is not RunPhase.SUCCEEDED:
        # A run that began again from an earlier step has not the version that the engines verified before.
        current = before.policy is None or before.policy.step <= live_policy.step
        return before.policy if current else None, before.history
    policy = PolicyStatus(
        version=live_policy.name,
        parent=live.state.policy.parent or None,
        step=live_policy.step,
        sha256=live_policy.sha256,
        uri=live.state.policy.uri or None,
        converged_at=now if verified else None,
    )
    return policy, [policy, *before.history][:HISTORY]


def _engines(snapshot: Snapshot, before: JobStatus) -> list[EngineStatus]:
    """The engines as the learner reports them; their state is unknown while it does not report."""
    live = snapshot.live_report
    if live is None or not live.state.engines.reports:
        return [EngineStatus(name=engine.name, state=UNKNOWN) for engine in before.engines]
    return [
        EngineStatus(
            name=engine.name,
            version=None if engine.policy is None else engine.policy.name,
            lag=None if engine.policy is None else engine.lag,
            state=engine.state or UNKNOWN,
            message=shortened(engine.message, LONGEST_MESSAGE),
        )
        for engine in listed_engines(live.state)
    ]


def listed_engines(state: RunState) -> list[EngineReport]:
    """The engines to list, those with problems first if there are too many."""
    engines = sorted(state.engines.reports, key=lambda engine: (engine.state is ServingState.SERVING, -engine.lag))
    return sorted(engines[:ENGINES_SHOWN], key=lambda engine: engine.name)


def _shown(status: JobStatus, conditions: list[Condition], live: LearnerReport | None) -> Shown:
    progress, policy = status.progress, status.policy
    return Shown(
        phase=phase(conditions),
        step=f"{progress.step}/{progress.total_steps}" if progress.total_steps else "",
        policy="" if policy is None else f"v{policy.step}",
        converged=""
        if live is None or not live.state.engines.reports
        else f"{live.verified}/{live.state.engines.total}",
        lag=max((engine.lag for engine in status.engines if engine.lag is not None), default=None),
        reward="" if progress.reward is None else f"{progress.reward:.2f}",
        idle="" if live is None else live.state.last_step.idle.shares(),
        reason=reason_of(conditions),
    )
