"""Groups: streaming, concurrency, deadlines, cancellation, draining, and requests that cannot be run."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest
from tests.fakes.engine import Completion

from kestrl.api.judge.v1 import judge_pb2
from kestrl.episode import Group, Scenario, StopReason
from kestrl.errors import Boundary, FailureError


def hold(stage: Any) -> tuple[asyncio.Event, asyncio.Event]:
    """Makes the engine wait: (a request has arrived, let them go)."""
    arrived, go = asyncio.Event(), asyncio.Event()

    def script(prompt: Any) -> Completion:
        arrived.set()
        return Completion(token_ids=stage.ids("Hello.<|im_end|>"), after=go)

    stage.engine.script = script
    return arrived, go


async def test_ended_episodes_are_reported_and_the_scored_group_comes_last(stage: Any) -> None:
    slow = asyncio.Event()
    stage.engine.script = lambda prompt: Completion(
        token_ids=stage.ids("Hello.<|im_end|>"), after=slow if prompt.index == 0 else None
    )
    ended, group = 0, None
    async for event in stage.stream(stage.request(size=3)):
        assert group is None
        if isinstance(event, Group):
            group = event
        else:
            ended += event
            assert (await stage.capacity()).running <= 3 - ended
        if ended == 2 and not slow.is_set():
            assert (await stage.capacity()).running == 1
            slow.set()
    assert (ended, slow.is_set()) == (3, True)
    assert group is not None
    assert [episode.reward for episode in group.episodes] == [0.0, 1.0, 2.0]
    assert [episode.seed for episode in group.episodes] == [7, 8, 9]
    assert stage.judge.requests[0].max_turns == 6
    assert group.scenario.ground_truth == "42"


async def test_a_judge_model_gets_the_tools_and_its_details_are_kept(make_stage: Any) -> None:
    for describes in (True, False):
        stage = await make_stage(offers_tools=True, describes_tools=describes)
        stage.engine.script = lambda _, stage=stage: Completion(token_ids=stage.ids("Hello.<|im_end|>"))
        stage.judge.details_json = '{"ruler": {"calls": []}}'
        stage.judge.score = lambda episode: judge_pb2.EpisodeScore(
            episode_id=episode.id, reward=0.5, details_json='{"ruler": {"explanation": "because"}}', answer="42"
        )
        group = await stage.run(size=2)
        sent = json.loads(stage.judge.requests[0].group.tools_json or "[]")
        assert [tool["type"] for tool in sent] == (["function"] * len(sent))
        assert bool(sent) is describes
        assert list(group.tools) == sent
        assert group.scoring == {"ruler": {"calls": []}}
        assert [episode.answer for episode in group.episodes] == ["42", "42"]
        assert [episode.scoring for episode in group.episodes] == [{"ruler": {"explanation": "because"}}] * 2


async def test_no_more_episodes_run_at_once_than_the_worker_has_slots(make_stage: Any) -> None:
    stage = await make_stage(concurrency=2)
    arrived, go = hold(stage)
    running = asyncio.create_task(stage.run(size=5))
    await arrived.wait()
    capacity = await stage.capacity()
    assert (capacity.concurrency, capacity.running, capacity.draining) == (2, 5, False)
    await stage.capacity()
    assert len(stage.engine.prompts) <= 2
    go.set()
    assert len((await running).episodes) == 5
    assert (await stage.capacity()).running == 0


async def test_groups_share_the_slots(make_stage: Any) -> None:
    stage = await make_stage(concurrency=1)
    stage.says("Hello.")
    groups = await asyncio.gather(*(stage.run(group_id=f"g-{index}", size=2) for index in range(3)))
    assert [group.id for group in groups] == ["g-0", "g-1", "g-2"]
    assert all(episode.failure is None for group in groups for episode in group.episodes)


async def test_nobody_waits_for_the_end_of_a_tool_session_but_its_slot(
    make_stage: Any, call_text: Callable[..., str]
) -> None:
    stage = await make_stage(concurrency=1)
    stage.tools.close_gate = asyncio.Event()
    stage.says(call_text("search", word="a"), "Done.")
    episode = await stage.episode(deadlines={"tool": 5, "turn": 6, "episode": 7, "group": 8})
    assert (episode.failure, episode.reward) == (None, 0.0)
    assert stage.tools.closed == []
    second = asyncio.create_task(stage.run(group_id="g-2"))
    while (await stage.capacity()).running == 0:  # noqa: ASYNC110 - a worker's capacity has no event
        await asyncio.sleep(0)
    assert len(stage.tools.opened) == 1
    stage.tools.close_gate.set()
    assert (await second).episodes[0].failure is None
    assert await stage.closed() == ["g-1/0", "g-2/0"]


async def test_turns_of_one_episode_stay_on_one_engine_and_sessions_end(
    make_stage: Any, call_text: Callable[..., str]
) -> None:
    stage = await make_stage(engines=2)
    stage.says(call_text("search", word="a"), call_text("search", word="b"), "Done.")
    group = await stage.run(size=4)
    used = [{turn.engine for turn in episode.turns} for episode in group.episodes]
    assert all(len(engines) == 1 for engines in used)
    assert {engine for engines in used for engine in engines} == {"engine-0", "engine-1"}
    sessions = stage.groups._episodes.engine_sets.sessions
    assert (sessions.active("engine-0"), sessions.active("engine-1")) == (0, 0)


async def test_the_judge_gets_the_scenario_as_the_learner_encoded_it(stage: Any) -> None:
    stage.says("Done.")
    request = stage.request(size=2)
    request.scenario.ground_truth_json = '{ "answer": 1.50 }'
    *_, group = [event async for event in stage.stream(request)]
    assert group.scenario.ground_truth == {"answer": 1.5}
    (judged,) = stage.judge.requests
    assert judged.group.scenario == request.scenario


@pytest.mark.parametrize(
    ("deadlines", "problem"),
    [
        ({"tool": 0}, r"deadlines\.tool: is 0"),
        ({"tool": 21}, r"deadlines\.turn: 20 s does not leave room for tool \(21 s\); deadlines nest: tool < turn"),
        ({"tool": 20}, r"deadlines\.turn: 20 s does not leave room"),
        ({"turn": 31}, r"deadlines\.episode: 30 s does not leave room for turn"),
        ({"episode": 41}, r"deadlines\.group: 40 s does not leave room for episode"),
        ({"group": 0}, r"deadlines\.group: 0 s does not leave room"),
        ({"episode": float("nan")}, r"deadlines\.episode: nan s does not leave room"),
    ],
)
async def test_deadlines_must_nest(stage: Any, deadlines: dict[str, float], problem: str) -> None:
    with pytest.raises(FailureError, match=problem) as refused:
        await stage.run(deadlines=deadlines)
    assert refused.value.code == "invalid_request"


async def test_the_episodes_deadline_counts_all_turns(stage: Any, call_text: Callable[..., str]) -> None:
    stage.says(call_text("search", word="a"))

    async def search(arguments: dict[str, str]) -> str:
        await asyncio.sleep(0.1)  # so that the deadline comes before the context is full
        return "found"

    stage.tools.handlers["search"] = search
    limits = {"tool": 1.9, "turn": 1.95, "episode": 2.0, "group": 20}
    episode = await stage.episode(deadlines=limits, sampling={"max_turns": 1000, "max_tokens": 10**6})
    assert episode.failure is not None
    assert episode.failure.code == "episode_deadline"
    assert episode.failure.boundary in {Boundary.TOOL, Boundary.ENGINE}
    assert len(episode.turns) > 1
    assert await stage.closed() == ["g-1/0"]


async def test_the_groups_deadline_ends_those_that_never_got_a_slot(make_stage: Any) -> None:
    stage = await make_stage(concurrency=1)
    hold(stage)
    group = await stage.run(size=3, deadlines={"tool": 0.05, "turn": 2.0, "episode": 3.4, "group": 3.5})
    # The second began after 2 s and had its time in full; 1.5 s are left in which it may begin late.
    codes = sorted(episode.failure.code for episode in group.episodes if episode.failure)
    assert codes == ["group_deadline", "turn_deadline", "turn_deadline"]


async def test_the_groups_deadline_counts_from_the_last_episode_that_began(make_stage: Any) -> None:
    stage = await make_stage(concurrency=1)
    stage.says("Hello.")
    answer, score = stage.engine.script, stage.judge.score

    async def slowly(prompt: Any) -> Any:
        await asyncio.sleep(1.0)
        return answer(prompt)

    async def slow_score(episode: Any) -> Any:
        await asyncio.sleep(0.1)
        return score(episode)

    stage.engine.script, stage.judge.score = slowly, slow_score
    group = await stage.run(size=3, deadlines={"tool": 0.1, "turn": 2.5, "episode": 2.6, "group": 2.7})
    assert [(episode.failure, episode.reward) for episode in group.episodes] == [(None, 0.0), (None, 1.0), (None, 2.0)]
    assert all(episode.seconds < 2.6 for episode in group.episodes), (
        "the time that one waited for its slot is not its own"
    )


async def test_the_groups_deadline_includes_scoring(stage: Any) -> None:
    async def never(episode: Any) -> None:
        await asyncio.Event().wait()

    stage.judge.score = never
    stage.says("Hello.")
    episode = await stage.episode(deadlines={"tool": 0.1, "turn": 0.9, "episode": 0.95, "group": 1.0})
    assert episode.failure is not None
    assert (episode.failure.boundary, episode.failure.code) == (Boundary.JUDGE, "group_deadline")
    assert episode.stop_reason is StopReason.ANSWERED


async def test_a_client_that_goes_cancels_episodes_and_closes_their_sessions(
    stage: Any, call_text: Callable[..., str]
) -> None:
    called = asyncio.Event()

    async def hang(arguments: dict[str, str]) -> str:
        called.set()
        await asyncio.Event().wait()
        return ""

    stage.tools.handlers["search"] = hang
    stage.says(call_text("search", word="a"))
    client = asyncio.create_task(stage.run())
    await called.wait()
    client.cancel()
    with pytest.raises(asyncio.CancelledError):
        await client
    await stage.tools.all_closed.wait()
    assert stage.tools.closed == ["g-1/0"]
    groups = {task for task in asyncio.all_tasks() if task.get_name() == "group-g-1"}
    if groups:
        await asyncio.wait(groups)
    assert (await stage.capacity()).running == 0
    assert stage.groups._episodes.engine_sets.sessions.active("engine-0") == 0


async def test_a_client_that_leaves_between_two_episodes(stage: Any) -> None:
    slow = asyncio.Event()
    stage.engine.script = lambda prompt: Completion(
        token_ids=stage.ids("Hello.<|im_end|>"), after=slow if prompt.index else None
    )
    events = stage.stream(stage.request(size=2))
    assert await anext(events) == 1
    await events.aclose()
    groups = {task for task in asyncio.all_tasks() if task.get_name() == "group-g-1"}
    if groups:
        await asyncio.wait(groups, timeout=5)
    assert (await stage.capacity()).running == 0


async def test_a_draining_worker_takes_no_group_and_finishes_those_in_flight(make_stage: Any) -> None:
    stage = await make_stage(drain_seconds=10)
    arrived, go = hold(stage)
    running = asyncio.create_task(stage.run())
    await arrived.wait()
    drain = asyncio.create_task(stage.groups.drain())
    await asyncio.sleep(0)
    assert (await stage.capacity()).draining
    with pytest.raises(FailureError) as refused:
        await stage.run(group_id="late")
    assert (refused.value.code, refused.value.retryable) == ("draining", True)
    go.set()
    assert (await running).episodes[0].failure is None
    await drain


async def test_what_does_not_finish_in_time_is_cut_off_with_a_typed_failure(stage: Any) -> None:
    arrived, _ = hold(stage)
    running = asyncio.create_task(stage.run())
    await arrived.wait()
    await stage.groups.drain()
    with pytest.raises(FailureError) as cut:
        await running
    assert (cut.value.code, cut.value.retryable) == ("drained", True)
    assert cut.value.boundary is Boundary.INFRASTRUCTURE


def blank(text: str = "") -> Scenario:
    return Scenario(id="s", ordinal=0, messages=[{"role": "developer", "content": text}])


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"group_id": ""}, "group_id"),
        ({"size": 0}, "size"),
        ({"sampling": {"temperature": -1.0}}, "temperature"),
        ({"sampling": {"top_p": 1.5}, "purpose": "evaluation"}, "top_p"),
        ({"sampling": {"top_k": -1}, "purpose": "evaluation"}, "top_k"),
        ({"sampling": {"top_p": 0.9}}, "are for evaluations"),
        ({"sampling": {"top_k": 20}, "purpose": ""}, "are for evaluations"),
        ({"sampling": {"max_turns": 0}}, "max_turns"),
        ({"sampling": {"max_tokens": 0}}, "max_tokens"),
        ({"scenario": blank()}, "role"),
    ],
)
async def test_a_request_that_cannot_be_run_names_the_field(stage: Any, changes: dict[str, Any], field: str) -> None:
    with pytest.raises(FailureError, match=field) as refused:
        await stage.run(**changes)
    assert refused.value.code == "invalid_request"


async def test_engines_are_needed_and_named_once(stage: Any) -> None:
    request = stage.request()
    request.engines.append(request.engines[0])
    with pytest.raises(FailureError, match="twice"):
        [event async for event in stage.stream(request)]
    del request.engines[:]
    with pytest.raises(FailureError, match="no engine"):
        [event async for event in stage.stream(request)]
