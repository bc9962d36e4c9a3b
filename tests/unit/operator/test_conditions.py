"""Conditions: a closed list of reasons, Unknown until observed, and times that change with the status alone."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kestrl.spec.status import Condition
from kestrl_operator.conditions import LONGEST_MESSAGE, NOT_OBSERVED, REASONS, Observed, Truth, Type, joined, phase
from kestrl_operator.events import TOLD, notices

FIRST, LATER = "2026-01-01T00:00:00Z", "2026-01-01T00:05:00Z"


def seen(kind: Type, truth: Truth, reason: str, message: str = "") -> Observed:
    return Observed(type=kind, truth=truth, reason=reason, message=message)


def by_type(conditions: list[Condition]) -> dict[str, Condition]:
    return {condition.type: condition for condition in conditions}


def test_at_first_everything_is_unknown() -> None:
    conditions = joined([], [], generation=1, now=FIRST)
    assert [condition.type for condition in conditions] == list(Type)
    assert {(item.status, item.reason, item.observed_generation) for item in conditions} == {
        ("Unknown", NOT_OBSERVED, 1)
    }
    assert phase(conditions) == "Pending"


def test_the_time_is_of_the_status_not_of_the_reason() -> None:
    starting = seen(Type.ENGINES_READY, Truth.FALSE, "Starting")
    down = seen(Type.ENGINES_READY, Truth.FALSE, "Unavailable", "engine-0 ended: out of memory")
    up = seen(Type.ENGINES_READY, Truth.TRUE, "AllReady")
    first = joined([], [starting], generation=1, now=FIRST)
    second = joined(first, [down], generation=1, now=LATER)
    assert by_type(second)["EnginesReady"].last_transition_time == FIRST
    assert by_type(second)["EnginesReady"].message == "engine-0 ended: out of memory"
    assert by_type(joined(second, [up], generation=1, now=LATER))["EnginesReady"].last_transition_time == LATER


def test_what_was_not_looked_at_keeps_the_generation_it_was_seen_for() -> None:
    accepted = seen(Type.ACCEPTED, Truth.TRUE, "Valid")
    first = joined([], [accepted], generation=1, now=FIRST)
    again = by_type(joined(first, [seen(Type.READY, Truth.FALSE, "NotReady")], generation=2, now=LATER))
    assert again["Accepted"].observed_generation == 1
    assert again["Ready"].observed_generation == 2


@pytest.mark.parametrize(
    ("kind", "truth", "reason"),
    [
        (Type.READY, Truth.TRUE, "Fine"),
        (Type.READY, Truth.UNKNOWN, "Training"),
        (Type.READY, Truth.TRUE, NOT_OBSERVED),
        (Type.SUCCEEDED, Truth.FALSE, "Valid"),
    ],
)
def test_a_reason_that_is_not_on_the_list_cannot_be_said(kind: Type, truth: Truth, reason: str) -> None:
    with pytest.raises(ValueError, match=kind):
        seen(kind, truth, reason)


def test_every_condition_has_reasons_and_each_is_explained() -> None:
    assert set(REASONS) == set(Type)
    for kind, reasons in REASONS.items():
        for reason, told in reasons.items():
            assert re.fullmatch(r"[A-Z][A-Za-z]+", reason), f"{kind}: {reason}"
            assert told.endswith(".")


def test_events_are_told_of_reasons_that_there_are() -> None:
    assert {(kind, reason) for kind, reasons in TOLD.items() for reason in reasons} <= {
        (kind, reason) for kind, reasons in REASONS.items() for reason in reasons
    }


@pytest.mark.parametrize(
    ("before", "after", "told"),
    [
        ([], [("Succeeded", "Completed", "26 steps")], [("Normal", "Completed", "26 steps")]),
        ([], [("Suspended", "Draining", "")], [("Normal", "Draining", "Suspended: Draining")]),
        ([("Accepted", "Valid", "")], [("Accepted", "Invalid", "why")], [("Warning", "Invalid", "why")]),
        ([("Accepted", "Invalid", "why")], [("Accepted", "Invalid", "another why")], []),
        ([("Succeeded", "Running", "")], [("Succeeded", "Running", "")], []),
        ([], [("Ready", "Training", "")], []),
    ],
)
def test_a_change_of_reason_is_told_once(
    before: list[tuple[str, str, str]], after: list[tuple[str, str, str]], told: list[tuple[str, str, str]]
) -> None:
    def status(items: list[tuple[str, str, str]]) -> dict[str, Any]:
        return {"conditions": [{"type": kind, "reason": reason, "message": text} for kind, reason, text in items]}

    assert list(notices(status(before), status(after))) == told


@pytest.mark.parametrize("length", [0, LONGEST_MESSAGE, LONGEST_MESSAGE + 1, 10**6])
def test_a_message_is_never_longer_than_may_be_written(length: int) -> None:
    (condition, *_) = joined([], [seen(Type.ACCEPTED, Truth.FALSE, "Invalid", "x" * length)], generation=1, now=FIRST)
    assert len(condition.message) == min(length, LONGEST_MESSAGE)
    assert condition.message.endswith("...") == (length > LONGEST_MESSAGE)


@pytest.mark.parametrize(
    ("observed", "word"),
    [
        ([(Type.ACCEPTED, Truth.FALSE, "Invalid")], "Rejected"),
        ([(Type.QUOTA_RESERVED, Truth.FALSE, "Waiting")], "Queued"),
        ([(Type.SCHEDULED, Truth.FALSE, "Unsatisfiable")], "Pending"),
        ([(Type.SCHEDULED, Truth.TRUE, "PodsScheduled")], "Starting"),
        ([(Type.SCHEDULED, Truth.TRUE, "PodsScheduled"), (Type.READY, Truth.TRUE, "Training")], "Running"),
        ([(Type.READY, Truth.TRUE, "Training"), (Type.SUSPENDED, Truth.FALSE, "Draining")], "Suspending"),
        ([(Type.SUSPENDED, Truth.TRUE, "Released")], "Suspended"),
        ([(Type.SUCCEEDED, Truth.FALSE, "Running"), (Type.READY, Truth.TRUE, "Training")], "Running"),
        ([(Type.SUCCEEDED, Truth.FALSE, "LearnerFailed"), (Type.READY, Truth.FALSE, "Finished")], "Failed"),
        ([(Type.SUCCEEDED, Truth.TRUE, "Completed"), (Type.READY, Truth.FALSE, "Finished")], "Succeeded"),
    ],
)
def test_the_phase_is_derived(observed: list[tuple[Type, Truth, str]], word: str) -> None:
    assert phase(joined([], [seen(*item) for item in observed], generation=1, now=FIRST)) == word


OBSERVATIONS = st.lists(
    st.sampled_from([(kind, reason) for kind, reasons in REASONS.items() for reason in reasons]).flatmap(
        lambda pair: st.sampled_from([Truth.TRUE, Truth.FALSE]).map(lambda truth: seen(pair[0], truth, pair[1]))
    )
)


@given(st.lists(OBSERVATIONS))
def test_whatever_is_seen_there_is_one_condition_a_type_and_times_never_go_back(looks: list[list[Observed]]) -> None:
    conditions: list[Condition] = []
    for number, look in enumerate(looks):
        before = by_type(conditions)
        conditions = joined(conditions, look, generation=number, now=f"2026-01-01T00:00:{number:02}Z")
        assert [condition.type for condition in conditions] == list(Type)
        for kind, condition in by_type(conditions).items():
            if kind in before:
                changed = before[kind].status != condition.status
                assert changed == (before[kind].last_transition_time != condition.last_transition_time)
