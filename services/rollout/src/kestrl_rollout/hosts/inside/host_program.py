"""Runs the episodes of a function of the user's: `python host_program.py FD`.

FD is a socket to the worker; messages are JSON, each a frame as of `kestrl._shared.processes`. The first has the
settings, and is answered with `ready` or `refused`; with `starts` in it, the class has a method `start`, which is
awaited first. Then `{"id": 1, "row": ..., "base_url": ..., "key": ..., "deadline": ..., "mcp_url": ...}` starts an
episode, `{"cancel": 1}` ends one. An episode is answered once, with `result`, `error` or `invalid`; a cancellation at
once, with `cancelled` and whether a thread runs on.

It needs the standard library alone, since its interpreter may have nothing else.
"""

from __future__ import annotations

import asyncio
import functools
import importlib
import inspect
import json
import socket
import struct
import sys
import threading
import traceback
from typing import Any

HEADER = struct.Struct("<I")
"""The length of a frame's body."""
MAX_MESSAGE = 64 * 1024 * 1024
MAX_RESULT = 4 * 1024 * 1024
MAX_TEXT = 500
FURTHER = ("mcp_url",)
"""Keyword arguments for functions that have such a parameter."""


class FunctionRefused(Exception):
    """The function cannot be used."""


def load(path: str, config: dict[str, Any]) -> Any:
    """The function that runs an episode, with its configuration.

    Raises:
        Refused: It cannot be imported, or takes other arguments.
    """
    module_name, _, name = path.partition(":")
    try:
        target: Any = importlib.import_module(module_name)
        for part in name.split("."):
            target = getattr(target, part)
    except BaseException as error:
        raise FunctionRefused(f"{path} cannot be imported: {described(error)}") from error
    function: Any = target
    if inspect.isclass(target):
        try:
            function, config = function(**config).run, {}
        except BaseException as error:
            raise FunctionRefused(f"{path} cannot be constructed with its config: {described(error)}") from error
    try:
        further = {name: name for name in FURTHER if takes(function, name)}
        inspect.signature(function).bind("row", "base_url", "key", "deadline", **{**further, **config})
    except (TypeError, ValueError) as error:
        raise FunctionRefused(
            f"{path} cannot be called with (row, base_url, key, deadline) and its config as keyword arguments: {error}"
        ) from error
    return functools.partial(function, **config)


def takes(function: Any, name: str) -> bool:
    """Whether a function has a parameter of this name."""
    parameter = inspect.signature(function).parameters.get(name)
    return parameter is not None and parameter.kind is not inspect.Parameter.POSITIONAL_ONLY


async def started(run: Any) -> None:
    """Awaits `start` of the class whose method runs episodes.

    Raises:
        Refused: It failed.
    """
    try:
        await run.func.__self__.start()
    except BaseException as error:
        raise FunctionRefused(described(error)) from error


def described(error: BaseException) -> str:
    try:
        text = str(error)
    except BaseException:  # noqa: BLE001 - a user's `__str__`
        text = ""
    return f"{type(error).__name__}: {text}"[:MAX_TEXT]


def error_of(error: BaseException) -> dict[str, Any]:
    """An exception as data, with the names of its class and of the bases."""
    kinds = [kind for kind in type(error).__mro__ if kind not in (Exception, BaseException, object)]
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    names = [f"{kind.__module__}.{kind.__qualname__}" for kind in kinds]
    text = described(error).partition(": ")[2]
    return {"error": {"type": type(error).__name__, "types": names, "message": f"{text}{where}"}}


def plain(value: Any) -> Any:
    """A number of an array library as a number."""
    item = getattr(value, "item", None)
    if item is None:
        raise TypeError(f"{type(value).__name__} has no form as JSON")
    return item()


def answer_of(returned: Any) -> dict[str, Any]:
    """What a run returned, if it has a form as JSON."""
    try:
        if len(json.dumps(returned, default=plain)) > MAX_RESULT:
            return {"invalid": f"its result has more than {MAX_RESULT} bytes"}
        return {"result": json.loads(json.dumps(returned, default=plain))}
    except (TypeError, ValueError, RecursionError) as error:
        return {"invalid": f"its result is not JSON: {error}"}


class HostConnection:
    """The episodes of one connection."""

    def __init__(self, run: Any, writer: asyncio.StreamWriter) -> None:
        self._run, self._writer = run, writer
        self._further = [name for name in FURTHER if takes(run, name) and name not in run.keywords]
        self._loop = asyncio.get_running_loop()
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._threads: set[int] = set()
        self._cancelled: set[int] = set()
        """Episodes that were cancelled while their thread ran."""

    def handle(self, message: dict[str, Any]) -> None:
        if "cancel" in message:
            number = message["cancel"]
            task = self._tasks.get(number)
            if task is not None:
                task.cancel()
            elif number in self._threads:
                self._cancelled.add(number)
            self._send({"id": number, "cancelled": True, "runs_on": number in self._threads})
            return
        number = message["id"]
        arguments = (message["row"], message["base_url"], message["key"], message["deadline"])
        self._threads.add(number)
        # A thread of its own for each: a pool would make episodes wait for each other.
        further = {name: message[name] for name in self._further}
        threading.Thread(
            target=self._call, args=(number, arguments, further), name=f"episode-{number}", daemon=True
        ).start()

    def _call(self, number: int, arguments: Any, further: dict[str, Any]) -> None:
        """Calls the function in a thread; what it returns to await is awaited in the loop."""
        try:
            returned = self._run(*arguments, **further)
        except BaseException as error:  # noqa: BLE001 - SystemExit included: it is this episode's alone
            answer: Any = error_of(error)
        else:
            answer = None if inspect.isawaitable(returned) else answer_of(returned)
            if answer is None:
                self._loop.call_soon_threadsafe(self._start, number, returned)
                return
        self._loop.call_soon_threadsafe(self._ended, number, answer)

    def _start(self, number: int, work: Any) -> None:
        self._threads.discard(number)
        if number in self._cancelled:
            if inspect.iscoroutine(work):
                work.close()
            self._ended(number, {"invalid": "it was cancelled"})
            return
        self._tasks[number] = self._loop.create_task(self._await(number, work))

    async def _await(self, number: int, work: Any) -> None:
        try:
            answer = answer_of(await work)
        except BaseException as error:  # noqa: BLE001 - as above
            answer = error_of(error)
        self._ended(number, answer)

    def _ended(self, number: int, answer: dict[str, Any]) -> None:
        self._threads.discard(number)
        self._cancelled.discard(number)
        self._tasks.pop(number, None)
        self._send({"id": number, **answer})

    def _send(self, message: dict[str, Any]) -> None:
        self._writer.write(framed(message))


def framed(message: dict[str, Any]) -> bytes:
    body = json.dumps(message).encode()
    return HEADER.pack(len(body)) + body


async def received(reader: asyncio.StreamReader) -> dict[str, Any] | None:
    """The next message; None at the end of the connection.

    Raises:
        ValueError: It is too long.
    """
    try:
        (length,) = HEADER.unpack(await reader.readexactly(HEADER.size))
        if length > MAX_MESSAGE:
            raise ValueError(f"a message of {length} bytes")
        message: dict[str, Any] = json.loads(await reader.readexactly(length))
    except asyncio.IncompleteReadError:
        return None
    return message


async def serve(connection: socket.socket) -> None:
    """Serves a connection until it is closed."""
    reader, writer = await asyncio.open_connection(sock=connection)
    settings = await received(reader)
    if settings is None:
        return
    sys.path[:1] = settings["python_path"]  # in place of this file's folder
    try:
        run = load(settings["run"], settings["config"])
        if settings.get("starts"):
            await started(run)
    except FunctionRefused as refused:
        writer.write(framed({"refused": str(refused)}))
        await writer.drain()
        return
    writer.write(framed({"ready": True}))
    host = HostConnection(run, writer)
    while (message := await received(reader)) is not None:
        host.handle(message)


if __name__ == "__main__":
    asyncio.run(serve(socket.socket(fileno=int(sys.argv[1]))))
