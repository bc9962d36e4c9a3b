"""The server in a pod of an agent, or of an environment that runs its episodes itself: a POST runs an episode, with the
hosts that run beside a worker elsewhere.

It is imported with the standard library alone, since the user's image may have nothing else. A worker that closes the
connection, at an episode's deadline or by its own end, ends the episode with all that it has started.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import signal
import sys
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kestrl._shared.conventions import EXIT_INPUT
from kestrl.agents.runs import RunResult
from kestrl.errors import UserCodeError, UserInputError
from kestrl_rollout.hosts.command import CommandHost
from kestrl_rollout.hosts.environment_process import environment_process
from kestrl_rollout.hosts.host import Host, RunEnded, RunRequest
from kestrl_rollout.hosts.process import ProcessHost

log = logging.getLogger(__name__)
MAX_HEAD = 64 * 1024
MAX_REQUEST = 64 * 1024 * 1024
"""Maximum bytes of an episode's row and configuration."""
REQUEST_SECONDS = 60.0
"""Time in which a request has to have arrived."""
LATE_SECONDS = 30.0
"""Time after an episode's deadline at which it is ended even if its worker is silent: clocks may differ."""
REASONS = {200: "OK", 400: "Bad Request", 404: "Not Found", 500: "Internal Server Error", 503: "Service Unavailable"}
Answer = tuple[int, bytes]


class PodServer:
    """Serves the episodes of a host."""

    def __init__(self, host: Host, capacity: int) -> None:
        """Describes it.

        Args:
            host: The host of the agent.
            capacity: Episodes that run at the same time.
        """
        self._host, self._capacity = host, capacity
        self._running: set[asyncio.Task[RunResult]] = set()
        self._connections: set[asyncio.Task[None]] = set()
        self.draining = False
        """Whether new episodes are refused."""

    async def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answers the request of a connection, and closes it."""
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            answer = await self._answer(reader)
            if answer is not None:
                writer.write(_head(*answer) + answer[1])
                await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError, TimeoutError):
            pass  # nobody is left who could read an answer
        finally:
            self._connections.discard(task)
            writer.close()

    async def drain(self, seconds: float) -> None:
        """Refuses new episodes, and waits until those that run have been answered; later ones are ended."""
        self.draining = True
        if self._connections:
            await asyncio.wait(self._connections, timeout=seconds)
        for task in self._running:
            task.cancel()
        if self._running:
            await asyncio.wait(self._running)

    async def _answer(self, reader: asyncio.StreamReader) -> Answer | None:
        """The answer to a request; None if its sender is gone."""
        try:
            async with asyncio.timeout(REQUEST_SECONDS):
                method, body = await _request(reader)
        except (ValueError, asyncio.LimitOverrunError) as error:
            return 400, f"no request: {error}".encode()
        if method == "GET":
            return (503, b"it ends") if self.draining else (200, b"")
        if self.draining or len(self._running) >= self._capacity:
            return 503, b"it ends" if self.draining else f"{self._capacity} episodes run".encode()
        try:
            request = RunRequest(**json.loads(body))
        except (ValueError, TypeError) as error:
            return 400, f"no episode: {error}".encode()
        return await self._run(request, reader)

    async def _run(self, request: RunRequest, reader: asyncio.StreamReader) -> Answer | None:
        run = asyncio.create_task(self._host.run(request), name="episode")
        disconnected = asyncio.create_task(reader.read(1), name="connection")
        self._running.add(run)
        seconds_left = max(0.0, request.deadline - time.time()) + LATE_SECONDS
        try:
            done, _ = await asyncio.wait({run, disconnected}, timeout=seconds_left, return_when=asyncio.FIRST_COMPLETED)
        finally:
            disconnected.cancel()
            run.cancel()  # no effect on a run that has ended
            with suppress(ConnectionError):
                await asyncio.wait({run, disconnected})
            self._running.discard(run)
        if run not in done or run.cancelled():
            return None
        return answer_of(run)


def answer_of(run: asyncio.Task[RunResult]) -> Answer:
    """Status and body of a run that has ended."""
    try:
        return 200, json.dumps(asdict(run.result())).encode()
    except RunEnded as end:
        described = {"message": str(end), "types": end.names, "code": end.code, "retryable": end.retryable}
    except UserCodeError as error:
        described = {"message": str(error), "code": error.code, "retryable": error.retryable}
    invalid = "types" not in described
    return 500, json.dumps({"error": {**described, "invalid": invalid}}).encode()


def _head(status: int, body: bytes) -> bytes:
    lines = (f"HTTP/1.1 {status} {REASONS[status]}", f"content-length: {len(body)}", "connection: close", "", "")
    return "\r\n".join(lines).encode()


async def _request(reader: asyncio.StreamReader) -> tuple[str, bytes]:
    """Method and body of a request.

    Raises:
        ValueError: It is none that a worker or a probe sends.
    """
    first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    method = first.partition(" ")[0]
    headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    if method not in {"GET", "POST"} or "transfer-encoding" in headers:
        raise ValueError("send GET, or POST with content-length")
    length = int(headers.get("content-length", "0"))
    if not 0 <= length <= MAX_REQUEST:
        raise ValueError(f"its body has more than {MAX_REQUEST} bytes")
    return method, await reader.readexactly(length)


async def serve(settings: Mapping[str, Any], folder: str) -> None:
    """Serves an agent or an environment until SIGTERM.

    Args:
        settings: `AgentPodSettings` as JSON.
        folder: Where programs run and what is imported first.

    Raises:
        UserInputError: It cannot be used; the message has the field.
    """
    terminated = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, terminated.set)
    async with _opened_host(settings, folder) as host:
        server = PodServer(host, settings["capacity"])
        address, _, port = settings["listen"].rpartition(":")
        listening = await asyncio.start_server(server.connected, address, int(port), limit=MAX_HEAD)
        log.info("%s %s is served", host.field, host.name)
        await terminated.wait()
        listening.close()
        await server.drain(settings["drain_seconds"])


@asynccontextmanager
async def _opened_host(settings: Mapping[str, Any], folder: str) -> AsyncGenerator[Host]:
    """The host of the pod, while the context is open."""
    agent, environment = settings["agent"], settings["environment"]
    if environment is not None:
        async with environment_process(environment, (folder,), inherited=os.environ) as host:
            yield host
    elif agent["command"]:
        yield CommandHost(agent["command"], variables=agent["env"], folder=folder, inherited=os.environ)
    else:
        process = ProcessHost(
            agent["run"],
            python=None,
            config=agent["config"],
            variables=agent["env"],
            python_path=(folder,),
            folder=folder,
            inherited=os.environ,
        )
        try:
            await process.start()
            yield process
        finally:
            await process.close()


def main(arguments: Sequence[str]) -> int:
    """Serves what a settings file describes; its exit status."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--settings", type=Path, required=True)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    try:
        asyncio.run(serve(json.loads(parser.parse_args(arguments).settings.read_bytes()), str(Path.cwd())))
    except UserInputError as error:
        print(f"error: {error}", file=sys.stderr)  # noqa: T201 - Kubernetes keeps it as the container's last message
        return EXIT_INPUT
    return 0
