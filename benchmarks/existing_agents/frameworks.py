"""The same tasks by agents that exist: each answers the row's question by a base URL and a key, with the job's tools by
MCP, in the order and with the schemas that the built-in loop shows the model."""

# pyright: reportMissingImports=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
# ruff: noqa: ARG001 - every run is called with a deadline
from __future__ import annotations

import asyncio
import json
import urllib.request
from typing import Any

STEPS = 24
"""Steps of a graph, more than an episode has turns: the job ends it first."""


class Tools:
    """The tools of an episode."""

    def __init__(self, url: str, key: str) -> None:
        self._url, self._headers = url, {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        self.specs: list[Any] = self._request("tools/list")["tools"]

    def call(self, name: str, arguments: Any) -> str:
        answer = self._request("tools/call", name=name, arguments=arguments)
        return "".join(part["text"] for part in answer["content"])

    def _request(self, method: str, **params: Any) -> Any:
        message = json.dumps({"jsonrpc": "2.0", "id": 1, "method": method, "params": params}).encode()
        request = urllib.request.Request(self._url, message, self._headers)
        with urllib.request.urlopen(request, timeout=300) as response:
            return json.load(response)["result"]


def bare(row: Any, base_url: str, key: str, deadline: float, *, mcp_url: str) -> None:
    """OpenAI's client and nothing else."""
    import openai

    tools = Tools(mcp_url, key)
    functions: list[Any] = [
        {"type": "function", "function": {**_named(spec), "parameters": spec["inputSchema"]}} for spec in tools.specs
    ]
    messages = list(row["messages"])
    with openai.OpenAI(base_url=base_url, api_key=key) as client:
        while True:
            reply = (
                client.chat.completions.create(model="policy", messages=messages, tools=functions or openai.omit)
                .choices[0]
                .message
            )
            messages.append(reply)
            if not reply.tool_calls:
                return
            for call in reply.tool_calls:
                text = tools.call(call.function.name, json.loads(call.function.arguments))
                messages.append({"role": "tool", "tool_call_id": call.id, "content": text})


async def openai_agents(row: Any, base_url: str, key: str, deadline: float, *, mcp_url: str) -> None:
    """An agent of the OpenAI Agents SDK, over Responses."""
    from agents import Agent, FunctionTool, OpenAIResponsesModel, Runner, set_tracing_disabled
    from openai import AsyncOpenAI

    set_tracing_disabled(True)
    tools = await asyncio.to_thread(Tools, mcp_url, key)

    def function(spec: Any) -> Any:
        async def invoke(_context: Any, arguments: str) -> str:
            return await asyncio.to_thread(tools.call, spec["name"], json.loads(arguments))

        schema = spec["inputSchema"]
        return FunctionTool(**_named(spec), params_json_schema=schema, on_invoke_tool=invoke, strict_json_schema=False)

    async with AsyncOpenAI(base_url=base_url, api_key=key) as client:
        model = OpenAIResponsesModel(model="policy", openai_client=client)
        agent = Agent(name="agent", model=model, tools=[function(spec) for spec in tools.specs])
        await Runner.run(agent, row["messages"])


def langgraph(row: Any, base_url: str, key: str, deadline: float, *, mcp_url: str) -> None:
    """A LangGraph agent, whose invoke() blocks."""
    from langchain.agents import create_agent
    from langchain_core.tools import StructuredTool
    from langchain_openai import ChatOpenAI

    tools = Tools(mcp_url, key)

    def function(spec: Any) -> Any:
        def invoke(**arguments: Any) -> str:
            return tools.call(spec["name"], arguments)

        return StructuredTool(**_named(spec), args_schema=spec["inputSchema"], func=invoke)

    model = ChatOpenAI(model="policy", base_url=base_url, api_key=key)
    agent = create_agent(model, [function(spec) for spec in tools.specs])
    agent.invoke({"messages": row["messages"]}, {"recursion_limit": STEPS})


def _named(spec: Any) -> dict[str, str]:
    return {"name": spec["name"], "description": spec.get("description", "")}
