"""A reward process as seen by the judge: started, asked for one episode at a time, killed after the time limit."""

from __future__ import annotations

import asyncio
import contextlib
import json
import select
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kestrl._shared.processes import frames
from kestrl._shared.processes.guarded import GuardedProcess, ending, variables_without_ours
from kestrl.api.judge.v1 import judge_pb2 as pb
from kestrl.episode.codec import failure_from_proto
from kestrl.errors import JudgeFailure, UserInputError

START_SECONDS = 60.0
"""Time limit for imports in seconds; rewards may import large libraries."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessParameters:
    """Parameters of a reward process."""

    name: str
    rule: str
    field: str
    python_path: Sequence[str]
    config: Mapping[str, Any]
    """Sent as the first frame, since command lines are limited in size and readable by other users."""

    def arguments(self, inherited: int) -> list[str]:
        paths = [part for path in self.python_path for part in ("--path", path)]
        return [
            *("-m", "kestrl_judge.worker", "--name", self.name, "--rule", self.rule, "--field", self.field),
            *("--socket", str(inherited), *paths),
        ]


class Died(JudgeFailure):
    """The process ended during a request."""

    code = "reward_process_died"


class Late(JudgeFailure):
    """The reward exceeded its time limit."""

    code = "reward_deadline"


class RewardProcess:
    """A running process. Made by `start`, ended by `kill`; asked by one caller at a time."""

    def __init__(
        self,
        command: ProcessParameters,
        process: GuardedProcess,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self._command = command
        self._process = process
        self._reader = reader
        self._writer = writer

    @classmethod
    async def start(cls, command: ProcessParameters) -> RewardProcess:
        """Starts a process and waits until its reward is loaded.

        Raises:
            UserInputError: The reward cannot be loaded; the message names the field and the fix.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            process = GuardedProcess.start(
                [sys.executable, *command.arguments(theirs.fileno())],
                variables=variables_without_ours(),
                stdout=2,  # output of a reward goes to the judge's log
                pass_fds=(theirs.fileno(),),
            )
        reader, writer = await asyncio.open_unix_connection(sock=ours)
        started = cls(command, process, reader, writer)
        try:
            await started._greeted()
        except BaseException:
            await started.kill()
            raise
        return started

    @property
    def alive(self) -> bool:
        if self._process.process.poll() is not None or self._reader.at_eof():
            return False
        # The event loop may not have noticed yet that the process has ended and its guard is about to.
        hangup = select.poll()
        hangup.register(self._writer.get_extra_info("socket").fileno(), select.POLLRDHUP)
        return not hangup.poll(0)

    @property
    def pid(self) -> int:
        return self._process.process.pid

    async def ask(self, request: Sequence[bytes | memoryview], *, seconds: float) -> pb.EpisodeScore:
        """Scores one episode.

        Args:
            request: A `ScoreGroupRequest`, encoded, in parts.
            seconds: Time limit.

        Raises:
            Late: It took longer than `seconds`. The process must be killed then.
            Died: The process ended.
        """
        try:
            async with asyncio.timeout(seconds):
                await frames.write(self._writer, *request)
                return pb.EpisodeScore.FromString(await frames.read(self._reader))
        except TimeoutError as error:
            raise Late(
                f"{self._command.name}: no score within its time limit of {seconds:g} s for one episode "
                "(rewards[].timeout)"
            ) from error
        except frames.FrameTooLong as error:
            raise Died(f"{self._command.name}: its process sent {error}") from error
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            raise Died(f"{self._command.name}: its process ended while scoring ({await self._ending()})") from error

    async def kill(self) -> None:
        """Kills the process and its descendants, including those in other sessions."""
        self._writer.close()
        await self._process.kill()
        with contextlib.suppress(ConnectionError):
            await self._writer.wait_closed()

    async def _greeted(self) -> None:
        field = self._command.field
        try:
            async with asyncio.timeout(START_SECONDS):
                await frames.write(self._writer, json.dumps(dict(self._command.config)).encode())
                greeting = pb.EpisodeScore.FromString(await frames.read(self._reader))
        except TimeoutError as error:
            raise UserInputError(
                f"{field}: {self._command.rule} could not be imported within {START_SECONDS:g} s"
            ) from error
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            raise UserInputError(
                f"{field}: importing {self._command.rule} ended its process ({await self._ending()}); the log above "
                "says more"
            ) from error
        if greeting.HasField("failure"):
            raise UserInputError(failure_from_proto(greeting.failure).message)

    async def _ending(self) -> str:
        # The socket may close slightly before the process ends; a process that only closed it is treated as ended.
        with contextlib.suppress(subprocess.TimeoutExpired):
            await asyncio.to_thread(self._process.wait, 1)
        code = self._process.process.returncode
        if code is None:
            return "it closed its connection"
        return ending(code)
