"""The cycle of an engine that gives its device to the learner: the machine, and the agent of an engine that sleeps."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kestrl.errors import KestrlError
from kestrl_inference.turns import Turn, TurnCommand, TurnEvent, TurnState, after

ORDERS = {
    TurnCommand.SLEEP: (TurnEvent.SLEPT, TurnEvent.STAYED, TurnEvent.FAILED),
    TurnCommand.WAKE: (TurnEvent.WOKE, TurnEvent.FAILED),
    TurnCommand.PROVE: (TurnEvent.PROVED, TurnEvent.FAILED),
}


class World:
    """An engine and its learner as the machine moves them."""

    def __init__(self) -> None:
        self.turn = Turn()
        self.order: TurnCommand | None = None
        """The order that is being carried out."""
        self.proved = True
        """Whether the engine was verified since it last slept."""

    def happens(self, event: TurnEvent) -> None:
        if event is TurnEvent.LOST:
            self.order, self.proved = None, True
        elif self.order is not None and event in ORDERS[self.order]:
            self.order = None
        self.turn, command = after(self.turn, event)
        if command in ORDERS:
            assert self.order is None, f"{command} while {self.order} is carried out"
            self.order = command
        if command is TurnCommand.SLEEP:
            assert self.turn.wanted, "no engine sleeps unless the learner wants the device"
        if event is TurnEvent.SLEPT:
            self.proved = False
        if event is TurnEvent.PROVED:
            self.proved = True
        if self.turn.state is TurnState.AWAKE:
            assert self.proved, "nobody samples from an engine that slept and was not verified"
        assert (self.turn.state in {TurnState.FALLING_ASLEEP, TurnState.WAKING, TurnState.PROVING}) == (
            self.order is not None
        ), "an order is being carried out in these states, and in no others"

    def possible(self) -> list[TurnEvent]:
        events = [TurnEvent.ASKED, TurnEvent.RETURNED, TurnEvent.LOST]
        events += [TurnEvent.BACK, TurnEvent.RESTING] if self.turn.state is TurnState.GONE else []
        return events + list(ORDERS.get(self.order, ()) if self.order else ())


@given(st.lists(st.integers(min_value=0, max_value=99), max_size=60))
def test_no_order_of_events_lets_an_unverified_engine_sample_or_two_orders_run(choices: list[int]) -> None:
    world = World()
    for choice in choices:
        events = world.possible()
        world.happens(events[choice % len(events)])


@given(st.lists(st.integers(min_value=0, max_value=99), max_size=60), st.booleans())
def test_from_every_state_the_one_who_is_to_have_the_device_gets_it(choices: list[int], wanted: bool) -> None:
    world = World()
    for choice in choices:
        events = world.possible()
        world.happens(events[choice % len(events)])
    world.happens(TurnEvent.ASKED if wanted else TurnEvent.RETURNED)
    for _ in range(6):
        if world.turn.state is TurnState.ENDING:
            world.happens(TurnEvent.LOST)
        elif world.turn.state is TurnState.GONE:
            world.happens(TurnEvent.BACK)
        elif world.order is not None:
            world.happens(ORDERS[world.order][0])
    assert world.turn == Turn(TurnState.ASLEEP if wanted else TurnState.AWAKE, wanted)


async def drained(stage: Any) -> None:
    """Waits until the engine has been asked to drain."""
    before = stage.engine.drains
    while stage.engine.drains == before:  # noqa: ASYNC110 - the fake has no event for it
        await asyncio.sleep(0.01)


@pytest.fixture
async def turns(make_stage: Any, engine: Any) -> Any:
    """A stage whose engine shares its device in turns, and has proved version 1."""
    engine.turns = 0
    stage = await make_stage(turns=True)
    await stage.look()
    await stage.load(stage.publish(1))
    return stage


async def test_an_engine_sleeps_and_is_verified_again_before_it_is_ready(turns: Any) -> None:
    assert await turns.state() == "READY"
    await turns.sleep()
    assert turns.engine.asleep
    assert (await turns.state(), await turns.proved()) == ("ASLEEP", {1: False})
    scored = len(turns.engine.scored)
    await turns.look()
    await turns.look()
    assert len(turns.engine.scored) == scored, "nothing is verified while it sleeps"
    await turns.wake()
    assert (await turns.state(), await turns.proved()) == ("READY", {1: True})
    assert turns.engine.scored[scored:] == [turns.engine.prompts[scored].model, turns.engine.base_model]
    assert turns.engine.sleeps == ["sleep", "wake"]
    assert turns.engine.disturbed == []


async def test_a_load_of_a_sleeping_engine_waits_for_it(turns: Any) -> None:
    await turns.sleep()
    loading = asyncio.create_task(turns.load(turns.publish(2)))
    await turns.look()
    assert not loading.done()
    await turns.wake()
    await loading
    assert await turns.proved() == {1: True, 2: True}
    assert turns.engine.disturbed == []


async def test_an_engine_does_not_sleep_before_its_requests_have_ended(turns: Any) -> None:
    turns.engine.turns = 1
    with pytest.raises(KestrlError, match="1 requests did not end"):
        await turns.sleep(timeout=3)
    assert not turns.engine.asleep
    assert turns.engine.sleeps == []
    await turns.look()
    assert (await turns.state(), await turns.proved()) == ("READY", {1: True}), "it goes on, verified"


async def test_an_engine_that_falls_asleep_slowly_keeps_the_learner_s_turn(turns: Any) -> None:
    turns.engine.turns = 1
    falling = asyncio.create_task(turns.sleep(lease=0.0))
    await drained(turns)
    await turns.look()
    assert await turns.state() == "ASLEEP", "the lease begins when it sleeps"
    turns.engine.turns = 0
    await falling
    assert turns.engine.asleep


async def test_weights_may_move_for_longer_than_a_call_takes(make_stage: Any, engine: Any) -> None:
    engine.turns, engine.move_seconds = 0, 0.6
    stage = await make_stage(turns=True, load_seconds=0.4, move_seconds=30.0)
    await stage.look()
    await stage.sleep()
    assert engine.asleep
    await stage.wake()
    assert engine.sleeps == ["sleep", "wake"]


async def test_an_engine_that_moves_its_weights_for_too_long_is_ended(make_stage: Any, engine: Any) -> None:
    engine.turns, engine.move_seconds = 0, 30.0
    stage = await make_stage(turns=True, move_seconds=0.2)
    await stage.look()
    with pytest.raises(KestrlError, match=r"POST /sleep\?level=1&mode=wait: no answer in 0.2 s"):
        await stage.sleep()
    await asyncio.wait_for(engine.ended.wait(), 5)


async def test_the_learner_may_return_the_device_before_it_has_it(turns: Any) -> None:
    turns.engine.turns = 1
    falling = asyncio.create_task(turns.sleep())
    await drained(turns)
    waking = asyncio.create_task(turns.wake())
    with pytest.raises(KestrlError, match="falling asleep: another request"):
        await falling
    turns.engine.turns = 0
    await waking
    assert turns.engine.sleeps == ["sleep", "wake"]
    assert (await turns.state(), await turns.proved()) == ("READY", {1: True})


async def test_an_engine_that_answers_and_does_not_wake_is_ended(turns: Any) -> None:
    await turns.sleep()
    turns.engine.wakes = False
    with pytest.raises(KestrlError, match="answered that it would wake, and did not"):
        await turns.wake()
    await asyncio.wait_for(turns.engine.ended.wait(), 5)
    assert await turns.proved() == {1: False}


async def test_an_engine_that_computes_otherwise_after_its_sleep_is_ended(turns: Any) -> None:
    await turns.sleep()
    (name,) = turns.engine.adapters
    turns.engine.swapped[name] = "other weights"
    with pytest.raises(KestrlError, match="it answers neither as the adapter"):
        await turns.wake()
    await asyncio.wait_for(turns.engine.ended.wait(), 5)
    turns.engine.swapped.clear()
    turns.engine.healthy = True  # its supervisor has started it anew
    turns.watch._is_down(await turns.watch.engine.look())
    await turns.look()
    assert await turns.state() == "READY"


async def test_a_base_that_computes_otherwise_ends_the_engine(turns: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    await turns.sleep()
    scores = turns.engine.scores
    monkeypatch.setattr(turns.engine, "scores", lambda weights, ids: scores(weights or "other", ids))
    with pytest.raises(KestrlError, match="base model as before it slept"):
        await turns.wake()
    await asyncio.wait_for(turns.engine.ended.wait(), 5)


async def test_an_engine_wakes_when_its_learner_has_died(turns: Any) -> None:
    await turns.sleep(lease=0.0)
    await turns.look()
    await turns.watch.sleeper.wait_awake(5)
    assert turns.engine.sleeps == ["sleep", "wake"]
    assert await turns.state() == "READY"


async def test_an_engine_that_dies_asleep_sleeps_again_before_it_loads_anything(turns: Any) -> None:
    await turns.sleep()
    await turns.engine.stop()
    await turns.look()
    assert await turns.state() == "DOWN"
    await turns.engine.start()
    loads = len(turns.engine.calls)
    await turns.look()
    await turns.sleep()
    assert turns.engine.asleep
    assert len(turns.engine.calls) == loads
    await turns.wake()
    assert await turns.proved() == {1: True}
    assert turns.engine.disturbed == []


async def test_an_engine_that_was_started_anew_between_two_looks_sleeps_again(turns: Any) -> None:
    await turns.sleep()
    await turns.engine.stop()
    await turns.engine.start()
    await turns.sleep()
    assert turns.engine.asleep
    assert turns.engine.sleeps == ["sleep", "sleep"]
    await turns.look()
    assert await turns.state() == "ASLEEP"
    await turns.wake()
    assert (await turns.state(), await turns.proved()) == ("READY", {1: True}), "it has loaded its versions again"


async def test_an_agent_that_was_restarted_leaves_a_sleeping_engine_asleep(
    turns: Any, make_stage: Any, engine: Any
) -> None:
    await turns.sleep()
    second_agent = await make_stage(turns=True)
    await second_agent.look()
    assert await second_agent.state() == "ASLEEP"
    assert engine.asleep
    await second_agent.wake()
    await second_agent.look()
    assert await second_agent.state() == "READY"
    assert engine.adapters == {}, "adapters of the earlier agent are unloaded"
    await second_agent.load(second_agent.publish(2))
    assert engine.base_model in engine.scored[-2:], "it had no version whose manifest has the base model's log-probs"
    await second_agent.load(second_agent.publish(3))
    assert engine.base_model not in engine.scored[-1:], "once is enough"
    assert engine.disturbed == []


async def test_an_engine_without_routes_for_sleep_says_so_and_goes_on(make_stage: Any, engine: Any) -> None:
    engine.turns, engine.can_sleep = 0, False
    await engine.stop()
    await engine.start()
    stage = await make_stage(turns=True)
    await stage.look()
    await stage.load(stage.publish(1))
    with pytest.raises(KestrlError, match=r"cannot sleep; set spec\.inference\.sharing: split"):
        await stage.sleep()
    await stage.look()
    assert (await stage.state(), await stage.proved()) == ("READY", {1: True})


async def test_an_engine_that_cannot_sleep_says_so(make_stage: Any, engine: Any) -> None:
    engine.turns = 0
    stage = await make_stage()
    await stage.look()
    with pytest.raises(KestrlError, match="was not started to share"):
        await stage.sleep()
