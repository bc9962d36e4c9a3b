"""What breaks, how it is called, and that it stays where it broke."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from tests.fakes.engine import Completion, Fault

from kestrl.api.judge.v1 import judge_pb2
from kestrl.episode import StopReason
from kestrl.errors import Boundary, Failure, FailureError, ToolFailure


def failure(episode: Any) -> tuple[Boundary, str]:
    assert episode.failure is not None
    assert episode.stop_reason is StopReason.FAILED
    assert episode.reward is None
    assert episode.failure.component
    return episode.failure.boundary, episode.failure.code


@pytest.mark.parametrize(
    ("fault", "code", "retryable"),
    [
        (Fault(status=400), "bad_request", False),
        (Fault(status=401), "unauthorized", False),
        (Fault(status=404), "unknown_policy", True),
        (Fault(status=429), "engine_error", True),
        (Fault(status=500), "engine_error", True),
        (Fault(status=418), "engine_error", False),
        (Fault(), "connection_lost", True),
        (Fault(status=200, body="<html>"), "bad_answer", True),
        (Fault(status=200, body='{"model": "base", "choices": []}'), "bad_answer", True),
        (Completion(token_ids=[1], model="base-2"), "wrong_policy", False),
        (Completion(token_ids=[1], finish_reason="abort"), "aborted", True),
        (Completion(token_ids=[]), "bad_answer", True),
        (Completion(token_ids=[1, 2], logprobs=[-1.0]), "bad_answer", True),
        (Completion(token_ids=[1], logprobs=[-9999.0]), "bad_logprob", True),
    ],
)
async def test_engine_failures_are_typed(stage: Any, fault: Any, code: str, retryable: bool) -> None:
    stage.engine.script = lambda prompt: fault
    episode = await stage.episode()
    assert failure(episode) == (Boundary.ENGINE, code)
    assert episode.failure.retryable is retryable
    assert "engine-0" in episode.failure.message


async def test_an_engine_that_is_gone(stage: Any) -> None:
    request = stage.request()
    await stage.engine.stop()
    events = [event async for event in stage.stream(request)]
    assert failure(events[-1].episodes[0]) == (Boundary.ENGINE, "unreachable")


async def test_the_engines_key_is_sent(make_stage: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KESTRL_ENGINE_KEY", "secret")
    stage = await make_stage()
    stage.says("Hello.")
    stage.engine.key = "secret"
    assert (await stage.episode()).failure is None
    stage.engine.key = "another"
    assert failure(await stage.episode()) == (Boundary.ENGINE, "unauthorized")


async def test_a_failed_turn_is_tried_once_on_another_engine(make_stage: Any, call_text: Callable[..., str]) -> None:
    stage = await make_stage(engines=2)
    stage.says(call_text("search", word="a"), "Done.")
    stage.engines[0].script = lambda prompt: Fault(status=500)
    episode = await stage.episode()
    assert episode.failure is None
    assert [turn.engine for turn in episode.turns] == ["engine-1", "engine-1"]
    assert episode.metrics["engine_retries"] == 1
    assert len(stage.engines[0].prompts) == 1


async def test_the_second_engine_may_fail_too(make_stage: Any) -> None:
    stage = await make_stage(engines=3)
    for engine in stage.engines:
        engine.script = lambda prompt: Fault(status=503)
    assert failure(await stage.episode()) == (Boundary.ENGINE, "engine_error")
    assert sum(len(engine.prompts) for engine in stage.engines) == 2


async def test_a_lost_connection_is_tried_once_more_even_on_the_only_engine(stage: Any) -> None:
    stage.engine.script = lambda prompt: (
        Fault() if prompt.index == 0 else Completion(token_ids=stage.ids("Hello.<|im_end|>"))
    )
    episode = await stage.episode()
    assert episode.failure is None
    assert episode.metrics["engine_retries"] == 1


async def test_a_failed_turn_keeps_what_was_sampled_before(stage: Any, call_text: Callable[..., str]) -> None:
    stage.says(call_text("search", word="a"), Fault(status=500))
    episode = await stage.episode()
    assert failure(episode) == (Boundary.ENGINE, "engine_error")
    assert len(episode.turns) == 1
    assert sum(episode.rows[0].mask) == episode.sampled_tokens > 0


async def test_a_tools_own_failure_ends_the_episode_not_the_group(stage: Any, call_text: Callable[..., str]) -> None:
    def search(arguments: dict[str, str]) -> str:
        if len(stage.tools.calls) == 1:
            raise ToolFailure("search: the index is gone")
        return "found"

    stage.tools.handlers["search"] = search
    stage.says(call_text("search", word="a"), "Done.")
    group = await stage.run(size=3)
    failed = [episode for episode in group.episodes if episode.failure is not None]
    assert [failure(episode) for episode in failed] == [(Boundary.TOOL, "tool_raised")]
    assert failed[0].failure.component == "tools"
    assert [episode.reward is None for episode in group.episodes].count(False) == 2
    judged = [episode.id for episode in stage.judge.requests[0].group.episodes]
    assert failed[0].id not in judged
    assert len(await stage.closed()) == 3


async def test_one_of_several_calls_fails(stage: Any, call_text: Callable[..., str]) -> None:
    async def hang(arguments: dict[str, str]) -> str:
        await asyncio.Event().wait()
        return ""

    def broken(arguments: dict[str, str]) -> str:
        raise ToolFailure("answer: broken")

    stage.tools.handlers |= {"search": hang, "answer": broken}
    stage.says(call_text("search", word="a") + call_text("answer", text="b"))
    assert failure(await stage.episode()) == (Boundary.TOOL, "tool_raised")


async def test_the_tool_service_is_gone(make_stage: Any, call_text: Callable[..., str]) -> None:
    stage = await make_stage()
    gone = Failure(boundary=Boundary.INFRASTRUCTURE, code="gone", message="gone", component="tools")
    stage.tools.open_error = FailureError(gone)
    stage.says(call_text("search", word="a"))
    assert failure(await stage.episode()) == (Boundary.INFRASTRUCTURE, "gone")


async def test_a_tool_that_hangs(stage: Any, call_text: Callable[..., str]) -> None:
    async def hang(arguments: dict[str, str]) -> str:
        await asyncio.Event().wait()
        return ""

    stage.tools.handlers["search"] = hang
    stage.says(call_text("search", word="a"))
    assert failure(await stage.episode(deadlines={"tool": 0.05})) == (Boundary.TOOL, "tool_deadline")
    assert await stage.closed() == ["g-1/0"]


async def test_the_first_call_has_as_long_again_for_the_tools_to_be_made(
    stage: Any, call_text: Callable[..., str]
) -> None:
    async def longer(arguments: dict[str, str]) -> str:
        await asyncio.sleep(0.9)
        return "late"

    stage.tools.handlers["search"] = longer
    stage.says(call_text("search", word="a"), call_text("search", word="b"))
    episode = await stage.episode(deadlines={"tool": 0.8})
    assert [call.text for call in episode.tool_calls] == ["late"]
    assert failure(episode) == (Boundary.TOOL, "tool_deadline")


async def test_an_engine_that_hangs(stage: Any) -> None:
    stage.engine.script = lambda prompt: Completion(token_ids=[1], after=asyncio.Event())
    episode = await stage.episode(deadlines={"tool": 0.01, "turn": 0.05})
    assert failure(episode) == (Boundary.ENGINE, "turn_deadline")
    assert episode.failure.retryable


async def test_a_judge_that_fails_leaves_the_episode_without_a_reward(stage: Any) -> None:
    def score(episode: Any) -> Any:
        raise RuntimeError("the judge is broken")

    stage.judge.score = score
    stage.says("Hello.")
    episode = await stage.episode()
    assert episode.failure is not None
    assert episode.failure.code == "internal"
    assert episode.reward is None
    assert episode.stop_reason is StopReason.ANSWERED
    assert episode.sampled_tokens > 0


@pytest.mark.parametrize(
    ("score", "code"),
    [
        (lambda episode: None, "missing_score"),
        (lambda episode: judge_pb2.EpisodeScore(episode_id=episode.id), "no_finite_reward"),
        (lambda episode: judge_pb2.EpisodeScore(episode_id=episode.id, reward=float("nan")), "no_finite_reward"),
        (lambda episode: judge_pb2.EpisodeScore(episode_id="x", reward=1), "missing_score"),
    ],
)
async def test_a_score_that_is_none(stage: Any, score: Any, code: str) -> None:
    stage.judge.score = score
    stage.says("Hello.")
    episode = await stage.episode()
    assert episode.failure is not None
    assert (episode.failure.boundary, episode.failure.code) == (Boundary.JUDGE, code)
    assert episode.reward is None


async def test_a_judge_that_says_why_is_quoted(stage: Any) -> None:
    from kestrl.episode.codec import failure_to_proto
    from kestrl.errors import JudgeFailure

    reason = JudgeFailure("reward art_e raised ZeroDivisionError").failure(component="judge-0")
    stage.judge.score = lambda episode: judge_pb2.EpisodeScore(
        episode_id=episode.id,
        reward=1.0 if episode.index else None,
        failure=None if episode.index else failure_to_proto(reason),
        rewards={"format": 0.5},
    )
    stage.says("Hello.")
    first, second = (await stage.run(size=2)).episodes
    assert first.failure == reason
    assert first.rewards == {"format": 0.5}
    assert second.reward == 1.0


async def test_one_score_twice_is_none() -> None:
    from kestrl.errors import JudgeFailure
    from kestrl_rollout.groups.scoring import read_scores

    twice = judge_pb2.EpisodeScore(episode_id="a", reward=1)
    with pytest.raises(JudgeFailure, match="twice"):
        read_scores([twice, twice])


async def test_nothing_to_score_asks_no_judge(stage: Any) -> None:
    stage.engine.script = lambda prompt: Fault(status=500)
    await stage.run(size=2)
    assert stage.judge.requests == []
