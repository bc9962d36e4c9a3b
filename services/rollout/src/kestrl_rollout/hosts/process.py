"""A process that runs the episodes of a function of the user's, in an interpreter that may be another than the
worker's.
"""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from kestrl._shared.processes import frames
from kestrl._shared.processes.guarded import kept_variables
from kestrl.agents.runs import RunResult, invalid, run_result
from kestrl.errors import UserInputError
from kestrl_rollout.hosts.host import MAX_RESULT, RunEnded, RunRequest, error_end
from kestrl_rollout.hosts.inside import host_program
from kestrl_rollout.hosts.program import Program

START_SECONDS = 100.0
"""Time limit for imports: frameworks of agents are large."""
CANCEL_SECONDS = 5.0
"""Time for the process to confirm that an episode was cancelled, which only a blocked event loop exceeds."""
MAX_THREADS_LEFT = 64
"""Threads of cancelled episodes that still run, above which the process is replaced."""
MAX_MESSAGE = 2 * MAX_RESULT
Message = dict[str, Any]


class ProcessHost:
    """Runs episodes in one process, which is started again after its end."""

    def __init__(
        self,
        run: str,
        *,
        python: str | None,
        config: Mapping[str, Any],
        variables: Mapping[str, str],
        python_path: Sequence[str],
        folder: str | None,
        field: str = "agent.run",
        starts: bool = False,
        start_seconds: float = START_SECONDS,
        inherited: Mapping[str, str] | None = None,
    ) -> None:
        """Describes it.

        Args:
            run: Import path of the function or class.
            python: Interpreter; None for that of the worker.
            config: Keyword arguments.
            variables: Environment variables of the manifest.
            python_path: Folders with the code.
            folder: Where it runs; None for the worker's folder.
            field: The manifest field of the agent.
            starts: Whether it is a class with a method `start`, which is awaited first.
            start_seconds: Time limit for imports and `start`.
            inherited: Other environment variables; None for `kept_variables`.
        """
        self.field, self.name = field, run
        self._python = python or sys.executable
        self._settings = {"run": run, "config": dict(config), "python_path": list(python_path), "starts": starts}
        base_variables = kept_variables() if inherited is None else inherited
        self._variables = {**base_variables, "PYTHONUNBUFFERED": "1", **variables}
        self._folder, self._start_seconds = folder, start_seconds
        self._starting = asyncio.Lock()
        self._process: _Process | None = None

    async def start(self) -> None:
        """Starts the process and imports the function.

        Raises:
            UserInputError: It cannot be used; the message has the field.
        """
        process = self._spawned()
        try:
            async with asyncio.timeout(self._start_seconds):
                problem = await process.greeted(self._settings)
        except TimeoutError:
            problem = f"{self.name} could not be imported within {self._start_seconds:g} s"
        except BaseException:
            await process.end()
            raise
        if problem:
            await process.end()
            raise UserInputError(f"{self.field}: {problem}")
        self._process = process

    async def run(self, request: RunRequest) -> RunResult:
        process = await self._running()
        return await process.run(request)

    async def close(self) -> None:
        """Ends the process with all that it started."""
        if self._process is not None:
            await self._process.end()

    async def _running(self) -> _Process:
        async with self._starting:
            if self._process is None or self._process.ended:
                await self.close()
                self._process = None
                try:
                    await self.start()
                except UserInputError as error:
                    raise RunEnded(str(error), code="agent_not_started", retryable=True) from error
            assert self._process is not None
            return self._process

    def _spawned(self) -> _Process:
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                program = Program.start(
                    [self._python, host_program.__file__, str(theirs.fileno())],
                    variables=self._variables,
                    folder=self._folder,
                    pass_fds=(theirs.fileno(),),
                    stdin=subprocess.DEVNULL,
                    stdout=2,  # what the agent prints goes to the worker's log
                )
            except BaseException:
                ours.close()
                raise
        return _Process(f"{self.field} {self.name}", program, ours)


class _Process:
    """A running process and its episodes."""

    def __init__(self, title: str, program: Program, connection: socket.socket) -> None:
        self._title, self._program, self._connection = title, program, connection
        self._reader: asyncio.StreamReader
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None
        self._next = 0
        self._answers: dict[int, asyncio.Future[Message]] = {}
        self._cancelled: dict[int, asyncio.Future[Message]] = {}
        self._threads_left: set[int] = set()
        self.ended = False

    async def greeted(self, settings: Message) -> str:
        """Sends the settings; what is wrong with the function, or nothing."""
        self._reader, self._writer = await asyncio.open_connection(sock=self._connection)
        self._send(settings)
        try:
            greeting: Message = json.loads(await frames.read(self._reader, MAX_MESSAGE))
        except (asyncio.IncompleteReadError, ConnectionError):
            return f"importing {settings['run']} ended its process; the log above says more"
        if "refused" in greeting:
            return str(greeting["refused"])
        self._reading = asyncio.create_task(self._read(), name=self._title)
        return ""

    async def run(self, request: RunRequest) -> RunResult:
        self._next += 1
        number = self._next
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        self._send(
            {
                "id": number,
                "row": request.row,
                "base_url": request.base_url,
                "key": request.key,
                "mcp_url": request.mcp_url,
                "deadline": request.deadline,
            }
        )
        try:
            message = await answer
        except asyncio.CancelledError:
            await asyncio.shield(self._cancel(number))
            raise
        finally:
            self._answers.pop(number, None)
        if "error" in message:
            raise error_end(self._title, message["error"])
        if "invalid" in message:
            raise invalid(self._title, message["invalid"])
        return run_result(self._title, message["result"])

    async def _cancel(self, number: int) -> None:
        """Cancels an episode. A process that does not confirm it, or has too many threads left, is ended: other
        episodes in it fail and can be retried.
        """
        if self.ended:
            return
        confirmed = self._cancelled[number] = asyncio.get_running_loop().create_future()
        self._send({"cancel": number})
        try:
            async with asyncio.timeout(CANCEL_SECONDS):
                message = await confirmed
        except RunEnded:
            return  # the process has ended
        except TimeoutError:
            await self.end()
            return
        finally:
            self._cancelled.pop(number, None)
        if message.get("runs_on"):
            self._threads_left.add(number)
            if len(self._threads_left) > MAX_THREADS_LEFT:
                await self.end()

    async def end(self) -> None:
        """Kills the process with all that it started."""
        self.ended = True
        await self._program.kill()
        if self._reading is not None:
            await asyncio.shield(self._reading)
        if self._writer is None:
            self._connection.close()
        else:
            self._writer.close()

    def _send(self, message: Message) -> None:
        if not self.ended:
            assert self._writer is not None
            self._writer.write(frames.framed(json.dumps(message).encode()))

    async def _read(self) -> None:
        """Hands out answers until the process has ended, or has sent what is no message: the agent's code shares its
        connection, and episodes would wait for answers of a process that is understood no more.
        """
        with suppress(asyncio.IncompleteReadError, ConnectionError, ValueError, TypeError, AttributeError, KeyError):
            while True:
                self._take(json.loads(await frames.read(self._reader, MAX_MESSAGE)))
        self.ended = True
        await self._program.kill()
        status = self._program.process.returncode
        for waiting in (*self._answers.values(), *self._cancelled.values()):
            if not waiting.done():
                waiting.set_exception(
                    RunEnded(
                        f"{self._title}: its process ended with status {status} while the episode ran",
                        code="agent_process_ended",
                        retryable=True,
                    )
                )
                waiting.exception()  # one that is not awaited any more is no error of its own

    def _take(self, message: Message) -> None:
        number = message["id"]
        if message.get("cancelled"):
            waiting = self._cancelled.get(number)
        else:
            self._threads_left.discard(number)
            waiting = self._answers.get(number)
        if waiting is not None and not waiting.done():
            waiting.set_result(message)
