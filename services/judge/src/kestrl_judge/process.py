"""One reward process as the judge holds it: started, asked one episode at a time, killed when it is late."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kestrl import process_guard
from kestrl.api.judge.v1 import judge_pb2 as pb
from kestrl.errors import JudgeFailure, UserInputError
from kestrl.rpc.codec import failure_from_proto
from kestrl_judge.frames import receive, send

START_SECONDS = 60.0
"""For imports; a reward may bring a large library."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """What a process is started with."""

    name: str
    rule: str
    field: str
    python_path: Sequence[str]
    config: Mapping[str, Any]
    """Sent as the first frame: it may hold more than a command line, which every user of the machine can read."""

    def arguments(self, inherited: int) -> list[str]:
        paths = [part for path in self.python_path for part in ("--path", path)]
        return [
            *("-m", "kestrl_judge.worker", "--name", self.name, "--rule", self.rule, "--field", self.field),
            *("--socket", str(inherited), *paths),
        ]


class Died(JudgeFailure):
    """The process ended while it was asked."""

    code = "reward_process_died"


class Late(JudgeFailure):
    """The reward took longer than it may."""

    code = "reward_deadline"


def _environment() -> Mapping[str, str]:
    # The job's credential is none of a reward's business: with it, it could post what only the judge may.
    return {name: value for name, value in os.environ.items() if not name.startswith("KESTRL_")}


class RewardProcess:
    """A running process. Made by `start`, ended by `kill`; asked by one caller at a time."""

    def __init__(
        self,
        command: Command,
        process: subprocess.Popen[bytes],
        hold: int,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self._command = command
        self._process = process
        self._hold = hold
        """Writing end of the process guard's pipe: closing it kills the process and all it started."""
        self._reader = reader
        self._writer = writer

    @classmethod
    async def start(cls, command: Command) -> RewardProcess:
        """Starts a process and waits until its reward is loaded.

        Raises:
            UserInputError: The reward cannot be loaded; names the field and the mend.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            process, hold = _spawn(command, theirs.fileno())
        reader, writer = await asyncio.open_unix_connection(sock=ours)
        started = cls(command, process, hold, reader, writer)
        try:
            await started._greeted()
        except BaseException:
            await started.kill()
            raise
        return started

    @property
    def alive(self) -> bool:
        if self._process.poll() is not None or self._reader.at_eof():
            return False
        # What the event loop does not know yet: the process ended, and its guard is about to.
        hangup = select.poll()
        hangup.register(self._writer.get_extra_info("socket").fileno(), select.POLLRDHUP)
        return not hangup.poll(0)

    @property
    def pid(self) -> int:
        return self._process.pid

    async def ask(self, request: bytes, *, seconds: float) -> pb.EpisodeScore:
        """Has one episode scored.

        Raises:
            Late: It took longer than `seconds`. The process is of no use any more: kill it.
            Died: The process ended.
        """
        try:
            async with asyncio.timeout(seconds):
                await send(self._writer, request)
                return pb.EpisodeScore.FromString(await receive(self._reader))
        except TimeoutError as error:
            raise Late(
                f"{self._command.name}: no score within its time limit of {seconds:g} s for one episode (rewards[].timeout)"
            ) from error
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            raise Died(f"{self._command.name}: its process ended while scoring ({await self._ending()})") from error

    async def kill(self) -> None:
        """Ends it and all it started, sessions of their own included."""
        self._writer.close()
        os.close(self._hold)
        await asyncio.to_thread(self._process.wait)
        with contextlib.suppress(ConnectionError):
            await self._writer.wait_closed()

    async def _greeted(self) -> None:
        field = self._command.field
        try:
            async with asyncio.timeout(START_SECONDS):
                await send(self._writer, json.dumps(dict(self._command.config)).encode())
                greeting = pb.EpisodeScore.FromString(await receive(self._reader))
        except TimeoutError as error:
            raise UserInputError(f"{field}: {self._command.rule} is not imported after {START_SECONDS:g} s") from error
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            raise UserInputError(
                f"{field}: importing {self._command.rule} ended its process ({await self._ending()}); the log above says more"
            ) from error
        if greeting.HasField("failure"):
            raise UserInputError(failure_from_proto(greeting.failure).message)

    async def _ending(self) -> str:
        # The socket can end a moment before the process does; one that closed it and lives on is as good as dead.
        with contextlib.suppress(subprocess.TimeoutExpired):
            await asyncio.to_thread(self._process.wait, 1)
        code = self._process.returncode
        if code is None:
            return "it closed its connection"
        number = -code if code < 0 else code - 128
        return f"signal {signal.Signals(number).name}" if number in set(signal.Signals) else f"exit code {code}"


def _spawn(command: Command, inherited: int) -> tuple[subprocess.Popen[bytes], int]:
    """Starts the process under a process guard; also returns the writing end of the guard's pipe."""
    held, hold = os.pipe()
    try:
        # Not asyncio's: uvloop forks and runs Python in the child before exec, which crashes now and then beside gRPC's threads
        # (seen: SIGSEGV in one start of ten). The standard library's vfork and exec runs nothing in between, and takes a millisecond.
        process = subprocess.Popen(  # noqa: S603 - our own interpreter and modules
            [
                *(sys.executable, "-I", "-S", process_guard.__file__, str(held), "0"),
                *(sys.executable, *command.arguments(inherited)),
            ],
            stdin=subprocess.DEVNULL,
            stdout=2,  # what a reward prints goes to the judge's log
            pass_fds=(inherited, held),
            env=_environment(),
            start_new_session=True,  # the terminal's Ctrl-C is the judge's alone
        )
    except OSError:
        os.close(hold)
        raise
    finally:
        os.close(held)
    return process, hold
