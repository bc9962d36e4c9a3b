"""A service runs an episode for each POST."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from tests.fakes.ports import free_port

from kestrl.episode import Scenario
from kestrl.errors import Boundary


@pytest.fixture
async def service() -> AsyncIterator[tuple[str, list[Any], list[web.Response]]]:
    """An agent behind a URL: what it was sent, and what it answers after a turn."""
    requests: list[Any] = []
    answers: list[web.Response] = []

    async def run(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        requests.append(body)
        async with aiohttp.ClientSession(headers={"authorization": f"Bearer {body['key']}"}) as session:
            message = {"model": "policy", "messages": body["row"]["messages"]}
            async with session.post(f"{body['base_url']}/chat/completions", json=message) as reply:
                assert reply.status == 200
        return answers.pop(0)

    app = web.Application()
    app.router.add_post("/run", run)
    runner = web.AppRunner(app)
    await runner.setup()
    port = free_port()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    yield f"http://127.0.0.1:{port}/run", requests, answers
    await runner.cleanup()


async def test_an_episode_is_one_post(make_stage: Any, service: Any) -> None:
    url, requests, answers = service
    stage = await make_stage(outside={"url": url, "config": {"depth": 2}})
    stage.says("42")
    answers += [web.json_response({"metrics": {"steps": 3}, "reward": 0.5}), web.Response(status=204)]
    episode = await stage.episode()
    assert (episode.failure, episode.metrics["steps"], episode.loop_reward) == (None, 3, 0.5)
    assert (await stage.episode()).failure is None
    assert [request["config"] for request in requests] == [{"depth": 2}] * 2
    assert requests[0]["key"] != requests[1]["key"]


@pytest.mark.parametrize(
    ("answer", "code", "message", "retryable"),
    [
        (lambda: web.Response(status=500, text="no plan"), "agent_http_error", "answered 500: no plan", False),
        (lambda: web.Response(status=503), "agent_http_error", "answered 503", True),
        (lambda: web.Response(status=302, headers={"location": "/"}), "agent_http_error", "answered 302", False),
        (lambda: web.Response(text="fine"), "agent_result_invalid", "not JSON", False),
        (lambda: web.Response(text=json.dumps("x" * 5_000_000)), "agent_result_invalid", "more than 4194304", False),
        (lambda: web.json_response({"error": {"type": "Own"}}, status=500), "agent_raised", "raised Own", False),
    ],
)
async def test_what_a_service_does_wrong_is_its_failure(
    make_stage: Any, service: Any, answer: Callable[[], web.Response], code: str, message: str, retryable: bool
) -> None:
    url, requests, answers = service
    stage = await make_stage(outside={"url": url})
    stage.says("42")
    answers.append(answer())
    failure = (await stage.episode()).failure
    assert failure is not None
    assert (failure.boundary, failure.code, failure.retryable) == (Boundary.USER_CODE, code, retryable)
    assert f"agent.url {url}" in failure.message
    assert message in failure.message
    assert len(requests) == 1


async def test_a_row_that_names_a_loop_does_not_leave_the_agent(make_stage: Any, service: Any) -> None:
    url, requests, _ = service
    stage = await make_stage(outside={"url": url}, agents={"mine": "single_turn"})
    stage.says("42")
    row = Scenario(id="s-1", ordinal=0, messages=({"role": "user", "content": "?"},), agent="single_turn")
    failure = (await stage.episode(scenario=row)).failure
    assert failure is not None
    assert failure.code == "unknown_agent"
    assert "run by agent.url; remove the column" in failure.message
    assert (await stage.episode(scenario=replace(row, agent="mine"))).failure is None
    assert requests == []


async def test_a_service_that_is_away_can_be_retried(make_stage: Any) -> None:
    stage = await make_stage(outside={"url": f"http://127.0.0.1:{free_port()}/run"})
    failure = (await stage.episode()).failure
    assert failure is not None
    assert (failure.code, failure.retryable) == ("agent_unreachable", True)


async def test_statuses_and_errors_are_stops(make_stage: Any, service: Any) -> None:
    url, _, answers = service
    stage = await make_stage(outside={"url": url, "stops": {"http:422": "model_behavior"}, "stopped_reward": 0.0})
    stage.says("42")
    answers += [
        web.Response(status=422),
        web.json_response({"error": {"type": "agents.exceptions.MaxTurnsExceeded"}}, status=500),
    ]
    first, second = await stage.episode(), await stage.episode()
    assert (first.failure, first.stop_reason, first.metrics["stopped_by.http:422"]) == (None, "model_behavior", 1)
    assert (second.failure, second.stop_reason, second.loop_reward) == (None, "agent_limit", 0.0)
