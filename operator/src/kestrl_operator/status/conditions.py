"""The conditions of a job: their types, the closed list of their reasons, and how new observations are merged. Pure.

A condition reports what was observed for a generation of the spec, never what was intended. What was not observed yet
is Unknown.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from kestrl._shared.spec.status import Condition


class Type(StrEnum):
    """The condition types of a job."""

    ACCEPTED = "Accepted"
    QUOTA_RESERVED = "QuotaReserved"
    SCHEDULED = "Scheduled"
    ENGINES_READY = "EnginesReady"
    POLICY_CONVERGED = "PolicyConverged"
    ROLLOUTS_FLOWING = "RolloutsFlowing"
    LEARNER_PROGRESSING = "LearnerProgressing"
    CHECKPOINT_DURABLE = "CheckpointDurable"
    REWARD_HEALTHY = "RewardHealthy"
    TOOLS_HEALTHY = "ToolsHealthy"
    LEARNED = "Learned"
    TRACKED = "Tracked"
    SUSPENDED = "Suspended"
    READY = "Ready"
    SUCCEEDED = "Succeeded"
    RECONCILING = "Reconciling"
    STALLED = "Stalled"


class ConditionStatus(StrEnum):
    """The status of a condition."""

    TRUE = "True"
    FALSE = "False"
    UNKNOWN = "Unknown"


NOT_OBSERVED = "NotObserved"
QUARANTINED = "Quarantined"
CREDENTIAL_REFUSED = "CredentialRefused"
LONGEST_MESSAGE = 4096
"""Maximum characters of a message, an eighth of what the CRD allows: a status of twelve such messages is still a small
object."""
CHECKING = "Checking"
QUEUED = frozenset({"Waiting", "Inactive", "Refused", CHECKING})
"""Reasons of QuotaReserved of a job that does not run since its queue has not admitted it."""
LOST: Mapping[str, str] = {
    "OOMKilled": "A container used more memory than it may, and was killed; the message names it.",
    "NodeNotReady": "The node of a pod does not answer Kubernetes; the message names both.",
}
"""Reasons of a component whose pod was lost through no failure of its program."""
REASONS: Mapping[Type, Mapping[str, str]] = {
    Type.ACCEPTED: {
        "Valid": "The manifest is valid.",
        "Invalid": (
            "The spec is invalid, or Kubernetes refuses an object of the job; the message names "
            "the field and the fix. A running job continues with the spec that was accepted last."
        ),
        "Unresolvable": "A model, data set, secret or RuntimeClass that the manifest names does not exist.",
    },
    Type.QUOTA_RESERVED: {
        "Admitted": "Its queue has admitted the whole job, or every pod of it.",
        "Waiting": "It waits in its queue.",
        CHECKING: (
            "Its quota is reserved, and no pod runs yet: an admission check of its queue is not ready. The message "
            "names the check, with what that says."
        ),
        "Inactive": (
            "Its Workload is deactivated, by an administrator or since Kueue gave up, as after an admission check that "
            "rejected it; the message says why, and how the job queues again."
        ),
        "Draining": (
            "Its queue takes the quota back, or the job needs another one: rollouts end, the learner checkpoints, and "
            "the pods go. Then it waits in its queue again."
        ),
        "Refused": "Kubernetes refuses its Workload, or there is no such priority class; the message says why.",
    },
    Type.SCHEDULED: {
        "PodsScheduled": "Every pod has a node.",
        "Pending": "A pod waits for a node; the message is the scheduler's.",
        "Unsatisfiable": "No node could ever take a pod of this accelerator profile.",
        "Parked": (
            "It held pods and could not start, or not train its first step: a part of them found no nodes beside older "
            "jobs, something that it needs is missing, or a credential is refused. It has given them back; the message "
            "says why, and when it tries again."
        ),
        "Released": "No pod is to run: the job is suspended, waits for quota or has ended.",
    },
    Type.ENGINES_READY: {
        "AllReady": "Every engine answers.",
        "Starting": "Engines load the model.",
        "Unavailable": "An engine stopped answering, or cannot start; the message says why.",
        **LOST,
        "Released": "No engine is to run: the job is suspended or parked, waits for quota or has ended.",
    },
    Type.POLICY_CONVERGED: {
        "AllProved": "Every engine has reproduced the newest version's log-probs, or has those of the version before "
        "and loads the newest, for up to 30 s after a step.",
        "Loading": "Engines fetch, load and verify the first version, or the newest for longer than 30 s.",
        "Quarantined": "An engine could not verify it and gets no requests.",
    },
    Type.ROLLOUTS_FLOWING: {
        "Flowing": "Groups are running or being trained on.",
        "Starting": "No group has been requested yet.",
        "NoWorker": "No rollout worker answers; the message reports the state of their pods.",
        "Failing": "Workers, tools or judge keep failing; the message says how.",
        **LOST,
        "Drained": "No group is started: the job is suspended, parked, waiting for quota, draining or at its end.",
    },
    Type.LEARNER_PROGRESSING: {
        "Stepping": "Steps are completed.",
        "Starting": "The learner loads its model or its last checkpoint.",
        "WaitingForRanks": "The learner starts and waits for its pods of ranks; the message has how many are ready.",
        "StorageUnavailable": (
            "Object storage does not answer, or denies access; the learner waits and retries, or is restarted to. The "
            "message says since and until when."
        ),
        CREDENTIAL_REFUSED: (
            "A tool's server, a claimed sandbox or a judge model accepts a credential no more that it has accepted "
            "before; its scenarios wait until the Secret has another one. The message names it, and says since when. "
            "Before its first step the job gives its pods back after a while, and tries again later."
        ),
        "Stalled": "No step has ended for five times as long as the longest of the last ones took.",
        "Unavailable": "The learner does not answer any more, or cannot start; the message says why.",
        **LOST,
        "Failed": "The learner reported a failure; the message says which, and what follows.",
        "Released": "No learner is to run: the job is suspended or parked, waits for quota or has ended.",
    },
    Type.CHECKPOINT_DURABLE: {
        "Confirmed": "The newest checkpoint was read back from storage.",
        "None": "There is no checkpoint yet.",
        "StorageFailed": "Storage refused it.",
    },
    Type.REWARD_HEALTHY: {
        "Scoring": "Episodes get rewards.",
        "JudgeFailing": "Episodes get no reward because scoring fails.",
        "Degenerate": "Every group of the last steps had equal rewards: there is nothing to learn from.",
    },
    Type.TOOLS_HEALTHY: {
        "Calling": "Episodes call tools; the message has the mean number of calls.",
        "NoTools": "The job offers no tools.",
        "NoToolCall": (
            "None of the last episodes called a tool. The message says whether they contain calls in another format."
        ),
        "CallsFailing": "No tool call of the last episodes succeeded; the message has their outcomes.",
    },
    Type.LEARNED: {
        "WeightsChanged": "The newest version differs from version 0.",
        "NoToolCall": "All rewards of every group were equal, and no episode called a tool.",
        "NoRewardSpread": "All rewards of every group were equal.",
        "ZeroGradient": "Rewards differed, and the gradient was 0.",
        "WeightsUnchanged": "The updates were too small to change any weight.",
    },
    Type.TRACKED: {
        "Sending": "The MLflow server of `telemetry.mlflow` has received what is stored.",
        "Starting": "The pod that sends the run starts.",
        "Failing": (
            "The server does not answer or refuses, or the pod cannot start; the message says why. The run goes on, "
            "and what was not sent is sent later. After the end of the job it stays as it was last observed."
        ),
    },
    Type.SUSPENDED: {
        "Running": "It is not suspended.",
        "Draining": "Rollouts end, the learner checkpoints.",
        "Released": "Everything is checkpointed and every pod is gone.",
    },
    Type.READY: {
        "Training": "Engines, rollouts and learner are working.",
        "Degraded": "The learner trains, and one of the others is not ready; its own condition says why.",
        "Restarting": "The learner has run before and starts again; LearnerProgressing says why.",
        "Resuming": (
            "The job was suspended, preempted by its queue or parked, and its learner starts again from its newest "
            "checkpoint."
        ),
        "NotReady": "The job starts; the condition of what is missing says why.",
        "Suspended": "The job is suspended, as its spec says: everything is checkpointed and no pod runs.",
        "Completed": "The job has succeeded.",
        "Finished": "The job has failed.",
        "Quarantined": (
            "The operator was killed while it worked on this spec; it leaves the job "
            "alone until the spec changes. The other conditions are as last observed."
        ),
        "OperatorFailed": (
            "The operator fails to reconcile this job; the message says why. The other conditions are as last observed."
        ),
    },
    Type.SUCCEEDED: {
        "Completed": "Every step was done and the adapter is in storage.",
        "Running": "It has not ended.",
        "LearnerFailed": "The learner ended with a failure; the message is its reason.",
        "BackoffExceeded": "Components failed more often than the job allows.",
        "DeadlineExceeded": "activeDeadline passed.",
        "PendingTooLong": "Pods could not start for longer than pendingDeadline.",
    },
    Type.RECONCILING: {
        "Progressing": "The job is on its way to what its spec says; Ready's message has what is missing.",
        "Reconciled": "It is as its spec says: it trains, is suspended or has succeeded.",
        "Stalled": "It cannot get there; Stalled says why.",
    },
    Type.STALLED: {
        "NotStalled": "Nothing keeps the job from what its spec says, or what does may end by itself.",
        "Rejected": "The newest spec is not in force; Accepted says why.",
        "Failed": "The job has failed; Succeeded says why.",
        "Quarantined": "The operator was killed while it worked on this spec, and leaves it alone.",
    },
}
"""The closed list of reasons; no other reason is ever written. docs/conditions.md is generated from it."""
SFT_REASONS: Mapping[Type, Mapping[str, str]] = {
    Type.ACCEPTED: {
        "Valid": "The manifest is valid.",
        "Invalid": (
            "The spec is invalid, Kubernetes refuses an object of the job, or the program refuses its input; the "
            "message names the field and the fix."
        ),
        "Unresolvable": "A model, data set or secret that the manifest names does not exist.",
    },
    Type.QUOTA_RESERVED: {
        "Admitted": "Its queue has admitted it.",
        "Waiting": REASONS[Type.QUOTA_RESERVED]["Waiting"],
        CHECKING: REASONS[Type.QUOTA_RESERVED][CHECKING],
        "Inactive": REASONS[Type.QUOTA_RESERVED]["Inactive"],
        "Draining": "Its queue takes the quota back: the program ends after a checkpoint, and waits again.",
        "Refused": REASONS[Type.QUOTA_RESERVED]["Refused"],
    },
    Type.SCHEDULED: {
        "PodsScheduled": "The pod has a node.",
        "Pending": "The pod waits for a node, or could not be created; the message says why.",
        "Unsatisfiable": "No node could ever take a pod of this accelerator profile.",
        "Released": "No pod is to run: the job waits for quota or has ended.",
    },
    Type.READY: {
        "Training": "The program runs.",
        "NotReady": "It does not; the message says why.",
        "Completed": "The job has succeeded.",
        "Finished": "The job has failed.",
        "Quarantined": REASONS[Type.READY]["Quarantined"],
        "OperatorFailed": REASONS[Type.READY]["OperatorFailed"],
    },
    Type.SUCCEEDED: {
        "Completed": "Every step was done and the adapter is in storage.",
        "Running": "It has not ended.",
        "LearnerFailed": "The program refused its input; the message is its own.",
        "BackoffExceeded": "Too many pods failed; the message is that of the last one.",
    },
    Type.RECONCILING: REASONS[Type.RECONCILING],
    Type.STALLED: REASONS[Type.STALLED],
}
"""The conditions and reasons of an SFTJob, a part of those of an AgentRLJob."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """What was observed of one condition."""

    type: Type
    status: ConditionStatus
    reason: str
    message: str = ""

    def __post_init__(self) -> None:
        reasons = {NOT_OBSERVED, *REASONS[self.type]}
        if self.reason not in reasons:
            raise ValueError(f"{self.reason} is not a reason of {self.type} (reasons: {', '.join(sorted(reasons))})")
        if (self.reason == NOT_OBSERVED) != (self.status is ConditionStatus.UNKNOWN):
            raise ValueError(
                f"{self.type}: {NOT_OBSERVED} and Unknown go together, not {self.reason} and {self.status}"
            )


def joined(
    before: Sequence[Condition],
    observed: Iterable[Observation],
    *,
    generation: int,
    now: str,
    kinds: Iterable[Type] = Type,
) -> list[Condition]:
    """All conditions after an observation, in a fixed order.

    A condition that was not observed this time keeps its state and its generation; one that never was is Unknown. The
    transition time changes with the status only.

    Args:
        before: The conditions in the current status.
        observed: The new observations.
        generation: Generation of the spec that was observed.
        now: RFC 3339.
        kinds: The conditions of this kind of job.
    """
    old = {condition.type: condition for condition in before}
    observations = {item.type: item for item in observed}
    return [_condition(kind, old.get(kind), observations.get(kind), generation, now) for kind in kinds]


def _condition(
    kind: Type, old: Condition | None, observation: Observation | None, generation: int, now: str
) -> Condition:
    if observation is None:
        if old is not None:
            return old
        observation = Observation(
            type=kind, status=ConditionStatus.UNKNOWN, reason=NOT_OBSERVED, message="not observed yet"
        )
    since = old.last_transition_time if old is not None and old.status == observation.status else now
    return Condition(
        type=kind,
        status=observation.status.value,
        reason=observation.reason,
        message=shortened(observation.message, LONGEST_MESSAGE),
        observed_generation=generation,
        last_transition_time=since,
    )


def shortened(text: str, limit: int) -> str:
    """The text, cut to at most `limit` characters."""
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


def phase(conditions: Sequence[Condition]) -> str:
    """A summary of the conditions in one word, for display only; nothing is decided by it."""
    by = {condition.type: condition for condition in conditions}

    def current(kind: Type) -> tuple[str, str]:
        condition = by.get(kind)
        return ("Unknown", NOT_OBSERVED) if condition is None else (condition.status, condition.reason)

    succeeded, success_reason = current(Type.SUCCEEDED)
    if succeeded == ConditionStatus.TRUE:
        return "Succeeded"
    if succeeded == ConditionStatus.FALSE and success_reason != "Running":
        return "Failed"
    suspended, suspension_reason = current(Type.SUSPENDED)
    if suspended == ConditionStatus.TRUE:
        return "Suspended"
    if suspension_reason == "Draining":
        return "Suspending"
    ready, condition = current(Type.READY)
    if condition == QUARANTINED:
        return "Quarantined"
    if ready == ConditionStatus.TRUE:
        return "Running"  # possibly with the last spec that was accepted
    if current(Type.LEARNER_PROGRESSING)[1] == CREDENTIAL_REFUSED:
        return "WaitingFor"
    if condition == "Degraded" or current(Type.LEARNER_PROGRESSING)[0] == ConditionStatus.TRUE:
        return "Degraded"
    return _idle(current)


def _idle(current: Callable[[Type], tuple[str, str]]) -> str:
    """The word for a job that does not train."""
    accepted, problem = current(Type.ACCEPTED)
    learner = current(Type.LEARNER_PROGRESSING)[1]
    if accepted == ConditionStatus.FALSE and problem == "Invalid":
        return "Rejected"
    if learner == "StorageUnavailable" or (problem == "Unresolvable" and learner != "Failed"):
        return "WaitingFor"
    if current(Type.QUOTA_RESERVED)[1] in QUEUED:
        return "Queued"
    if current(Type.SCHEDULED)[0] != ConditionStatus.TRUE:
        return "Pending"
    ready = current(Type.READY)[1]
    if ready == "Resuming":
        return "Resuming"
    return "Restarting" if ready == "Restarting" else "Starting"
