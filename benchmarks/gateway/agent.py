"""The agent of `benchmarks.gateway`: a service that plays an episode for each POST by Chat Completions, and keeps how
long its calls took.

`python -m benchmarks.gateway.agent` prints its port and serves until its input closes. GET /seconds returns what was
kept, in order, and forgets it.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from collections.abc import Mapping
from typing import Any

import aiohttp
import uvloop
from aiohttp import web
from benchmarks.fake_services import TOOL

TOOLS = [{"type": "function", "function": {"name": "look_up", "description": "Looks a word up.", "parameters": TOOL}}]
RESULT = '{"meaning": "a small falcon"}'
DIRECT = 4
"""Each such call is also made to the engine itself, as what the other ones would take without a gateway."""


class Agent:
    """Plays episodes, with a client that is as cheap as can be."""

    def __init__(self, http: aiohttp.ClientSession) -> None:
        self._http = http
        self._seconds: dict[str, list[float]] = {"gateway": [], "engine": []}
        self._calls = 0

    async def play(self, request: web.Request) -> web.Response:
        run = await request.json()
        config, messages = run["config"], list(run["row"]["messages"])
        for _ in range(config["turns"]):
            await asyncio.sleep(random.uniform(0, 2 * config["think"]))
            body = {"model": "policy", "messages": messages, "tools": TOOLS}
            answer = await self._timed("gateway", f"{run['base_url']}/chat/completions", run["key"], body)
            self._calls += 1
            if self._calls % DIRECT == 0:
                direct = {"request_id": f"bench/0/{self._calls}/0/0", "model": "bench", "token_ids": [7] * 200}
                await self._timed("engine", config["engine"], "", direct)
            said = answer["choices"][0]["message"]
            messages += [said, *_results(said)]
        return web.json_response({})

    async def _timed(self, name: str, url: str, key: str, body: Mapping[str, Any]) -> Any:
        began = time.perf_counter()
        async with self._http.post(url, json=body, headers={"authorization": f"Bearer {key}"}) as response:
            answer = await response.read()
        self._seconds[name].append(time.perf_counter() - began)
        assert response.status == 200, answer
        return json.loads(answer)

    async def seconds(self, _request: web.Request) -> web.Response:
        kept, self._seconds = self._seconds, {"gateway": [], "engine": []}
        return web.json_response(kept)


def _results(said: Mapping[str, Any]) -> list[dict[str, Any]]:
    calls = said.get("tool_calls") or ()
    results = [{"role": "tool", "tool_call_id": call["id"], "content": RESULT} for call in calls]
    return results or [{"role": "user", "content": "And?"}]


async def serve() -> None:
    closed = asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
        agent, app = Agent(http), web.Application()
        app.add_routes([web.post("/run", agent.play), web.get("/seconds", agent.seconds)])
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0, backlog=4096).start()
        print(runner.addresses[0][1], flush=True)
        await closed
        await runner.cleanup()


if __name__ == "__main__":
    uvloop.run(serve())
