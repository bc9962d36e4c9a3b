"""The conditions of a job: which there are, the closed list of their reasons, and how a new observation joins the old ones. Pure.

A condition says what was observed for a generation of the spec, never what was intended. What was not looked at yet is Unknown.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from kestrl.spec.status import Condition


class Type(StrEnum):
    """What can be true of a job."""

    ACCEPTED = "Accepted"
    QUOTA_RESERVED = "QuotaReserved"
    SCHEDULED = "Scheduled"
    ENGINES_READY = "EnginesReady"
    POLICY_CONVERGED = "PolicyConverged"
    ROLLOUTS_FLOWING = "RolloutsFlowing"
    LEARNER_PROGRESSING = "LearnerProgressing"
    CHECKPOINT_DURABLE = "CheckpointDurable"
    REWARD_HEALTHY = "RewardHealthy"
    LEARNED = "Learned"
    SUSPENDED = "Suspended"
    READY = "Ready"
    SUCCEEDED = "Succeeded"


class Truth(StrEnum):
    """The status of a condition."""

    TRUE = "True"
    FALSE = "False"
    UNKNOWN = "Unknown"


NOT_OBSERVED = "NotObserved"
QUARANTINED = "Quarantined"
LONGEST_MESSAGE = 4096
"""An eighth of what the CRD allows: what is longer nobody reads, and a status of twelve such messages is still a small object."""
REASONS: Mapping[Type, Mapping[str, str]] = {
    Type.ACCEPTED: {
        "Valid": "The manifest makes a job.",
        "Invalid": "The spec makes no job, or Kubernetes refuses an object of it; the message names field and fix. A job that runs goes on as it was last accepted.",
        "Unresolvable": "A model, data set or secret that the manifest names is not there.",
    },
    Type.QUOTA_RESERVED: {
        "NotQueued": "The job waits for no queue.",
        "Admitted": "Its queue has admitted it.",
        "Waiting": "It waits in its queue.",
    },
    Type.SCHEDULED: {
        "PodsScheduled": "Every pod has a node.",
        "Pending": "A pod waits for a node; the message is the scheduler's.",
        "Unsatisfiable": "No node could ever take a pod of this accelerator profile.",
        "Released": "No pod is to run: the job is suspended or has ended.",
    },
    Type.ENGINES_READY: {
        "AllReady": "Every engine answers.",
        "Starting": "Engines load the model.",
        "Unavailable": "An engine stopped answering, or cannot start; the message says why.",
        "Released": "No engine is to run: the job is suspended or has ended.",
    },
    Type.POLICY_CONVERGED: {
        "AllProved": "Every engine has reproduced the newest version's log-probs.",
        "Loading": "Engines fetch, load and prove the newest version.",
        "Quarantined": "An engine could not prove it and is named in no request.",
    },
    Type.ROLLOUTS_FLOWING: {
        "Flowing": "Groups are running or being trained on.",
        "Starting": "No group has been asked for yet.",
        "NoWorker": "No rollout worker answers; the message says what is wrong with their pods.",
        "Failing": "Workers, tools or judge keep failing; the message says how.",
        "Drained": "No group is started: the job is suspended, draining or at its end.",
    },
    Type.LEARNER_PROGRESSING: {
        "Stepping": "Steps follow one another.",
        "Starting": "The learner loads its model or its last checkpoint.",
        "StorageUnavailable": "Object storage does not answer; the learner waits and tries again. The message says since and until when.",
        "Stalled": "No step has ended for five times as long as the longest of the last ones took.",
        "Unavailable": "The learner does not answer, or cannot start; the message says why.",
        "Failed": "The learner reported a failure; the message says which, and what follows.",
        "Released": "It is not to run: the job is suspended or has ended.",
    },
    Type.CHECKPOINT_DURABLE: {
        "Confirmed": "The newest checkpoint was read back from storage.",
        "None": "There is none yet.",
        "StorageFailed": "Storage refused it.",
    },
    Type.REWARD_HEALTHY: {
        "Scoring": "Episodes get rewards.",
        "JudgeFailing": "Episodes stay without a reward because scoring fails.",
        "Degenerate": "Every group of the last steps had equal rewards: there is nothing to learn from.",
    },
    Type.LEARNED: {
        "WeightsChanged": "The newest version differs from version 0.",
        "NoToolCall": "All rewards of every group were equal, and no episode called a tool.",
        "NoRewardSpread": "All rewards of every group were equal.",
        "ZeroGradient": "Rewards differed, and the gradient was 0.",
        "WeightsUnchanged": "The updates were too small to change any weight.",
    },
    Type.SUSPENDED: {
        "Running": "It is not suspended.",
        "Draining": "Rollouts end, the learner checkpoints.",
        "Released": "All is checkpointed and every pod is gone.",
    },
    Type.READY: {
        "Training": "Engines, rollouts and learner work.",
        "NotReady": "One of them does not; its own condition says why.",
        "Finished": "The job has ended.",
        "Quarantined": "The operator was killed while it handled this spec, and looks at the job again when its spec changes. All else is as it was seen before.",
        "OperatorFailed": "The operator cannot do its work on this job; the message says why. All else is as it was seen before.",
    },
    Type.SUCCEEDED: {
        "Completed": "Every step was done and the adapter is in storage.",
        "Running": "It has not ended.",
        "LearnerFailed": "The learner ended with a failure; the message is its reason.",
        "BackoffExceeded": "Components failed more often than the job allows.",
        "DeadlineExceeded": "activeDeadline passed.",
        "PendingTooLong": "Pods could not start for longer than pendingDeadline.",
    },
}
"""The closed list: a reason that is not here is never written. docs/conditions.md is made of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """What was seen of one condition."""

    type: Type
    truth: Truth
    reason: str
    message: str = ""

    def __post_init__(self) -> None:
        known = {NOT_OBSERVED, *REASONS[self.type]}
        if self.reason not in known:
            raise ValueError(f"{self.reason} is no reason of {self.type} (there are: {', '.join(sorted(known))})")
        if (self.reason == NOT_OBSERVED) != (self.truth is Truth.UNKNOWN):
            raise ValueError(f"{self.type}: {NOT_OBSERVED} and Unknown go together, not {self.reason} and {self.truth}")


def joined(before: Sequence[Condition], observed: Iterable[Observed], *, generation: int, now: str) -> list[Condition]:
    """All conditions after an observation, in a fixed order.

    One that was not observed this time keeps what was seen of it, and the generation that was seen for; one that never was is
    Unknown. The transition's time changes with the status alone.

    Args:
        before: As they stand in the status.
        observed: What was seen now.
        generation: Of the spec that it was seen for.
        now: RFC 3339.
    """
    old = {condition.type: condition for condition in before}
    seen = {item.type: item for item in observed}
    return [_condition(kind, old.get(kind), seen.get(kind), generation, now) for kind in Type]


def _condition(kind: Type, old: Condition | None, seen: Observed | None, generation: int, now: str) -> Condition:
    if seen is None:
        if old is not None:
            return old
        seen = Observed(type=kind, truth=Truth.UNKNOWN, reason=NOT_OBSERVED, message="not looked at yet")
    since = old.last_transition_time if old is not None and old.status == seen.truth else now
    return Condition(
        type=kind,
        status=seen.truth.value,
        reason=seen.reason,
        message=shortened(seen.message, LONGEST_MESSAGE),
        observed_generation=generation,
        last_transition_time=since,
    )


def shortened(text: str, longest: int) -> str:
    """The text, or as much of its beginning as may be written."""
    return text if len(text) <= longest else f"{text[: longest - 3]}..."


def phase(conditions: Sequence[Condition]) -> str:
    """One word for people, from the conditions; nothing is ever decided by it."""
    by = {condition.type: condition for condition in conditions}

    def told(kind: Type) -> tuple[str, str]:
        condition = by.get(kind)
        return ("Unknown", NOT_OBSERVED) if condition is None else (condition.status, condition.reason)

    succeeded, why = told(Type.SUCCEEDED)
    if succeeded == Truth.TRUE:
        return "Succeeded"
    if succeeded == Truth.FALSE and why != "Running":
        return "Failed"
    suspended, how = told(Type.SUSPENDED)
    if suspended == Truth.TRUE:
        return "Suspended"
    if how == "Draining":
        return "Suspending"
    if told(Type.READY)[1] == QUARANTINED:
        return "Quarantined"
    if told(Type.READY)[0] == Truth.TRUE:
        return "Running"  # be it of the last spec that was accepted
    if told(Type.ACCEPTED)[0] == Truth.FALSE:
        return "Rejected"
    if told(Type.QUOTA_RESERVED)[1] == "Waiting":
        return "Queued"
    return "Pending" if told(Type.SCHEDULED)[0] != Truth.TRUE else "Starting"
