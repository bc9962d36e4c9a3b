"""The same task by agents that exist: each answers the row's question, by a base URL and a key."""

# pyright: reportMissingImports=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# ruff: noqa: ARG001 - every run is called with a deadline
from __future__ import annotations

from typing import Any


def bare(row: Any, base_url: str, key: str, deadline: float) -> None:
    """OpenAI's client and nothing else."""
    import openai

    with openai.OpenAI(base_url=base_url, api_key=key) as client:
        client.chat.completions.create(model="policy", messages=row["messages"])


async def openai_agents(row: Any, base_url: str, key: str, deadline: float) -> None:
    """An agent of the OpenAI Agents SDK, over Responses."""
    from agents import Agent, OpenAIResponsesModel, Runner, set_tracing_disabled
    from openai import AsyncOpenAI

    set_tracing_disabled(True)
    async with AsyncOpenAI(base_url=base_url, api_key=key) as client:
        agent = Agent(name="repeats", model=OpenAIResponsesModel(model="policy", openai_client=client))
        await Runner.run(agent, row["messages"])


def langgraph(row: Any, base_url: str, key: str, deadline: float) -> None:
    """A LangGraph agent, whose invoke() blocks."""
    from langchain.agents import create_agent
    from langchain_openai import ChatOpenAI

    agent = create_agent(ChatOpenAI(model="policy", base_url=base_url, api_key=key), [])
    agent.invoke({"messages": row["messages"]})
