"""The back-end `zygote`: a warm interpreter that forks, and namespaces, filters and limits around each fork."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import os
import socket
import subprocess
import sys
import time
from functools import partial

from kestrl_sandbox.config import ENVIRONMENT, SOURCE, PoolConfig, prefixes
from kestrl_sandbox.contract import Capabilities, Isolation, SandboxFailure
from kestrl_sandbox.inside import syscall_table
from kestrl_sandbox.inside.frames import LEADER_ENDED, SANDBOX_BROKE
from kestrl_sandbox.pool.cgroups import Cgroups, SlotCgroup
from kestrl_sandbox.pool.slots import EVIDENCE_SECONDS, SandboxSlot, first_frame, handshake, make_cgroups, slot_sockets

log = logging.getLogger(__name__)
NOBODY = 65534
START_SECONDS = 30.0
CLOSE_SECONDS = 5.0
_numbers = itertools.count(1)
"""Numbers of slots: a slot of a zygote that has ended has none of its successor's."""


class Zygote:
    """The process that forks sandboxes."""

    def __init__(
        self, config: PoolConfig, process: subprocess.Popen[bytes], control: socket.socket, cgroups: Cgroups | None
    ) -> None:
        self._config, self._process, self._control, self._cgroups = config, process, control, cgroups
        self._slots: dict[int, SlotCgroup] = {}
        self._leaders: dict[int, asyncio.Future[int | None]] = {}
        """Exit status of each slot's leader once it has ended; None when the zygote itself has."""
        self._said = b""
        self._gone = False
        self.capabilities = Capabilities(backend="zygote", isolation=Isolation.NAMESPACES, mechanisms={})

    @classmethod
    async def start(cls, config: PoolConfig) -> Zygote:
        """Starts it and waits until it can fork sandboxes.

        Raises:
            SandboxFailure: This node does not allow it.
        """
        began = time.monotonic()
        cgroups, no_cgroup = make_cgroups()
        ours, theirs = socket.socketpair()
        settings = {
            "preload": list(config.preload),
            "prefixes": prefixes(),
            "cgroup": cgroups is not None,
            "limits": {
                "disk_mb": config.disk_mb,
                "inodes": config.inodes,
                "memory_mb": config.memory_mb,
                "processes": config.processes,
                "open_files": config.open_files,
            },
        }
        program = (
            f"import sys; sys.path.insert(0, {str(SOURCE)!r}); from kestrl_sandbox.inside.launcher import main; main()"
        )
        process = subprocess.Popen(  # noqa: S603, ASYNC220 - our own interpreter; it returns after the fork
            # Without `site` and the environment: what is imported here is in the memory of every fork.
            [sys.executable, "-I", "-S", "-c", program, str(theirs.fileno()), json.dumps(settings)],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            env=ENVIRONMENT,
            cwd="/",
        )
        theirs.close()
        ours.setblocking(False)
        zygote = cls(config, process, ours, cgroups)
        try:
            await zygote._ready(no_cgroup, began)
        except BaseException:
            await zygote.close()
            raise
        return zygote

    async def _ready(self, no_cgroup: str, began: float) -> None:
        try:
            async with asyncio.timeout(START_SECONDS):
                answer, _ = await first_frame(self._control)
        except (TimeoutError, EOFError, OSError, ValueError) as error:
            raise SandboxFailure(
                f"the zygote did not start: {error or 'no answer'}", code="sandbox_unavailable"
            ) from error
        if "error" in answer:
            raise SandboxFailure(
                f"this node does not allow it: {answer['error']}", code="sandbox_unavailable", retryable=False
            )
        asyncio.get_running_loop().add_reader(self._control, self._notified)
        memory = f"cgroup v{self._cgroups.version}" if self._cgroups else f"watched every 0.1 s ({no_cgroup})"
        self.capabilities = Capabilities(
            backend="zygote",
            isolation=Isolation.NAMESPACES,
            start_seconds=time.monotonic() - began,
            mechanisms={
                "namespaces": "user, pid and mount for each; network for each place of the pool; ipc and uts for "
                "all, in which nothing can be made",
                "user": "1000 inside, no capability, no_new_privs",
                "root": "read-only; private /work, /tmp, /dev/shm with a quota",
                "proc": "own, processes only"
                if answer["proc"]
                else "none: a container's /proc cannot be mounted again",
                "seccomp": f"allow-list of {len(syscall_table.allowed(os.uname().machine))} calls",
                "landlock": f"ABI {answer['landlock']}" if answer["landlock"] else "no: not in this kernel",
                "memory": memory if self._cgroups or answer["proc"] else f"address space only ({no_cgroup})",
                "network": "none: an empty namespace for each place of the pool",
            },
        )

    @property
    def running(self) -> bool:
        return not self._gone and self._process.poll() is None

    def _notified(self) -> None:
        """Takes what the zygote says of ended leaders; the end of the socket is its own."""
        try:
            data = self._control.recv(4096)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        # A stream of records, of which a read may end amid one.
        self._said += data
        complete_bytes = len(self._said) // LEADER_ENDED.size * LEADER_ENDED.size
        records, self._said = self._said[:complete_bytes], self._said[complete_bytes:]
        for number, status in LEADER_ENDED.iter_unpack(records):
            leader = self._leaders.get(number)
            if leader is not None and not leader.done():
                leader.set_result(status)
        if not data:
            self._gone = True
            self._forget()

    def _forget(self) -> None:
        asyncio.get_running_loop().remove_reader(self._control)
        for leader in self._leaders.values():
            if not leader.done():
                leader.set_result(None)
        self._leaders.clear()

    async def _from_outside(self, leader: asyncio.Future[int | None]) -> bool:
        """Whether somebody outside of a sandbox has ended it, which the zygote knows from its leader."""
        reports, _ = await asyncio.wait({leader}, timeout=EVIDENCE_SECONDS)
        return bool(reports) and leader.result() != SANDBOX_BROKE

    async def new_slot(self) -> SandboxSlot:
        """Starts the leader of a slot.

        Raises:
            SandboxFailure: It did not start.
        """
        number = next(_numbers)
        ours, theirs = slot_sockets()
        try:
            with theirs:
                socket.send_fds(self._control, [b"S" + number.to_bytes(4, "big")], [theirs.fileno()])
        except OSError as error:
            ours.close()
            raise SandboxFailure(f"the zygote takes no command: {error}", code="sandbox_unavailable") from error
        leader = self._leaders[number] = asyncio.get_running_loop().create_future()
        try:
            slot, _ = await handshake(
                number,
                ours,
                lambda pid: self._new_cgroup(number, pid),
                seconds=START_SECONDS,
                ended_from_outside=partial(self._from_outside, leader),
            )
        except BaseException as error:
            if isinstance(error, SandboxFailure):
                await asyncio.wait({leader}, timeout=EVIDENCE_SECONDS)  # whether the zygote has ended, too
            self._leaders.pop(number, None)
            raise
        return slot

    def _new_cgroup(self, number: int, pid: int) -> SlotCgroup | None:
        if self._cgroups is None:
            return None
        memory = self._config.memory_mb + self._config.disk_mb
        cgroup = self._cgroups.slot(number, memory_mb=memory, processes=self._config.processes)
        self._slots[number] = (
            cgroup  # before its process is moved, which may have been killed: it is removed all the same
        )
        cgroup.add(pid)
        return cgroup

    def kill_slot(self, slot: SandboxSlot) -> None:
        """Kills what is left of a slot."""
        # By number, and by the zygote, whose children the leaders are: a pid known here may be another process's now.
        self._leaders.pop(slot.number, None)
        if self.running:
            try:
                self._control.send(b"K" + slot.number.to_bytes(4, "big"))
            except OSError:
                log.warning("the zygote does not take commands")
        self._sweep()

    def _sweep(self) -> None:
        """Removes cgroups of slots that have ended."""
        # The newest ones may still have processes that are ending; they are looked at again with the next slot.
        for number, cgroup in list(self._slots.items()):
            if cgroup.close():
                del self._slots[number]

    async def close(self) -> None:
        """Ends the zygote and all sandboxes."""
        self._forget()
        self._control.close()
        try:
            await asyncio.to_thread(self._process.wait, CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            await asyncio.to_thread(self._process.wait)
        if self._cgroups is None:
            return
        deadline = time.monotonic() + CLOSE_SECONDS
        while self._slots and time.monotonic() < deadline:
            for number, cgroup in list(self._slots.items()):
                if cgroup.close():
                    del self._slots[number]
            await asyncio.sleep(0.01 if self._slots else 0)
        if self._slots:
            # Seen on Linux 6.18: a cgroup without any process is busy for minutes. The next start removes it.
            log.warning("%d cgroups of sandboxes cannot be removed yet", len(self._slots))
        else:
            self._cgroups.close()
