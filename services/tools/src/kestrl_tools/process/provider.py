"""A Python tool whose instances run in processes of their own."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from kestrl._shared import process_guard
from kestrl._shared.plan.settings.tools import ToolEntry
from kestrl.errors import Boundary, Failure, FailureError, KestrlError, ToolFailure, UserInputError
from kestrl.tools import ToolError, ToolResult, ToolSchema
from kestrl.tools.arguments import Arguments
from kestrl.tools.provider import Kwargs, ProviderSession, ToolDefinition
from kestrl_tools.process.frames import Message, ask, read, receive, write
from kestrl_tools.process.host import HostSettings

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


class _Host:
    """A running host."""

    def __init__(
        self, process: subprocess.Popen[bytes], write_end: int, requests: socket.socket, control: socket.socket
    ) -> None:
        self._process, self._write_end = process, write_end
        self.requests, self._control = requests, control
        self._ended: dict[int, asyncio.Future[int | None]] = {}
        self._next = 0
        self.gone = False
        """Whether the host has ended."""

    @classmethod
    def spawn(cls, settings: HostSettings) -> _Host:
        """Starts the process without waiting for it."""
        ours, theirs = socket.socketpair()
        control, their_control = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        read_end, write_end = os.pipe()
        fds = (theirs.fileno(), their_control.fileno())
        command = ("-m", "kestrl_tools.process.host", "--requests", str(fds[0]), "--control", str(fds[1]))
        try:
            process = subprocess.Popen(  # noqa: S603 - our own interpreter and module
                [
                    *(sys.executable, "-I", "-S", process_guard.__file__, str(read_end), "0"),
                    *(sys.executable, *command),
                ],
                stdin=subprocess.PIPE,
                stdout=2,  # output of a tool goes to the log of the service
                pass_fds=(*fds, read_end),
                # Without the service's credentials, so that a tool cannot act as the service.
                env={name: value for name, value in os.environ.items() if not name.startswith("KESTRL_")},
                start_new_session=True,
            )
        except OSError:
            os.close(write_end)
            raise
        finally:
            for end in (theirs, their_control):
                end.close()
            os.close(read_end)
        assert process.stdin is not None
        with process.stdin as given, suppress(BrokenPipeError):
            given.write(settings.model_dump_json().encode())
        return cls(process, write_end, ours, control)

    async def asked(self, message: Message | None, seconds: float) -> Message:
        """The answer to a request, or the greeting; raises OSError if the host ended or is late."""
        if message is None:
            self.requests.settimeout(seconds)
            return await asyncio.to_thread(receive, self.requests)
        return await asyncio.to_thread(ask, self.requests, message, seconds)

    def watch(self) -> None:
        """Notices from now on which processes have ended."""
        self._control.setblocking(False)
        asyncio.get_running_loop().add_reader(self._control.fileno(), self._notified)

    def _notified(self) -> None:
        try:
            data = self._control.recv(4096)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if data:
            ended: Message = json.loads(data)
            if (future := self._ended.pop(ended["session"], None)) is not None and not future.done():
                future.set_result(ended["status"])
            return
        self.gone = True
        asyncio.get_running_loop().remove_reader(self._control.fileno())
        for future in self._ended.values():
            if not future.done():
                future.set_result(None)
        self._ended.clear()

    def open(self) -> tuple[int, socket.socket, asyncio.Future[int | None]]:
        """Forks the process of a session: its id, the connection, and its exit status once it has ended.

        Raises:
            OSError: The host has ended.
        """
        self._next += 1
        ended: asyncio.Future[int | None] = asyncio.get_running_loop().create_future()
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                command = json.dumps({"op": "open", "session": self._next}).encode()
                socket.send_fds(self._control, [command], [theirs.fileno()])
            except OSError:
                ours.close()
                raise
        self._ended[self._next] = ended
        return self._next, ours, ended

    def kill(self, session: int) -> None:
        """Kills the process of a session with all that it started."""
        if session in self._ended:
            with suppress(OSError):  # the host has ended, and its guard kills what is left
                self._control.send(json.dumps({"op": "kill", "session": session}).encode())

    async def end(self) -> None:
        """Ends the host and all its descendants."""
        with suppress(ValueError, OSError):
            asyncio.get_running_loop().remove_reader(self._control.fileno())
        self.requests.close()
        self._control.close()
        os.close(self._write_end)
        await asyncio.shield(asyncio.to_thread(self._process.wait))


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
        self.environment = self.has_state = self.has_prompt = self.has_reward = False
        self._field = field
        self._settings = HostSettings(entry=entry, field=field, python_path=(folder,) if folder else ())
        self._host: _Host | None = None
        self._starting = asyncio.Lock()
        self._started = False
        self._problem = ""

    async def list_tools(self) -> Sequence[ToolDefinition]:
        greeting = await self._spawned()
        self.environment = greeting["environment"]
        self.has_state, self.has_prompt = greeting["has_state"], greeting["has_prompt"]
        self.has_reward = greeting["has_reward"]
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

    async def open(self, create_kwargs: Kwargs) -> ProviderSession:
        host = await self._running()
        try:
            number, connection, ended = host.open()
        except OSError as error:
            raise self._host_died() from error
        reader, writer = await asyncio.open_unix_connection(sock=connection)
        session = _ProcessSession(self.name, host, number, reader, writer, ended)
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

    async def _running(self) -> _Host:
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
        host = await asyncio.to_thread(_Host.spawn, self._settings)
        try:
            greeting = await host.asked(None, IMPORT_SECONDS)
        except TimeoutError:
            await host.end()
            raise UserInputError(f"use: {self.name} could not be imported within {IMPORT_SECONDS:g} s") from None
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


class _ProcessSession:
    """The process of an episode."""

    def __init__(
        self,
        name: str,
        host: _Host,
        number: int,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        ended: asyncio.Future[int | None],
    ) -> None:
        self._name, self._host, self._number = name, host, number
        self._reader, self._writer, self._ended = reader, writer, ended
        self._turn = asyncio.Lock()
        self._lost = False
        self.prompt = ""
        """Whether the process has ended or was killed."""

    async def call(self, tool: str, arguments: Kwargs, filled: Kwargs) -> object:
        request = {"op": "call", "tool": tool, "arguments": dict(arguments), "filled": dict(filled)}
        answer = await self.ask(request)
        return ToolResult(text=answer["text"], final=answer["final"], data=answer["data"])

    async def state(self) -> object:
        return (await self.ask({"op": "state"}))["state"]

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


def _failure(found: Message) -> KestrlError:
    boundary = Boundary(found["boundary"])
    if boundary is Boundary.TOOL:
        return ToolFailure(found["message"], code=found["code"], retryable=found["retryable"])
    return FailureError(
        Failure(boundary=boundary, code=found["code"], message=found["message"], retryable=found["retryable"])
    )
