"""Many deadlines over one timer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kestrl.alarms import EARLY, Alarms

FAR = 1000.0
SOON = 0.02


def now() -> float:
    return asyncio.get_running_loop().time()


class Bell:
    """An alarm that can be awaited, and writes down when it rang."""

    def __init__(self, at: float, does: Callable[[], object] = lambda: None) -> None:
        self.at, self._does = at, does
        self.rang = asyncio.Event()
        self.times: list[float] = []

    def ring(self) -> None:
        self.times.append(now())
        self.rang.set()
        self._does()


@pytest.fixture
def timers(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """When the loop was asked to call, in the order of asking."""
    asked: list[float] = []
    plain = asyncio.BaseEventLoop.call_at

    def call_at(loop: Any, when: float, *rest: Any, **more: Any) -> asyncio.TimerHandle:
        asked.append(when)
        return plain(loop, when, *rest, **more)

    monkeypatch.setattr(asyncio.BaseEventLoop, "call_at", call_at)
    return asked


async def test_each_alarm_rings_once_at_its_time() -> None:
    alarms, began = Alarms(), now()
    bells = [Bell(began + SOON * number) for number in (3, 1, 2)]
    for bell in bells:
        alarms.add(bell)
    for bell in bells:
        await bell.rang.wait()
        (rang,) = bell.times
        assert rang >= bell.at - 0.002
    assert len(alarms) == 0


async def test_an_overdue_alarm_rings_at_once_but_not_within_add() -> None:
    alarms, late = Alarms(), Bell(now() - 1)
    alarms.add(Bell(now() + FAR))
    alarms.add(late)
    assert not late.times
    await late.rang.wait()


async def test_a_discarded_alarm_never_rings_and_the_next_one_does() -> None:
    alarms, began = Alarms(), now()
    gone, next_ = Bell(began + SOON), Bell(began + 2 * SOON)
    alarms.add(gone)
    alarms.add(next_)
    alarms.discard(gone)
    alarms.discard(gone)
    await next_.rang.wait()
    assert not gone.times


async def test_later_alarms_cost_no_timer_and_none_is_left(timers: list[float]) -> None:
    alarms, began = Alarms(), now()
    first = Bell(began + FAR)
    alarms.add(first)
    for number in range(100):
        bell = Bell(began + FAR + number)
        alarms.add(bell)
        alarms.discard(bell)
    assert timers == [first.at]
    earlier = Bell(began + FAR / 2)
    alarms.add(earlier)
    assert timers == [first.at, earlier.at]
    alarms.discard(first)
    alarms.discard(earlier)
    scheduled: list[asyncio.TimerHandle] = vars(asyncio.get_running_loop())["_scheduled"]
    assert not [timer for timer in scheduled if timer.when() in {first.at, earlier.at} and not timer.cancelled()]


async def test_one_that_rings_may_add_and_discard_others() -> None:
    alarms, began = Alarms(), now()
    last = Bell(began + 2 * SOON)
    spared = Bell(began + FAR)

    def change() -> None:
        alarms.add(last)
        alarms.discard(spared)

    alarms.add(spared)
    alarms.add(Bell(began + SOON, change))
    await last.rang.wait()
    assert len(alarms) == 0


class Timer:
    def __init__(self, when: float, callback: Callable[[], object]) -> None:
        self.when, self.callback, self.cancelled = when, callback, False

    def cancel(self) -> None:
        self.cancelled = True


class Clock:
    """An event loop with a clock set by the test."""

    def __init__(self) -> None:
        self.now = 0.0
        self.timers: list[Timer] = []

    def time(self) -> float:
        return self.now

    def call_at(self, when: float, callback: Callable[[], object]) -> Timer:
        self.timers.append(Timer(when, callback))
        return self.timers[-1]

    def pending(self) -> list[Timer]:
        self.timers = [timer for timer in self.timers if not timer.cancelled]
        return self.timers

    def advance(self, to: float) -> None:
        while due := [timer for timer in self.pending() if timer.when <= to]:
            first = min(due, key=lambda timer: timer.when)
            self.timers.remove(first)
            self.now = max(self.now, first.when)
            first.callback()
        self.now = max(self.now, to)


class Recorded:
    """An alarm that notes when it rang."""

    def __init__(self, clock: Clock, at: float) -> None:
        self.at, self._clock = at, clock
        self.times: list[float] = []

    def ring(self) -> None:
        self.times.append(self._clock.now)


INDEX = st.integers(0, 30)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(-5, 50)),
        st.tuples(st.just("discard"), INDEX),
        st.tuples(st.just("advance"), st.integers(0, 20)),
    ),
    max_size=60,
)


@given(steps=STEPS)
def test_every_alarm_rings_once_in_time_or_was_discarded(steps: list[tuple[str, int]]) -> None:
    clock, alarms = Clock(), Alarms()
    made: list[Recorded] = []
    gone: set[int] = set()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kestrl.alarms.asyncio.get_running_loop", lambda: clock)
        for what, number in steps:
            if what == "add":
                made.append(Recorded(clock, clock.now + number))
                alarms.add(made[-1])
            elif what == "discard" and number < len(made):
                alarms.discard(made[number])
                if not made[number].times:
                    gone.add(number)
            elif what == "advance":
                clock.advance(clock.now + number)
            waiting = [index for index, alarm in enumerate(made) if not alarm.times and index not in gone]
            assert len(alarms) == len(waiting)
            assert len(clock.pending()) == bool(waiting), "one timer while there is an alarm, and none else"
            if what == "advance":
                assert all(made[index].at > clock.now for index in waiting)
        clock.advance(clock.now + 1000)
    for index, alarm in enumerate(made):
        assert len(alarm.times) == (index not in gone)
        assert all(alarm.at - EARLY <= rang for rang in alarm.times)
