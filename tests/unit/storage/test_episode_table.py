"""The table of episodes: whatever is appended is read again, and other programs read its columns."""

from __future__ import annotations

from array import array
from dataclasses import fields
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kestrl.episode import (
    CallOutcome,
    Episode,
    Group,
    PolicyVersion,
    Purpose,
    Row,
    Scenario,
    StopReason,
    ToolCall,
    Turn,
)
from kestrl.errors import Boundary, Failure
from kestrl.storage import ObjectStore, open_store
from kestrl.storage.episodes import EpisodeBatch, GroupOutcome, ObjectEpisodeStore, StoredGroup, TrainedTokens

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
NUMBER = st.floats(allow_nan=False, width=64)
SINGLE = st.floats(width=32, allow_nan=False)
WHOLE = st.integers(-(2**63), 2**63 - 1)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)
OBJECT = st.dictionaries(TEXT, JSON, max_size=3)
NUMBERS = st.dictionaries(TEXT, NUMBER, max_size=3)
FAILURE = st.builds(
    Failure, boundary=st.sampled_from(Boundary), code=TEXT, message=TEXT, retryable=st.booleans(), component=TEXT
)
KEYS = st.sampled_from(["role", "content", "tool_calls", "name"]) | TEXT
MESSAGE = st.dictionaries(KEYS, JSON, max_size=4)
TURN = st.builds(
    Turn,
    index=WHOLE, row=WHOLE, start=WHOLE, end=WHOLE, text=TEXT, finish_reason=TEXT, engine=TEXT, policy=TEXT,
    seconds=NUMBER, reasoning_opened=st.booleans(), seed=WHOLE,
)  # fmt: skip
CALL = st.builds(
    ToolCall,
    turn=WHOLE, name=TEXT, raw=TEXT, arguments=st.none() | OBJECT, outcome=st.sampled_from(CallOutcome), text=TEXT,
    data=OBJECT, seconds=NUMBER,
)  # fmt: skip
POLICY = st.builds(PolicyVersion, job=TEXT, step=WHOLE, sha256=st.text("0123456789abcdef", min_size=64, max_size=64))


@st.composite
def rows(draw: Any) -> Row:
    length = draw(st.integers(0, 6))
    return Row(
        token_ids=array("i", draw(st.lists(st.integers(-(2**31), 2**31 - 1), min_size=length, max_size=length))),
        mask=bytes(draw(st.lists(st.integers(0, 255), min_size=length, max_size=length))),
        logprobs=array("f", draw(st.lists(SINGLE, min_size=length, max_size=length))),
        policies=draw(st.lists(TEXT, max_size=2)),
    )


EPISODE: dict[str, Any] = {
    "seed": WHOLE,
    "rows": st.lists(rows(), max_size=3),
    "turns": st.lists(TURN, max_size=2),
    "tool_calls": st.lists(CALL, max_size=2),
    "messages": st.lists(MESSAGE, max_size=3),
    "stop_reason": st.sampled_from(StopReason),
    "failure": st.none() | FAILURE,
    "policy": st.none() | POLICY,
    "engine": TEXT,
    "started_at": NUMBER,
    "seconds": NUMBER,
    "trace_id": TEXT,
    "reward": st.none() | NUMBER,
    "rewards": NUMBERS,
    "reward_weights": NUMBERS,
    "turn_rewards": st.lists(NUMBER, max_size=2).map(tuple),
    "metrics": NUMBERS,
    "loop_reward": st.none() | NUMBER,
    "answer": st.none() | TEXT,
    "environments": OBJECT,
    "info": OBJECT,
    "scoring": OBJECT,
    "main_row": st.none() | st.integers(0, 3),
}
"""Strategies of an episode's fields, but for those that say where it belongs."""
PLACE = {"id", "group_id", "scenario_id", "index"}


@st.composite
def stored_groups(draw: Any, name: str) -> StoredGroup:
    scenario = draw(
        st.builds(
            Scenario,
            id=TEXT,
            ordinal=WHOLE,
            messages=st.lists(MESSAGE, max_size=2),
            tools=st.none() | st.lists(TEXT, max_size=2),
            tools_kwargs=OBJECT,
            agent=TEXT,
            ground_truth=JSON,
            metadata=OBJECT,
        )
    )
    episodes = [
        draw(
            st.builds(
                Episode,
                id=st.just(f"{name}/{index}"),
                group_id=st.just(name),
                scenario_id=st.just(scenario.id),
                index=st.just(index),
                **EPISODE,
            )
        )
        for index in range(draw(st.integers(0, 3)))
    ]
    tokens = {
        episode.id: TrainedTokens(advantages=array("f", values), learner_logprobs=array("f", values[::-1]))
        for episode in episodes
        if episode.rows and draw(st.booleans())
        for count in [sum(1 for row in episode.rows for on in row.mask if on)]
        for values in [draw(st.lists(SINGLE, min_size=count, max_size=count))]
    }
    tools = draw(st.lists(OBJECT, min_size=1, max_size=2) | st.just(()))
    return StoredGroup(
        group=Group(id=name, scenario=scenario, episodes=episodes, tools=tools, scoring=draw(OBJECT)),
        outcome=draw(st.sampled_from(GroupOutcome)),
        attempt=draw(st.integers(0, 9)),
        reason=draw(TEXT),
        failure=None if episodes else draw(st.none() | FAILURE),
        tokens=tokens,
    )


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> ObjectStore:
    return open_store(str(tmp_path_factory.mktemp("table")))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(data=st.data())
def test_what_is_appended_is_read(store: ObjectStore, data: st.DataObject) -> None:
    names = ["run/0", "run/1", "run/0"]  # an id may come twice
    stored = [data.draw(stored_groups(name)) for name in names[: data.draw(st.integers(0, 3))]]
    batch = EpisodeBatch(purpose=Purpose.TRAIN, step=12, stored=stored)
    episodes = ObjectEpisodeStore(store, "run")
    episodes.append(batch)
    assert episodes.read(Purpose.TRAIN, 12) == batch


def test_every_field_of_an_episode_is_tried() -> None:
    assert set(EPISODE) | PLACE == {field.name for field in fields(Episode)}
