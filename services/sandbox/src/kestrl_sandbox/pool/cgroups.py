"""A cgroup for each slot where this process may make one: memory and processes of all that runs in it together.

A slot's leader is moved into it once; what it forks is born there. Both hierarchies are served, v1 and v2.
"""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

MOUNT = Path("/sys/fs/cgroup")
PREFIX = "kestrl-sandbox-"
OWN_MB = 64
"""Memory for the supervisors beside the code's."""


class NoCgroup(Exception):
    """There is no writable cgroup; the text says why."""


@dataclass(frozen=True, slots=True)
class Cgroups:
    """Parents of the slots' cgroups, by controller; the same folder for both with v2."""

    memory: Path
    pids: Path
    version: int

    @classmethod
    def create(cls) -> Cgroups:
        """Makes a parent for the slots of this process.

        Raises:
            NoCgroup: They cannot be made here.
        """
        paths = _own()
        name = f"{PREFIX}{os.getpid()}-{os.urandom(3).hex()}"
        unified = (MOUNT / "cgroup.controllers").exists()
        try:
            if not unified:
                folders = [MOUNT / kind / paths.get(kind, "/").lstrip("/") / name for kind in ("memory", "pids")]
                for folder in folders:
                    remove_stale(folder.parent)
                    folder.mkdir()
                return cls(folders[0], folders[1], 1)
            parent = MOUNT / paths.get("", "/").lstrip("/")
            remove_stale(parent)
            (parent / "cgroup.subtree_control").write_text("+memory +pids")
            (parent / name).mkdir()
            (parent / name / "cgroup.subtree_control").write_text("+memory +pids")
        except OSError as error:
            raise NoCgroup(f"{error.filename or MOUNT}: {error.strerror}") from error
        return cls(parent / name, parent / name, 2)

    def slot(self, number: int, *, memory_mb: int, processes: int) -> SlotCgroup:
        """Makes the cgroup of one slot."""
        slot = SlotCgroup(self.memory / str(number), self.pids / str(number), self.version)
        for folder in slot.folders:
            folder.mkdir(exist_ok=True)
        limit = (memory_mb + OWN_MB) << 20
        (slot.memory / ("memory.max" if self.version == 2 else "memory.limit_in_bytes")).write_text(str(limit))
        (slot.pids / "pids.max").write_text(str(processes + 8))
        if self.version == 2:
            with suppress(FileNotFoundError):  # a kernel without swap
                (slot.memory / "memory.swap.max").write_text("0")
        return slot

    def close(self) -> None:
        """Removes the parents; their slots are closed before."""
        for folder in {self.memory, self.pids}:
            folder.rmdir()


@dataclass(frozen=True, slots=True)
class SlotCgroup:
    """Cgroups of one slot."""

    memory: Path
    pids: Path
    version: int

    @property
    def folders(self) -> set[Path]:
        return {self.memory, self.pids}

    def add(self, pid: int) -> None:
        """Moves a process into the cgroups.

        Raises:
            ValueError: `pid` is not positive; the kernel would take 0 for this process itself.
        """
        if pid <= 0:
            raise ValueError(f"no process has the number {pid}")
        for folder in self.folders:
            (folder / "cgroup.procs").write_text(str(pid))

    def kills(self) -> int:
        """Processes killed for memory so far; 0 when the cgroup was removed, as with an ended back-end."""
        name = "memory.events" if self.version == 2 else "memory.oom_control"
        try:
            lines = (self.memory / name).read_text().splitlines()
        except OSError as error:
            if error.errno in {errno.ENOENT, errno.ENODEV}:
                return 0
            raise
        for line in lines:
            key, _, value = line.partition(" ")
            if key == "oom_kill":
                return int(value)
        return 0

    def close(self) -> bool:
        """Removes the cgroups; False while processes are in them."""
        try:
            for folder in self.folders:
                with suppress(FileNotFoundError):
                    folder.rmdir()
        except OSError:
            return False
        return True


def remove_stale(parent: Path) -> None:
    """Removes the cgroups of services that have been killed, as far as the kernel allows it already."""
    for folder in parent.glob(f"{PREFIX}*"):
        owner = folder.name.removeprefix(PREFIX).partition("-")[0]
        if Path(f"/proc/{owner}").exists():
            continue
        for cgroup in (*(item for item in folder.iterdir() if item.is_dir()), folder):
            with suppress(OSError):
                cgroup.rmdir()


def _own() -> dict[str, str]:
    """Cgroup of this process by controller; "" is v2's."""
    paths: dict[str, str] = {}
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        paths |= dict.fromkeys(controllers.split(","), path)
    return paths
