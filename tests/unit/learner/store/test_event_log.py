"""The stored events of a run: under kills, over restarts, within bounds, and as a real run writes them."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.unit.runstate.test_log import EVENTS, entries

from kestrl.errors import StorageError, UserInputError
from kestrl.runstate import events
from kestrl.runstate.history import History, LastStep, StepCounts
from kestrl.runstate.log import Entry, Event, reduced
from kestrl.runstate.segments import PASSING, DamagedEvents
from kestrl.runstate.state import RunState
from kestrl.runstate.states import RunPhase
from kestrl.runstate.stored import finished_steps, read_events, read_segments, read_state
from kestrl.storage import ObjectStore, open_store
from kestrl_learner.progress.progress import Progress
from kestrl_learner.run import LearnerRun
from kestrl_learner.store.event_log import EventLog, SegmentWriter


class Killed(BaseException):
    """The process ends here."""


class MortalStore(ObjectStore):
    """A real store of files whose process is killed at one of its writes, before or after it."""

    def __init__(self, uri: str, *, after: int) -> None:
        super().__init__(uri)
        self._moments = after

    def _live(self) -> None:
        if self._moments == 0:
            raise Killed
        self._moments -= 1

    def put(self, path: str, content: bytes, *, create: bool = False) -> None:
        self._live()
        super().put(path, content, create=create)
        self._live()

    def delete(self, path: str) -> None:
        self._live()
        super().delete(path)
        self._live()


def step_finished(step: int) -> Event:
    counts = StepCounts(groups=1, idle_groups=0, tool_calls=0, gradient=1.0)
    return events.StepFinished(step=step, counts=counts, took=LastStep(), message="x" * 60)


def steps(first: int, count: int) -> list[Event]:
    """What happens in some steps, with much that passes."""
    happened: list[Event] = []
    for step in range(first, first + count):
        happened += [events.GatheringBegan(wanted=step), events.ActivityNoted(message=f"{step} " * 20)]
        happened += [events.FailureCounted(boundary="tool", code=f"code_{step}"), step_finished(step)]
    return happened


def lasting(log: Sequence[Entry]) -> list[Entry]:
    return [entry for entry in log if entry.event is None or entry.event.kind not in PASSING]


def write(store: ObjectStore, log: Sequence[Entry], owner: int, **bounds: int) -> Iterator[int]:
    """Stores a log in batches of three, after those events that are stored; gives the number of each batch's last."""
    writer = SegmentWriter(store, owner, **bounds)
    for batch in _batches(log, 3):
        numbered = [entry for entry in batch if entry.number > writer.number]
        if numbered:
            writer.add(numbered, RunState())
            yield numbered[-1].number


def _batches(log: Sequence[Entry], size: int) -> list[Sequence[Entry]]:
    return [log[at : at + size] for at in range(0, len(log), size)]


BOUNDS = {"segment_bytes": 2000, "segments": 40}


def moments(folder: Path, log: Sequence[Entry]) -> int:
    """Moments at which a writer of a log can be killed."""
    for after in itertools.count():
        try:
            list(write(MortalStore(f"{folder}/count-{after}", after=after), log, 1, **BOUNDS))
        except Killed:
            continue
        return after
    raise AssertionError


def test_a_writer_may_be_killed_at_every_write(tmp_path: Path) -> None:
    log = entries(steps(1, 14))
    states = [reduced(RunState(), log[:count]) for count in range(len(log) + 1)]
    total = moments(tmp_path, log)
    assert total > 40, "segments were put, compacted and deleted"
    for after in range(total):
        uri = f"{tmp_path}/killed-{after}"
        acknowledged = [0]
        with pytest.raises(Killed):
            acknowledged.extend(write(MortalStore(uri, after=after), log, 1, **BOUNDS))
        store = open_store(uri)
        state = read_state(store) or RunState()
        assert state == states[state.number], "the state after some event, and nothing between"
        assert state.number >= acknowledged[-1], "what was stored stays"
        seen = read_events(store)
        assert lasting(seen) == lasting(log[: state.number])
        list(write(store, log, 2, **BOUNDS))
        assert read_state(store) == states[-1], "a resumed run continues after the last stored event"
        assert lasting(read_events(store)) == lasting(log)


@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    happened=st.lists(EVENTS, max_size=30), sizes=st.lists(st.integers(1, 4), min_size=1), size=st.integers(200, 6000)
)
def test_a_snapshot_with_its_tail_is_the_state_after_every_put(
    tmp_path_factory: pytest.TempPathFactory, happened: list[Event], sizes: list[int], size: int
) -> None:
    store = open_store(str(tmp_path_factory.mktemp("log")))
    log, owner, state = entries(happened), 1, RunState()
    writer = SegmentWriter(store, owner, segment_bytes=size, segments=5)
    for count in itertools.cycle(sizes):
        batch, log = log[:count], log[count:]
        if not batch:
            break
        if count == 4:  # another process goes on
            owner += 1
            writer = SegmentWriter(store, owner, segment_bytes=size, segments=5)
        state = reduced(state, batch)
        writer.add(batch, state)
        assert read_state(store) == state.stored
        assert len(store.list("events")) <= 5


def test_a_long_run_keeps_its_steps_in_few_segments_of_bounded_size(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    log = entries(steps(1, 60))
    list(write(store, log, 1, segment_bytes=20_000, segments=8))
    assert len(store.list("events")) <= 3, "compacted segments are joined"
    assert list(finished_steps(read_events(store))) == list(range(1, 61))
    list(write(store, entries(steps(61, 600), first=len(log) + 1), 1, segment_bytes=20_000, segments=8))
    assert len(store.list("events")) == 8
    assert all(store.size(path) < 30_000 for path in store.list("events"))
    kept = list(finished_steps(read_events(store)))
    assert kept == list(range(kept[0], 661)), "the oldest are gone, and none between"
    state = read_state(store)
    assert state is not None
    assert len(state.history.failures) == 660


def test_what_a_replaced_learner_stores_late_does_not_count(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    log = entries(steps(1, 3))
    replaced = SegmentWriter(store, 1)
    replaced.add(log[:6], RunState())
    list(write(store, [*log[:6], *log[6:]], 2))
    replaced.add(entries([events.ActivityNoted(message="late"), step_finished(99)], first=7), RunState())
    assert read_state(store) == reduced(RunState(), log)
    assert lasting(read_events(store)) == lasting(log)


def test_events_that_were_lost_leave_a_gap_and_the_state(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    log = entries(steps(1, 4))
    writer = SegmentWriter(store, 1)
    writer.add(log[:3], RunState())
    writer.add(log[8:], reduced(RunState(), log))
    assert read_state(store) == reduced(RunState(), log)
    writer.add(entries([step_finished(5)], first=17), RunState())
    assert [entry.number for entry in read_events(store)] == [3, 17], "what passes is not kept"
    assert [entry.number for entry in read_events(store, after=3)] == [17]


def test_steps_after_the_checkpoint_that_a_run_resumes_from_are_done_again() -> None:
    happened = [*steps(1, 4), events.HistoryRestored(step=2, history=History()), step_finished(3)]
    assert list(finished_steps(entries(happened))) == [1, 2, 3]


def test_a_damaged_segment_and_one_of_a_later_version_are_refused(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    assert (read_state(store), read_events(store)) == (None, [])
    SegmentWriter(store, 1).add(entries([step_finished(1)]), RunState())
    (path,) = store.list("events")
    whole = store.get(path)
    for content in (b"", b"{}", b"[]\n", whole + b"{\n", b"\xff"):
        store.put(path, content)
        with pytest.raises(DamagedEvents, match="events/"):
            read_events(store)
    later = json.loads(whole.splitlines()[0])
    for change in ({"version": 2}, {"state": {**later["state"], "version": 2}}):
        store.put(path, json.dumps({**later, **change}).encode())
        with pytest.raises(UserInputError, match="later version"):
            read_segments(store)


async def test_a_store_that_refuses_ends_the_log_and_not_the_run(tmp_path: Path) -> None:
    class Refusing(ObjectStore):
        def put(self, path: str, content: bytes, *, create: bool = False) -> None:
            raise StorageError(f"{path} is refused")

    progress = Progress(engines=1, episodes_per_step=1)
    event_log = EventLog(Refusing(str(tmp_path)), progress, owner=1)
    await event_log.flush()
    assert progress.state.history.failures == {"infrastructure/storage_failed": 1}
    await event_log.flush()
    assert read_state(open_store(str(tmp_path))) is None


@pytest.mark.usefixtures("quick")
async def test_a_run_and_its_resume_store_their_events(staged: Any) -> None:
    async with staged() as stage:
        run = LearnerRun(stage.settings.model_copy(update={"max_steps": 4}))
        await run.main()
        store = open_store(stage.settings.storage)
        assert read_state(store) == run.progress.state.stored
        again = LearnerRun(stage.settings)
        await again.main()
        assert read_state(store) == again.progress.state.stored
        log = read_events(store)
        numbers = [entry.number for entry in log]
        assert numbers == sorted(set(numbers))
        assert sum(isinstance(entry.event, events.ProcessStarted) for entry in log) == 2
        done = finished_steps(log)
        assert list(done) == [1, 2, 3, 4, 5, 6]
        assert all(event.took.idle.seconds > 0 for event in done.values())
        last = log[-1].event
        assert isinstance(last, events.PhaseEntered)
        assert last.phase is RunPhase.SUCCEEDED
