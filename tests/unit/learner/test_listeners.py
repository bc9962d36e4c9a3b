"""Listeners: who is called, and when."""

from __future__ import annotations

from kestrl_learner.concurrency import Listeners


class Counter:
    def __init__(self) -> None:
        self.calls = 0

    def count(self) -> None:
        self.calls += 1


def test_each_listener_is_called_once_for_each_notice_in_its_order() -> None:
    listeners, called = Listeners(), list[str]()
    listeners.notify()
    listeners.add(lambda: called.append("first"))
    listeners.add(lambda: called.append("second"))
    listeners.notify()
    assert called == ["first", "second"]


def test_a_method_that_was_added_twice_is_called_once() -> None:
    listeners, counter = Listeners(), Counter()
    listeners.add(counter.count)
    listeners.add(counter.count)
    listeners.notify()
    assert counter.calls == 1


def test_who_is_added_by_a_listener_is_called_from_the_next_notice_on() -> None:
    listeners, counter = Listeners(), Counter()
    listeners.add(lambda: listeners.add(counter.count))
    listeners.notify()
    assert counter.calls == 0
    listeners.notify()
    assert counter.calls == 1
