"""The form in which a run's events are stored: segments, each a snapshot and the events after it. Pure.

A segment is one object of JSON lines: a header with the state before its first event, then the events. The state of a
run is the newest segment's snapshot with its events applied. Older segments are compacted: events that only tell how a
step went on are dropped, and small segments are joined, so that the history of a run is of bounded size.
docs/events.schema.json has the schema.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

from kestrl.errors import Boundary, KestrlError
from kestrl.runstate import events
from kestrl.runstate.log import Entry, reduced
from kestrl.runstate.state import RunState
from kestrl.runstate.versioned import Versioned

EVENTS = "events"
"""Folder of the segments in a run's storage."""
_NAME = re.compile(r"events/(?P<first>\d{12})-(?P<owner>\d{8})\.jsonl")
PASSING = frozenset(
    str(kind.model_fields["kind"].default)
    for kind in (events.ActivityNoted, events.EnginesObserved, events.GatheringBegan, events.GroupScored)
)
"""Kinds of events that only tell how a step went on; compacted segments are without them."""


class DamagedEvents(KestrlError):
    """A stored segment is not one."""

    boundary = Boundary.INFRASTRUCTURE
    code = "events_damaged"


class SegmentHeader(Versioned):
    """The first line of a segment."""

    NAME: ClassVar[str] = "log of events"
    state: RunState = RunState()
    """The state before the segment's first event, without gauges."""
    compacted: bool = False
    """Whether passing events were dropped."""


@dataclass(frozen=True)
class Segment:
    """Some of a run's events, in their order."""

    first: int
    """Smallest number that an event in it may have."""
    owner: int
    """Fencing token of the learner that began it: a later owner's segments replace what it stored beyond them."""
    header: SegmentHeader
    lines: tuple[str, ...]
    """Events as stored; those of kinds that are unknown to this version are kept as they are."""

    @property
    def path(self) -> str:
        return f"{EVENTS}/{self.first:012d}-{self.owner:08d}.jsonl"

    @cached_property
    def entries(self) -> Sequence[Entry]:
        """The events.

        Raises:
            DamagedEvents: A line is none.
        """
        try:
            return tuple(Entry.model_validate_json(line) for line in self.lines)
        except ValueError as error:
            raise DamagedEvents(f"{self.path} has a line that is no event: {error}") from error

    @property
    def content(self) -> bytes:
        """The stored object."""
        return "".join(f"{line}\n" for line in (self.header.model_dump_json(), *self.lines)).encode()

    def with_entries(self, added: Iterable[Entry]) -> Segment:
        """The segment with more events at its end."""
        lines = (entry.model_dump_json() for entry in added)
        return Segment(self.first, self.owner, self.header, (*self.lines, *lines))

    def compact(self) -> Segment:
        """The segment without passing events."""
        lines = tuple(line for line in self.lines if _kind(line) not in PASSING)
        return Segment(self.first, self.owner, self.header.but(compacted=True), lines)

    def joined(self, later: Segment) -> Segment:
        """Both compacted segments as one."""
        return Segment(self.first, self.owner, self.header, (*self.lines, *later.lines))


def _kind(line: str) -> str:
    """Kind of the event in a line that this program has read or written before."""
    content: dict[str, dict[str, Any] | None] = json.loads(line)
    event = content.get("event")
    return "" if event is None else str(event.get("kind", ""))


def segment_place(path: str) -> tuple[int, int] | None:
    """First number and owner of the segment at a path; None for other files."""
    parts = _NAME.fullmatch(path)
    return None if parts is None else (int(parts["first"]), int(parts["owner"]))


def parse_segment(path: str, content: bytes, address: str) -> Segment:
    """Reads a stored segment.

    Args:
        path: Its path, which `segment_place` knows.
        content: The object.
        address: Where it was stored, for errors.

    Raises:
        UserInputError: It was written by a later version of KestRL.
        DamagedEvents: It is malformed.
    """
    place = segment_place(path)
    assert place is not None, path
    try:
        head, *lines = content.decode().splitlines()
        header = json.loads(head)
        RunState.from_json(header["state"], address)  # its version counts, too
        return Segment(*place, SegmentHeader.from_json(header, address), tuple(lines))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise DamagedEvents(f"{address} is no segment of events: {error}") from error


def ordered(segments: Iterable[Segment]) -> list[tuple[Segment, Sequence[Entry]]]:
    """Segments with those of their events that count, in the order of the run.

    Events that are stored twice, as by a compaction that was cut short, count once. What a replaced learner stored at
    or after the number from which a later owner continues does not count.
    """
    sorted_segments = sorted(segments, key=lambda segment: (segment.owner, segment.first))
    starts: dict[int, int] = {}
    for segment in reversed(sorted_segments):
        starts[segment.owner] = min(segment.first, starts.get(segment.owner, segment.first))
    counting: list[tuple[Segment, Sequence[Entry]]] = []
    number = 0
    for segment in sorted_segments:
        end = min((first for owner, first in starts.items() if owner > segment.owner), default=None)
        entries = [entry for entry in segment.entries if entry.number > number and (end is None or entry.number < end)]
        number = entries[-1].number if entries else number
        counting.append((segment, entries))
    return counting


def state_of_segments(segments: Iterable[Segment]) -> RunState | None:
    """The state after the last stored event; None without segments."""
    segment_entry = next(reversed(ordered(segments)), None)
    return None if segment_entry is None else reduced(segment_entry[0].header.state, segment_entry[1])
