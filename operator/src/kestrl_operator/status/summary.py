"""The conditions that sum up the others: Ready, and those by which kstatus judges an object. Pure.

Ready=True says that an object is as its spec says, Reconciling=True that it is on its way there, and Stalled=True that
it is stuck; no two are true at a time. kstatus looks at them in this order: Reconciling, Stalled, Ready.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kestrl._shared.plan.components import Role
from kestrl.runstate.states import RunPhase
from kestrl_operator.state.snapshot import LearnerReport, Snapshot
from kestrl_operator.status.conditions import QUARANTINED, ConditionStatus, Observation, Type
from kestrl_operator.status.lifecycle import Decision, Stage
from kestrl_operator.status.waiting import TRAINS

NEEDED = (Type.SCHEDULED, Type.ENGINES_READY, Type.ROLLOUTS_FLOWING, Type.LEARNER_PROGRESSING)
LEARNER = "learner"
"""Name of the learner's container."""


def summed_up(observations: Sequence[Observation], snapshot: Snapshot, decision: Decision) -> Iterator[Observation]:
    """The conditions that follow from the others.

    Args:
        observations: The other conditions, as observed in this pass.
        snapshot: The snapshot of the job.
        decision: The decision about it.
    """
    status = {item.type: item.status for item in observations}
    succeeded = status.get(Type.SUCCEEDED) is ConditionStatus.TRUE
    ready = _ready(observations, snapshot, decision, succeeded=succeeded)
    yield ready
    if decision.stage is Stage.ENDED:
        yield from distance(ready, "" if succeeded else "Failed", _message(observations, Type.SUCCEEDED))
    else:
        yield from distance(ready, "Rejected" if snapshot.problem else "", _message(observations, Type.ACCEPTED))


def distance(ready: Observation | None, stalled: str, message: str) -> Iterator[Observation]:
    """Conditions Reconciling and Stalled.

    Args:
        ready: Condition Ready.
        stalled: Reason of condition Stalled; empty if the job is not stalled.
        message: Why it is.
    """
    kind = Type.RECONCILING
    if stalled:
        yield Observation(type=kind, status=ConditionStatus.FALSE, reason="Stalled")
        yield Observation(type=Type.STALLED, status=ConditionStatus.TRUE, reason=stalled, message=message)
        return
    if ready is not None and ready.status is ConditionStatus.TRUE:
        yield Observation(type=kind, status=ConditionStatus.FALSE, reason="Reconciled")
    else:
        ready_message = "" if ready is None else ready.message
        yield Observation(type=kind, status=ConditionStatus.TRUE, reason="Progressing", message=ready_message)
    yield Observation(type=Type.STALLED, status=ConditionStatus.FALSE, reason="NotStalled")


def left_alone(message: str) -> Iterator[Observation]:
    """The conditions of a job whose spec killed an operator."""
    yield Observation(type=Type.READY, status=ConditionStatus.FALSE, reason=QUARANTINED, message=message)
    yield from distance(None, QUARANTINED, message)


def _message(observations: Sequence[Observation], kind: Type) -> str:
    return next((item.message for item in observations if item.type is kind), "")


def _ready(
    observations: Sequence[Observation], snapshot: Snapshot, decision: Decision, *, succeeded: bool
) -> Observation:
    if decision.stage is Stage.ENDED:
        outcome = (ConditionStatus.TRUE, "Completed") if succeeded else (ConditionStatus.FALSE, "Finished")
        return Observation(type=Type.READY, status=outcome[0], reason=outcome[1])
    if decision.stage is Stage.RELEASED:
        return Observation(type=Type.READY, status=ConditionStatus.TRUE, reason="Suspended")
    missing_types = [
        item.type for item in observations if item.type in NEEDED and item.status is not ConditionStatus.TRUE
    ]
    if not missing_types:
        return Observation(type=Type.READY, status=ConditionStatus.TRUE, reason="Training")
    reason = _shortfall(snapshot) if decision.stage is Stage.RUNNING else "NotReady"
    return Observation(
        type=Type.READY, status=ConditionStatus.FALSE, reason=reason, message=f"not {', '.join(missing_types)}"
    )


def _shortfall(snapshot: Snapshot) -> str:
    """The reason of Ready for a job of which something is missing."""
    last, learners = snapshot.last_report, snapshot.of(Role.LEARNER)
    learner_ready = last is not None and any(pod.uid == last.pod and pod.ready for pod in learners)
    if last is not None and learner_ready and last.phase in TRAINS:
        return "Degraded"
    if not _has_run(snapshot, last):
        return "NotReady"
    return "Resuming" if _resumes(snapshot, last) else "Restarting"


def _resumes(snapshot: Snapshot, last: LearnerReport | None) -> bool:
    """Whether the learner starts again after it was asked to end, and has not failed since."""
    phase = None if last is None else last.phase
    if phase is RunPhase.FAILED or _has_failed(snapshot):
        return False
    released = snapshot.condition(Type.SCHEDULED)[1] in {"Released", "Parked"}
    return released or phase is RunPhase.SUSPENDED or snapshot.condition(Type.READY)[1] == "Resuming"


def _has_failed(snapshot: Snapshot) -> bool:
    """Whether a learner's container has ended with a failure."""
    return any(item.container == LEARNER for pod in snapshot.of(Role.LEARNER) for item in pod.ended)


def _has_run(snapshot: Snapshot, last: LearnerReport | None) -> bool:
    reported = last is not None and last.phase is not RunPhase.STARTING and last.phase is not None
    # The report's step, too: a status computed again from what was written must be the same.
    steps = max(snapshot.status.get("progress", {}).get("step", 0), 0 if last is None else last.state.steps.done)
    return _has_failed(snapshot) or reported or snapshot.attempts > 0 or steps > 0
