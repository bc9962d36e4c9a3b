"""The job's tools by MCP, through the SDK's own client, beside the record of the agent's calls."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import anthropic
import openai
import pytest
from mcp import ClientSession
from mcp.client.streamable_http import streamable_http_client
from mcp.shared._httpx_utils import create_mcp_http_client
from mcp.shared.exceptions import MCPError

from kestrl.api.tools.v1 import tools_pb2
from kestrl.episode import CallOutcome, Episode
from kestrl.errors import Boundary, ToolFailure

USER = {"role": "user", "content": "Find the kestrel."}


@asynccontextmanager
async def connected(endpoint: Any, key: str | None = None) -> AsyncIterator[ClientSession]:
    headers = {"authorization": f"Bearer {key or endpoint.api_key}"}
    async with (
        create_mcp_http_client(headers=headers) as http,
        streamable_http_client(endpoint.mcp_url, http_client=http) as streams,
        ClientSession(*streams[:2]) as session,
    ):
        await session.initialize()
        yield session


@asynccontextmanager
async def agent(served: Any, **changes: Any) -> AsyncIterator[Any]:
    """A stage, a client of MCP, one of chat, and the episode's end."""
    async with (
        served(**changes) as (stage, endpoint, end),
        openai.AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key, max_retries=0) as chat,
        connected(endpoint) as session,
    ):
        yield stage, session, chat, end


def offered(listed: Any, prefix: str = "") -> list[Any]:
    """What MCP lists, as a framework offers it to the model."""
    return [
        {
            "type": "function",
            "function": {
                "name": f"{prefix}{tool.name}",
                "description": tool.description,
                "parameters": tool.input_schema,
            },
        }
        for tool in listed.tools
    ]


def text(result: Any) -> str:
    return "".join(part.text for part in result.content)


def result_of(said: Any, content: str, place: int = 0) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": said.tool_calls[place].id, "content": content}


def found(text: str, **data: Any) -> tools_pb2.CallResponse:
    return tools_pb2.CallResponse(outcome="ok", text=text, data_json=json.dumps(data))


@pytest.mark.parametrize("prefix", ["", "mcp__job__"])
async def test_a_loop_over_mcp_is_the_own_loops_episode(
    served: Any, make_stage: Any, call_text: Any, prefix: str
) -> None:
    def handle(arguments: dict[str, Any]) -> tools_pb2.CallResponse:
        return found(f"found {arguments['word']}", rank=arguments["word"])

    words = ("kestrel", "a", "a", "b")
    async with agent(served) as (stage, session, chat, end):
        stage.tools.handlers["search"] = handle
        written = [call_text(f"{prefix}search", word=word) for word in words]
        stage.says(written[0], written[1] + written[2] + written[3], "A falcon.")
        tools = offered(await session.list_tools(), prefix)
        messages: list[Any] = [USER]
        while (said := await say(chat, messages, tools)).tool_calls:
            calls = [
                (call.function.name.removeprefix(prefix), json.loads(call.function.arguments))
                for call in said.tool_calls
            ]
            results = await asyncio.gather(*(session.call_tool(name, arguments) for name, arguments in calls))
            assert not any(result.is_error for result in results)
            messages += [said, *(result_of(said, text(each), place) for place, each in enumerate(results))]
        episode: Episode = await end()
        assert len(stage.tools.calls) == len(words)
        assert await stage.closed() == ["g-1/0"]
    own = await make_stage()
    own.tools.handlers["search"] = handle
    written = [call_text("search", word=word) for word in words]
    own.says(written[0], written[1] + written[2] + written[3], "A falcon.")
    loops: Episode = await own.episode()
    assert [facts(call) for call in episode.tool_calls] == [facts(call) for call in loops.tool_calls]
    assert episode.metrics["tool_calls"] == loops.metrics["tool_calls"] == 4
    assert "tool_results_not_shown" not in episode.metrics
    if not prefix:
        assert [list(row.token_ids) for row in episode.rows] == [list(row.token_ids) for row in loops.rows]
        assert [bytes(row.mask) for row in episode.rows] == [bytes(row.mask) for row in loops.rows]


async def say(chat: Any, messages: list[Any], tools: Any) -> Any:
    options = {"tools": tools} if tools else {}
    said = await chat.chat.completions.create(model="policy", messages=messages, **options)
    return said.choices[0].message


def facts(call: Any) -> tuple[Any, ...]:
    return (call.turn, call.name, call.arguments, call.outcome, call.text, dict(call.data))


async def test_what_becomes_of_a_call_is_recorded(served: Any, call_text: Any) -> None:
    async with agent(served, sampling={"max_turns": 20, "max_tokens": 3000}) as (stage, session, chat, end):
        stage.tools.handlers["search"] = lambda arguments: found(f"found {arguments['word']}", rank=1)
        tools = offered(await session.list_tools())
        own_tool = {"type": "function", "function": {"name": "add", "description": "", "parameters": {}}}
        stage.says(
            "".join(call_text("search", word=word) for word in "abc")
            + call_text("add", x=1)
            + call_text("fly")
            + '<tool_call>{"name": "sea</tool_call>',
            "Done.",
        )
        await session.call_tool("search", {"word": "before"})  # by the agent, before it asks the model
        said = await say(chat, [USER], [*tools, own_tool])
        await session.call_tool("search", {"word": "a"})
        await session.call_tool("search", {"word": "b"})
        # a is shown as the agent words it, b never; c is not made; add is the agent's own
        results = [result_of(said, "a: it was found"), result_of(said, "1", 3), result_of(said, "no such tool", 4)]
        await say(chat, [USER, said, *results], [*tools, own_tool])
        await session.call_tool("search", {"word": "a"})  # once more, of its own accord
        episode: Episode = await end()
        ok, unanswered = CallOutcome.OK, CallOutcome.UNANSWERED
        assert [(call.turn, *facts(call)[1:]) for call in episode.tool_calls] == [
            (0, "search", {"word": "before"}, ok, "found before", {"rank": 1}),
            (0, "search", {"word": "a"}, ok, "a: it was found", {"rank": 1}),
            (0, "search", {"word": "b"}, ok, "found b", {"rank": 1}),
            (0, "search", {"word": "c"}, unanswered, "", {}),
            (0, "add", {"x": 1}, ok, "1", {}),
            (0, "fly", {}, CallOutcome.UNKNOWN_TOOL, "no such tool", {}),
            (0, "", None, CallOutcome.INVALID_JSON, "", {}),
            (1, "search", {"word": "a"}, ok, "found a", {"rank": 1}),
        ]
        assert episode.metrics["tool_results_not_shown"] == 1
        assert episode.metrics["tool_calls_by_agent"] == 2
        assert episode.metrics["tool_errors.invalid_json"] == episode.metrics["tool_errors.unknown_tool"] == 1
        raws = [call.raw for call in episode.tool_calls]
        assert raws[0] == raws[7] == ""
        assert all(raws[1:7])


async def test_a_tools_own_error_is_its_answer(served: Any, call_text: Any) -> None:
    async with agent(served) as (stage, session, chat, end):
        refusal = tools_pb2.CallResponse(outcome="tool_error", text="no such inbox")
        stage.tools.handlers["search"] = lambda arguments: refusal
        stage.says(call_text("search", word="a"), "Done.")
        await say(chat, [USER], offered(await session.list_tools()))
        refused = await session.call_tool("search", {"word": "a"})
        assert (refused.is_error, text(refused)) == (True, "no such inbox")
        unknown = await session.call_tool("fly", {})
        assert (unknown.is_error, text(unknown)) == (
            True,
            "Error: there is no tool 'fly'. The tools are: search, answer.",
        )
        episode = await end()
        assert episode.failure is None
        assert [call.outcome for call in episode.tool_calls] == ["tool_error", "unknown_tool"]
        assert len(stage.tools.calls) == 1


async def test_more_calls_of_a_turn_than_the_jobs_limit_are_not_made(served: Any) -> None:
    async with agent(served) as (stage, session, _, end):
        results = [await session.call_tool("search", {"word": str(number)}) for number in range(9)]
        assert [result.is_error for result in results] == [False] * 8 + [True]
        assert "at most 8 tool calls in one turn" in text(results[8])
        assert len(stage.tools.calls) == 8
        assert (await end()).failure is None


def broken(arguments: dict[str, Any]) -> str:
    raise ToolFailure("search: the index is gone")


async def stuck(arguments: dict[str, Any]) -> str:
    await asyncio.Event().wait()
    return ""


@pytest.mark.parametrize(
    ("handler", "deadlines", "boundary", "code"),
    [(broken, {}, Boundary.TOOL, "tool_raised"), (stuck, {"tool": 0.2}, Boundary.TOOL, "tool_deadline")],
)
async def test_a_failure_of_a_tool_ends_the_episode_and_is_no_answer(
    served: Any, call_text: Any, handler: Any, deadlines: dict[str, float], boundary: Boundary, code: str
) -> None:
    async with agent(served, deadlines=deadlines) as (stage, session, chat, end):
        stage.tools.handlers["search"] = handler
        stage.says(call_text("search", word="a"), "Done.")
        said = await say(chat, [USER], offered(await session.list_tools()))
        with pytest.raises(MCPError) as failed:
            await session.call_tool("search", {"word": "a"})
        assert failed.value.error.data == {"code": f"{boundary}/{code}"}
        with pytest.raises(openai.InternalServerError):  # whatever the agent makes of it
            await say(chat, [USER, said, result_of(said, "It seems to be gone.")], None)
        with pytest.raises(MCPError):
            await session.call_tool("answer", {"text": "42"})
        episode = await end()
        assert episode.failure is not None
        assert (episode.failure.boundary, episode.failure.code) == (boundary, code)
        assert len(stage.engine.prompts) == 1


async def test_a_tool_that_ends_the_episode_ends_its_sampling(served: Any) -> None:
    async with agent(served) as (stage, session, chat, end):
        stage.says("Hello.")
        await say(chat, [USER], None)
        assert not (await session.call_tool("answer", {"text": "42"})).is_error
        with pytest.raises(openai.BadRequestError) as over:
            await say(chat, [USER], None)
        assert over.value.code == "limit_reached"
        with pytest.raises(MCPError, match="a tool has ended it"):
            await session.call_tool("search", {"word": "a"})
        episode = await end()
        assert (episode.failure, episode.stop_reason, episode.num_turns) == (None, "final_tool", 1)
        assert episode.tool_calls[0].data == {"said": "42"}


async def test_a_call_whose_client_is_gone_is_made_and_recorded(served: Any) -> None:
    asked, gate = asyncio.Event(), asyncio.Event()

    async def slow(arguments: dict[str, Any]) -> str:
        asked.set()
        await gate.wait()
        return "late"

    async with served() as (stage, endpoint, end), aiohttp.ClientSession() as http:
        stage.tools.handlers["search"] = slow
        call: dict[str, Any] = {"jsonrpc": "2.0", "id": 1, "method": "tools/call"}
        call["params"] = {"name": "search", "arguments": {"word": "a"}}
        headers = {"x-api-key": endpoint.api_key}
        gone = asyncio.create_task(http.post(endpoint.mcp_url, json=call, headers=headers))
        await asked.wait()
        gone.cancel()
        (opened,) = stage.groups._episodes._gateway._episodes.values()
        (task,) = opened.tasks
        gate.set()
        await asyncio.wait({task})
        episode = await end()
        assert [(call.outcome, call.text) for call in episode.tool_calls] == [("ok", "late")]


async def test_the_key_and_the_form_are_checked(served: Any) -> None:
    async with served() as (stage, endpoint, end), aiohttp.ClientSession() as http:

        async def post(body: Any, key: str = endpoint.api_key, method: str = "POST") -> tuple[int, Any]:
            headers = {"authorization": f"Bearer {key}"}
            data = body if isinstance(body, bytes) else json.dumps(body).encode()
            async with http.request(method, endpoint.mcp_url, data=data, headers=headers) as response:
                content = await response.read()
                return response.status, json.loads(content) if content else None

        def request(method: str, **params: Any) -> dict[str, Any]:
            return {"jsonrpc": "2.0", "id": "x", "method": method, "params": params}

        assert (await post(request("tools/list"), key="other"))[0] == 401
        assert (await post(b"", method="GET"))[0] == (await post(b"", method="DELETE"))[0] == 405
        for body in (b"{", b"[]", b"\xff"):
            status, answer = await post(body)
            assert (status, answer["error"]["code"]) == (400, -32700)
        assert await post({"jsonrpc": "2.0", "method": "notifications/initialized"}) == (202, None)
        status, answer = await post(request("initialize", protocolVersion="1999-01-01"))
        assert (status, answer["id"], answer["result"]["protocolVersion"]) == (200, "x", "2025-11-25")
        deep: dict[str, Any] = {}
        for _ in range(70):
            deep = {"word": deep}
        for method, params, code in (
            ("prompts/list", {}, -32601),
            ("tools/call", {"name": 5}, -32602),
            ("tools/call", {"name": "search", "arguments": [1]}, -32602),
            ("tools/call", {"name": "search", "arguments": deep}, -32602),
        ):
            status, answer = await post(request(method, **params))
            assert (status, answer["error"]["code"]) == (200, code), method
        assert stage.tools.calls == []
        assert (await end()).failure is None
        assert (await post(request("tools/list")))[0] == 410


async def test_an_error_that_anthropics_client_marks_is_the_calls(served: Any, call_text: Any) -> None:
    async with served() as (stage, endpoint, end):
        root = endpoint.base_url.removesuffix("/v1")
        async with anthropic.AsyncAnthropic(base_url=root, api_key=endpoint.api_key, max_retries=0) as client:
            stage.says(call_text("own", word="a"), "Done.")
            user: Any = {"role": "user", "content": "Find."}
            tools: Any = [{"name": "own", "input_schema": {"type": "object"}}]
            said: Any = await client.messages.create(model="x", max_tokens=200, messages=[user], tools=tools)
            block = said.content[-1]
            result = {"type": "tool_result", "tool_use_id": block.id, "content": "it broke", "is_error": True}
            messages: Any = [
                user,
                {"role": "assistant", "content": said.content},
                {"role": "user", "content": [result]},
            ]
            await client.messages.create(model="x", max_tokens=200, messages=messages, tools=tools)
        episode = await end()
        assert [(call.outcome, call.text) for call in episode.tool_calls] == [("tool_error", "it broke")]
