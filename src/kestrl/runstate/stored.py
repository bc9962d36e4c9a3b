"""Reads the stored events of a run: for pages, for programs that pass them on, and for replays."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from kestrl.errors import StorageError
from kestrl.runstate import events
from kestrl.runstate.history import Mismatch
from kestrl.runstate.log import Entry
from kestrl.runstate.segments import EVENTS, Segment, ordered, parse_segment, segment_place, state_of_segments
from kestrl.runstate.state import RunState


class SegmentStore(Protocol):
    """What is needed of an object store (`kestrl.storage.open_store`)."""

    def list(self, prefix: str) -> list[str]:
        """Paths of all objects under a folder, sorted."""
        ...

    def get(self, path: str) -> bytes:
        """Reads an object."""
        ...

    def address(self, path: str) -> str:
        """The full address of an object."""
        ...


def read_segments(store: SegmentStore) -> list[Segment]:
    """All stored segments.

    A segment that a compaction removes meanwhile is in the one before it, which is written first and read last.

    Raises:
        StorageError: The store refused.
        UserInputError: They were written by a later version of KestRL.
        DamagedEvents: One is malformed.
    """
    segments: list[Segment] = []
    for path in reversed(store.list(EVENTS)):
        if segment_place(path) is None:
            continue
        try:
            content = store.get(path)
        except StorageError as error:
            if error.code != "not_found":
                raise
            continue
        segments.append(parse_segment(path, content, store.address(path)))
    return segments


def read_events(store: SegmentStore, *, after: int = 0) -> Sequence[Entry]:
    """The stored events of a run, in the order of their numbers.

    Numbers may be missing: events that only tell how a step went on are not kept for long, nor are the oldest of very
    long runs. Raises as `read_segments` does.

    Args:
        store: The run's storage.
        after: Only events with greater numbers.
    """
    return [entry for _, entries in ordered(read_segments(store)) for entry in entries if entry.number > after]


def read_state(store: SegmentStore) -> RunState | None:
    """The state after the last stored event, without gauges; None if no event is stored. Raises as `read_segments`."""
    return state_of_segments(read_segments(store))


def finished_steps(entries: Iterable[Entry]) -> dict[int, events.StepFinished]:
    """Steps that count, by number: a resume from a checkpoint does the steps after it again."""
    steps: dict[int, events.StepFinished] = {}
    for entry in entries:
        if isinstance(entry.event, events.HistoryRestored):
            steps = {step: event for step, event in steps.items() if step <= entry.event.step}
        elif isinstance(entry.event, events.StepFinished):
            steps[entry.event.step] = entry.event
    return steps


def measured_gaps(entries: Iterable[Entry]) -> dict[int, Mismatch]:
    """Log-prob mismatches of the steps that count, by number: a step's is measured before the step ends."""
    gaps: dict[int, Mismatch] = {}
    mismatch: Mismatch | None = None
    for entry in entries:
        if isinstance(entry.event, events.HistoryRestored):
            gaps, mismatch = {step: gap for step, gap in gaps.items() if step <= entry.event.step}, None
        elif isinstance(entry.event, events.MismatchMeasured):
            mismatch = entry.event.gap
        elif isinstance(entry.event, events.StepFinished) and mismatch is not None:
            gaps[entry.event.step], mismatch = mismatch, None
    return gaps
