"""The limit: the same requests with asyncio, aiohttp and uvloop only, without tools, masks, spans, checks or
records."""

from __future__ import annotations

import asyncio
import json
import resource
import sys
import time
from pathlib import Path

import aiohttp
import uvloop
from benchmarks.fake_services import TURNS, completions

PROMPT, OBSERVATION = 150, 40
"""Tokens of the first prompt, and of the observation of each turn."""


async def run(engine: int, concurrency: int, episodes: int, tokenizer: Path) -> None:
    url = f"http://127.0.0.1:{engine}/inference/v1/generate"
    _, (call, _) = completions(tokenizer)
    left = [episodes]
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def episode(number: int) -> None:
            ids = [7] * PROMPT
            for turn in range(TURNS):
                body = {
                    "request_id": f"bench/{number}/{turn}/0",
                    "model": "bench",
                    "token_ids": ids,
                    "sampling_params": {"temperature": 1.0, "max_tokens": 512, "seed": 1, "logprobs": 0},
                }
                async with session.post(url, json=body) as response:
                    answer = json.loads(await response.read())
                ids = [*ids, *answer["choices"][0]["token_ids"], *([7] * OBSERVATION)]
            assert len(ids) >= PROMPT + (TURNS - 1) * call

        async def many() -> None:
            while left[0] > 0:
                left[0] -= 1
                await episode(left[0])

        began, cpu = time.perf_counter(), time.process_time()
        await asyncio.gather(*(many() for _ in range(concurrency)))
        seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
    print(
        json.dumps(
            {
                "episodes_per_second": episodes / seconds,
                "cpu_ms_per_turn": 1000 * cpu / (episodes * TURNS),
                "memory_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
            }
        ),
        flush=True,
    )


if __name__ == "__main__":
    uvloop.run(run(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])))
