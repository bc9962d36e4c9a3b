"""Agents of frameworks as `agent.run` takes them, for environments of their own: each ends within three calls."""

from __future__ import annotations

from typing import Any


def count_stock(item: str) -> str:
    """Says how many of an item are in stock.

    Args:
        item: Name of the item.
    """
    return f"2 {item}"


def question_of(row: dict[str, Any]) -> str:
    return row["messages"][-1]["content"]


def langgraph(row: dict[str, Any], base_url: str, key: str, deadline: float) -> Any:
    from langchain.agents import create_agent
    from langchain_openai import ChatOpenAI

    agent: Any = create_agent(ChatOpenAI(model="policy", base_url=base_url, api_key=key), [count_stock])
    answer = agent.invoke({"messages": [("user", question_of(row))]}, {"recursion_limit": 6})
    return {"info": {"answer": answer["messages"][-1].text}}


async def openai_agents(row: dict[str, Any], base_url: str, key: str, deadline: float) -> Any:
    from agents import Agent, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled
    from openai import AsyncOpenAI

    set_tracing_disabled(True)
    model = OpenAIResponsesModel(model="policy", openai_client=AsyncOpenAI(base_url=base_url, api_key=key))
    agent = Agent(name="clerk", tools=[function_tool(count_stock)], model=model)
    answer = await Runner.run(agent, question_of(row), max_turns=3)
    return {"info": {"answer": answer.final_output}}


async def pydantic_ai(row: dict[str, Any], base_url: str, key: str, deadline: float) -> Any:
    from pydantic_ai import Agent, UsageLimits
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    model = OpenAIChatModel("policy", provider=OpenAIProvider(base_url=base_url, api_key=key))
    agent: Any = Agent(model, tools=[count_stock])
    answer = await agent.run(question_of(row), usage_limits=UsageLimits(request_limit=3))
    return {"info": {"answer": answer.output}}


async def pydantic_ai_behavior(row: dict[str, Any], base_url: str, key: str, deadline: float) -> Any:
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    model = OpenAIChatModel("policy", provider=OpenAIProvider(base_url=base_url, api_key=key))
    agent: Any = Agent(model, output_type=int, tools=[count_stock], retries=0)
    return {"info": {"answer": (await agent.run(question_of(row))).output}}
