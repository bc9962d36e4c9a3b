"""Engines that come and go while groups run: turns move with their tokens, and nothing fails."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from tests.fakes.engine import Completion, Fault, Prompt

from kestrl._shared import rpc
from kestrl._shared.credentials import Secret
from kestrl.api.rollout.v1 import rollout_pb2 as pb
from kestrl.api.rollout.v1 import rollout_pb2_grpc as stubs
from kestrl.engines import DRAINING
from kestrl_rollout.engine.client import EngineAddress
from kestrl_rollout.engine.engine_set import EARLY, EngineSet, EngineSets

CALL = '<tool_call>{"name": "search", "arguments": {"word": "kestrel"}}</tool_call>'


def address(number: int) -> EngineAddress:
    return EngineAddress(name=f"engine-{number}", url=f"http://engine-{number}")


async def update(stage: Any, *engines: int, revision: int) -> None:
    stub: Any = stubs.RolloutServiceStub(stage.channel)
    named = [pb.Engine(name=f"engine-{number}", url=stage.engines[number].url) for number in engines]
    await rpc.call(
        stub.UpdateEngines,
        pb.UpdateEnginesRequest(engines=named, engines_revision=revision),
        pb.UpdateEnginesResponse,
        timeout=5,
        peer="rollout",
        token=Secret.LEARNER_TO_ROLLOUT.here(),
    )


async def test_a_turn_moves_as_often_as_engines_go_away(make_stage: Any) -> None:
    stage = await make_stage(engines=4)
    stage.says("Done.")
    for gone in stage.engines[:3]:
        gone.script = lambda prompt: Fault()
    episode = await stage.episode()
    assert episode.failure is None
    assert [turn.engine for turn in episode.turns] == ["engine-3"]
    moved = [engine.prompts[0] for engine in stage.engines]
    assert len({tuple(prompt.token_ids) for prompt in moved}) == 1, "the tokens move with the turn"
    assert len({prompt.sampling["seed"] for prompt in moved}) == 1


async def test_a_running_episode_leaves_an_engine_that_is_named_no_more(make_stage: Any) -> None:
    stage = await make_stage(engines=2)

    async def then_the_other(prompt: Prompt) -> Completion:
        await update(stage, 1, revision=1)
        return Completion(token_ids=stage.ids(f"{CALL}<|im_end|>"))

    stage.says(CALL, "Done.")
    stage.engines[0].script = then_the_other
    episode = await stage.episode()
    assert episode.failure is None
    assert [turn.engine for turn in episode.turns] == ["engine-0", "engine-1"]


async def test_a_running_episode_may_use_an_engine_that_joins(make_stage: Any) -> None:
    stage = await make_stage(engines=2)
    stage.says("Done.")

    async def gone(prompt: Prompt) -> Fault:
        await update(stage, 0, 1, revision=1)
        return Fault()

    stage.engines[0].script = gone
    request = stage.request()
    del request.engines[1]
    events = [event async for event in stage.stream(request)]
    (episode,) = events[-1].episodes
    assert episode.failure is None
    assert [turn.engine for turn in episode.turns] == ["engine-1"]


async def test_a_turn_waits_while_no_engine_serves_its_policy(make_stage: Any) -> None:
    stage = await make_stage(engines=2)
    stage.says(CALL, "Done.")

    async def none_left(prompt: Prompt) -> Completion:
        await update(stage, revision=1)
        return Completion(token_ids=stage.ids(f"{CALL}<|im_end|>"))

    stage.engines[0].script = none_left
    request = stage.request()
    del request.engines[1]
    found = asyncio.Event()
    stage.tools.handlers["search"] = lambda _: (found.set(), "found")[1]
    running = asyncio.create_task(anext_group(stage, request))
    await asyncio.wait_for(found.wait(), 10)
    await update(stage, 1, revision=2)
    (episode,) = (await running).episodes
    assert episode.failure is None
    assert [turn.engine for turn in episode.turns] == ["engine-0", "engine-1"]


def drains(_prompt: Prompt) -> Fault:
    """What the guard of a draining engine answers."""
    error = {"message": "the engine drains", "type": DRAINING, "code": 503}
    return Fault(status=503, body=json.dumps({"error": error}))


async def test_a_turn_that_a_draining_engine_refuses_moves_and_is_no_failure(make_stage: Any) -> None:
    stage = await make_stage(engines=4)
    stage.says(CALL, "Done.")
    for leaving in stage.engines[:3]:
        leaving.script = drains
    episode = await stage.episode()
    assert episode.failure is None
    assert [turn.engine for turn in episode.turns] == ["engine-3"] * 2
    assert episode.metrics["engine_retries"] == 0
    moved = [engine.prompts[0] for engine in stage.engines]
    assert len({tuple(prompt.token_ids) for prompt in moved}) == 1, "the tokens move with the turn"
    assert len({prompt.sampling["seed"] for prompt in moved}) == 1


async def test_a_turn_of_the_only_engine_that_drains_waits_for_another(make_stage: Any) -> None:
    stage = await make_stage(engines=2)
    stage.says("Done.")
    refused = asyncio.Event()
    stage.engines[0].script = lambda prompt: (refused.set(), drains(prompt))[1]
    request = stage.request(size=1)
    del request.engines[1]
    running = asyncio.create_task(anext_group(stage, request))
    await asyncio.wait_for(refused.wait(), 10)
    await update(stage, 0, revision=1)  # the learner has not heard of it
    await update(stage, revision=2)
    await update(stage, 1, revision=3)
    (episode,) = (await asyncio.wait_for(running, 20)).episodes
    assert episode.failure is None
    assert [turn.engine for turn in episode.turns] == ["engine-1"]
    assert len(stage.engines[0].prompts) == 1, "it is not asked again"


async def anext_group(stage: Any, request: Any) -> Any:
    return [event async for event in stage.stream(request)][-1]


async def test_an_older_list_changes_nothing() -> None:
    sets = EngineSets()
    with sets.opened("policy", [address(0)], 5):
        sets.update("policy", [address(1)], 4)
        assert set(sets["policy"].addresses) == {"engine-0"}
        with sets.opened("policy", [address(2)], 3):
            assert set(sets["policy"].addresses) == {"engine-0"}
        sets.update("policy", [address(1)], 6)
        assert set(sets["policy"].addresses) == {"engine-1"}
    sets.update("policy", [address(1)], 7)
    with pytest.raises(KeyError):
        sets["policy"]


async def test_a_list_that_overtakes_the_first_group_of_its_version_counts() -> None:
    sets = EngineSets()
    sets.update("policy", [address(1)], 7)
    with sets.opened("policy", [address(0)], 6):
        assert set(sets["policy"].addresses) == {"engine-1"}
    with sets.opened("policy", [address(0)], 6):
        assert set(sets["policy"].addresses) == {"engine-0"}
    for number in range(100):
        sets.update(f"policy-{number}", [address(1)], 8)
    assert len(sets._early) == EARLY


async def test_engines_that_come_wake_who_waits() -> None:
    engines = EngineSet("p", [], 1)
    waiting = asyncio.create_task(engines.available())
    engines.update([], 2)
    engines.update([address(0)], 3)
    assert set(await asyncio.wait_for(waiting, 5)) == {"engine-0"}


async def test_half_of_the_engines_killed_at_once_three_times_fails_no_episode(make_stage: Any) -> None:
    """As on spot nodes: the learner names those that come back, and learns of a kill later than the turns do."""
    stage = await make_stage(engines=4, concurrency=32)
    turns = [CALL, CALL, CALL, "Done."]
    stage.says(*turns)
    calm = await anext_group(stage, stage.request(size=16))
    says, sampled = stage.engines[0].script, 0
    one_at_a_time, kills = asyncio.Lock(), list[asyncio.Task[None]]()

    async def kill_half(number: int) -> None:
        async with one_at_a_time:
            killed = stage.engines[:2] if number == 24 else stage.engines[2:]
            for engine in stage.engines:
                if engine not in killed and not engine.running:
                    await engine.start()
            await update(stage, 0, 1, 2, 3, revision=number)
            for engine in killed:
                await engine.stop()

    async def then_half_are_killed(prompt: Prompt) -> Any:
        nonlocal sampled
        sampled += 1
        if sampled in {8, 24, 40}:
            # A task of its own: an engine that stops cancels its handlers, of which this may be one.
            kills.append(asyncio.create_task(kill_half(sampled)))
            await asyncio.shield(kills[-1])
        return says(prompt)

    for engine in stage.engines:
        engine.script = then_half_are_killed
    spot = await anext_group(stage, stage.request(size=16, group_id="g-2"))
    await asyncio.gather(*kills)
    assert sampled > 40
    assert [episode.failure for episode in spot.episodes] == [None] * 16
    assert [len(episode.turns) for episode in spot.episodes] == [4] * 16
    assert [list(row.token_ids) for each in spot.episodes for row in each.rows] == [
        list(row.token_ids) for each in calm.episodes for row in each.rows
    ]
    assert {turn.engine for episode in spot.episodes for turn in episode.turns} > {"engine-0", "engine-2"}
