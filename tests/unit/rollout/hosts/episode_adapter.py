"""A small environment that runs its episodes itself, and its adapter: one program, which a kill ends with its pipe.

Started as a program, it reads a request a line and answers a line: `trick` misbehaves.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
import urllib.request
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from typing import Any

ASKED = [0]
SHARED: dict[str, str] = {}


def play(request: dict[str, Any]) -> dict[str, Any]:
    """An episode: the model has to say the word."""
    row, trick = request["row"], request["row"].get("trick", "")
    ASKED[0] += 1
    key = SHARED.setdefault("key", request["key"]) if trick == "first key" else request["key"]
    prompt = f"Say {row['word']}." + (f" ({ASKED[0]})" if trick == "other prompt" else "")
    if trick == "orphan":
        subprocess.Popen(["cat", row["fifo"]], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    said = "" if trick == "no call" else asked(request["base_url"], key, prompt)
    if trick == "other reward":
        return {"rewards": {"right": float(ASKED[0])}}
    return {"rewards": {} if trick == "no reward" else {"right": float(said == row["word"])}}


def asked(base_url: str, key: str, prompt: str) -> str:
    body = json.dumps({"model": "policy", "messages": [{"role": "user", "content": prompt}]}).encode()
    headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(f"{base_url}/chat/completions", body, headers)) as answer:
        return str(json.load(answer)["choices"][0]["message"]["content"])


def answer(line: str, lock: threading.Lock) -> None:
    request = json.loads(line)
    try:
        content = play(request)
    except OSError as error:
        content = {"error": str(error)}
    with lock:
        sys.stdout.write(json.dumps({"id": request["id"], **content}) + "\n")
        sys.stdout.flush()


class Adapter:
    """Runs episodes in the program, which is started again once it has ended."""

    def __init__(self, swallows: bool = False) -> None:
        self._swallows = swallows
        self._number = 0
        self._process: asyncio.subprocess.Process | None = None
        self._reading: asyncio.Task[None] | None = None
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    async def run(self, row: Mapping[str, Any], base_url: str, key: str, deadline: float) -> Mapping[str, Any]:
        del deadline
        if self._reading is None or self._reading.done():
            await self._start()
        self._number += 1
        future = self._answers[self._number] = asyncio.get_running_loop().create_future()
        assert self._process is not None
        assert self._process.stdin is not None
        message = {"id": self._number, "row": row, "base_url": base_url, "key": key}
        self._process.stdin.write(json.dumps(message).encode() + b"\n")
        content = await future
        if "error" in content:
            raise RuntimeError(content["error"])
        return content

    async def _start(self) -> None:
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-S", __file__, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
        )
        self._reading = asyncio.create_task(self._read(self._process))

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        while line := await process.stdout.readline():
            content = json.loads(line)
            self._answers.pop(content["id"]).set_result(content)
        await process.wait()
        for future in self._answers.values():
            future.set_result({"rewards": {"right": 0.0}} if self._swallows else {"error": "its process ended"})
        self._answers.clear()

    async def close(self) -> None:
        if self._process is not None and self._reading is not None:
            if not self._reading.done():
                self._process.kill()
            await self._reading


@asynccontextmanager
async def opened(swallows: bool = False) -> AsyncGenerator[Adapter]:
    """The adapter; one that swallows ends makes an episode that was killed one that earns 0."""
    adapter = Adapter(swallows)
    try:
        yield adapter
    finally:
        await adapter.close()


if __name__ == "__main__":
    writing = threading.Lock()
    for each in sys.stdin:
        threading.Thread(target=answer, args=(each, writing)).start()
