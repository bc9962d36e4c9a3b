"""A group as the judge received it: what reward processes read was encoded once, by the rollout worker, and is passed
on as it came.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from copy import copy
from dataclasses import replace
from functools import cached_property
from typing import NamedTuple, Self

from google.protobuf.message import DecodeError

from kestrl.api.common.v1 import common_pb2 as common
from kestrl.api.judge.v1 import judge_pb2 as pb
from kestrl.episode import Group
from kestrl.episode.codec import episode_from_proto, group_from_proto
from kestrl_judge.wire import VARINT, opening, read_varint, tag_of, wire_fields

Encoded = bytes | memoryview
EPISODE_ID, EPISODE_FAILURE = tag_of(common.Episode.ID_FIELD_NUMBER), tag_of(common.Episode.FAILURE_FIELD_NUMBER)
GROUP_EPISODES = tag_of(common.Group.EPISODES_FIELD_NUMBER)
REQUEST_GROUP = tag_of(pb.ScoreGroupRequest.GROUP_FIELD_NUMBER)
REQUEST_MAX_TURNS = tag_of(pb.ScoreGroupRequest.MAX_TURNS_FIELD_NUMBER, VARINT)


class EncodedEpisode(NamedTuple):
    """An episode, of which is read what the judge needs."""

    id: str
    failed: bool
    encoded: memoryview

    @classmethod
    def read(cls, encoded: bytes, start: int, end: int) -> Self:
        """The episode in a part of some bytes; raises DecodeError."""
        episode_id, failed = "", False
        for tag, _, begin, after in wire_fields(encoded, start, end):
            if tag == EPISODE_ID:
                episode_id = _text(encoded[begin:after])
            elif tag == EPISODE_FAILURE:
                failed = True
        return cls(episode_id, failed, memoryview(encoded)[start:end])


class EncodedGroup:
    """The episodes of a group that are to be scored.

    Args:
        encoded: Bytes with a `Group` of the protocol.
        start: Where it begins.
        end: Where it ends; None for the end of the bytes.

    Raises:
        DecodeError: It is not in the wire format of protobuf. Episodes are decoded only where they are used.
    """

    def __init__(self, encoded: bytes, start: int = 0, end: int | None = None) -> None:
        episodes: list[EncodedEpisode] = []
        header: list[bytes] = []
        for tag, field, begin, after in wire_fields(encoded, start, len(encoded) if end is None else end):
            if tag == GROUP_EPISODES:
                episodes.append(EncodedEpisode.read(encoded, begin, after))
            else:
                header.append(encoded[field:after])
        self.episodes: Sequence[EncodedEpisode] = episodes
        self._message = common.Group.FromString(b"".join(header))
        self._requests: dict[str, Sequence[Encoded]] = {}

    @property
    def id(self) -> str:
        return self._message.id

    @property
    def scenario_id(self) -> str:
        return self._message.scenario.id

    @cached_property
    def decoded(self) -> Group:
        """The group with these episodes, for scorers that read it themselves.

        Raises:
            DecodeError: An episode is not in the wire format.
            ValueError: It holds impossible values, such as an unknown stop reason.
        """
        messages = [common.Episode.FromString(bytes(episode.encoded)) for episode in self.episodes]
        return replace(group_from_proto(self._message), episodes=[episode_from_proto(message) for message in messages])

    def request(self, episode: EncodedEpisode) -> Sequence[Encoded]:
        """A `ScoreGroupRequest` with this episode alone, in parts, which all rules share. Further fields may follow.

        The parts are not joined here: each copy of an episode takes as long as to encode it.
        """
        if episode.id not in self._requests:
            length = len(episode.encoded)
            group = self._header + opening(common.Group.EPISODES_FIELD_NUMBER, length)
            begin = opening(pb.ScoreGroupRequest.GROUP_FIELD_NUMBER, len(group) + length)
            self._requests[episode.id] = (begin + group, episode.encoded)
        return self._requests[episode.id]

    @cached_property
    def _header(self) -> bytes:
        return common.Group(id=self._message.id, scenario=self._message.scenario).SerializeToString()

    def without_failures(self) -> EncodedGroup:
        """The episodes that did not fail."""
        return self._with([episode for episode in self.episodes if not episode.failed])

    def without(self, episode_ids: Container[str]) -> EncodedGroup:
        return self._with([episode for episode in self.episodes if episode.id not in episode_ids])

    def _with(self, episodes: Sequence[EncodedEpisode]) -> EncodedGroup:
        if len(episodes) == len(self.episodes):
            return self
        group = copy(self)
        group.episodes = episodes
        group.__dict__.pop("decoded", None)
        return group


class ReceivedRequest(NamedTuple):
    """A `ScoreGroupRequest` of a rollout worker."""

    group: EncodedGroup
    max_turns: int

    @classmethod
    def read(cls, encoded: bytes) -> Self:
        """The request in these bytes; raises DecodeError."""
        groups: list[EncodedGroup] = []
        max_turns = 0
        for tag, _, begin, after in wire_fields(encoded, 0, len(encoded)):
            if tag == REQUEST_GROUP:
                groups.append(EncodedGroup(encoded, begin, after))
            elif tag == REQUEST_MAX_TURNS:
                max_turns, _ = read_varint(encoded, begin)
        if len(groups) > 1:
            raise DecodeError("a request in which the group is in parts")
        return cls(groups[0] if groups else EncodedGroup(b""), max_turns)


def _text(content: bytes) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise DecodeError(f"a text that is not UTF-8: {error}") from error
