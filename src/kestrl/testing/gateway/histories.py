"""Cases of histories: which ones continue a row, and why others begin one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from kestrl.testing.gateway.case import Table
from kestrl.testing.gateway.client import SYSTEM, TOOLS, USER, Agent, forks, serving, tool_result, user
from kestrl.testing.gateway.seam import Subject

TABLE = Table()
ABSENT = object()
Messages = Sequence[Mapping[str, Any]]
Spelling = Callable[[dict[str, Any]], dict[str, Any]]
"""A turn as a client sends it back, by its message."""


def echoed(message: Mapping[str, Any], *, arguments: str | None = None, content: Any = None) -> dict[str, Any]:
    """A turn of one call in a client's spelling."""
    call = message["tool_calls"][0]
    function = {**call["function"], **({} if arguments is None else {"arguments": arguments})}
    echo = {"role": "assistant", "content": content, "tool_calls": [{**call, "function": function}]}
    return {name: value for name, value in echo.items() if value is not ABSENT}


async def _one_row(subject: Subject, *spellings: Spelling) -> None:
    """Each spelling of a turn, made by a function of its message, continues its row."""
    for spelling in spellings:
        async with serving(subject) as agent:
            call = subject.call_text("search", {"word": "lämp", "n": 1})
            agent.served.says(f"<think>Hm.</think>{call}", "Done.")
            first = (await agent.chat([USER])).message
            echo = spelling(first)
            await agent.chat([USER, echo, tool_result(echo["tool_calls"][0], "2")])
            episode = await agent.end()
            assert [turn.row for turn in episode.turns] == [0, 0], f"a row began at {echo}"
            assert forks(episode) == {}


async def _fork(subject: Subject, reason: str, change: Callable[[list[Any]], Messages], **fields: Any) -> None:
    """A changed second request begins a row with its reason and its price."""
    async with serving(subject) as agent:
        agent.served.says(subject.call_text("search", {"word": "a"}), "Done.")
        first = (await agent.chat([SYSTEM, USER])).message
        await agent.chat(change([SYSTEM, USER, first, tool_result(first["tool_calls"][0], "2")]), **fields)
        episode = await agent.end()
        assert forks(episode) == {reason: 1}, forks(episode)
        price = len(agent.served.prompts[-1].token_ids)
        assert episode.metrics[f"fork_tokens.{reason}"] == price, "the price is not the tokens of the prompt"
        assert [turn.row for turn in episode.turns] == [0, 1]


@TABLE.case(4, title="calls may have other ids, in another order of their results' ids")
async def renamed_ids(subject: Subject) -> None:
    async with serving(subject) as agent:
        agent.served.says(subject.call_text("search", {"word": "a"}) + subject.call_text("search", {"word": "b"}), "D.")
        first = (await agent.chat([USER])).message
        assert len({call["id"] for call in first["tool_calls"]}) == 2
        calls = [{**call, "id": f"mine-{1 - place}"} for place, call in enumerate(first["tool_calls"])]
        results = [tool_result(calls[0], "of a"), tool_result(calls[1], "of b")]
        await agent.chat([USER, {**first, "tool_calls": calls}, *results])
        assert forks(await agent.end()) == {}


@TABLE.case(5, 39, title="spaces, key order, escapes and 1.0 for 1 in arguments make no other message")
async def spelled_arguments(subject: Subject) -> None:
    spellings = ('{"word":"l\\u00e4mp","n":1}', '{"n": 1.0, "word": "lämp"}', '{ "word" : "lämp", "n": 1 }')
    await _one_row(subject, *(partial(echoed, arguments=text) for text in spellings))


@TABLE.case(6, title="reasoning may be left out")
async def reasoning_stripped(subject: Subject) -> None:
    await _one_row(subject, echoed)


@TABLE.case(7, title="reasoning may be sent back; what was not sampled is no turn of the model")
async def reasoning_kept(subject: Subject) -> None:
    await _one_row(subject, lambda messages: messages)
    async with serving(subject) as agent:
        agent.served.says("<think>Hm.</think>Hello.", "Done.")
        first = (await agent.chat([USER])).message
        await agent.chat([USER, {**first, "reasoning_content": "Something else."}, user("And?")])
        assert forks(await agent.end()) == {"unproven": 1}


@TABLE.case(8, title="a turn whose text was edited begins a row")
async def edited_text(subject: Subject) -> None:
    await _fork(
        subject, "edited_assistant", lambda messages: [*messages[:2], {**messages[2], "content": "I say:"}, messages[3]]
    )


@TABLE.case(9, title="white space around a turn is no edit, within it is one")
async def edited_space(subject: Subject) -> None:
    for content, reasons in ((" One two.\n", {}), ("One  two.", {"edited_assistant": 1})):
        async with serving(subject) as agent:
            agent.served.says("One two.", "Done.")
            await agent.chat([USER])
            await agent.chat([USER, {"role": "assistant", "content": content}, user("And?")])
            assert (began := forks(await agent.end())) == reasons, f"{began} for {content!r}"


@TABLE.case(10, 40, title="content may be null, empty, absent or parts")
async def contents(subject: Subject) -> None:
    parts: list[Any] = [None, "", ABSENT, [], [{"type": "text", "text": ""}]]
    await _one_row(subject, *(partial(echoed, content=content) for content in parts))


@TABLE.case(11, title="a time in the system prompt makes a row of every call, which is reported")
async def time_stamps(subject: Subject) -> None:
    async with serving(subject) as agent:
        agent.served.says("Hello.")
        for minute in range(3):
            await agent.chat([{"role": "system", "content": f"It is 12:0{minute}."}, USER])
        episode = await agent.end()
        assert (forks(episode), len(episode.rows)) == ({"system_changed": 2}, 3)


@TABLE.case(12, title="other tools, and another order of them, begin a row")
async def other_tools(subject: Subject) -> None:
    for tools in (TOOLS[::-1], TOOLS[:1]):
        await _fork(subject, "tools_changed", lambda messages: messages, tools=tools)


@TABLE.case(13, title="a compaction begins a row")
async def compaction(subject: Subject) -> None:
    await _fork(subject, "compacted", lambda messages: [*messages[:2], user("So far: 2.")])


@TABLE.case(14, title="a sub-agent has a row of its own, and the main conversation goes on in its own")
async def sub_agent(subject: Subject) -> None:
    async with serving(subject) as agent:
        agent.served.says("One.", "Two.")
        main = (await agent.chat([SYSTEM, USER])).message
        helped = (await agent.chat([user("Help.")])).message
        await agent.chat([SYSTEM, USER, main, user("And?")])
        await agent.chat([user("Help."), helped, user("More.")])
        episode = await agent.end()
        assert [turn.row for turn in episode.turns] == [0, 1, 0, 1]
        assert (forks(episode), episode.main_row) == ({"new_conversation": 1}, 0)


@TABLE.case(15, title="siblings of one prompt at once are samples of their own, and each goes on")
async def siblings(subject: Subject) -> None:
    async with serving(subject) as agent:
        agent.served.says("One.", "Two.")
        messages = [reply.message for reply in await asyncio.gather(*(agent.chat([USER]) for _ in range(3)))]
        assert len({prompt.sampling["seed"] for prompt in agent.served.prompts}) == 3, "siblings share a seed"
        for place, message in enumerate(messages):
            await agent.chat([USER, message, user(f"And {place}?")])
        episode = await agent.end()
        assert len(episode.turns) == 6
        assert forks(episode).get("resampled") == 2


@TABLE.case(16, title="a prompt that is sent twice is sampled twice")
async def sampled_twice(subject: Subject) -> None:
    async with serving(subject) as agent:
        agent.served.says("One.")
        for _ in range(2):
            await agent.chat([USER])
        episode = await agent.end()
        assert (len(episode.rows), forks(episode)) == (2, {"resampled": 1})
        assert len({turn.seed for turn in episode.turns}) == 2


@TABLE.case(38, title="a client may send a turn back with the stop string or without it; what it adds is no sample")
async def echo_of_stop(subject: Subject) -> None:
    for content in ("Thought: x\n", "Thought: x\nObservation:", "Thought: x\nObservation: found it"):
        async with serving(subject) as agent:
            agent.served.says("Thought: x\nObservation: made up", "Done.")
            await agent.chat([USER], stop=["Observation:"])
            await agent.chat([USER, {"role": "assistant", "content": content}, user("Go on.")])
            episode = await agent.end()
            assert (began := forks(episode)) == {}, f"{began} for {content!r}"
            (row,) = episode.rows
            trained = agent.served.decode([token for token, mask in zip(row.token_ids, row.mask, strict=True) if mask])
            assert trained.startswith("Thought: x\nObservation:Done."), trained
            assert ("found it" in agent.served.decode(row.token_ids)) == content.endswith("found it")


@TABLE.case(41, title="an agent that writes each turn anew is n rows of one episode, with their price and a warning")
async def rewriting(subject: Subject) -> None:
    async with serving(subject) as agent:
        call = subject.call_text("search", {"word": "a"})
        agent.served.says(call)
        history: list[Mapping[str, Any]] = [USER]
        for number in range(4):
            await agent.chat(history)
            history += [{"role": "assistant", "content": f"Calling tools: {number}"}, user("Observation: 2")]
        episode = await agent.end()
        assert len(episode.rows) == 4
        assert episode.metrics["rewrites_history"] == 1
        assert episode.metrics["fork_tokens.edited_assistant"] > 0


@TABLE.case(51, title="a billing line that changes in the system prompt makes no other message")
async def billing(subject: Subject) -> None:
    await _same(subject, lambda number: [{"role": "system", "content": f"x-anthropic-billing-header: {number}\nBe."}])


@TABLE.case(53, title="keys without tokens, such as cache_control, do not count")
async def cache_control(subject: Subject) -> None:
    def begin(number: int) -> list[dict[str, Any]]:
        part: dict[str, Any] = {"type": "text", "text": "Find."}
        return [{"role": "user", "content": [part if number else {**part, "cache_control": {"type": "ephemeral"}}]}]

    await _same(subject, begin)


@TABLE.case(55, title="developer is system")
async def developer(subject: Subject) -> None:
    await _same(subject, lambda number: [{"role": ("developer", "system")[number], "content": "Be brief."}, USER])


async def _same(subject: Subject, begin: Callable[[int], Messages]) -> None:
    """Two calls whose beginnings, made by their number, are one history."""
    async with serving(subject) as agent:
        agent.served.says("One.", "Two.")
        first = await agent.chat([*begin(0), USER])
        await agent.chat([*begin(1), USER, first.message, user("And?")])
        assert forks(await agent.end()) == {}


@TABLE.case(56, title="a title call is a row of its own, and not the one that is judged")
async def title_call(subject: Subject) -> None:
    async with serving(subject) as agent:
        agent.served.says("One.", "Two.")
        await agent.chat([user("Write a title for: kestrels")], tools=None)
        first = await _question(agent)
        await agent.chat([SYSTEM, USER, first, user("And?")])
        episode = await agent.end()
        assert (len(episode.rows), episode.main_row) == (2, 1)
        assert episode.messages[-1]["content"] == "Two."


async def _question(agent: Agent) -> dict[str, Any]:
    return (await agent.chat([SYSTEM, USER])).message
