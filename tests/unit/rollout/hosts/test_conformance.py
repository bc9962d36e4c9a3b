"""The conformance suite of agents by URL: what passes, and what it finds."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from kestrl.testing.agents import check_run

CALL = {
    "content": None,
    "tool_calls": [{"id": "call-1", "type": "function", "function": {"name": "multiply", "arguments": "{}"}}],
}


def bare(row: dict[str, Any], base_url: str, key: str, deadline: float) -> Any:
    with openai.OpenAI(base_url=base_url, api_key=key) as client:
        messages: list[Any] = list(row["messages"])
        while True:
            message = client.chat.completions.create(model="policy", messages=messages).choices[0].message
            if not message.tool_calls:
                return {"metrics": {"turns": len(messages)}, "info": {"answer": message.content}}
            messages += [
                message,
                *({"role": "tool", "tool_call_id": call.id, "content": "42"} for call in message.tool_calls),
            ]


async def streaming(row: dict[str, Any], base_url: str, key: str, deadline: float) -> float:
    async with openai.AsyncOpenAI(base_url=base_url, api_key=key) as client:
        text = ""
        async for chunk in await client.chat.completions.create(model="policy", messages=row["messages"], stream=True):
            text += chunk.choices[0].delta.content or ""
        return float(text == row["ground_truth"])


def test_agents_that_call_their_episode_pass() -> None:
    check_run(bare, replies=[CALL, "42"])
    check_run(streaming)


SHARED: list[openai.OpenAI] = []


def with_the_first_episodes_client(row: dict[str, Any], base_url: str, key: str, deadline: float) -> None:
    if not SHARED:
        SHARED.append(openai.OpenAI(base_url=base_url, api_key=key))
    SHARED[0].chat.completions.create(model="policy", messages=row["messages"])


def idle(row: dict[str, Any], base_url: str, key: str, deadline: float) -> None:
    """Makes no call."""


def endless(row: dict[str, Any], base_url: str, key: str, deadline: float) -> None:
    with openai.OpenAI(base_url=base_url, api_key=key) as client:
        for _ in range(15):
            try:
                client.chat.completions.create(model="policy", messages=row["messages"])
            except openai.BadRequestError:
                continue
            if "/e/first-" in base_url:
                return


def odd(row: dict[str, Any], base_url: str, key: str, deadline: float) -> Any:
    bare(row, base_url, key, deadline)
    return {"score": 1}


def raising(row: dict[str, Any], base_url: str, key: str, deadline: float) -> Any:
    raise KeyError("plan")


@pytest.mark.parametrize(
    ("agent", "problem"),
    [
        (with_the_first_episodes_client, "no call was made to its base URL"),
        (idle, "no call was made to its base URL"),
        (endless, "calls were made after the first was refused"),
        (raising, "the agent raised KeyError"),
    ],
)
def test_what_an_agent_does_wrong_is_named(agent: Any, problem: str) -> None:
    try:
        with pytest.raises(AssertionError, match=problem):
            check_run(agent)
    finally:
        for client in SHARED:
            client.close()
        SHARED.clear()


def test_a_result_that_is_none_is_refused() -> None:
    with pytest.raises(Exception, match="'score' is none of metrics, reward, info"):
        check_run(odd)
