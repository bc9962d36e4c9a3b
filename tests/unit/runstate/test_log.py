"""The state of a run: events and their reducer, snapshots, and the JSON form over versions."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kestrl._shared.rpc.run_report import EVALUATIONS, MalformedReport, report_of, state_of
from kestrl.api.learner.v1 import learner_pb2 as pb
from kestrl.episode import PolicyVersion
from kestrl.errors import Boundary, Failure, UserInputError
from kestrl.runstate import events
from kestrl.runstate.history import History, LastStep, Mismatch, StepCounts, ToolCounts
from kestrl.runstate.log import KINDS, Entry, Event, reduced
from kestrl.runstate.state import Activity, EngineReport, Gauges, Learning, RunState, StoreAccess
from kestrl.runstate.states import RunPhase, ServingState
from kestrl.runstate.work import EngineWork
from kestrl.tools import SandboxInUse

WORDS = st.sampled_from(["", "a", "b \N{BELL SYMBOL}", "engine-0"])
COUNTS = st.integers(min_value=0, max_value=40)
NUMBERS = st.floats(min_value=-1e6, max_value=1e6)
MEANS = st.dictionaries(st.sampled_from(["reward", "num_turns"]), NUMBERS, max_size=2)
SPECIAL: dict[type[events.RunEvent], st.SearchStrategy[Any]] = {
    events.Evaluated: st.builds(events.Evaluated, step=COUNTS, means=MEANS),
    events.EnginesObserved: st.builds(
        events.EnginesObserved,
        verified=COUNTS,
        reports=st.lists(st.builds(EngineReport, name=WORDS, state=st.sampled_from(ServingState)), max_size=2).map(
            tuple
        ),
    ),
    events.EnginesWorked: st.builds(
        events.EnginesWorked,
        work=st.dictionaries(WORDS, st.builds(EngineWork, sampled_tokens=COUNTS, busy_seconds=NUMBERS), max_size=2),
    ),
    events.HistoryRestored: st.builds(events.HistoryRestored, step=COUNTS, history=st.just(History(skipped_rows=2))),
    events.PhaseEntered: st.builds(
        events.PhaseEntered,
        phase=st.sampled_from(RunPhase),
        message=st.none() | WORDS,
        failure=st.none() | st.just(Failure(boundary=Boundary.ENGINE, code="gone", message="why")),
    ),
    events.VersionPublished: st.builds(
        events.VersionPublished,
        version=st.builds(PolicyVersion, job=st.just("j"), step=COUNTS, sha256=st.just("0" * 64)),
        uri=WORDS,
        parent=WORDS,
        probe_distance=st.none() | NUMBERS,
    ),
    events.GroupScored: st.builds(
        events.GroupScored,
        episodes=st.lists(MEANS, max_size=2).map(tuple),
        tokens=COUNTS,
        seconds=NUMBERS,
        means=MEANS,
        tools=st.builds(ToolCounts, episodes=COUNTS, outcomes=st.dictionaries(WORDS, COUNTS, max_size=2)),
    ),
    events.SandboxesReported: st.builds(
        events.SandboxesReported,
        sandboxes=st.dictionaries(WORDS, st.just(SandboxInUse(backend="zygote", isolation="namespaces")), max_size=2),
    ),
    events.MismatchMeasured: st.builds(
        events.MismatchMeasured, gap=st.builds(Mismatch, mean=NUMBERS, max=NUMBERS, tokens=COUNTS)
    ),
    events.StepFinished: st.builds(
        events.StepFinished,
        step=COUNTS,
        counts=st.builds(StepCounts, groups=COUNTS, idle_groups=COUNTS, tool_calls=COUNTS, gradient=NUMBERS),
        took=st.builds(LastStep, tokens_per_second=NUMBERS, eta_seconds=NUMBERS),
        message=WORDS,
    ),
    events.LearningObserved: st.builds(
        events.LearningObserved, learning=st.builds(Learning, learned=st.none() | st.booleans(), message=WORDS)
    ),
    events.FailureCounted: st.builds(
        events.FailureCounted, boundary=WORDS, code=WORDS, gathered_seconds=st.none() | NUMBERS
    ),
    events.Compared: st.builds(events.Compared, when=st.sampled_from(["before", "after"]), means=st.none() | MEANS),
}
PLAIN: dict[Any, st.SearchStrategy[Any]] = {"int": COUNTS, "float": NUMBERS, "str": WORDS}


def strategy(kind: type[events.RunEvent]) -> st.SearchStrategy[Any]:
    """Events of a kind."""
    if kind in SPECIAL:
        return SPECIAL[kind]
    fields = {name: PLAIN[kind.__annotations__[name]] for name in kind.model_fields if name != "kind"}
    return st.builds(kind, **fields)


EVENTS: st.SearchStrategy[Event] = st.one_of([strategy(kind) for kind in events.RunEvent.__subclasses__()])


def entries(happened: list[Event], first: int = 1) -> list[Entry]:
    """The log of some events."""
    return [Entry(number=number, at=float(number), event=event) for number, event in enumerate(happened, first)]


@given(st.lists(EVENTS, max_size=20), st.data())
def test_a_snapshot_and_the_tail_after_it_give_the_state(happened: list[Event], data: st.DataObject) -> None:
    log = entries(happened)
    whole = reduced(RunState(), log)
    at = data.draw(st.integers(min_value=0, max_value=len(log)))
    snapshot = RunState.from_json(json.loads(reduced(RunState(), log[:at]).stored.text()), "")
    tail = [Entry.model_validate_json(entry.model_dump_json()) for entry in log[at:]]
    assert reduced(snapshot, tail) == whole
    assert whole.number == len(log)


@given(st.lists(EVENTS, min_size=1, max_size=12), st.data())
def test_events_that_come_again_change_nothing(happened: list[Event], data: st.DataObject) -> None:
    log = entries(happened)
    whole = reduced(RunState(), log)
    again = data.draw(st.lists(st.sampled_from(log), max_size=8))
    assert reduced(whole, again) == whole
    start = data.draw(st.integers(min_value=0, max_value=len(log)))
    assert reduced(RunState(), [*log, *log[start:]]) == whole


@given(st.lists(EVENTS, max_size=12))
def test_what_is_sent_is_received_but_for_old_evaluations(happened: list[Event]) -> None:
    state = reduced(RunState(), entries(happened))
    received = state_of(pb.WatchProgressResponse.FromString(report_of(state).SerializeToString()))
    last = dict(sorted(state.history.evaluations.items())[-EVALUATIONS:])
    assert received == state.but(history=state.history.but(evaluations=last))


def test_every_kind_of_event_has_a_name_of_its_own() -> None:
    assert len(KINDS) == len(events.RunEvent.__subclasses__())


def test_an_event_of_a_later_version_is_passed_over_and_its_number_counts() -> None:
    later = Entry.model_validate({"number": 1, "at": 0.0, "event": {"kind": "moon_rose", "phase": "full"}})
    noted = Entry.model_validate(
        {"number": 2, "at": 0.0, "event": {"kind": "activity_noted", "message": "m", "new": 1}}
    )
    state = reduced(RunState(), [later, noted])
    assert (state.number, state.activity.message) == (2, "m")


def test_a_state_of_a_later_version_with_more_fields_is_read() -> None:
    content = RunState(activity=Activity(message="m")).to_json()
    failure = {"boundary": "weather", "code": "rain", "message": "why"}
    content["activity"] |= {"mood": "good", "phase": "dreaming", "failure": failure}
    content["moons"] = {"count": 2}
    state = RunState.from_json(content, "")
    assert (state.activity.message, state.activity.phase, state.final) == ("m", None, False)
    assert state.activity.failure == Failure(boundary=Boundary.INFRASTRUCTURE, code="rain", message="why")


def test_gauges_are_not_stored() -> None:
    state = RunState(gauges=Gauges(workers=3))
    assert state.stored == RunState()
    assert state_of(report_of(state)).gauges.workers == 3


def test_a_state_whose_version_is_later_is_refused_in_a_file_and_read_in_part_from_a_learner() -> None:
    content = {**RunState().to_json(), "version": RunState.CURRENT + 1}
    with pytest.raises(UserInputError, match="later version of KestRL"):
        RunState.from_json(content, "run.json")
    report = report_of(RunState(storage=StoreAccess(wait="since noon")))
    report.state = json.dumps(content)
    assert state_of(report).storage.wait == "since noon"


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        "7",
        '{"steps": 3}',
        '{"steps": {"done": "x"}}',
        '{"steps": {"done": 9223372036854775808}}',
        "[" * 10_000,
        '{"activity": {"message": "\\ud800"}}',
    ],
    ids=["cut off", "a list", "a number", "no part", "no count", "beyond 64 bits", "deep", "no text"],
)
def test_a_malformed_state_is_a_failure_with_a_name(text: str) -> None:
    with pytest.raises(MalformedReport, match="malformed"):
        state_of(pb.WatchProgressResponse(state=text))


def test_numbers_that_are_not_finite_survive() -> None:
    state = RunState(means={"reward": math.nan, "other": math.inf}, history=History(gap=Mismatch(mean=math.nan)))
    received = state_of(report_of(state))
    assert math.isnan(received.means["reward"])
    assert received.means["other"] == math.inf
    assert received.history.gap is not None
    assert math.isnan(received.history.gap.mean)
