"""The request of one episode, as a reward process reads it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given, settings
from hypothesis import strategies as st

from kestrl.api.common.v1 import common_pb2 as common
from kestrl.api.judge.v1 import judge_pb2 as pb
from kestrl.episode import Group
from kestrl.episode.codec import group_from_proto, group_to_proto
from kestrl_judge.encoded import EncodedGroup, ReceivedRequest


@pytest.mark.parametrize("length", [0, 1, 100, 127, 128, 16_383, 16_384, 3_000_000])
def test_an_episode_of_any_length_is_read_with_its_scenario_and_further_fields(
    group: Callable[..., Group], length: int
) -> None:
    message = group_to_proto(group("first", "x" * length, ground_truth={"answer": "y" * length}))
    further = pb.ScoreGroupRequest(max_turns=7, has_judge=True, verdicts={"digest": True})
    encoded = EncodedGroup(message.SerializeToString())
    for episode, encoded_episode in zip(message.episodes, encoded.episodes, strict=True):
        request = b"".join((*encoded.request(encoded_episode), further.SerializeToString()))
        read = pb.ScoreGroupRequest.FromString(request)
        assert list(read.group.episodes) == [episode]
        assert (read.group.id, read.group.scenario) == (message.id, message.scenario)
        assert (read.max_turns, read.has_judge, dict(read.verdicts)) == (7, True, {"digest": True})


def test_a_request_is_read_as_protobuf_reads_it(group: Callable[..., Group]) -> None:
    message = pb.ScoreGroupRequest(group=group_to_proto(group("first", "second")), max_turns=300)
    message.group.tools_json = "[]"
    message.group.episodes[1].failure.code = "engine_lost"
    request = ReceivedRequest.read(message.SerializeToString())
    assert (request.max_turns, request.group.id) == (300, message.group.id)
    assert request.group.scenario_id == message.group.scenario.id
    assert [(episode.id, episode.failed) for episode in request.group.episodes] == [
        (message.group.episodes[0].id, False),
        (message.group.episodes[1].id, True),
    ]
    assert request.group.decoded == group_from_proto(message.group)
    assert [episode.id for episode in request.group.without_failures().decoded.episodes] == [
        message.group.episodes[0].id
    ]


@settings(max_examples=1_000)
@given(data=st.data())
def test_damaged_bytes_are_refused_or_read_as_protobuf_reads_them(data: st.DataObject) -> None:
    scenario = common.Scenario(id="scenario", ordinal=1)
    episodes = [common.Episode(id=f"{index}", started_at=1.5, turn_rewards=[1.0]) for index in range(2)]
    group = common.Group(id="group", scenario=scenario, episodes=episodes)
    encoded = bytearray(pb.ScoreGroupRequest(group=group, max_turns=5).SerializeToString())
    for _ in range(data.draw(st.integers(0, 3))):
        encoded[data.draw(st.integers(0, len(encoded) - 1))] = data.draw(st.integers(0, 255))
    del encoded[data.draw(st.integers(0, len(encoded))) :]
    try:
        request = ReceivedRequest.read(bytes(encoded))
        message = pb.ScoreGroupRequest.FromString(bytes(encoded))
    except DecodeError:
        return  # protobuf also reads what is in an episode, which is left to reward processes
    assert request.group.id == message.group.id
    assert request.group.scenario_id == message.group.scenario.id
    assert [(episode.id, episode.failed) for episode in request.group.episodes] == [
        (episode.id, episode.HasField("failure")) for episode in message.group.episodes
    ]
    assert request.max_turns % 2**32 == message.max_turns % 2**32


@pytest.mark.parametrize(
    "encoded",
    [
        pytest.param(b"\x80" * 2_000_000, id="a number without an end"),
        pytest.param(b"\x10" + b"\xff" * 10 + b"\x01", id="a number of more than 64 bits"),
        pytest.param(b"\x10\xff", id="a number that is cut"),
        pytest.param(b"\x0a\x05abc", id="a group that is cut"),
        pytest.param(b"\x0b", id="a type of the wire that is not of proto3"),
        pytest.param(b"\x00\x00", id="a field without a number"),
        pytest.param(b"\x0a\x00\x0a\x00", id="two groups"),
    ],
)
def test_what_is_no_message_is_refused(encoded: bytes) -> None:
    with pytest.raises(DecodeError):
        ReceivedRequest.read(encoded)
