"""The state of environments on its way to the reward."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest

from kestrl.api.tools.v1.tools_pb2 import CallResponse
from kestrl.episode import CallOutcome, Scenario, StopReason
from kestrl.errors import Boundary, ToolFailure

STATE = {"Shop": {"basket": {"lamp": 2}}}


def with_state(stage: Any) -> Any:
    for schema in stage.tools.schemas:
        schema.environment, schema.has_state = "Shop", True
    stage.tools.states = STATE
    return stage


@pytest.mark.parametrize("calls", [0, 2])
async def test_the_reward_gets_the_final_state_also_of_an_episode_without_calls(
    stage: Any, call_text: Any, calls: int
) -> None:
    with_state(stage).says(*[call_text("search", word="lamp")] * calls, "Done.")
    episode = await stage.episode()
    assert episode.failure is None
    assert episode.environments == STATE
    (request,) = stage.judge.requests
    assert request.group.episodes[0].environments_json == '{"Shop":{"basket":{"lamp":2}}}'
    assert await stage.closed() == ["g-1/0"]
    assert len(stage.tools.opened) == 1


@pytest.mark.parametrize(
    ("tools", "offered"),
    [(["Shop"], ["search", "answer"]), (["answer", "Shop"], ["answer", "search"]), (["answer"], ["answer"])],
)
async def test_a_row_may_offer_an_environment_by_its_name(stage: Any, tools: list[str], offered: list[str]) -> None:
    with_state(stage).says("Done.")
    episode = await stage.episode(tools=tools)
    assert episode.failure is None
    (opening,) = stage.tools.opened.values()
    assert list(opening.tools) == offered


async def test_a_state_that_cannot_be_had_fails_the_episode(stage: Any) -> None:
    with_state(stage).says("Done.")
    stage.tools.states = ToolFailure("Shop: KeyError: 'basket'")
    episode = await stage.episode()
    assert episode.failure is not None
    assert (episode.failure.boundary, episode.failure.code) == (Boundary.TOOL, "tool_raised")
    assert episode.reward is None
    assert await stage.closed() == ["g-1/0"]


async def test_tools_without_a_state_are_not_asked(stage: Any) -> None:
    stage.tools.states = AssertionError("asked")
    stage.says("Done.")
    assert (await stage.episode()).failure is None
    assert stage.tools.opened == {}


async def test_an_episode_that_failed_is_not_asked(stage: Any) -> None:
    with_state(stage).tools.handlers["search"] = lambda _: (_ for _ in ()).throw(ToolFailure("lost"))
    stage.says('<tool_call>\n{"name": "search", "arguments": {"word": "a"}}\n</tool_call>')
    episode = await stage.episode()
    assert episode.failure is not None
    assert episode.failure.message == "lost"
    assert episode.environments == {}


async def test_a_number_of_many_digits_is_not_the_workers_failure(stage: Any) -> None:
    """The worker hands on what JSON can hold; the tool service knows what the tool takes."""
    stage.says('<tool_call>\n{"name": "search", "arguments": {"word": ' + "9" * 400 + "}}\n</tool_call>", "Done.")
    episode = await stage.episode()
    assert episode.failure is None
    assert [call.outcome for call in episode.tool_calls] == [CallOutcome.OK]
    assert stage.tools.calls[0].arguments_json == '{"word":' + "9" * 400 + "}"


async def test_what_an_environment_says_at_its_beginning_ends_the_prompt(stage: Any, call_text: Any) -> None:
    for schema in with_state(stage).tools.schemas:
        schema.has_prompt = True
    stage.tools.prompt = "\nThere are three lamps."
    stage.says(call_text("search", word="lamp"), "Done.")
    episode = await stage.episode()
    assert episode.failure is None
    assert str(episode.messages[-4]["content"]).endswith("\nThere are three lamps.")
    prompts = [stage.chat_model.vocabulary.decode(list(prompt.token_ids)) for prompt in stage.engine.prompts]
    assert all("There are three lamps.<|im_end|>" in prompt for prompt in prompts)
    assert episode.environments == STATE
    assert len(stage.tools.opened) == 1
    assert not stage.tools.calls[0].HasField("opening")
    assert await stage.closed() == ["g-1/0"]


async def test_an_environment_that_cannot_begin_fails_the_episode(stage: Any) -> None:
    for schema in stage.tools.schemas:
        schema.has_prompt = True
    stage.tools.prompt = ToolFailure("Shop: reset() returned a list", code="tool_result_invalid")
    stage.says("Done.")
    episode = await stage.episode()
    assert episode.failure is not None
    assert (episode.failure.boundary, episode.failure.code) == (Boundary.TOOL, "tool_result_invalid")
    assert (episode.reward, stage.judge.requests) == (None, [])
    assert await stage.closed() == ["g-1/0"]


def as_job_environment(stage: Any, *, turns: bool) -> None:
    """Makes the tools of the stage those of the job's environment; `answer` takes the model's turns."""
    for schema in stage.tools.schemas:
        schema.environment, schema.of_environment, schema.has_prompt, schema.has_state = "environment", *[True] * 3
        schema.acts = turns and schema.name == "answer"
    stage.tools.states = {"environment": {"get_reward": 1.0}}


def answering(*answers: CallResponse) -> Callable[[Any], CallResponse]:
    """A tool that gives these answers, one after another."""
    left = list(answers)

    def answer(_: Any) -> CallResponse:
        return left.pop(0)

    return answer


async def test_turns_without_calls_are_actions_until_the_environment_ends_the_episode(stage: Any) -> None:
    as_job_environment(stage, turns=True)
    answers = [
        CallResponse(outcome="tool_error", text="Say a number."),
        CallResponse(outcome="ok", text="go on"),
        CallResponse(outcome="ok", text="", final=True),
    ]
    stage.tools.handlers["answer"] = answering(*answers)
    stage.says("two", "2", "1", "never asked for")
    episode = await stage.episode()
    assert episode.failure is None
    assert [json.loads(call.arguments_json) for call in stage.tools.calls] == [
        {"text": said} for said in ("two", "2", "1")
    ]
    said = [(message["role"], message["content"]) for message in episode.messages]
    assert said[1:] == [
        ("assistant", "two"), ("user", "Say a number."), ("assistant", "2"), ("user", "go on"), ("assistant", "1")
    ]  # fmt: skip
    assert (episode.stop_reason, episode.metrics["invalid_actions"]) == (StopReason.ANSWERED, 1.0)
    assert episode.environments == stage.tools.states
    first = stage.chat_model.vocabulary.decode(list(stage.engine.prompts[0].token_ids))
    assert "search" in first
    assert "Ends." not in first  # the action is not offered as a tool
    assert await stage.closed() == ["g-1/0"]


async def test_it_is_reset_with_the_columns_of_the_row_and_gives_the_prompt(stage: Any) -> None:
    as_job_environment(stage, turns=True)
    stage.tools.prompt = "What is 1 + 1?"
    stage.tools.handlers["answer"] = answering(CallResponse(outcome="ok", final=True))
    stage.says("2")
    row = Scenario(id="r", ordinal=0, messages=[], tools=["answer"], metadata={"index": 3}, ground_truth="2")
    episode = await stage.episode(scenario=row)
    assert episode.failure is None
    assert episode.messages[0] == {"role": "user", "content": "What is 1 + 1?"}
    (opening,) = stage.tools.opened.values()
    assert json.loads(opening.tools_kwargs_json) == {
        "environment": {"create_kwargs": {"index": 3, "ground_truth": "2"}}
    }
    assert set(opening.tools) == {"search", "answer"}


async def test_a_row_to_which_nothing_gives_a_prompt_fails(stage: Any) -> None:
    as_job_environment(stage, turns=True)
    episode = await stage.episode(scenario=Scenario(id="r", ordinal=0, messages=[]))
    assert episode.failure is not None
    assert episode.failure.code == "no_prompt"


async def test_an_environment_that_does_not_answer_is_its_own_failure(stage: Any) -> None:
    as_job_environment(stage, turns=True)
    never = asyncio.Event()

    async def hang(_: Any) -> CallResponse:
        await never.wait()
        raise AssertionError

    stage.tools.handlers["answer"] = hang
    stage.says("2")
    episode = await stage.episode(deadlines={"tool": 0.5})
    assert episode.failure is not None
    assert (episode.failure.boundary, episode.reward) == (Boundary.ENVIRONMENT, None)
