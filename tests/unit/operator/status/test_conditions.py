"""Conditions: a closed list of reasons, Unknown until observed, and times that change with the status alone."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kestrl._shared.spec.status import Condition
from kestrl_operator.events import PUBLISHED, notices
from kestrl_operator.status.conditions import (
    LONGEST_MESSAGE,
    NOT_OBSERVED,
    REASONS,
    ConditionStatus,
    Observation,
    Type,
    joined,
    phase,
)

FIRST, LATER = "2026-01-01T00:00:00Z", "2026-01-01T00:05:00Z"


def seen(kind: Type, status: ConditionStatus, reason: str, message: str = "") -> Observation:
    return Observation(type=kind, status=status, reason=reason, message=message)


def by_type(conditions: list[Condition]) -> dict[str, Condition]:
    return {condition.type: condition for condition in conditions}


def test_conditions_start_as_unknown() -> None:
    conditions = joined([], [], generation=1, now=FIRST)
    assert [condition.type for condition in conditions] == list(Type)
    assert {(item.status, item.reason, item.observed_generation) for item in conditions} == {
        ("Unknown", NOT_OBSERVED, 1)
    }
    assert phase(conditions) == "Pending"


def test_the_transition_time_changes_with_the_status_only() -> None:
    starting = seen(Type.ENGINES_READY, ConditionStatus.FALSE, "Starting")
    down = seen(Type.ENGINES_READY, ConditionStatus.FALSE, "Unavailable", "engine-0 ended: out of memory")
    up = seen(Type.ENGINES_READY, ConditionStatus.TRUE, "AllReady")
    first = joined([], [starting], generation=1, now=FIRST)
    second = joined(first, [down], generation=1, now=LATER)
    assert by_type(second)["EnginesReady"].last_transition_time == FIRST
    assert by_type(second)["EnginesReady"].message == "engine-0 ended: out of memory"
    assert by_type(joined(second, [up], generation=1, now=LATER))["EnginesReady"].last_transition_time == LATER


def test_a_condition_not_observed_keeps_its_generation() -> None:
    accepted = seen(Type.ACCEPTED, ConditionStatus.TRUE, "Valid")
    first = joined([], [accepted], generation=1, now=FIRST)
    again = by_type(joined(first, [seen(Type.READY, ConditionStatus.FALSE, "NotReady")], generation=2, now=LATER))
    assert again["Accepted"].observed_generation == 1
    assert again["Ready"].observed_generation == 2


@pytest.mark.parametrize(
    ("kind", "status", "reason"),
    [
        (Type.READY, ConditionStatus.TRUE, "Fine"),
        (Type.READY, ConditionStatus.UNKNOWN, "Training"),
        (Type.READY, ConditionStatus.TRUE, NOT_OBSERVED),
        (Type.SUCCEEDED, ConditionStatus.FALSE, "Valid"),
    ],
)
def test_a_reason_that_is_not_on_the_list_is_refused(kind: Type, status: ConditionStatus, reason: str) -> None:
    with pytest.raises(ValueError, match=kind):
        seen(kind, status, reason)


def test_every_condition_has_reasons_and_each_is_explained() -> None:
    assert set(REASONS) == set(Type)
    for kind, reasons in REASONS.items():
        for reason, explanation in reasons.items():
            assert re.fullmatch(r"[A-Z][A-Za-z]+", reason), f"{kind}: {reason}"
            assert explanation.endswith(".")


def test_published_reasons_exist() -> None:
    assert {(kind, reason) for kind, reasons in PUBLISHED.items() for reason in reasons} <= {
        (kind, reason) for kind, reasons in REASONS.items() for reason in reasons
    }


@pytest.mark.parametrize(
    ("before", "after", "published"),
    [
        ([], [("Succeeded", "Completed", "26 steps")], [("Normal", "Completed", "26 steps")]),
        ([], [("Suspended", "Draining", "")], [("Normal", "Draining", "Suspended: Draining")]),
        ([("Accepted", "Valid", "")], [("Accepted", "Invalid", "why")], [("Warning", "Invalid", "why")]),
        ([("Accepted", "Invalid", "why")], [("Accepted", "Invalid", "another why")], []),
        ([("Succeeded", "Running", "")], [("Succeeded", "Running", "")], []),
        ([], [("Ready", "Training", "")], []),
    ],
)
def test_a_change_of_reason_is_published_once(
    before: list[tuple[str, str, str]], after: list[tuple[str, str, str]], published: list[tuple[str, str, str]]
) -> None:
    def status(items: list[tuple[str, str, str]]) -> dict[str, Any]:
        return {"conditions": [{"type": kind, "reason": reason, "message": text} for kind, reason, text in items]}

    assert list(notices(status(before), status(after))) == published


@pytest.mark.parametrize("length", [0, LONGEST_MESSAGE, LONGEST_MESSAGE + 1, 10**6])
def test_a_message_has_a_maximum_length(length: int) -> None:
    (condition, *_) = joined(
        [], [seen(Type.ACCEPTED, ConditionStatus.FALSE, "Invalid", "x" * length)], generation=1, now=FIRST
    )
    assert len(condition.message) == min(length, LONGEST_MESSAGE)
    assert condition.message.endswith("...") == (length > LONGEST_MESSAGE)


@pytest.mark.parametrize(
    ("observed", "word"),
    [
        ([(Type.ACCEPTED, ConditionStatus.FALSE, "Invalid")], "Rejected"),
        ([(Type.QUOTA_RESERVED, ConditionStatus.FALSE, "Waiting")], "Queued"),
        ([(Type.QUOTA_RESERVED, ConditionStatus.TRUE, "Checking")], "Queued"),
        ([(Type.SCHEDULED, ConditionStatus.FALSE, "Unsatisfiable")], "Pending"),
        ([(Type.SCHEDULED, ConditionStatus.TRUE, "PodsScheduled")], "Starting"),
        (
            [(Type.SCHEDULED, ConditionStatus.TRUE, "PodsScheduled"), (Type.READY, ConditionStatus.TRUE, "Training")],
            "Running",
        ),
        (
            [(Type.READY, ConditionStatus.TRUE, "Training"), (Type.SUSPENDED, ConditionStatus.FALSE, "Draining")],
            "Suspending",
        ),
        ([(Type.SUSPENDED, ConditionStatus.TRUE, "Released")], "Suspended"),
        (
            [(Type.SUCCEEDED, ConditionStatus.FALSE, "Running"), (Type.READY, ConditionStatus.TRUE, "Training")],
            "Running",
        ),
        (
            [(Type.SUCCEEDED, ConditionStatus.FALSE, "LearnerFailed"), (Type.READY, ConditionStatus.FALSE, "Finished")],
            "Failed",
        ),
        (
            [(Type.SUCCEEDED, ConditionStatus.TRUE, "Completed"), (Type.READY, ConditionStatus.FALSE, "Finished")],
            "Succeeded",
        ),
    ],
)
def test_the_phase_is_derived(observed: list[tuple[Type, ConditionStatus, str]], word: str) -> None:
    assert phase(joined([], [seen(*item) for item in observed], generation=1, now=FIRST)) == word


OBSERVATIONS = st.lists(
    st.sampled_from([(kind, reason) for kind, reasons in REASONS.items() for reason in reasons]).flatmap(
        lambda pair: st.sampled_from([ConditionStatus.TRUE, ConditionStatus.FALSE]).map(
            lambda status: seen(pair[0], status, pair[1])
        )
    )
)


@given(st.lists(OBSERVATIONS))
def test_any_observations_give_one_condition_a_type_and_monotonic_times(looks: list[list[Observation]]) -> None:
    conditions: list[Condition] = []
    for number, look in enumerate(looks):
        before = by_type(conditions)
        conditions = joined(conditions, look, generation=number, now=f"2026-01-01T00:00:{number:02}Z")
        assert [condition.type for condition in conditions] == list(Type)
        for kind, condition in by_type(conditions).items():
            if kind in before:
                changed = before[kind].status != condition.status
                assert changed == (before[kind].last_transition_time != condition.last_transition_time)
