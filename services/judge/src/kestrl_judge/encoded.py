"""A group as the judge received it: what reward processes read was encoded once, by the rollout worker."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import replace
from functools import cached_property

from kestrl.api.common.v1 import common_pb2 as common
from kestrl.api.judge.v1 import judge_pb2 as pb
from kestrl.episode import Group
from kestrl.episode.codec import episode_from_proto, group_from_proto

LENGTH_DELIMITED = 2
"""Wire type of protobuf for messages, texts and bytes."""


class EncodedGroup:
    """The episodes of a group that are to be scored.

    Args:
        message: The group as it was received; it must not change.
        episodes: Some of its episodes. Default: all of them.
    """

    def __init__(self, message: common.Group, episodes: Sequence[common.Episode] | None = None) -> None:
        self._message = message
        self.episodes: Sequence[common.Episode] = message.episodes if episodes is None else episodes
        self._requests: dict[str, Sequence[bytes]] = {}

    @property
    def id(self) -> str:
        return self._message.id

    @cached_property
    def decoded(self) -> Group:
        """The group with these episodes, for scorers that read it themselves.

        Raises:
            ValueError: It holds impossible values, such as an unknown stop reason.
        """
        message = self._message
        header = common.Group(
            id=message.id, scenario=message.scenario, tools_json=message.tools_json, scoring_json=message.scoring_json
        )
        return replace(group_from_proto(header), episodes=[episode_from_proto(episode) for episode in self.episodes])

    def request(self, episode: common.Episode) -> Sequence[bytes]:
        """A `ScoreGroupRequest` with this episode alone, in parts, which all rules share. Further fields may follow.

        Written by hand in the wire format of protobuf, and not joined here: each copy of an episode takes as long as to
        encode it.
        """
        if episode.id not in self._requests:
            encoded = episode.SerializeToString()
            group = self._header + _opening(common.Group.EPISODES_FIELD_NUMBER, len(encoded))
            opening = _opening(pb.ScoreGroupRequest.GROUP_FIELD_NUMBER, len(group) + len(encoded))
            self._requests[episode.id] = (opening + group, encoded)
        return self._requests[episode.id]

    @cached_property
    def _header(self) -> bytes:
        return common.Group(id=self._message.id, scenario=self._message.scenario).SerializeToString()

    def without_failures(self) -> EncodedGroup:
        """The episodes that did not fail."""
        return self._with([episode for episode in self.episodes if not episode.HasField("failure")])

    def without(self, episode_ids: Container[str]) -> EncodedGroup:
        return self._with([episode for episode in self.episodes if episode.id not in episode_ids])

    def _with(self, episodes: Sequence[common.Episode]) -> EncodedGroup:
        if len(episodes) == len(self.episodes):
            return self
        group = EncodedGroup(self._message, episodes)
        group._requests = self._requests
        return group


def _opening(number: int, length: int) -> bytes:
    """What stands before a message that is a field of another one."""
    return _varint(number << 3 | LENGTH_DELIMITED) + _varint(length)


def _varint(number: int) -> bytes:
    encoded = bytearray()
    while number > 0x7F:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)
