"""Back-ends that start a program of the node, such as bubblewrap, for each slot."""

from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, Self

from kestrl_sandbox.backends.zygote import START_SECONDS
from kestrl_sandbox.config import PoolConfig
from kestrl_sandbox.contract import Capabilities, SandboxFailure
from kestrl_sandbox.pool.cgroups import Cgroups, SlotCgroup
from kestrl_sandbox.pool.slots import EVIDENCE_SECONDS, SandboxSlot, handshake, slot_sockets

CLOSE_SECONDS = 5.0


class SlotPrograms(ABC):
    """A process of the program for each slot, with a cgroup where one can be made."""

    capabilities: Capabilities

    def __init__(self, config: PoolConfig, program: str, cgroups: Cgroups | None) -> None:
        self._config, self._program, self._cgroups = config, program, cgroups
        self._processes: dict[int, tuple[subprocess.Popen[bytes], SlotCgroup | None]] = {}
        self._unused: set[int] = set()
        """Slots that nobody waits for any more: only their cgroups are removed, since others are still asked."""
        self._number = 0

    @abstractmethod
    def _spawn(self, number: int, connection: socket.socket) -> subprocess.Popen[bytes]:
        """Starts the program of a slot, whose supervisor answers on the connection."""

    @abstractmethod
    def _limits(self) -> tuple[int, int]:
        """Memory in MiB and number of processes of a slot's cgroup."""

    @abstractmethod
    def _members(self, process: subprocess.Popen[bytes], supervisor: int) -> Iterable[int]:
        """Processes of a slot that its cgroup is for.

        Args:
            process: The program.
            supervisor: Process id of the peer of the slot's connection.
        """

    def _greeted(self, greeting: Mapping[str, Any]) -> None:  # noqa: B027 - not every program needs it
        """Takes note of what a supervisor says of itself when it has started."""

    def _forget(self, number: int) -> None:  # noqa: B027 - not every program needs it
        """Removes what the ended program of a slot has left."""

    async def _tried(self) -> Self:
        """Starts one sandbox and ends it, which shows that the node allows it, and measures the time.

        Raises:
            SandboxFailure: The node does not allow it.
        """
        began = time.monotonic()
        try:
            slot = await self.new_slot()
            slot.close()
            self.kill_slot(slot)
        except BaseException:
            await self.close()
            raise
        self.capabilities = replace(self.capabilities, start_seconds=time.monotonic() - began)
        return self

    @property
    def running(self) -> bool:
        return True

    async def new_slot(self) -> SandboxSlot:
        """Starts the program of a slot.

        Raises:
            SandboxFailure: It did not start; the message has what the program wrote.
        """
        self._reap()
        self._number += 1
        number = self._number
        ours, theirs = slot_sockets()
        with theirs:
            process = self._spawn(number, theirs)
        self._processes[number] = (process, None)

        def cgroup_of(supervisor: int) -> SlotCgroup | None:
            if self._cgroups is None:
                return None
            memory, processes = self._limits()
            cgroup = self._cgroups.slot(number, memory_mb=memory, processes=processes)
            self._processes[number] = (process, cgroup)
            for pid in self._members(process, supervisor):
                with suppress(ProcessLookupError):  # one that has ended needs no limit
                    cgroup.add(pid)
            return cgroup

        try:
            slot, greeting = await handshake(
                number,
                ours,
                cgroup_of,
                seconds=START_SECONDS,
                single_use=True,
                ended_from_outside=partial(ended_from_outside, process),
            )
        except SandboxFailure as error:
            process.kill()
            self._unused.add(number)
            _, reason = await asyncio.to_thread(process.communicate)
            text = reason.decode(errors="replace").strip()[-500:]
            raise SandboxFailure(f"{error}: {text}", code="sandbox_unavailable") from error
        self._greeted(greeting)
        return slot

    def kill_slot(self, slot: SandboxSlot) -> None:
        """Kills what is left of a slot: the sandbox ends with the program that started it."""
        entry = self._processes.get(slot.number)
        if entry is not None:
            entry[0].kill()
            self._unused.add(slot.number)
        self._reap()

    def _reap(self) -> None:
        for number in list(self._unused):
            process, cgroup = self._processes[number]
            if process.poll() is not None and (cgroup is None or cgroup.close()):
                if process.stderr is not None:
                    process.stderr.close()
                self._forget(number)
                del self._processes[number]
                self._unused.discard(number)

    async def close(self) -> None:
        """Ends all sandboxes."""
        for process, _ in self._processes.values():
            process.kill()
        self._unused |= self._processes.keys()
        deadline = time.monotonic() + CLOSE_SECONDS
        while self._processes and time.monotonic() < deadline:
            self._reap()
            await asyncio.sleep(0.01 if self._processes else 0)
        if self._cgroups is not None and not self._processes:
            self._cgroups.close()


async def ended_from_outside(process: subprocess.Popen[bytes]) -> bool:
    """Whether a signal has ended the program of a slot, or process 1 in it, which no process of the code can send one.

    What runs in gVisor may end its kernel, which is part of the sandbox: that is not from outside.
    """
    try:
        status = await asyncio.to_thread(process.wait, EVIDENCE_SECONDS)
    except subprocess.TimeoutExpired:
        return False
    return status < 0 or status == 128 + signal.SIGKILL
