"""Idle time by a scripted clock, and in a run with engines that count theirs."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kestrl.api.inference.v1 import inference_pb2 as ipb
from kestrl.runstate.history import IdleTime
from kestrl_learner.progress.idle_clock import LATE_SECONDS, IdleClock
from kestrl_learner.run import LearnerRun


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Step:
    """A clock of idle time whose time is scripted."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.idle = IdleClock(self.clock)

    def waits(self, what: Any, seconds: float) -> None:
        with self.idle.waiting(what):
            self.clock.now += seconds

    def works(self, seconds: float) -> None:
        self.clock.now += seconds


@pytest.fixture
def step() -> Step:
    return Step()


def test_waits_of_the_learner_are_summed_by_what_it_waited_for(step: Step) -> None:
    step.waits("groups", 3)
    step.works(5)
    step.waits("policy", 2)
    step.waits("groups", 1)
    idle = step.idle.lap()
    assert (idle.seconds, idle.learner) == (11, {"groups": 4, "policy": 2})
    assert idle.learner_share == pytest.approx(6 / 11)
    assert (idle.engines, idle.engine_share) == ({}, None), "no engine has said anything"
    assert step.idle.lap() == IdleTime(), "the next step has begun"


def test_a_wait_that_goes_on_is_split_between_two_steps(step: Step) -> None:
    with step.idle.waiting("groups"):
        step.works(3)
        first = step.idle.lap()
        step.works(4)
    assert (first.learner, step.idle.lap().learner) == ({"groups": 3}, {"groups": 4})


def test_a_wait_ends_with_its_failure(step: Step) -> None:
    with pytest.raises(RuntimeError), step.idle.waiting("groups"):
        raise RuntimeError
    step.works(4)
    assert step.idle.lap().learner == {}


def test_an_engine_without_episodes_waits_for_the_update_or_for_work(step: Step) -> None:
    step.idle.observe("engine-0", idle=0, observed=0)
    step.works(6)  # the update
    step.waits("groups", 2)
    step.idle.observe("engine-0", idle=8, observed=8)
    idle = step.idle.lap()
    assert idle.engines == {"update": pytest.approx(6), "work": pytest.approx(2)}
    assert (idle.engine_seconds, idle.engine_share) == (8, 1)


def test_an_engine_beside_running_episodes_waits_for_their_tools(step: Step) -> None:
    step.idle.observe("engine-0", idle=0, observed=0)
    step.idle.count_episodes(4)
    step.waits("groups", 60)
    step.idle.observe("engine-0", idle=40, observed=60)
    idle = step.idle.lap()
    assert idle.engines == {"tools": pytest.approx(40 - LATE_SECONDS), "update": pytest.approx(LATE_SECONDS)}
    assert idle.engine_share == pytest.approx(40 / 60)


def test_counts_that_arrive_late_are_no_waits_for_tools(step: Step) -> None:
    step.works(50)
    step.idle.observe("engine-0", idle=47, observed=47)  # as of three seconds ago
    step.works(10)
    step.idle.observe("engine-0", idle=60, observed=60)
    assert "tools" not in step.idle.lap().engines


def test_an_engine_that_starts_anew_or_stops_answering_is_not_counted_meanwhile(step: Step) -> None:
    step.idle.observe("engine-0", idle=50, observed=70)
    step.works(10)
    step.idle.observe("engine-0", idle=1, observed=2)
    step.idle.forget("engine-0")
    step.works(10)
    step.idle.observe("engine-0", idle=9, observed=12)
    assert step.idle.lap().engine_seconds == 0


def test_a_clock_that_goes_back_counts_nothing(step: Step) -> None:
    step.waits("groups", 5)
    step.waits("groups", -3)
    assert step.idle.lap().learner == {"groups": 5}


MOVES = st.lists(
    st.tuples(
        st.sampled_from(["wait", "work", "begin", "end", "look", "restart", "lap"]),
        st.floats(min_value=-1, max_value=9),
        st.floats(min_value=0, max_value=1),
    ),
    max_size=30,
)


@given(moves=MOVES)
def test_idle_time_is_never_negative_and_never_more_than_the_time(moves: list[tuple[str, float, float]]) -> None:
    step, episodes, idle, observed = Step(), 0, 0.0, 0.0
    laps: list[IdleTime] = []
    for move, seconds, share in moves:
        if move == "wait":
            step.waits("groups", seconds)
        elif move in {"begin", "end"}:
            change = 1 if move == "begin" else -min(1, episodes)
            episodes += change
            step.idle.count_episodes(change)
        elif move == "lap":
            laps.append(step.idle.lap())
        elif move == "restart":
            idle = observed = 0.0
        else:
            step.works(seconds)
        if move == "look":
            idle, observed = idle + share * max(0.0, seconds), observed + max(0.0, seconds)
            step.idle.observe("engine-0", idle=idle, observed=observed)
    for lap in (*laps, step.idle.lap()):
        assert all(seconds >= 0 for seconds in (lap.seconds, *lap.learner.values(), *lap.engines.values()))
        assert sum(lap.learner.values()) <= lap.seconds + 1e-6
        assert sum(lap.engines.values()) <= lap.engine_seconds + 1e-6


@pytest.mark.usefixtures("quick")
async def test_a_run_reports_the_idle_time_of_its_steps(staged: Any) -> None:
    async with staged() as stage:
        answered = stage.agents[0].GetEngine
        observed = 0.0

        async def counting(request: Any, context: Any) -> ipb.GetEngineResponse:
            nonlocal observed
            answer = await answered(request, context)
            observed += 2.0
            answer.idle.CopyFrom(ipb.EngineIdle(idle=observed / 2, observed=observed))
            return answer

        stage.agents[0].GetEngine = counting
        run = LearnerRun(stage.settings)
        await run.main()
        total = run.progress.state.history.idle
        steps = [stage.read(f"metrics/{step:06d}.json")["idle"] for step in range(1, 7)]
        assert sum(step["seconds"] for step in steps) == pytest.approx(total.seconds, abs=0.1)
        assert total.learner["groups"] > 0
        assert total.learner["policy"] > 0
        assert total.engine_seconds > 0
        assert total.engine_share == pytest.approx(0.5, abs=0.01)
        assert stage.summary["state"]["history"]["idle"]["learner"] == total.learner
        assert run.progress.state.last_step.idle.seconds == pytest.approx(steps[-1]["seconds"], abs=0.01)
