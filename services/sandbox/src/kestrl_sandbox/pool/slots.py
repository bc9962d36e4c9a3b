"""A slot: the connection to a leader, which has a fresh sandbox ready for each request."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import struct
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from kestrl_sandbox.contract import Result, Run, SandboxFailure
from kestrl_sandbox.inside import frames
from kestrl_sandbox.pool.cgroups import Cgroups, NoCgroup, SlotCgroup
from kestrl_sandbox.pool.results import broken, late, out_of_memory, result_of

log = logging.getLogger(__name__)
GRACE_SECONDS = 10.0
"""Seconds beyond a run's own limit after which its supervisor counts as stuck."""
EVIDENCE_SECONDS = 5.0
"""Time for a back-end to say how a sandbox ended that closed its connection."""
_CREDENTIALS = struct.Struct("iii")


class SlotLost(SandboxFailure):
    """A slot's processes ended without an answer."""

    code = "sandbox_lost"


def request(run: Run, *, session: bool) -> bytes:
    """The message for a run."""
    code = run.code.encode("utf-8", "surrogatepass")
    header = {
        "code": len(code),
        "stdin": len(run.stdin),
        "files": [[path, len(content)] for path, content in run.files.items()],
        "fetch": list(run.fetch),
        "language": run.language.value,
        "echo": run.echo.value,
        "session": session,
        "timeout": run.limits.seconds,
        "memory_mb": run.limits.memory_mb,
        "output_limit": run.limits.output_bytes,
        "max_file": run.limits.file_bytes,
    }
    return frames.encode(header, b"".join([code, run.stdin, *run.files.values()]))


Evidence = Callable[[], Awaitable[bool]]


async def never_from_outside() -> bool:
    """Evidence of a back-end that has none."""
    return False


class SandboxSlot:
    """One connection; runs one request at a time.

    Whether an end without an answer is the sandbox's own failure or the code's doing, evidence from outside of the
    sandbox decides: what runs in it is not asked.

    Args:
        number: Its number.
        reader: From its supervisor.
        writer: To its supervisor.
        cgroup: Its cgroup, where there is one.
        single_use: Whether it serves one run or session only.
        ended_from_outside: Evidence of the back-end: whether it, or somebody else on the node, has ended the sandbox.
    """

    def __init__(
        self,
        number: int,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        cgroup: SlotCgroup | None = None,
        *,
        single_use: bool = False,
        ended_from_outside: Evidence = never_from_outside,
    ) -> None:
        self.number = number
        self.single_use = single_use
        self.cgroup = cgroup
        self.alive = True
        """Whether the state of a session is still there."""
        self._ended_from_outside = ended_from_outside
        self._reader, self._writer = reader, writer
        self._handed_over = False
        """Whether code has run in the sandbox that is there now."""

    @property
    def usable(self) -> bool:
        return not self._reader.at_eof() and not self._writer.is_closing()

    async def run(self, run: Run, *, session: bool) -> Result:
        """Runs code.

        Raises:
            SandboxFailure: The sandbox failed before any code ran in it; `SlotLost` if it was ended from outside.
        """
        kills = self.cgroup.kills() if self.cgroup else 0
        began = time.monotonic()
        self.alive = False  # until the sandbox says otherwise
        try:
            async with asyncio.timeout(run.limits.seconds + GRACE_SECONDS):
                header, body = await self._exchange(request(run, session=session))
        except TimeoutError as error:
            self.close()
            if self._handed_over:
                log.error("a sandbox did not answer %g s after the limit of its code", GRACE_SECONDS)
                return late(run, time.monotonic() - began)
            raise SandboxFailure(
                f"the sandbox did not start within {run.limits.seconds + GRACE_SECONDS:g} s", code="sandbox_stuck"
            ) from error
        except (OSError, EOFError, ValueError) as error:
            self.close()
            if self.cgroup is not None and self.cgroup.kills() > kills:
                return out_of_memory(run)
            if not self._handed_over or await self._ended_from_outside():
                raise SlotLost(f"the processes of the sandbox ended without an answer: {error}") from error
            log.error("a sandbox ended without an answer, by the code in it: %s", error)
            return broken()
        if header["kind"] == "unprepared":
            self.close()
            raise SandboxFailure(f"the sandbox's process did not start: {header['reason']}", code="sandbox_unprepared")
        self.alive = self._handed_over = bool(header["alive"])
        killed = self.cgroup is not None and self.cgroup.kills() > kills
        return result_of(run, header, body, memory_killed=killed)

    async def _exchange(self, message: bytes) -> tuple[Mapping[str, Any], bytes]:
        self._writer.write(message)
        await self._writer.drain()
        header, body = await read_frame(self._reader)
        if header["kind"] != "started":
            return header, body
        self._handed_over = True
        return await read_frame(self._reader)

    def close(self) -> None:
        """Closes the connection: leader and sandbox end by themselves."""
        self._writer.close()


async def read_frame(reader: asyncio.StreamReader) -> tuple[dict[str, Any], bytes]:
    """Reads a message.

    Raises:
        EOFError: The connection ends before it.
        ValueError: It is not one.
    """
    header, body = frames.lengths(await reader.readexactly(frames.PREFIX.size))
    text = await reader.readexactly(header)
    return json.loads(text), await reader.readexactly(body)


def make_cgroups() -> tuple[Cgroups | None, str]:
    """A parent of cgroups for slots, or the reason why there is none."""
    try:
        return Cgroups.create(), ""
    except NoCgroup as error:
        return None, str(error)


def slot_sockets() -> tuple[socket.socket, socket.socket]:
    """The service's and the leader's end of a connection.

    Credentials are on before a leader has its end: a message that was sent without them has no process number, and
    is read as from process 0.
    """
    ours, theirs = socket.socketpair()
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
    ours.setblocking(False)
    return ours, theirs


async def handshake(
    number: int,
    connection: socket.socket,
    cgroup_of: Callable[[int], SlotCgroup | None],
    *,
    seconds: float,
    single_use: bool = False,
    ended_from_outside: Evidence = never_from_outside,
) -> tuple[SandboxSlot, dict[str, Any]]:
    """Waits for the greeting of a slot's process, on a socket of `slot_sockets`, and puts it into its cgroup, before it
    forks.

    Raises:
        SandboxFailure: It did not start.
    """
    try:
        async with asyncio.timeout(seconds):
            greeting, pid = await first_frame(connection)
        if pid <= 0:
            raise EOFError("its process number is not visible here")
        cgroup = cgroup_of(pid)
        await asyncio.get_running_loop().sock_sendall(connection, b"G")
        reader, writer = await asyncio.open_unix_connection(sock=connection)
    except (TimeoutError, EOFError, OSError, ValueError) as error:
        connection.close()
        raise SandboxFailure(f"a sandbox did not start: {error or 'no answer'}", code="sandbox_unavailable") from error
    except BaseException:
        connection.close()
        raise
    slot = SandboxSlot(number, reader, writer, cgroup, single_use=single_use, ended_from_outside=ended_from_outside)
    return slot, greeting


async def first_frame(connection: socket.socket) -> tuple[dict[str, Any], int]:
    """First message on a non-blocking socket with SO_PASSCRED, and the sender's process number as seen here."""
    loop = asyncio.get_running_loop()
    readable = loop.create_future()
    loop.add_reader(connection, lambda: readable.done() or readable.set_result(None))
    try:
        await readable
    finally:
        loop.remove_reader(connection)
    data, ancillary, _flags, _address = connection.recvmsg(4096, socket.CMSG_SPACE(_CREDENTIALS.size))
    if len(data) < frames.PREFIX.size:
        raise EOFError("the leader of the slot ended at its start")
    header, _body = frames.lengths(data[: frames.PREFIX.size])
    pid = next((_CREDENTIALS.unpack(item)[0] for _l, kind, item in ancillary if kind == socket.SCM_CREDENTIALS), 0)
    return json.loads(data[frames.PREFIX.size : frames.PREFIX.size + header]), pid
