"""Where sessions go: least loaded first, then the same engine, unless it fails or is far too full."""

from __future__ import annotations

from kestrl_rollout.engine.seeds import turn_seed
from kestrl_rollout.engine.sessions import AVOID_SECONDS, SessionsByEngine

ENGINES = ("a", "b", "c")


def filled(**active: int) -> SessionsByEngine:
    sessions = SessionsByEngine()
    for engine, count in active.items():
        for index in range(count):
            sessions.place(f"{engine}{index}", (engine,), now=0)
    return sessions


def test_first_turns_spread() -> None:
    sessions = SessionsByEngine()
    assert [sessions.place(str(index), ENGINES, now=0) for index in range(6)] == ["a", "b", "c", "a", "b", "c"]


def test_later_turns_stick() -> None:
    sessions = filled(a=1, b=3)
    assert sessions.place("b0", ENGINES, now=0) == "b"
    assert sessions.active("b") == 3


def test_an_ended_session_makes_room() -> None:
    sessions = filled(a=2, b=1)
    for session in ("a0", "a1", "a1", "unknown"):
        sessions.finish(session)
    assert (sessions.active("a"), sessions.active("b")) == (0, 1)
    assert sessions.place("new", ("b", "a"), now=0) == "a"


def test_a_large_imbalance_lets_a_session_move() -> None:
    sessions = filled(a=9, b=3)
    assert sessions.place("a0", ("a", "b"), now=0) == "b"
    assert (sessions.active("a"), sessions.active("b")) == (8, 4)


def test_a_small_one_does_not() -> None:
    assert filled(a=8).place("a0", ("a", "b"), now=0) == "a"
    assert filled(a=9, b=4).place("a0", ("a", "b"), now=0) == "a"


def test_an_engine_that_no_longer_serves_the_policy_is_left() -> None:
    sessions = filled(a=1)
    assert sessions.place("a0", ("b",), now=0) == "b"
    assert sessions.active("a") == 0


def test_a_failed_turn_moves_and_others_avoid_the_engine_for_a_while() -> None:
    sessions = filled(a=1, b=2)
    sessions.failed("a", now=0)
    assert sessions.place("a0", ("a", "b"), now=0, exclude=("a",)) == "b"
    assert sessions.place("new", ("a", "b"), now=AVOID_SECONDS - 0.1) == "b"
    assert sessions.place("newer", ("a", "b"), now=AVOID_SECONDS) == "a"


def test_an_engine_that_answers_again_is_used_again() -> None:
    sessions = filled(b=2)
    sessions.failed("a", now=0)
    sessions.answered("a")
    assert sessions.place("new", ("a", "b"), now=0) == "a"


def test_the_only_engine_is_used_however_it_fared() -> None:
    sessions = SessionsByEngine()
    sessions.failed("a", now=0)
    assert sessions.place("new", ("a",), now=0, exclude=("a",)) == "a"


def test_failures_are_forgotten() -> None:
    sessions = SessionsByEngine()
    for index in range(100):
        sessions.failed(f"engine-{index}", now=index * AVOID_SECONDS)
    assert len(sessions._avoid_until) == 1


def test_a_turns_seed_is_the_same_in_every_process() -> None:
    assert turn_seed(7, 0) == 7127318741406446
    assert len({turn_seed(seed, turn) for seed in range(20) for turn in range(20)}) == 400
    assert all(0 <= turn_seed(seed, 0) < 2**63 for seed in range(100))
