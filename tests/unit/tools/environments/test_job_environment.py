"""The environment of a job over the wire: its processes, turns, reward, bounds and failures."""

from __future__ import annotations

import asyncio
import os
import secrets
from pathlib import Path
from typing import Any

import pytest

from kestrl._shared.plan.settings.tools import EnvironmentEntry, ProcessEntry, ToolEntry
from kestrl.errors import Boundary, FailureError, UserInputError
from kestrl_tools.catalogue import load_tools
from kestrl_tools.tool_threads import ToolThreads

FOLDER = str(Path(__file__).parent)


def environment(use: str, *, acts: bool = True, sessions: int = 8, wait: float = 20, **config: Any) -> ToolEntry:
    return ToolEntry(
        name="environment",
        use=f"environment_samples:{use}",
        config=config,
        process=ProcessEntry(),
        environment=EnvironmentEntry(acts=acts, sessions=sessions, wait_seconds=wait, start_seconds=60),
    )


def row(**columns: Any) -> dict[str, Any]:
    return {"environment": {"create_kwargs": columns}}


async def begun(client: Any, **columns: Any) -> tuple[str, str]:
    """A session that was begun, and its prompt."""
    session = secrets.token_urlsafe(24)
    return session, await client.prompt(session, client.opening(kwargs=row(**columns)))


async def test_turns_are_played_and_the_reward_has_its_parts(serve: Any) -> None:
    async with serve(environment("Countdown", bonus=0.5), folder=FOLDER) as client:
        (act,) = await client.list()
        assert (act.name, act.acts, act.of_environment, act.has_prompt, act.has_state) == ("act", *[True] * 4)
        session, prompt = await begun(client, start=2, unknown="column")
        assert prompt == "Count down from 2."
        wrong = await client.call(session, "act", {"text": "two"})
        assert (wrong.outcome, wrong.text, wrong.final) == ("tool_error", "Say a number and nothing else.", False)
        assert not (await client.call(session, "act", {"text": "2"})).final
        assert (await client.call(session, "act", {"text": "1"})).final
        state = (await client.state(session))["environment"]
        assert state["get_reward"] == {"done": 1.0, "said": 2.5}
        assert state["pid"] != os.getpid()


async def test_it_gets_no_credential(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s")
    monkeypatch.setenv("KESTRL_OWN", "s")
    async with serve(environment("Countdown"), folder=FOLDER) as client:
        session, _ = await begun(client, start=1)
        variables = (await client.state(session))["environment"]["variables"]
    assert "PATH" in variables
    assert not [name for name in variables if "SECRET" in name or name.startswith("KESTRL_")]


async def test_a_class_for_trl_is_taken_as_it_is(serve: Any) -> None:
    async with serve(environment("Guess", acts=False), folder=FOLDER) as client:
        listed = await client.list()
        assert [(tool.name, tool.acts) for tool in listed] == [("guess", False), ("act", False)]
        session, prompt = await begun(client, word="lamp", prompt=[{"role": "user", "content": "Guess."}])
        assert prompt == " It has 4 letters."
        assert (await client.call(session, "guess", {"word": "lamp"})).text == "right"
        assert (await client.state(session))["environment"] == {"get_reward": 1.0}


@pytest.mark.parametrize(
    ("how", "code"),
    [("raise", "raised"), ("die", "process_died"), ("hang", "deadline"), ("nan", "result_invalid")],
)
async def test_failures_are_the_environments_and_end_one_episode(serve: Any, how: str, code: str) -> None:
    async with serve(environment("Fragile"), folder=FOLDER, call_seconds=2.0) as client:
        other, _ = await begun(client, how="")
        session, _ = await begun(client, how=how)

        async def play() -> None:
            await client.call(session, "act", {"text": "x"})
            await client.state(session)

        with pytest.raises(FailureError) as caught:
            await play()
        failure = caught.value.failure()
        assert (failure.boundary, failure.code, failure.retryable) == (Boundary.ENVIRONMENT, code, False)
        assert (await client.call(other, "act", {"text": "still there"})).text == "still there"


async def test_a_beginning_that_fails_is_the_environments(serve: Any) -> None:
    async with serve(environment("Fragile"), folder=FOLDER) as client:
        with pytest.raises(FailureError, match="KeyError") as caught:
            await begun(client, how="reset")
        assert caught.value.boundary is Boundary.ENVIRONMENT
        with pytest.raises(FailureError, match="missing a required argument: 'how'") as caught:
            await begun(client)
        assert (caught.value.boundary, caught.value.code) == (Boundary.ENVIRONMENT, "kwargs_invalid")


async def test_episodes_wait_for_a_place_and_the_wait_is_bounded(serve: Any) -> None:
    async with serve(environment("Countdown", sessions=1, wait=0.5), folder=FOLDER) as client:
        session, _ = await begun(client, start=1)
        with pytest.raises(FailureError, match="all 1 sessions were busy") as caught:
            await begun(client, start=1)
        failure = caught.value.failure()
        assert (failure.boundary, failure.code, failure.retryable) == (Boundary.ENVIRONMENT, "capacity", True)
        waiting = asyncio.create_task(begun(client, start=3))
        await client.close(session)
        assert (await waiting)[1] == "Count down from 3."


@pytest.mark.parametrize(
    ("use", "message"),
    [
        ("Rewardless", r"Rewardless has no get_reward\(\), so that nothing scores its episodes"),
        ("Absent", "Absent"),
    ],
)
async def test_what_cannot_be_played_is_refused_by_its_field(use: str, message: str) -> None:
    with pytest.raises(UserInputError, match=message) as caught:
        await load_tools([environment(use)], ToolThreads(), folder=FOLDER)
    assert str(caught.value).startswith("spec.environment.use")
