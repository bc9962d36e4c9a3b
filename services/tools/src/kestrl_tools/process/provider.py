"""A Python tool whose instances run in processes of their own."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from kestrl._shared.plan.settings.tools import ToolEntry
from kestrl.errors import Boundary, Failure, FailureError, KestrlError, ToolFailure, UserInputError
from kestrl.tools import ToolError, ToolResult, ToolSchema
from kestrl.tools.arguments import Arguments
from kestrl.tools.provider import Kwargs, ToolDefinition
from kestrl_tools.process.frames import Message, ask, read, write
from kestrl_tools.process.host import HostSettings
from kestrl_tools.process.host_process import HostProcess

IMPORT_SECONDS = 55.0
"""Time limit of importing the tool."""
HOOK_SECONDS = 600.0
"""Time limit of `start_service`, as without a process of its own: an index may take minutes."""
CHECK_SECONDS = 5.0
END_SECONDS = 5.0
"""Time for a process to end, before it is killed."""


class ToolProcessDied(ToolFailure):
    """The process of a tool's instance has ended."""

    code = "tool_process_died"


class ProcessProvider:
    """A Python tool in processes: one that imports it, and one for every episode."""

    def __init__(self, entry: ToolEntry, field: str, folder: str | None) -> None:
        """Describes it.

        Args:
            entry: The entry of the manifest.
            field: Its place in the manifest, for messages.
            folder: Folder of the manifest, which is importable; None for none.
        """
        self.name = entry.name
        self.environment = self.has_state = self.has_prompt = self.has_reward = self.acts = False
        self._field = field
        self._settings = HostSettings(entry=entry, field=field, python_path=(folder,) if folder else ())
        environment = entry.environment
        self._import_seconds = IMPORT_SECONDS if environment is None else environment.start_seconds
        self._host: HostProcess | None = None
        self._starting = asyncio.Lock()
        self._started = False
        self._problem = ""

    async def list_tools(self) -> Sequence[ToolDefinition]:
        greeting = await self._spawned()
        self.environment = greeting["environment"]
        self.has_state, self.has_prompt = greeting["has_state"], greeting["has_prompt"]
        self.has_reward, self.acts = greeting["has_reward"], greeting["acts"]
        return [_definition(tool) for tool in greeting["tools"]]

    def check(self, create_kwargs: Kwargs) -> None:
        # A local round trip of 0.1 ms; only `kestrl validate` and the check of a run's rows call it.
        assert self._host is not None
        try:
            answer = ask(self._host.requests, {"op": "check", "create_kwargs": dict(create_kwargs)}, CHECK_SECONDS)
        except OSError as error:
            self._host.gone = True  # also after a late answer, which the next request would take for its own
            raise self._host_died() from error
        if "failure" in answer:
            raise ToolFailure(answer["failure"], code=answer["code"])

    async def start(self) -> None:
        await self._hook("start")
        self._started = True

    async def open(self, create_kwargs: Kwargs) -> ProcessSession:
        host = await self._running()
        try:
            number, connection, exit_status = host.open()
        except OSError as error:
            raise self._host_died() from error
        reader, writer = await asyncio.open_unix_connection(sock=connection)
        session = ProcessSession(self.name, host, number, reader, writer, exit_status)
        try:
            session.prompt = (await session.ask({"op": "open", "create_kwargs": dict(create_kwargs)}))["prompt"]
        except BaseException:
            await asyncio.shield(session.abandon())
            raise
        return session

    def health(self) -> str:
        return self._problem

    async def stop(self) -> None:
        host, self._host = self._host, None
        if host is None:
            return
        try:
            if self._started and not host.gone:
                with suppress(OSError):
                    await host.asked({"op": "stop"}, END_SECONDS)
        finally:
            await host.end()

    async def _running(self) -> HostProcess:
        """The host, started again if it has ended."""
        async with self._starting:
            if self._host is not None and not self._host.gone:
                return self._host
            if self._host is not None:
                await self._host.end()
                self._host = None
            try:
                await self._spawned()
                if self._started:
                    await self._hook("start")
            except UserInputError as error:
                self._problem = str(error)
                raise ToolProcessDied(f"{self.name}: {error}", retryable=True) from error
            self._problem = ""
            assert self._host is not None
            return self._host

    async def _spawned(self) -> Message:
        try:
            host = await asyncio.to_thread(HostProcess.spawn, self._settings)
        except OSError as error:
            raise UserInputError(
                f"image: the container of {self.name} did not answer within {self._import_seconds:g} s: {error}"
            ) from error
        try:
            greeting = await host.asked(None, self._import_seconds)
        except TimeoutError:
            await host.end()
            raise UserInputError(f"use: {self.name} could not be imported within {self._import_seconds:g} s") from None
        except OSError as error:
            await host.end()
            raise UserInputError(f"use: importing {self.name} ended its process; the log above says more") from error
        except BaseException:
            await asyncio.shield(host.end())
            raise
        if "refused" in greeting:
            await host.end()
            raise UserInputError(str(greeting["refused"]).removeprefix(f"{self._field}."))
        host.watch()
        self._host = host
        return greeting

    async def _hook(self, name: str) -> None:
        assert self._host is not None
        try:
            answer = await self._host.asked({"op": name}, HOOK_SECONDS)
        except OSError as error:
            raise self._host_died() from error
        if "refused" in answer:
            raise UserInputError(answer["refused"])
        if "failure" in answer:
            raise ToolFailure(answer["failure"], code=answer["code"])

    def _host_died(self) -> ToolProcessDied:
        return ToolProcessDied(f"{self.name}: the process that imports it has ended", retryable=True)


class ProcessSession:
    """The process of an episode."""

    def __init__(
        self,
        name: str,
        host: HostProcess,
        number: int,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        exit_status: asyncio.Future[int | None],
    ) -> None:
        self._name, self._host, self._number = name, host, number
        self._reader, self._writer, self._ended = reader, writer, exit_status
        self._turn = asyncio.Lock()
        self._lost = False
        """Whether the process has ended or was killed."""
        self.prompt = ""

    async def call(self, tool: str, arguments: Kwargs, filled: Kwargs) -> object:
        request = {"op": "call", "tool": tool, "arguments": dict(arguments), "filled": dict(filled)}
        answer = await self.ask(request)
        return ToolResult(text=answer["text"], final=answer["final"], data=answer["data"])

    async def state(self) -> object:
        return (await self.ask({"op": "state"}))["state"]

    async def gold(self) -> object:
        """What a perfect player of an environment does; None where it does not say."""
        return (await self.ask({"op": "gold"}))["gold"]

    async def close(self) -> None:
        try:
            if not self._lost:
                await self.ask({"op": "close"})
        finally:
            await self.abandon()

    async def abandon(self) -> None:
        """Waits until the process has ended, and kills it if it does not."""
        self._writer.close()
        with suppress(ConnectionError):
            await self._writer.wait_closed()
        done, _ = await asyncio.wait({self._ended}, timeout=END_SECONDS)
        if not done:
            self._kill()
            await asyncio.wait({self._ended}, timeout=END_SECONDS)

    async def ask(self, request: Message) -> Message:
        """The answer of the process.

        Raises:
            ToolError: A message for the model.
            KestrlError: A failure of the tool; `ToolProcessDied` if its process has ended.
        """
        async with self._turn:
            try:
                await write(self._writer, request)
                answer = await read(self._reader)
            except (asyncio.IncompleteReadError, ConnectionError) as error:
                self._kill()  # it may only have closed the connection
                raise ToolProcessDied(f"{self._name}: its process {await self._ending()}") from error
            except BaseException:  # cancelled: the tool may run on, in a state that nobody knows
                self._kill()
                raise
        if "error" in answer:
            raise ToolError(answer["error"])
        if "failure" in answer:
            raise _failure(answer["failure"])
        return answer

    def _kill(self) -> None:
        self._lost = True
        self._host.kill(self._number)

    async def _ending(self) -> str:
        await asyncio.wait({self._ended}, timeout=END_SECONDS)
        status = self._ended.result() if self._ended.done() else None
        if status is None:
            return "has ended"
        if status < 0:
            return f"was ended by signal {-status} ({signal.Signals(-status).name})"
        return f"exited with {status}"


def _definition(tool: Message) -> ToolDefinition:
    parameters: dict[str, Any] = tool["parameters"]
    return ToolDefinition(
        schema=ToolSchema(name=tool["name"], description=tool["description"], parameters=parameters),
        arguments=Arguments(parameters),
        fillable=None if tool["fillable"] is None else frozenset(tool["fillable"]),
        required=frozenset(tool["required"]),
        fixed=frozenset(tool["fixed"]),
    )


def _failure(message: Message) -> KestrlError:
    boundary = Boundary(message["boundary"])
    if boundary is Boundary.TOOL:
        return ToolFailure(message["message"], code=message["code"], retryable=message["retryable"])
    return FailureError(
        Failure(boundary=boundary, code=message["code"], message=message["message"], retryable=message["retryable"])
    )
