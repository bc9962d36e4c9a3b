"""Anthropic's Messages and OpenAI's Responses, through the providers' own clients: the rows of all faces are equal."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import anthropic
import openai
import pytest

from kestrl.episode import Episode

SCHEMA = {"type": "object", "properties": {"word": {"type": "string"}}}
CHAT_TOOLS = [{"type": "function", "function": {"name": "search", "description": "Looks up.", "parameters": SCHEMA}}]
RESPONSE_TOOLS: list[Any] = [
    {"type": "function", "name": "search", "description": "Looks up.", "parameters": SCHEMA, "strict": False}
]
MESSAGE_TOOLS: list[Any] = [{"name": "search", "description": "Looks up.", "input_schema": SCHEMA}]
SYSTEM, QUESTION = "You are a clerk.", "Find the kestrel."


class Agent:
    """The same agent by three APIs: one that streams takes what the client's helper puts together."""

    def __init__(self, stage: Any, endpoint: Any, end: Any) -> None:
        self.stage, self.endpoint, self.end = stage, endpoint, end
        self.openai = openai.AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key, max_retries=0)
        root = endpoint.base_url.removesuffix("/v1")
        self.anthropic = anthropic.AsyncAnthropic(base_url=root, api_key=endpoint.api_key, max_retries=0)

    async def chat(self, *, stream: bool) -> str:
        messages: list[Any] = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": QUESTION}]
        while True:
            options: dict[str, Any] = {"model": "policy", "messages": messages, "tools": CHAT_TOOLS}
            if stream:
                async with self.openai.chat.completions.stream(**options) as events:
                    said: Any = (await events.get_final_completion()).choices[0].message
            else:
                said = (await self.openai.chat.completions.create(**options)).choices[0].message
            if not said.tool_calls:
                return said.content
            messages.append({"role": "assistant", "content": said.content, "tool_calls": said.tool_calls})
            messages += [{"role": "tool", "tool_call_id": call.id, "content": "found"} for call in said.tool_calls]

    async def messages(self, *, stream: bool) -> str:
        messages: list[Any] = [{"role": "user", "content": QUESTION}]
        while True:
            options: dict[str, Any] = {"model": "policy", "system": SYSTEM, "messages": messages, "max_tokens": 400}
            options["tools"] = MESSAGE_TOOLS
            if stream:
                async with self.anthropic.messages.stream(**options) as events:
                    said: Any = await events.get_final_message()
            else:
                said = await self.anthropic.messages.create(**options)
            if said.stop_reason != "tool_use":
                return "".join(block.text for block in said.content)
            messages.append({"role": "assistant", "content": said.content})
            results = [
                {"type": "tool_result", "tool_use_id": block.id, "content": "found", "is_error": False}
                for block in said.content
                if block.type == "tool_use"
            ]
            messages.append({"role": "user", "content": results})

    async def responses(self, *, stream: bool, stateful: bool = False) -> str:
        items: list[Any] = [{"role": "user", "content": QUESTION}]
        previous: Any = openai.omit
        while True:
            options: dict[str, Any] = {"model": "policy", "instructions": SYSTEM, "input": items}
            options |= {"tools": RESPONSE_TOOLS, "previous_response_id": previous}
            if stream:
                async with self.openai.responses.stream(**options) as events:
                    said: Any = await events.get_final_response()
            else:
                said = await self.openai.responses.create(**options)
            calls = [item for item in said.output if item.type == "function_call"]
            if not calls:
                return said.output_text
            results = [{"type": "function_call_output", "call_id": call.call_id, "output": "found"} for call in calls]
            items = results if stateful else [*items, *(item.to_dict() for item in said.output), *results]
            previous = said.id if stateful else openai.omit


@pytest.fixture
async def agent(served: Any) -> Callable[..., Any]:
    @asynccontextmanager
    async def serving(**changes: Any) -> AsyncIterator[Agent]:
        async with served(**changes) as (stage, endpoint, end):
            one = Agent(stage, endpoint, end)
            async with one.openai, one.anthropic:
                yield one

    return serving


async def test_all_faces_make_the_same_rows(agent: Any, call_text: Any) -> None:
    says = (
        "<think>Hm.</think>Look.\n" + call_text("search", word="lämp") + call_text("search", word="b"),
        call_text("search", word="c"),
        "A falcon.",
    )
    rows: dict[str, list[list[int]]] = {}
    for name, options in (
        ("chat", {"stream": False}),
        ("chat", {"stream": True}),
        ("messages", {"stream": False}),
        ("messages", {"stream": True}),
        ("responses", {"stream": False}),
        ("responses", {"stream": True}),
        ("responses", {"stream": False, "stateful": True}),
    ):
        async with agent() as one:
            one.stage.says(*says)
            assert await getattr(one, name)(**options) == "A falcon."
            episode: Episode = await one.end()
            assert episode.failure is None
            assert [turn.row for turn in episode.turns] == [0, 0, 0], name
            rows[f"{name} {options}"] = [list(row.token_ids) for row in episode.rows]
    assert all(each == rows["chat {'stream': False}"] for each in rows.values())


async def test_anthropics_client_counts_exactly_and_stops(agent: Any) -> None:
    async with agent() as one:
        one.stage.says("One, two, three.")
        options: dict[str, Any] = {"model": "policy", "messages": [{"role": "user", "content": QUESTION}]}
        counted = await one.anthropic.messages.count_tokens(**options, tools=MESSAGE_TOOLS, system=SYSTEM)
        assert one.stage.engine.prompts == []
        said = await one.anthropic.messages.create(
            **options, tools=MESSAGE_TOOLS, system=SYSTEM, max_tokens=50, stop_sequences=["two"]
        )
        assert (said.content[0].text, said.stop_reason, said.stop_sequence) == ("One, ", "stop_sequence", "two")
        assert counted.input_tokens == said.usage.input_tokens == len(one.stage.engine.prompts[0].token_ids)
        cut = await one.anthropic.messages.create(**options, max_tokens=2)
        assert (cut.stop_reason, cut.usage.output_tokens) == ("max_tokens", 2)
        assert (await one.end()).failure is None


async def test_what_harnesses_send_is_taken(agent: Any, call_text: Any) -> None:
    """Fields and items of Claude Code and Codex, as they were recorded."""
    async with agent(sampling={"max_turns": 20, "max_tokens": 3000}) as one, aiohttp.ClientSession() as http:
        one.stage.says("<think>Hm.</think>" + call_text("search", word="a"), "Done.")
        root = one.endpoint.base_url.removesuffix("/v1")

        async def post(path: str, body: dict[str, Any], **headers: str) -> Any:
            async with http.post(f"{root}{path}", json=body, headers=headers) as response:
                answer = await response.json()
                assert response.status == 200, answer
                return answer

        cached = {"cache_control": {"type": "ephemeral"}}
        claude: dict[str, Any] = {
            "model": "x",
            "max_tokens": 32_000,
            "system": [{"type": "text", "text": "x-anthropic-billing-header: 1\nYou code.", **cached}],
            "messages": [{"role": "user", "content": [{"type": "text", "text": QUESTION, **cached}]}],
            "tools": [{**MESSAGE_TOOLS[0], **cached}, {"type": "web_search_20250305", "name": "web_search"}],
            "thinking": {"type": "adaptive"},
            "context_management": {"edits": []},
            "output_config": {"effort": "high"},
            "metadata": {"user_id": "me"},
            "tool_choice": {"type": "auto"},
        }
        key = {"x-api-key": one.endpoint.api_key, "anthropic-version": "2026-10-21"}
        first = await post("/v1/messages?beta=true", claude, **key)
        assert [block["type"] for block in first["content"]] == ["thinking", "tool_use"]
        result = {"type": "tool_result", "tool_use_id": first["content"][1]["id"], "content": [
            {"type": "text", "text": "2"}
        ]}  # fmt: skip
        claude["system"][0]["text"] = "x-anthropic-billing-header: 2\nYou code."
        claude["messages"] = [
            {"role": "user", "content": [{"type": "text", "text": QUESTION}]},
            {"role": "assistant", "content": first["content"]},
            {"role": "user", "content": [result, {"type": "text", "text": "Go on.", **cached}]},
        ]
        assert (await post("/v1/messages?beta=true", claude, **key))["content"][0]["text"] == "Done."

        codex: dict[str, Any] = {
            "model": "x",
            "store": False,
            "include": ["reasoning.encrypted_content"],
            "reasoning": {"effort": "medium", "summary": "auto"},
            "prompt_cache_key": "k",
            "client_metadata": {"a": "b"},
            "parallel_tool_calls": True,
            "tools": [*RESPONSE_TOOLS, {"type": "namespace", "name": "n"}, {"type": "web_search"}],
            "tool_choice": "auto",
            "input": [
                {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Find a lamp."}]},
            ],
        }
        bearer = {"authorization": f"Bearer {one.endpoint.api_key}", "x-session-id": "its own"}
        answer = await post("/v1/responses", codex, **bearer)
        assert [item["type"] for item in answer["output"]] == ["reasoning", "function_call"]
        call = answer["output"][1]
        output = {"type": "function_call_output", "call_id": call["call_id"], "output": "2"}
        codex["input"] += [*answer["output"], output]
        again = await post("/v1/responses", codex, **bearer)
        assert again["output"][0]["content"][0]["text"] == "Done."
        assert again["usage"]["input_tokens_details"]["cached_tokens"] > 0
        episode = await one.end()
        assert episode.failure is None
        assert [turn.row for turn in episode.turns] == [0, 0, 1, 1]
        assert {name for name in episode.metrics if name.startswith("forks.")} == {"forks.new_conversation"}


JOB_TOOLS = {
    "type": "namespace",
    "name": "mcp__job",
    "description": "Tools in the mcp__job namespace.",
    "tools": RESPONSE_TOOLS,
}


@pytest.mark.parametrize("stream", [False, True])
async def test_tools_in_namespaces_are_called_by_them(agent: Any, call_text: Any, stream: bool) -> None:
    """Codex has the tools of MCP servers in namespaces: it is called by both names, and sends both back."""
    async with agent() as one:
        one.stage.says(call_text("mcp__job__search", word="a") + call_text("search", word="b"), "Done.")
        options: dict[str, Any] = {"model": "policy", "tools": [*RESPONSE_TOOLS, JOB_TOOLS]}

        async def ask(items: list[Any]) -> Any:
            if not stream:
                return await one.openai.responses.create(**options, input=items)
            async with one.openai.responses.stream(**options, input=items) as events:
                return await events.get_final_response()

        items: list[Any] = [{"role": "user", "content": QUESTION}]
        called = [item.to_dict() for item in (await ask(items)).output]
        assert [(call["name"], call.get("namespace")) for call in called] == [("search", "mcp__job"), ("search", None)]
        items += called
        items += [{"type": "function_call_output", "call_id": call["call_id"], "output": "found"} for call in called]
        assert (await ask(items)).output_text == "Done."
        episode: Episode = await one.end()
    assert [turn.row for turn in episode.turns] == [0, 0]
    assert [call.name for call in episode.tool_calls] == ["mcp__job__search", "search"]
    assert not any(name.startswith("asked_not_forced") for name in episode.metrics)


@pytest.mark.parametrize(
    ("tools", "param"),
    [
        ([{**JOB_TOOLS, "tools": [{"type": "oracle"}]}], "tools[0].tools[0].type"),
        ([{**JOB_TOOLS, "tools": [{"type": "function"}]}], "tools[0].tools[0].name"),
        ([{**JOB_TOOLS, "tools": "search"}], "tools[0].tools"),
        ([{**JOB_TOOLS, "name": 1}], "tools[0].name"),
        ([JOB_TOOLS, {**RESPONSE_TOOLS[0], "name": "mcp__job__search"}], "tools"),
        ([JOB_TOOLS, JOB_TOOLS], "tools"),
    ],
)
async def test_a_namespace_that_cannot_be_offered_is_refused(agent: Any, tools: Any, param: str) -> None:
    async with agent() as one:
        with pytest.raises(openai.BadRequestError) as refused:
            await one.openai.responses.create(model="policy", input=QUESTION, tools=tools)
        assert refused.value.param == param
        assert one.stage.engine.prompts == []


async def test_errors_have_the_shape_of_their_api(agent: Any) -> None:
    async with agent(sampling={"max_turns": 1}) as one:
        one.stage.says("Hello.")
        message: list[Any] = [{"role": "user", "content": QUESTION}]
        with pytest.raises(anthropic.BadRequestError) as refused:
            await one.anthropic.messages.create(
                model="x", max_tokens=5, messages=message, extra_body={"mcp_servers": [{"url": "x"}]}
            )
        assert refused.value.body["error"]["param"] == "mcp_servers"
        with pytest.raises(openai.BadRequestError) as background:
            await one.openai.responses.create(model="x", input="Hi", background=True)
        assert background.value.param == "background"
        with pytest.raises(openai.BadRequestError) as unknown:
            await one.openai.responses.create(model="x", input="Hi", previous_response_id="resp_1")
        assert unknown.value.code == "previous_response_not_found"
        image = [{"type": "image", "source": {"type": "url", "url": "x"}}]
        with pytest.raises(anthropic.BadRequestError) as picture:
            await one.anthropic.messages.create(
                model="x",
                max_tokens=5,
                messages=[{"role": "user", "content": image}],  # type: ignore[typeddict-item]
            )
        assert picture.value.body["error"]["code"] == "unsupported_content"
        stranger = one.anthropic.with_options(api_key="wrong")
        with pytest.raises(anthropic.AuthenticationError):
            await stranger.messages.create(model="x", max_tokens=5, messages=message)
        await one.anthropic.messages.create(model="x", max_tokens=5, messages=message)
        with pytest.raises(anthropic.BadRequestError) as limit:
            await one.anthropic.messages.create(model="x", max_tokens=5, messages=message)
        assert limit.value.body["error"]["code"] == "limit_reached"
        assert (await one.end()).failure is None
        with pytest.raises(anthropic.APIStatusError) as over:
            await one.anthropic.messages.create(model="x", max_tokens=5, messages=message)
        assert over.value.status_code == 410


async def test_reasoning_that_a_client_makes_up_is_no_turn_of_the_model(agent: Any) -> None:
    async with agent() as one:
        one.stage.says("<think>Hm.</think>Hello.", "Done.")
        message: list[Any] = [{"role": "user", "content": QUESTION}]
        options: dict[str, Any] = {"model": "x", "max_tokens": 200, "thinking": {"type": "adaptive"}}
        first = await one.anthropic.messages.create(**options, messages=message)
        said = json.loads(first.to_json())["content"]
        said[0]["thinking"] = "Something else."
        turn: Any = {"role": "assistant", "content": said}
        await one.anthropic.messages.create(**options, messages=[*message, turn, {"role": "user", "content": "And?"}])
        episode = await one.end()
        assert episode.metrics["forks.unproven"] == 1
