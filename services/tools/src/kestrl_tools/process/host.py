"""`python -m kestrl_tools.process.host`: imports a tool once, and forks a process of it for every episode.

It has one thread, so that forking is safe; a module that starts threads when it is imported is warned about. Each
episode's process has a keeper, which ends all that it has started. On the
socket `--requests` it answers one request after another: the definitions, the hooks, checks of rows. On `--control` it
receives the connections of new episodes and the ids of those to kill, and reports which have ended.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import selectors
import signal
import socket
import sys
import threading
from collections.abc import Callable
from contextlib import suppress

from kestrl._shared.log_lines import start_log
from kestrl._shared.plan.settings.common import SettingsModel
from kestrl._shared.plan.settings.tools import ToolEntry
from kestrl.errors import KestrlError, ToolFailure, UserInputError, described, text_of
from kestrl.tools import ToolError
from kestrl.tools.provider import ToolDefinition, ToolProvider
from kestrl_tools.execution import guarded
from kestrl_tools.process.frames import Message, encoded, receive
from kestrl_tools.process.keeper import keep, stop
from kestrl_tools.process.session import run
from kestrl_tools.python_provider import PythonProvider, python_provider
from kestrl_tools.tool_threads import ToolThreads

log = logging.getLogger(__name__)
MIB = 1024 * 1024


class HostSettings(SettingsModel):
    """What a host imports; its standard input."""

    entry: ToolEntry
    field: str
    """Place of the entry in the manifest, for messages."""
    python_path: tuple[str, ...] = ()


class ToolHost:
    """The loop of the host."""

    def __init__(
        self,
        provider: ToolProvider,
        tools: dict[str, ToolDefinition],
        memory: int | None,
        requests: socket.socket,
        control: socket.socket,
    ) -> None:
        self._provider, self._tools, self._memory = provider, tools, memory
        self._requests, self._control = requests, control
        self._episodes: dict[int, int] = {}
        """Process ids by the id of the session."""

    def serve(self) -> None:
        """Serves until the tool service closes a connection."""
        woken, wake = socket.socketpair()
        woken.setblocking(False)
        wake.setblocking(False)
        signal.signal(signal.SIGCHLD, _ignore)  # only for the wake-up
        signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
        handlers: dict[socket.socket, Callable[[], bool]] = {
            self._requests: self._answer,
            self._control: self._command,
            woken: lambda: self._reap(woken),
        }
        with selectors.DefaultSelector() as selector:
            for connection, handle in handlers.items():
                selector.register(connection, selectors.EVENT_READ, handle)
            while all(key.data() for key, _ in selector.select()):
                pass

    def _answer(self) -> bool:
        try:
            request = receive(self._requests)
            self._requests.sendall(encoded(self._answered(request)))
        except ConnectionError:
            return False
        return True

    def _answered(self, request: Message) -> Message:
        name = self._provider.name
        try:
            match request["op"]:
                case "check":
                    self._provider.check(request["create_kwargs"])
                case "start":
                    asyncio.run(_all(guarded(name, self._provider.start())))
                case _:
                    asyncio.run(_all(guarded(name, self._provider.stop())))
        except UserInputError as error:
            return {"refused": str(error)}
        except ToolFailure as error:
            return {"failure": str(error), "code": error.code}
        except (ToolError, KestrlError) as error:
            return {"failure": text_of(error), "code": "tool_raised"}
        return {}

    def _command(self) -> bool:
        data, fds, _, _ = socket.recv_fds(self._control, 4096, 1)
        if not data:
            return False
        command: Message = json.loads(data)
        session: int = command["session"]
        if command["op"] == "open":
            self._fork(session, fds[0])
        elif session in self._episodes:
            stop(self._episodes[session])
        return True

    def _fork(self, session: int, fd: int) -> None:
        if threading.active_count() > 1:
            log.warning("%s: the module started threads, which a fork does not have", self._provider.name)
        pid = os.fork()
        if pid:
            os.close(fd)
            self._episodes[session] = pid
            return
        try:
            signal.set_wakeup_fd(-1)
            self._requests.close()
            self._control.close()
            keep(lambda: self._serve_episode(fd), fd)
        finally:
            os._exit(1)

    def _serve_episode(self, fd: int) -> int:
        """Serves an episode in this process; its exit status."""
        try:
            run(socket.socket(fileno=fd), self._provider, self._tools, self._memory)
        except BaseException:
            log.exception("tool %s: its process ends", self._provider.name)
            return 1
        return 0

    def _reap(self, woken: socket.socket) -> bool:
        with suppress(BlockingIOError):
            while woken.recv(4096):
                pass
        sessions = {pid: session for session, pid in self._episodes.items()}
        for pid, session in sessions.items():
            # Of these alone: other children are those of the tool's hooks.
            ended_pid, status = os.waitpid(pid, os.WNOHANG)
            if ended_pid:
                del self._episodes[session]
                report = {"session": session, "status": os.waitstatus_to_exitcode(status)}
                self._control.send(json.dumps(report).encode())
        return True


def _ignore(number: int, frame: object) -> None:
    pass


async def _all(work: object) -> None:
    await work  # type: ignore[misc]  # pyright: ignore[reportGeneralTypeIssues, reportUnknownVariableType]


def _greeting(provider: PythonProvider, tools: dict[str, ToolDefinition]) -> Message:
    return {
        "environment": provider.environment,
        "has_state": provider.has_state,
        "has_prompt": provider.has_prompt,
        "has_reward": provider.has_reward,
        "acts": provider.acts,
        "tools": [
            {
                "name": tool.name,
                "description": tool.schema.description,
                "parameters": dict(tool.schema.parameters),
                "fillable": None if tool.fillable is None else sorted(tool.fillable),
                "required": sorted(tool.required),
                "fixed": sorted(tool.fixed),
            }
            for tool in tools.values()
        ],
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--requests", type=int, required=True)
    parser.add_argument("--control", type=int, required=True)
    arguments = parser.parse_args()
    start_log()
    requests, control = socket.socket(fileno=arguments.requests), socket.socket(fileno=arguments.control)
    settings = HostSettings.model_validate_json(sys.stdin.buffer.read())
    sys.path[:0] = settings.python_path
    try:
        provider = python_provider(settings.entry, settings.field, ToolThreads())
        tools = {tool.name: tool for tool in asyncio.run(provider.list_tools())}
    except UserInputError as error:
        requests.sendall(encoded({"refused": str(error)}))
        return
    except BaseException as error:  # noqa: BLE001 - importing a user's module may raise anything
        requests.sendall(encoded({"refused": f"{settings.field}.use: {described(error)}"}))
        return
    requests.sendall(encoded(_greeting(provider, tools)))
    memory = settings.entry.process.memory_mb if settings.entry.process is not None else None
    ToolHost(provider, tools, None if memory is None else memory * MIB, requests, control).serve()


if __name__ == "__main__":
    main()
