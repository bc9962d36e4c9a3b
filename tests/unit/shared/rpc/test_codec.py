"""What goes over the wire comes back the same."""

from __future__ import annotations

from array import array
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kestrl._shared.rpc import codec as reports
from kestrl.api.inference.v1 import inference_pb2
from kestrl.api.learner.v1 import learner_pb2
from kestrl.episode import CallOutcome, Episode, Group, PolicyVersion, Row, Scenario, StopReason, ToolCall, Turn, codec
from kestrl.errors import Boundary, Failure
from kestrl.runstate.states import EngineState, RunPhase, ServingState

text = st.text(max_size=20)
json_values: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3),
    max_leaves=5,
)
objects = st.dictionaries(text, json_values, max_size=3)
floats = st.floats(allow_nan=False, allow_infinity=False, width=32)
policies = st.builds(PolicyVersion, job=st.just("job"), step=st.integers(0, 10**9), sha256=st.just("ab" * 32))
failures = st.builds(
    Failure, boundary=st.sampled_from(Boundary), code=text, message=text, retryable=st.booleans(), component=text
)


@st.composite
def rows(draw: st.DrawFn) -> Row:
    ids = draw(st.lists(st.integers(0, 2**31 - 1), max_size=20))
    return Row(
        token_ids=array("i", ids),
        mask=bytes(draw(st.lists(st.integers(0, 1), min_size=len(ids), max_size=len(ids)))),
        logprobs=array("f", draw(st.lists(floats, min_size=len(ids), max_size=len(ids)))),
        policies=draw(st.lists(text, max_size=3)),
    )


turns = st.builds(
    Turn,
    index=st.integers(0, 9),
    row=st.integers(0, 9),
    start=st.integers(0, 99),
    end=st.integers(0, 99),
    text=text,
    finish_reason=st.just("stop"),
    engine=text,
    policy=text,
    seconds=floats,
)
calls = st.builds(
    ToolCall,
    turn=st.integers(0, 9),
    name=text,
    raw=text,
    arguments=st.none() | objects,
    outcome=st.sampled_from(CallOutcome),
    text=text,
    data=objects,
    seconds=floats,
)
episodes = st.builds(
    Episode,
    id=text,
    group_id=text,
    scenario_id=text,
    index=st.integers(0, 99),
    seed=st.integers(0, 2**62),
    rows=st.lists(rows(), max_size=2),
    turns=st.lists(turns, max_size=2),
    tool_calls=st.lists(calls, max_size=2),
    messages=st.lists(objects, max_size=2),
    stop_reason=st.sampled_from(StopReason),
    failure=st.none() | failures,
    policy=st.none() | policies,
    engine=text,
    started_at=floats,
    seconds=floats,
    trace_id=text,
    reward=st.none() | floats,
    loop_reward=st.none() | floats,
    answer=st.none() | text,
    environments=st.dictionaries(text, json_values, max_size=2),
    scoring=st.dictionaries(text, json_values, max_size=2),
    rewards=st.dictionaries(text, floats, max_size=2),
    turn_rewards=st.lists(floats, max_size=2).map(tuple),
    metrics=st.dictionaries(text, floats, max_size=2),
)
scenarios = st.builds(
    Scenario,
    id=text,
    ordinal=st.integers(0, 2**40),
    messages=st.lists(st.fixed_dictionaries({"role": st.just("user"), "content": text}), max_size=2),
    tools=st.none() | st.lists(text, max_size=2),
    tools_kwargs=st.dictionaries(
        text, st.fixed_dictionaries({"create_kwargs": objects, "execute_kwargs": objects}), max_size=2
    ),
    ground_truth=json_values,
    metadata=objects,
)


@given(st.builds(Group, id=text, scenario=scenarios, episodes=st.lists(episodes, max_size=2)))
def test_a_group_survives_the_wire(group: Group) -> None:
    sent = codec.group_to_proto(group).SerializeToString()
    assert codec.group_from_proto(type(codec.group_to_proto(group)).FromString(sent)) == group


@given(failures)
def test_a_failure_survives_the_wire(failure: Failure) -> None:
    assert codec.failure_from_proto(codec.failure_to_proto(failure).SerializeToString()) == failure


def test_no_reward_is_not_the_reward_zero() -> None:
    assert not codec.pb.Episode().HasField("reward")
    assert codec.pb.Episode(reward=0.0).HasField("reward")


def test_a_row_whose_arrays_differ_in_length_cannot_be_made() -> None:
    with pytest.raises(ValueError, match="2 ids, 1 mask, 2 log-probs"):
        Row(token_ids=array("i", [1, 2]), mask=b"\1", logprobs=array("f", [0.0, 0.0]), policies=[])


def test_every_boundary_has_its_number() -> None:
    assert {codec._BOUNDARIES[boundary] for boundary in Boundary} == set(range(1, len(Boundary) + 1))


@pytest.mark.parametrize(
    ("states", "wire", "to_proto", "from_proto"),
    [
        (RunPhase, learner_pb2.RunPhase, reports.run_phase_to_proto, reports.run_phase_from_proto),
        (
            ServingState,
            learner_pb2.ServingState,
            reports.serving_state_to_proto,
            reports.serving_state_from_proto,
        ),
        (
            EngineState,
            inference_pb2.EngineState,
            reports.engine_state_to_proto,
            reports.engine_state_from_proto,
        ),
    ],
)
def test_states_and_the_enums_of_the_wire_have_the_same_members(
    states: Any, wire: Any, to_proto: Any, from_proto: Any
) -> None:
    assert [from_proto(value) for value in wire.values()] == [None, *states]
    assert [from_proto(to_proto(state)) for state in states] == list(states)
    assert from_proto(max(wire.values()) + 1) is None, "a state of a later version is unknown, not an error"


def test_the_words_of_states_are_those_that_are_stored() -> None:
    words = [str(state) for states in (RunPhase, ServingState) for state in states]
    assert words == [
        *("starting", "evaluating", "training", "draining", "succeeded", "failed", "suspended"),
        *("starting", "serving", "loading", "recovering", "quarantined", "away", "draining", "asleep"),
    ]
