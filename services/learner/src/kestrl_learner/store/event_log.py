"""Writes the events of a run to its storage, as `kestrl.runstate.segments` has them.

One process writes: the learner, whose storage is fenced. It begins a segment of its own, and puts it again with every
change until it is full; each put leaves whole segments behind, wherever the process is killed. Events that were not
stored then are lost, and a resumed run continues the numbers after the last stored one.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from kestrl.errors import KestrlError
from kestrl.runstate.log import Entry, reduced
from kestrl.runstate.segments import EVENTS, Segment, SegmentHeader, segment_place, state_of_segments
from kestrl.runstate.state import RunState
from kestrl.runstate.stored import read_segments
from kestrl.storage import ObjectStore
from kestrl_learner.progress.progress import Progress

log = logging.getLogger(__name__)
PAUSE_SECONDS = 5.0
"""Shortest time between two puts, so that a chatty run does not write all the time."""
SEGMENT_BYTES = 256 * 1024
"""Size from which on a segment is full."""
SEGMENTS = 64
"""Largest number of segments; beyond it the oldest are deleted."""


class SegmentWriter:
    """Stores events in segments. Blocking; for one thread.

    Args:
        store: The run's storage.
        owner: Fencing token of this learner.
        segment_bytes: Size from which on a segment is full.
        segments: Largest number of segments.
    """

    def __init__(
        self, store: ObjectStore, owner: int, *, segment_bytes: int = SEGMENT_BYTES, segments: int = SEGMENTS
    ) -> None:
        self._store, self._owner = store, owner
        self._segment_bytes, self._segments = segment_bytes, segments
        stored = sorted(read_segments(store), key=lambda segment: (segment.owner, segment.first))
        self._state = state_of_segments(stored) or RunState()
        self._closed = stored[-2] if len(stored) > 1 else None
        """The segment before the open one."""
        self._open = stored[-1] if stored else None

    @property
    def number(self) -> int:
        """Number of the last stored event."""
        return self._state.number

    def add(self, entries: Sequence[Entry], state: RunState) -> None:
        """Stores events.

        Args:
            entries: The events after those stored; if some between them were lost, only the state is stored.
            state: The state after them.

        Raises:
            StorageError, PlaceError: The store refused; the events count as not stored.
        """
        if entries and entries[0].number != self._state.number + 1:
            log.warning("%d events of the run were not stored", entries[0].number - self._state.number - 1)
            self._begin(state.stored, ())
            return
        full = self._open is None or self._open.owner != self._owner or len(self._open.content) >= self._segment_bytes
        if full:
            self._begin(self._state, entries)
        else:
            assert self._open is not None
            self._put(self._open.with_entries(entries), reduced(self._state, entries))

    def _put(self, segment: Segment, state: RunState) -> None:
        self._store.put(segment.path, segment.content)
        self._open, self._state = segment, state

    def _begin(self, state: RunState, entries: Sequence[Entry]) -> None:
        """Begins a segment; only then compacts the one before it."""
        before, header = self._open, SegmentHeader(state=state)
        segment = Segment(state.number + 1, self._owner, header, ()).with_entries(entries)
        self._put(segment, reduced(state, entries))
        if before is not None and before.path != segment.path:
            self._close(before)
        self._delete_oldest()

    def _close(self, segment: Segment) -> None:
        """Compacts a segment, and joins it to the one before if both are small."""
        compacted, closed = segment.compact(), self._closed
        joined = None if closed is None or not closed.header.compacted else closed.joined(compacted)
        if joined is None or len(joined.content) > self._segment_bytes:
            self._store.put(compacted.path, compacted.content)
            self._closed = compacted
            return
        self._store.put(joined.path, joined.content)
        self._store.delete(segment.path)
        self._closed = joined

    def _delete_oldest(self) -> None:
        places = [(place[1], place[0], path) for path in self._store.list(EVENTS) if (place := segment_place(path))]
        for *_, path in sorted(places)[: -self._segments]:
            self._store.delete(path)


class EventLog:
    """Stores the events of a run's progress while it goes on. It never ends the run: a failure is logged and counted.

    Args:
        store: The run's storage.
        progress: Where events are emitted.
        owner: Fencing token of this learner.
    """

    def __init__(self, store: ObjectStore, progress: Progress, owner: int) -> None:
        self._store, self._progress, self._owner = store, progress, owner
        self._writer: SegmentWriter | None = None
        self._lock = asyncio.Lock()
        self._failed = False

    async def watch(self) -> None:
        """Stores what is emitted, until cancelled."""
        while True:
            await self.flush()
            await asyncio.sleep(PAUSE_SECONDS)
            while not self._progress.unstored:
                await self._progress.changed()

    async def flush(self) -> None:
        """Stores what was emitted until now."""
        # A put that goes on in its thread after a cancellation keeps the lock.
        await asyncio.shield(asyncio.create_task(self._flush(), name="flush-events"))

    async def _flush(self) -> None:
        async with self._lock:
            if self._failed:
                return
            try:
                await self._store_events()
            except KestrlError as error:
                self._failed = True
                log.error("the events of the run are stored no further: %s", error)
                self._progress.count_failure(error.failure(component="learner-0"))

    async def _store_events(self) -> None:
        if self._writer is None:
            self._writer = await asyncio.to_thread(SegmentWriter, self._store, self._owner)
            self._progress.continue_numbers(self._writer.number)
        entries, state = self._progress.take_unstored()
        if entries:
            await asyncio.to_thread(self._writer.add, entries, state)
