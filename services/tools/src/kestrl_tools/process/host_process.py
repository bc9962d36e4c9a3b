"""The process that imports a tool once, as the tool service sees it."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from kestrl._shared.environments import link_sources
from kestrl._shared.processes.guarded import GuardedProcess, kept_variables, variables_without_ours
from kestrl_tools.process.frames import Message, ask, receive
from kestrl_tools.process.host import HostSettings

LAUNCHER_POLL_SECONDS = 0.2


class Killable(Protocol):
    """A guarded process as its owner needs it."""

    async def kill(self) -> None:
        """Ends it with all its descendants, and waits for that even if it is cancelled."""
        ...


class LaunchedProcess:
    """A host in another container of the pod."""

    def __init__(self, launcher: socket.socket, write_end: int) -> None:
        self._launcher = launcher
        self._write_end = write_end
        """Write end of the pipe of the guard in the other container."""

    async def kill(self) -> None:
        os.close(self._write_end)
        await asyncio.shield(asyncio.to_thread(self._wait))

    def _wait(self) -> None:
        with self._launcher, suppress(OSError):  # the container has ended, and with it the host
            while self._launcher.recv(4096):
                pass


class HostProcess:
    """A running host."""

    def __init__(
        self,
        process: Killable,
        requests: socket.socket,
        control: socket.socket,
        folder: tempfile.TemporaryDirectory[str] | None,
    ) -> None:
        self._process, self._folder = process, folder
        self.requests, self._control = requests, control
        self._ended: dict[int, asyncio.Future[int | None]] = {}
        self._next = 0
        self.gone = False
        """Whether the host has ended."""

    @classmethod
    def spawn(cls, settings: HostSettings) -> HostProcess:
        """Starts the process without waiting for it."""
        ours, theirs = socket.socketpair()
        control, their_control = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        stdin, write_stdin = os.pipe()
        environment = settings.entry.environment
        launcher = None if environment is None else environment.launcher
        python = sys.executable if environment is None or environment.python is None else environment.python
        alike = launcher is not None or python == sys.executable
        folder = None if alike else tempfile.TemporaryDirectory(prefix="kestrl-environment-")
        fds = (stdin, theirs.fileno(), their_control.fileno())
        process: Killable
        try:
            if launcher is not None and environment is not None:
                process = _launched(launcher, fds, environment.start_seconds)
            else:
                # Without the service's credentials, so that a tool cannot act as the service.
                variables = _variables(None if folder is None else folder.name, ours=environment is None)
                process = _started(python, fds, variables)
        except BaseException:
            ours.close()
            control.close()
            os.close(write_stdin)
            if folder is not None:
                folder.cleanup()
            raise
        finally:
            for end in (theirs, their_control):
                end.close()
            os.close(stdin)
        with os.fdopen(write_stdin, "wb") as settings_pipe, suppress(BrokenPipeError):
            settings_pipe.write(settings.model_dump_json().encode())
        return cls(process, ours, control, folder)

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
            report: Message = json.loads(data)
            if (future := self._ended.pop(report["session"], None)) is not None and not future.done():
                future.set_result(report["status"])
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
        exit_status: asyncio.Future[int | None] = asyncio.get_running_loop().create_future()
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                command = json.dumps({"op": "open", "session": self._next}).encode()
                socket.send_fds(self._control, [command], [theirs.fileno()])
            except OSError:
                ours.close()
                raise
        self._ended[self._next] = exit_status
        return self._next, ours, exit_status

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
        await self._process.kill()
        if self._folder is not None:
            self._folder.cleanup()


def _started(python: str, fds: tuple[int, int, int], variables: dict[str, str]) -> GuardedProcess:
    """A host beside the service."""
    stdin, requests, control = fds
    command = ("-m", "kestrl_tools.process.host", "--requests", str(requests), "--control", str(control))
    return GuardedProcess.start(
        [python, *command],
        variables=variables,
        stdin=stdin,
        stdout=2,  # output of a tool goes to the log of the service
        pass_fds=(requests, control),
    )


def _launched(path: str, fds: tuple[int, int, int], seconds: float) -> LaunchedProcess:
    """A host that the launcher of another container starts, once that listens.

    Raises:
        OSError: It does not within so many seconds.
    """
    stdin, requests, control = fds
    read_end, write_end = os.pipe()
    try:
        return LaunchedProcess(_launcher(path, [stdin, read_end, requests, control], seconds), write_end)
    except BaseException:
        os.close(write_end)
        raise
    finally:
        os.close(read_end)


def _launcher(path: str, fds: list[int], seconds: float) -> socket.socket:
    """The connection to a launcher that has received descriptors."""
    deadline = time.monotonic() + seconds
    while True:
        launcher = socket.socket(socket.AF_UNIX)
        try:
            launcher.connect(path)
            socket.send_fds(launcher, [b"h"], fds)
        except OSError:
            launcher.close()
            if time.monotonic() > deadline:
                raise
            time.sleep(LAUNCHER_POLL_SECONDS)
        else:
            return launcher


def _variables(sources: str | None, *, ours: bool) -> dict[str, str]:
    """Variables of a host: without the service's credentials, so that a tool cannot act as the service.

    Args:
        sources: Folder with our packages for another interpreter; None for this one.
        ours: Whether what it imports belongs to the job's own code; else it gets no credential of any kind.
    """
    if ours:
        return variables_without_ours()
    variables = kept_variables()
    if sources is None:
        return variables
    link_sources(Path(sources))
    return {**variables, "PYTHONPATH": sources, "PYTHONUNBUFFERED": "1"}
