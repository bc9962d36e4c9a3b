"""The back-end `runsc`: each run has a kernel of its own, gVisor's, in which a cold interpreter supervises it.

gVisor is started without root (`runsc --rootless run`) with an OCI bundle; its standard input is the connection to the
service.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from kestrl_sandbox.backends.bwrap import HOME
from kestrl_sandbox.backends.locked_folder import LockedFolder
from kestrl_sandbox.backends.slot_programs import SlotPrograms
from kestrl_sandbox.config import ENVIRONMENT, SOURCE, PoolConfig, prefixes
from kestrl_sandbox.contract import Capabilities, Isolation, SandboxFailure
from kestrl_sandbox.inside import syscall_table
from kestrl_sandbox.inside.root import CONFIGURATION, FILES, PROGRAMS, USER, WRITABLE
from kestrl_sandbox.pool.cgroups import Cgroups
from kestrl_sandbox.pool.slots import make_cgroups

OWN_MB = 192
"""Memory of gVisor's own processes beside the code's."""
OWN_PROCESSES = 1024
"""Threads of gVisor's own processes, and what the code can start until the supervisor has counted it."""
PLATFORM = "ptrace"
"""The one way to intercept system calls that works in every build of runsc and on every node, virtual ones included."""
OUTER_LIMITS = ("RLIMIT_MSGQUEUE", "RLIMIT_NICE", "RLIMIT_RTPRIO")
"""Limits that gVisor lets no process set; they are 0 from the start."""
CAPABILITIES = ("CAP_SETUID", "CAP_SETGID")
"""What the supervisor needs to be another user than the code; the code has none."""
READ_ONLY = ("rbind", "ro", "nosuid", "nodev")


def runsc_program() -> str:
    """Path of runsc.

    Raises:
        SandboxFailure: There is none.
    """
    program = shutil.which("runsc")
    if program is None:
        raise SandboxFailure(
            "there is no runsc; install gVisor, such as Debian's package runsc",
            code="sandbox_unavailable",
            retryable=False,
        )
    return program


class Runsc(SlotPrograms):
    """Starts a gVisor for each run."""

    def __init__(
        self, config: PoolConfig, program: str, folder: LockedFolder, cgroups: Cgroups | None, no_cgroup: str
    ) -> None:
        super().__init__(config, program, cgroups)
        self._locked, self._folder = folder, folder.path
        self._identities: dict[int, str] = {}
        make_bundle(self._folder, config, watch_memory=cgroups is None)
        self.capabilities = Capabilities(
            backend="runsc",
            isolation=Isolation.KERNEL,
            mechanisms={
                "kernel": f"gVisor's, one each ({version_of(program)}, platform {PLATFORM})",
                "user": f"{USER} inside, no capability, no_new_privs",
                "root": "read-only; private /work, /tmp, /dev/shm with a quota each",
                "proc": "gVisor's, own processes only",
                "seccomp": f"allow-list of {len(syscall_table.allowed(os.uname().machine))} calls, inside gVisor",
                "landlock": "no: not in gVisor's kernel",
                "memory": f"cgroup v{cgroups.version}" if cgroups else f"watched every 0.1 s ({no_cgroup})",
                "network": "none",
            },
        )

    @classmethod
    async def start(cls, config: PoolConfig) -> Runsc:
        """Finds runsc and starts one sandbox with it.

        Raises:
            SandboxFailure: There is none, or this node does not allow it.
        """
        program = runsc_program()
        cgroups, reason = make_cgroups()
        folder = await asyncio.to_thread(LockedFolder, "kestrl-runsc-")
        return await cls(config, program, folder, cgroups, reason)._tried()

    def _limits(self) -> tuple[int, int]:
        return (
            self._config.memory_mb + 3 * self._config.disk_mb + OWN_MB,
            self._config.processes + OWN_PROCESSES,
        )

    def _members(self, process: subprocess.Popen[bytes], supervisor: int) -> Iterable[int]:  # noqa: ARG002
        return family(process.pid)

    def _spawn(self, number: int, connection: socket.socket) -> subprocess.Popen[bytes]:
        # gVisor makes an abstract socket of that name, in one space for all services of the node.
        identity = self._identities[number] = f"kestrl-{secrets.token_hex(8)}"
        options = ("--rootless", "--ignore-cgroups", "--network=none", f"--platform={PLATFORM}")
        return subprocess.Popen(  # noqa: S603
            [
                self._program,
                *options,
                f"--root={self._folder / 'state'}",
                "run",
                f"--bundle={self._folder}",
                identity,
            ],
            stdin=connection.fileno(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env={"PATH": os.environ.get("PATH", os.defpath)},  # no credentials of the service
            cwd="/",
        )

    def _forget(self, number: int) -> None:
        """Removes what a killed runsc has left of its container in the folder of states."""
        for path in (self._folder / "state").glob(f"*{self._identities.pop(number)}*"):
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)

    async def close(self) -> None:
        """Ends all sandboxes and removes the bundle."""
        await super().close()
        await asyncio.to_thread(self._locked.remove)


def version_of(program: str) -> str:
    """Version of a runsc as it prints it.

    Raises:
        SandboxFailure: It cannot be run.
    """
    try:
        process = subprocess.run([program, "--version"], capture_output=True, text=True, check=True, timeout=30)  # noqa: S603
    except (OSError, subprocess.SubprocessError) as error:
        raise SandboxFailure(f"{program} --version: {error}", code="sandbox_unavailable", retryable=False) from error
    return process.stdout.partition("\n")[0].removeprefix("runsc version ").strip()


def family(pid: int) -> list[int]:
    """A process and all that descend from it, as far as they have not ended."""
    members = [pid]
    for parent in members:
        for file in Path(f"/proc/{parent}/task").glob("*/children"):
            with suppress(OSError):
                members += map(int, file.read_text().split())
    return members


def make_bundle(folder: Path, config: PoolConfig, *, watch_memory: bool) -> None:
    """Writes an OCI bundle: the read-only root's own files, and the configuration of every sandbox."""
    root = folder / "rootfs"
    for path in ("/etc", "/proc", "/dev", "/var", HOME, *WRITABLE):
        _inside(root, path).mkdir(parents=True, exist_ok=True)
    for path, text in FILES.items():
        _inside(root, path).write_text(text)
    _inside(root, "/var/tmp").symlink_to("/tmp")  # noqa: S108
    mounts: list[dict[str, Any]] = [{"destination": "/proc", "type": "proc", "source": "proc"}]
    for path in (*PROGRAMS, *prefixes(), *CONFIGURATION):
        mounts += _bound(root, Path(path))
    mounts += _bound(root, SOURCE / "kestrl_sandbox", Path(HOME, "kestrl_sandbox"))
    options = ["nosuid", "nodev", "mode=0777", f"size={config.disk_mb << 20}"]
    mounts += [{"destination": path, "type": "tmpfs", "source": "tmpfs", "options": options} for path in WRITABLE]
    (folder / "config.json").write_text(json.dumps(_configuration(root, mounts, config, watch_memory=watch_memory)))
    (folder / "state").mkdir()


def _inside(root: Path, path: str) -> Path:
    return root / path.lstrip("/")


def _bound(root: Path, source: Path, target: Path | None = None) -> list[dict[str, Any]]:
    """The mount of a folder or file of the node, with its place in the root; none where it does not exist."""
    target = target or source
    place = _inside(root, str(target))
    if not source.exists():
        return []
    place.parent.mkdir(parents=True, exist_ok=True)
    if source.is_symlink():
        place.symlink_to(source.readlink())
        return []
    if source.is_dir():
        place.mkdir(exist_ok=True)
    else:
        place.touch()
    return [{"destination": str(target), "type": "bind", "source": str(source), "options": list(READ_ONLY)}]


def _configuration(
    root: Path, mounts: list[dict[str, Any]], config: PoolConfig, *, watch_memory: bool
) -> dict[str, Any]:
    limits = {
        "disk_mb": config.disk_mb,
        "memory_mb": config.memory_mb,
        "processes": config.processes,
        "open_files": config.open_files,
        "watch_memory": watch_memory,
        "watch_processes": True,  # gVisor's kernel knows RLIMIT_NPROC and does not keep to it
        "own_user": True,
    }
    program = f"import sys; sys.path.insert(0, {HOME!r}); from kestrl_sandbox.inside.alone import main; main()"
    return {
        "ociVersion": "1.0.2",
        "hostname": "sandbox",
        "root": {"path": str(root), "readonly": True},
        "mounts": mounts,
        "process": {
            "user": {"uid": 0, "gid": 0},  # the supervisor; the code is user 1000
            "args": [os.path.realpath(sys.executable), "-I", "-S", "-c", program, "0", json.dumps(limits)],
            "env": [f"{name}={value}" for name, value in ENVIRONMENT.items()],
            "cwd": "/work",
            "noNewPrivileges": True,
            "rlimits": [{"type": name, "soft": 0, "hard": 0} for name in OUTER_LIMITS],
            "capabilities": {kind: list(CAPABILITIES) for kind in ("effective", "permitted")},
        },
        "linux": {"namespaces": [{"type": kind} for kind in ("pid", "network", "ipc", "uts", "mount")]},
    }
