"""Cases of what clients ask for: what is answered, recorded or refused."""

from __future__ import annotations

import asyncio
from typing import Any

from kestrl.testing.gateway.case import Table
from kestrl.testing.gateway.client import SCHEMA, TOOLS, USER, forks, serving, user
from kestrl.testing.gateway.seam import Subject

TABLE = Table()
REFUSED: tuple[tuple[dict[str, Any], str], ...] = (
    ({"n": 2}, "n"),
    ({"logit_bias": {"5": 1}}, "logit_bias"),
    ({"logprobs": True, "top_logprobs": 3}, "top_logprobs"),
    ({"functions": [{"name": "x"}]}, "functions"),
    ({"modalities": ["audio"]}, "modalities"),
    ({"new_sampler": 1}, "new_sampler"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "messages"),
    ({"messages": [USER, {"role": "assistant", "content": "I sa"}]}, "messages"),
    ({"messages": [user("x" * 6000)]}, "messages"),
)
"""Fields that would change the sample or that no text model reads, and the names that the answer has."""


@TABLE.case(25, title="a field that cannot be trained is a 400 with its name, and the client can go on")
async def refused_fields(subject: Subject) -> None:
    async with serving(subject) as agent:
        agent.served.says("Hello.")
        for fields, name in REFUSED:
            reply = await agent.chat(**{"messages": [USER], **fields})
            assert reply.status == 400, fields
            assert str(reply.error["param"]).startswith(name), reply.text
        assert list(agent.served.prompts) == []
        assert (await agent.chat([USER])).message["content"] == "Hello."
        assert (await agent.end()).failure is None


@TABLE.case(26, title="sampling is the job's; what was asked is recorded")
async def forced_sampling(subject: Subject) -> None:
    async with serving(subject, temperature=1.0) as agent:
        agent.served.says("Hello.")
        await agent.chat([USER], temperature=0.0, top_p=0.5, presence_penalty=0.5, seed=3)
        episode = await agent.end()
        sampling = agent.served.prompts[0].sampling
        assert (sampling["temperature"], sampling["top_p"]) == (1.0, 1.0)
        for name in ("temperature", "top_p", "presence_penalty"):
            assert episode.metrics[f"sampling_forced.{name}"] == 1, name


@TABLE.case(36, title="a forced tool_choice is sampled as auto and recorded, or refused where the job says so")
async def forced_choice(subject: Subject) -> None:
    named_choice = {"type": "function", "function": {"name": "search"}}
    async with serving(subject) as agent:
        agent.served.says("Hello.")
        for choice in ("required", named_choice):
            assert (await agent.chat([USER], tool_choice=choice)).message["content"] == "Hello."
        assert (await agent.end()).metrics["asked_not_forced.tool_choice"] == 2
    async with serving(subject, refuses=("tool_choice",)) as agent:
        reply = await agent.chat([USER], tool_choice="required")
        assert (reply.status, reply.error["code"], reply.error["param"]) == (400, "not_forced", "tool_choice")


@TABLE.case(37, title="the reply is cut at a stop string, the row keeps what was sampled up to it")
async def stop_strings(subject: Subject) -> None:
    async with serving(subject) as agent:
        agent.served.says("Thought: x\nObservation: made up")
        reply = await agent.chat([USER], stop=["Calling:", "Observation:"])
        choice = reply.body["choices"][0]
        assert (choice["message"]["content"], choice["finish_reason"]) == ("Thought: x\n", "stop")
        (row,), (turn,) = (await agent.end()).rows, (await agent.end()).turns
        sampled = agent.served.decode(row.token_ids[turn.start : turn.end])
        assert sampled.startswith("Thought: x\nObservation:")
        assert "made up" not in sampled


@TABLE.case(46, title="models are listed with their length, tokens counted exactly, and neither is a row")
async def models_and_counts(subject: Subject) -> None:
    async with serving(subject) as agent:
        agent.served.says("Hello.")
        (model,) = (await agent.request("/v1/models", method="GET")).body["data"]
        assert model["max_model_len"] > 0
        tools = [{"name": "search", "description": "Looks up.", "input_schema": SCHEMA}]
        body: dict[str, Any] = {"model": "policy", "messages": [USER], "tools": tools, "system": "Be brief."}
        counted = (await agent.request("/v1/messages/count_tokens", body)).body["input_tokens"]
        assert list(agent.served.prompts) == []
        await agent.messages([USER], tools=tools, system="Be brief.")
        assert counted == len(agent.served.prompts[0].token_ids)
        assert len((await agent.end()).turns) == 1


@TABLE.case(47, title="the details of usage are never null")
async def usage_details(subject: Subject) -> None:
    async with serving(subject) as agent:
        agent.served.says("Hello.")
        usage = (await agent.chat([USER])).body["usage"]
        assert isinstance(usage["prompt_tokens_details"]["cached_tokens"], int)
        assert isinstance(usage["completion_tokens_details"], dict)
        usage = (await agent.responses([USER])).body["usage"]
        assert isinstance(usage["input_tokens_details"]["cached_tokens"], int)
        assert isinstance(usage["output_tokens_details"]["reasoning_tokens"], int)


@TABLE.case(48, title="no tools beside parallel_tool_calls is a call without tools")
async def empty_tools(subject: Subject) -> None:
    async with serving(subject) as agent:
        agent.served.says("Hello.")
        for parallel in (True, False):
            reply = await agent.chat([USER], tools=[], parallel_tool_calls=parallel)
            assert reply.message["content"] == "Hello."
        assert not any(name.startswith("asked") for name in (await agent.end()).metrics)


@TABLE.case(49, title="64,000 output tokens are clamped and recorded, fewer are honoured")
async def many_tokens(subject: Subject) -> None:
    async with serving(subject, max_tokens=60) as agent:
        agent.served.says("Hello.")
        await agent.chat([USER], max_tokens=64_000)
        await agent.chat([USER], max_tokens=3)
        episode = await agent.end()
        assert [prompt.sampling["max_tokens"] for prompt in agent.served.prompts] == [60, 3]
        assert episode.metrics["sampling_forced.max_tokens"] == 1


@TABLE.case(50, title="a silent stream is kept alive by comments, and an error behind them is an event and no turn")
async def kept_alive(subject: Subject) -> None:
    async with serving(subject, keep_alive=0.01) as agent:
        agent.served.says("Hello.")
        hold, began = agent.served.holds(), asyncio.Event()
        call = asyncio.create_task(agent.chat([USER], stream=True, began=began))
        await hold.asked.wait()
        await began.wait()
        hold.release.set()
        reply = await call
        assert reply.text.startswith(":"), "no comment was sent"
        assert reply.events[0]["choices"][0]["delta"]["content"] == "Hello."
        agent.served.fails()
        broken = await agent.chat([user("Again.")], stream=True)
        error = broken.events[0]["error"] if broken.status == 200 else broken.error
        assert error["message"]
        episode = await agent.end()
        assert episode.failure is not None
        assert len(episode.turns) == 1


@TABLE.case(54, title="what has no tokens is ignored by a list and recorded; an unknown semantic field is a 400")
async def ignored_fields(subject: Subject) -> None:
    async with serving(subject) as agent:
        agent.served.says("Hello.")
        tools: list[Any] = [{"name": "search", "input_schema": SCHEMA}, {"type": "web_search_20250305", "name": "web"}]
        claude: dict[str, Any] = {"thinking": {"type": "adaptive"}, "context_management": {"edits": []}}
        claude |= {"output_config": {"effort": "high"}, "metadata": {"user_id": "me"}, "tools": tools}
        assert (await agent.messages([USER], **claude)).status == 200
        codex: dict[str, Any] = {"include": ["reasoning.encrypted_content"], "reasoning": {"effort": "low"}}
        codex |= {"store": False, "prompt_cache_key": "k", "client_metadata": {"a": "b"}, "parallel_tool_calls": True}
        codex["tools"] = [{"type": "function", "name": "search", "parameters": SCHEMA}, {"type": "web_search"}]
        assert (await agent.responses([user("Other.")], **codex)).status == 200
        for reply in (
            await agent.messages([USER], mcp_servers=[{"url": "x"}]),
            await agent.responses([USER], background=True),
            await agent.chat([USER], new_sampler=1),
        ):
            assert reply.status == 400
            assert reply.error["param"] in ("mcp_servers", "background", "new_sampler")
        metrics = (await agent.end()).metrics
        for name in ("thinking", "context_management", "tools"):
            assert metrics[f"asked_not_forced.{name}"] >= 1, name


@TABLE.case(57, title="a websocket of Responses is refused at once, and the client's HTTP is served")
async def websocket(subject: Subject) -> None:
    async with serving(subject) as agent:
        agent.served.says("Hello.")
        headers = {"authorization": f"Bearer {agent.served.api_key}", "connection": "Upgrade", "upgrade": "websocket"}
        assert (await agent.request("/v1/responses", headers=headers, method="GET")).status in (404, 405, 426)
        assert (await agent.responses([USER], tools=TOOLS and [])).status == 200
        episode = await agent.end()
        assert (episode.failure, forks(episode)) == (None, {})
