"""Agents as their users write them, for environments of their own: `existing_agents.py CASE`.

Imports the framework, and reads a line of JSON from the standard input: variables with the base URL and the key. Prints
the final answer.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import sys
from typing import Any

MODULES = {
    "openai2": ["openai"],
    "openai3": ["openai"],
    "litellm": ["litellm"],
    "smolagents": ["smolagents"],
    "langgraph": ["langchain.agents", "langchain_openai", "langchain_anthropic"],
    "openai-agents": ["agents"],
    "pydantic-ai": ["pydantic_ai", "pydantic_ai.models.openai", "pydantic_ai.models.anthropic"],
}
"""What is imported before an episode begins, by the beginning of a case: a cold import takes many seconds."""
for _prefix, _names in MODULES.items():
    if sys.argv[1].startswith(_prefix):
        for _name in _names:
            importlib.import_module(_name)
sys.stdout.write("READY\n")
sys.stdout.flush()
os.environ.update(json.loads(sys.stdin.readline()))
BASE, KEY, ROOT = (os.environ[name] for name in ("OPENAI_BASE_URL", "OPENAI_API_KEY", "ANTHROPIC_BASE_URL"))
QUESTION = "How many lamps?"


def count_stock(item: str, n: int = 1) -> dict[str, Any]:
    """Says how many of an item are in stock.

    Args:
        item: Name of the item.
        n: How many places to look.
    """
    return {"item": item, "places": n, "stock": 2}


def bare(stream: bool) -> str:
    import openai

    parameters = {"type": "object", "properties": {"item": {"type": "string"}, "n": {"type": "integer"}}}
    function = {"name": "count_stock", "description": "Counts.", "parameters": parameters}
    options: Any = {"model": "policy", "tools": [{"type": "function", "function": function}]}
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    with openai.OpenAI() as client:
        while True:
            if stream:
                with client.chat.completions.stream(**options, messages=messages) as events:
                    said: Any = events.get_final_completion().choices[0].message
            else:
                said = client.chat.completions.create(**options, messages=messages).choices[0].message
            if not said.tool_calls:
                return said.content
            messages.append(said)
            messages += [{"role": "tool", "tool_call_id": call.id, "content": "2"} for call in said.tool_calls]


def langgraph(model: str, stream: bool = False) -> str:
    from langchain.agents import create_agent

    if model == "anthropic":
        from langchain_anthropic import ChatAnthropic

        chosen: Any = ChatAnthropic(model="policy", base_url=ROOT, api_key=KEY)
    else:
        from langchain_openai import ChatOpenAI

        options: Any = {"use_responses_api": True} if model == "responses" else {}
        chosen = ChatOpenAI(model="policy", base_url=BASE, api_key=KEY, temperature=0.3, **options)
    agent: Any = create_agent(chosen, [count_stock], system_prompt="You are a clerk.")
    question = {"messages": [("user", QUESTION)]}
    if stream:
        return "".join(
            said.text for said, about in agent.stream(question, stream_mode="messages") if said.type != "tool" and about
        )
    return agent.invoke(question)["messages"][-1].text


def openai_agents(api: str, stream: bool) -> str:
    from agents import (
        Agent,
        OpenAIChatCompletionsModel,
        OpenAIResponsesModel,
        Runner,
        function_tool,
        set_tracing_disabled,
    )
    from openai import AsyncOpenAI

    set_tracing_disabled(True)
    kind = OpenAIChatCompletionsModel if api == "chat" else OpenAIResponsesModel
    model = kind(model="policy", openai_client=AsyncOpenAI())
    agent = Agent(name="clerk", instructions="You are a clerk.", tools=[function_tool(count_stock)], model=model)

    async def run() -> str:
        if not stream:
            return (await Runner.run(agent, QUESTION)).final_output
        running = Runner.run_streamed(agent, QUESTION)
        async for _ in running.stream_events():
            pass
        return running.final_output

    return asyncio.run(run())


def pydantic_ai(api: str, stream: bool = False) -> str:
    from pydantic_ai import Agent

    if api == "anthropic":
        from pydantic_ai.models.anthropic import AnthropicModel
        from pydantic_ai.providers.anthropic import AnthropicProvider

        model: Any = AnthropicModel("policy", provider=AnthropicProvider(base_url=ROOT, api_key=KEY))
    else:
        from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
        from pydantic_ai.providers.openai import OpenAIProvider

        kind: Any = OpenAIChatModel if api == "chat" else OpenAIResponsesModel
        model = kind("policy", provider=OpenAIProvider(base_url=BASE, api_key=KEY))
    agent: Any = Agent(model, system_prompt="You are a clerk.", tools=[count_stock])

    async def run() -> str:
        async with agent.run_stream(QUESTION) as running:
            return await running.get_output()

    return asyncio.run(run()) if stream else agent.run_sync(QUESTION).output


def litellm() -> str:
    import litellm

    function = {"name": "count_stock", "parameters": {"type": "object", "properties": {"item": {"type": "string"}}}}
    options: Any = {"model": "openai/policy", "api_base": BASE, "api_key": KEY, "num_retries": 0}
    options["tools"] = [{"type": "function", "function": function}]
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    said: Any = litellm.completion(**options, messages=messages).choices[0].message
    messages += [said, {"role": "tool", "tool_call_id": said.tool_calls[0].id, "content": "2"}]
    chunks: Any = litellm.completion(**options, messages=messages, stream=True)
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)


def smolagents() -> str:
    from smolagents import OpenAIServerModel, ToolCallingAgent, tool

    @tool
    def count_stock(item: str, n: int = 1) -> str:
        """Says how many of an item are in stock.

        Args:
            item: Name of the item.
            n: How many places to look.
        """
        return f"2 {item} in {n} places"

    model = OpenAIServerModel(model_id="policy", api_base=BASE, api_key=KEY)
    agent = ToolCallingAgent(tools=[count_stock], model=model, max_steps=3, verbosity_level=0)
    return str(agent.run(QUESTION))


CASES = {
    "openai2": lambda: bare(False),
    "openai2-stream": lambda: bare(True),
    "openai3": lambda: bare(False),
    "openai3-stream": lambda: bare(True),
    "langgraph": lambda: langgraph("chat"),
    "langgraph-stream": lambda: langgraph("chat", stream=True),
    "langgraph-responses": lambda: langgraph("responses"),
    "langgraph-anthropic": lambda: langgraph("anthropic"),
    "openai-agents": lambda: openai_agents("responses", False),
    "openai-agents-stream": lambda: openai_agents("responses", True),
    "openai-agents-chat": lambda: openai_agents("chat", False),
    "openai-agents-chat-stream": lambda: openai_agents("chat", True),
    "pydantic-ai": lambda: pydantic_ai("chat"),
    "pydantic-ai-stream": lambda: pydantic_ai("chat", stream=True),
    "pydantic-ai-responses": lambda: pydantic_ai("responses"),
    "pydantic-ai-anthropic": lambda: pydantic_ai("anthropic"),
    "litellm": litellm,
    "smolagents": smolagents,
}

if __name__ == "__main__":
    sys.stdout.write(f"\nANSWER {CASES[sys.argv[1]]()}\n")
