"""Cases of keys, retries, ends and failures."""

from __future__ import annotations

import asyncio

from kestrl.errors import Boundary
from kestrl.testing.gateway.case import Table
from kestrl.testing.gateway.client import USER, Agent, serving, user
from kestrl.testing.gateway.seam import Subject

TABLE = Table()
WRONG = "wrong"


@TABLE.case(17, title="a retry joins its call in flight, gets the answer again, and survives a lost connection")
async def retries(subject: Subject) -> None:
    async with serving(subject) as agent:
        agent.served.says("Hello.")
        hold = agent.served.holds()
        lost_call = asyncio.create_task(agent.chat([USER]))
        await hold.asked.wait()
        joined = asyncio.create_task(agent.chat([USER], headers=agent.retrying(1)))
        third = asyncio.create_task(agent.chat([USER], headers=agent.retrying(2)))
        hold.release.set()
        answers = [await lost_call, await joined, await third, await agent.chat([USER], headers=agent.retrying(3))]
        assert len({answer.text for answer in answers}) == 1, "a retry has another answer"
        assert len(agent.served.prompts) == len((await agent.end()).turns) == 1


@TABLE.case(19, title="a call whose client goes away is aborted and not trained")
async def went_away(subject: Subject) -> None:
    for fields in ({}, {"stream": True}):
        async with serving(subject) as agent:
            agent.served.says("Hello.")
            hold = agent.served.holds()
            call = asyncio.create_task(agent.chat([USER], **fields))
            await hold.asked.wait()
            call.cancel()
            await hold.aborted.wait()
            hold.release.set()
            assert (await agent.chat([USER])).message["content"] == "Hello."
            episode = await agent.end()
            assert (episode.failure, len(episode.rows), len(episode.turns)) == (None, 1, 1)


@TABLE.case(23, 42, title="after the end every call is a 410 that no client sends again, refusals too")
async def sealed(subject: Subject) -> None:
    async with serving(subject) as agent:
        agent.served.says("Hello.")
        await agent.chat([USER])
        assert (await agent.end()).failure is None
        for reply in (await agent.chat([USER]), await agent.chat([USER], n=2), await agent.messages([USER])):
            assert (reply.status, reply.headers.get("x-should-retry")) == (410, "false")
        assert len(agent.served.prompts) == 1


@TABLE.case(24, title="a key opens its own episode, posts no reward, and chooses no evaluation")
async def keys(subject: Subject) -> None:
    async with serving(subject) as agent, serving(subject) as other:
        agent.served.says("Hello.")
        mine, theirs = agent.served.api_key, other.served.api_key
        for headers in (
            {},
            {"authorization": f"Bearer {WRONG}"},
            {"authorization": f"Bearer {theirs}"},
            {"authorization": f"Bearer {mine}", "x-api-key": theirs},
            {"authorization": mine},
        ):
            assert (await agent.chat([USER], headers=headers)).status == 401, headers
        for path in ("/reward", "/v1/reward_info", "/mode/val/v1/chat/completions", "/v1/load_lora_adapter"):
            assert (await agent.request(path, {"reward": 1.0})).status in (403, 404), path
        assert list(agent.served.prompts) == []
        assert (await agent.end()).failure is None


@TABLE.case(27, title="every call of an episode names one policy")
async def one_policy(subject: Subject) -> None:
    async with serving(subject) as agent:
        agent.served.says("One.", "Two.")
        first = await agent.chat([USER])
        await agent.chat([USER, first.message, user("And?")])
        episode = await agent.end()
        policies = {prompt.policy for prompt in agent.served.prompts} | {turn.policy for turn in episode.turns}
        assert len(policies) == 1, policies


@TABLE.case(28, title="an engine that dies amid a turn is the episode's typed failure, and no turn")
async def dead_engine(subject: Subject) -> None:
    async with serving(subject) as agent:
        agent.served.fails()
        reply = await agent.chat([USER])
        assert reply.status >= 500
        assert reply.headers.get("x-should-retry") == "false", "a client would send it again"
        episode = await agent.end()
        assert episode.failure is not None
        assert (episode.failure.boundary, episode.reward, len(episode.turns)) == (Boundary.ENGINE, None, 0)


@TABLE.case(43, title="another call with the same body is another sample, unless the client says it is a retry")
async def equal_bodies(subject: Subject) -> None:
    async with serving(subject) as agent:
        agent.served.says("Hello.")
        await agent.chat([USER])
        await agent.chat([USER], headers=agent.retrying(0))
        await agent.chat([USER], headers=agent.retrying(1))
        await agent.chat([USER], headers=agent.retrying(1), max_tokens=5)  # the lost one never arrived
        assert len(agent.served.prompts) == len((await agent.end()).turns) == 3


@TABLE.case(44, title="ids of answers and calls are unique across episodes")
async def unique_ids(subject: Subject) -> None:
    ids: list[str] = []
    for _ in range(2):
        async with serving(subject) as agent:
            agent.served.says(subject.call_text("search", {"word": "a"}))
            for _ in range(2):
                reply = await agent.chat([USER])
                ids += [reply.body["id"], reply.calls[0]["id"]]
            response = (await agent.responses([USER])).body
            ids += [response["id"], *(entry["id"] for entry in response["output"])]
    assert len(set(ids)) == len(ids)


@TABLE.case(45, title="the key comes as Bearer, x-api-key or x-goog-api-key, and a client's own session id is none")
async def key_headers(subject: Subject) -> None:
    async with serving(subject) as agent:
        agent.served.says("Hello.")
        key = agent.served.api_key
        for headers in ({"authorization": f"Bearer {key}"}, {"x-api-key": key}, {"x-goog-api-key": key}):
            assert (await agent.chat([USER], headers={**headers, "x-session-id": "its own"})).status == 200, headers
        assert (await agent.chat([USER], headers={"x-session-id": key})).status == 401


@TABLE.case(52, title="the end of the budget of calls is an error that no client repeats, and no made-up turn")
async def budget(subject: Subject) -> None:
    async with serving(subject, max_turns=1) as agent:
        agent.served.says("Hello.")
        first = await agent.chat([USER])
        await _refused(agent, first.message)
        await _refused(agent, first.message)
        episode = await agent.end()
        assert (episode.failure, episode.stop_reason, len(episode.turns)) == (None, "max_turns", 1)


async def _refused(agent: Agent, turn: dict[str, object]) -> None:
    reply = await agent.chat([USER, turn, user("And?")])
    assert (reply.status, reply.error["code"]) == (400, "limit_reached")
