"""The process of one episode: opens the tool's instance and answers one request at a time."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import socket
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

from kestrl._shared.user_tasks import contain_user_tasks
from kestrl.errors import KestrlError, ToolFailure
from kestrl.tools import ToolError
from kestrl.tools.arguments import ArgumentsInvalid
from kestrl.tools.provider import ProviderSession, ToolDefinition, ToolProvider
from kestrl_tools.execution import answer_of, for_model, guarded, state_of
from kestrl_tools.process.frames import Message, read, write


def run(
    connection: socket.socket, provider: ToolProvider, tools: dict[str, ToolDefinition], memory: int | None
) -> None:
    """Serves the requests of a connection until it is closed.

    Args:
        connection: The connection to the tool service.
        provider: The imported tool.
        tools: Its tools by name.
        memory: Maximum bytes of data in addition to those of the imported module.
    """
    os.setsid()  # so that the host can end what the tool starts, too
    if memory is not None:
        limit = _data_bytes() + memory
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    asyncio.run(_serve(connection, provider, tools))


def _data_bytes() -> int:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmData:"))


async def _serve(connection: socket.socket, provider: ToolProvider, tools: dict[str, ToolDefinition]) -> None:
    contain_user_tasks()
    reader, writer = await asyncio.open_unix_connection(sock=connection)
    served = _Session(provider, tools)
    with suppress(asyncio.IncompleteReadError, ConnectionError):
        while not served.closed:
            await write(writer, await served.answer(await read(reader)))


class _Session:
    def __init__(self, provider: ToolProvider, tools: dict[str, ToolDefinition]) -> None:
        self._provider, self._tools = provider, tools
        self._session: ProviderSession | None = None
        self.closed = False

    async def answer(self, request: Message) -> Message:
        try:
            return await self._done(request)
        except ToolError as error:
            return {"error": for_model(self._provider.name, error).text}
        except MemoryError as error:
            return _failed(_out_of_memory(self._provider.name, error))
        except KestrlError as error:
            cause = error.__cause__
            return _failed(_out_of_memory(self._provider.name, cause) if isinstance(cause, MemoryError) else error)

    async def _done(self, request: Message) -> Message:
        name = self._provider.name
        if self._session is None:
            opening = guarded(name, self._provider.open(request["create_kwargs"]))
            self._session = cast("ProviderSession", await opening)
            return {"prompt": self._session.prompt}
        match request["op"]:
            case "call":
                return await self._called(self._session, request)
            case "state":
                return {"state": state_of(name, await guarded(name, self._session.state()))}
            case "gold":
                gold = getattr(self._session, "gold", None)
                return {"gold": None if gold is None else state_of(name, await guarded(name, gold()))}
            case _:
                self.closed = True
                await guarded(name, self._session.close())
                return {}

    async def _called(self, session: ProviderSession, request: Message) -> Message:
        tool, filled = request["tool"], request["filled"]
        try:
            # Again, since the values of declared types (a date, a model) exist in this process alone.
            arguments = self._tools[tool].arguments.parse(request["arguments"], filled=frozenset(filled))
        except ArgumentsInvalid as error:
            raise ToolError(f"{tool} was not called: {error}.") from error
        answer = answer_of(tool, await guarded(tool, session.call(tool, arguments, filled)))
        return {"text": answer.text, "final": answer.final, "data": json.loads(answer.data_json)}


def _out_of_memory(name: str, error: BaseException) -> KestrlError:
    failure = ToolFailure(f"{name}: exceeded process.memoryMb", code="tool_out_of_memory")
    failure.__cause__ = error
    return failure


def _failed(error: KestrlError) -> Message:
    failure: Any = error.failure()
    return {
        "failure": {
            "boundary": str(failure.boundary),
            "code": failure.code,
            "message": failure.message,
            "retryable": failure.retryable,
        }
    }
