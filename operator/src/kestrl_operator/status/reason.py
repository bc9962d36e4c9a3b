"""Why a job is not as it should be, in one line for `kubectl get -o wide`. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from kestrl._shared.spec.status import Condition
from kestrl_operator.status.conditions import CHECKING, QUARANTINED, Type, shortened

LONGEST_LINE = 160
"""Maximum characters of the line."""
ORDER = (
    Type.ACCEPTED, Type.QUOTA_RESERVED, Type.SCHEDULED, Type.LEARNER_PROGRESSING, Type.ENGINES_READY,
    Type.ROLLOUTS_FLOWING, Type.POLICY_CONVERGED, Type.CHECKPOINT_DURABLE, Type.TOOLS_HEALTHY, Type.REWARD_HEALTHY,
    Type.LEARNED, Type.TRACKED,
)  # fmt: skip
"""Conditions that are looked at, causes before their effects."""
ABSENT = frozenset({"None"})
"""Reasons that are no problem: there is no checkpoint yet."""


def reason(conditions: Sequence[Condition]) -> str:
    """Reason and message of the first condition that is not as it should be; empty where none is."""
    by = {Type(condition.type): condition for condition in conditions}
    succeeded, suspended, ready = by.get(Type.SUCCEEDED), by.get(Type.SUSPENDED), by.get(Type.READY)
    if succeeded is not None and succeeded.status == "True":
        return ""
    if succeeded is not None and succeeded.status == "False" and succeeded.reason != "Running":
        return _line(succeeded)
    if ready is not None and ready.reason in {"OperatorFailed", QUARANTINED}:
        return _line(ready)
    quota = by.get(Type.QUOTA_RESERVED)
    if quota is not None and quota.reason == "Draining":
        return _line(quota)
    if suspended is not None and (suspended.status == "True" or suspended.reason == "Draining"):
        return ""
    for condition in (by[kind] for kind in ORDER if kind in by):
        if condition.reason == CHECKING or (condition.status == "False" and condition.reason not in ABSENT):
            return _line(condition)
    return ""


def _line(condition: Condition) -> str:
    return shortened(f"{condition.reason}: {condition.message}".removesuffix(": "), LONGEST_LINE)
