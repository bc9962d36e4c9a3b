"""The request of one episode, as a reward process reads it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kestrl.api.judge.v1 import judge_pb2 as pb
from kestrl.episode import Group
from kestrl.episode.codec import group_to_proto
from kestrl_judge.encoded import EncodedGroup


@pytest.mark.parametrize("length", [0, 1, 100, 127, 128, 16_383, 16_384, 3_000_000])
def test_an_episode_of_any_length_is_read_with_its_scenario_and_further_fields(
    group: Callable[..., Group], length: int
) -> None:
    message = group_to_proto(group("first", "x" * length, ground_truth={"answer": "y" * length}))
    further = pb.ScoreGroupRequest(max_turns=7, has_judge=True, verdicts={"digest": True})
    for episode in message.episodes:
        request = b"".join((*EncodedGroup(message).request(episode), further.SerializeToString()))
        read = pb.ScoreGroupRequest.FromString(request)
        assert list(read.group.episodes) == [episode]
        assert (read.group.id, read.group.scenario) == (message.id, message.scenario)
        assert (read.max_turns, read.has_judge, dict(read.verdicts)) == (7, True, {"digest": True})
