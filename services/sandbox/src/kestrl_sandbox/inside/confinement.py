"""Takes the rights of a sandbox away, in the order that the kernel needs."""

from __future__ import annotations

import os
import resource
from collections.abc import Mapping
from typing import Any

from kestrl_sandbox.inside import landlock, root, seccomp
from kestrl_sandbox.inside import syscalls as linux

SIGKILL = 9
PENDING_SIGNALS = 256
"""Queued signals and timers of all processes of a sandbox together."""


def enter_user_namespace(proc: int) -> None:
    """Moves this process to a user namespace in which it is user `root.USER`, mapped to the user that it is now.

    Args:
        proc: Descriptor of a /proc that shows this process.
    """
    user, group = os.geteuid(), os.getegid()
    linux.unshare(linux.CLONE_NEWUSER)
    _write(proc, "self/setgroups", "deny")
    _write(proc, "self/uid_map", f"{root.USER} {user} 1")
    _write(proc, "self/gid_map", f"{root.USER} {group} 1")


def _write(folder: int, path: str, text: str) -> None:
    file = os.open(path, os.O_WRONLY | os.O_CLOEXEC, dir_fd=folder)
    try:
        os.write(file, text.encode())
    finally:
        os.close(file)


def enter_sandbox(proc: int, limits: Mapping[str, Any], *, fresh_proc: bool) -> None:
    """Namespaces of one sandbox; this process is 1 of its PID namespace already."""
    # IPC and UTS namespaces are the zygote's: an IPC object can be made in none. The network namespace is the place's.
    linux.unshare(linux.CLONE_NEWNS)
    root.add_private_folders(limits["disk_mb"], limits["inodes"])
    if fresh_proc and not root.mount_proc(processes_only=True):
        raise OSError("/proc of the sandbox cannot be mounted")
    # Last: the mounts belong to the zygote's user namespace, which the code has no capability in. The limit of
    # processes counts per user namespace, so this one gives each sandbox a count of its own.
    enter_user_namespace(proc)
    linux.drop_capabilities()
    linux.prctl(linux.PR_SET_PDEATHSIG, SIGKILL)  # after the last change of credentials, which clears it
    linux.prctl(linux.PR_SET_DUMPABLE, 0)


def stand_apart() -> None:
    """Makes the supervisor, which is root, another user than the code, whose files it makes all the same.

    gVisor's kernel protects process 1 of a PID namespace neither by its number nor by being not dumpable.
    """
    os.setgroups([])
    os.setresgid(0, root.USER, 0)
    os.setresuid(0, root.USER, 0)


def become_user() -> None:
    """Makes a process that a supervisor apart has forked the user of the code, for good."""
    os.setresgid(root.USER, root.USER, root.USER)
    os.setresuid(root.USER, root.USER, root.USER)


def enter_place() -> None:
    """Gives the sandboxes of a place, which are there one after the other, a network namespace without interfaces.

    IP sockets can be made in none; what it holds apart are abstract sockets, their names, and what /proc/net shows. One
    for each sandbox would cost more than all else: the kernel removes them one by one, with some milliseconds for each.
    """
    linux.unshare(linux.CLONE_NEWNET)


def confine(limits: Mapping[str, Any]) -> None:
    """Rights of the process that runs the code, and of all that it starts."""
    memory = limits["memory_mb"] << 20
    if not limits["own_user"]:
        # Sandboxes have one user on the node, whose queued signals they share. In gVisor no process can set it, and
        # each sandbox has a kernel of its own.
        resource.setrlimit(resource.RLIMIT_SIGPENDING, (PENDING_SIGNALS, PENDING_SIGNALS))
    for kind, value in (
        (resource.RLIMIT_AS, memory + limits["base_bytes"]),
        (resource.RLIMIT_NPROC, limits["processes"]),
        (resource.RLIMIT_NOFILE, limits["open_files"]),
        (resource.RLIMIT_FSIZE, limits["disk_mb"] << 20),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_MEMLOCK, 64 << 10),
        (resource.RLIMIT_MSGQUEUE, 0),
        (resource.RLIMIT_NICE, 0),
        (resource.RLIMIT_RTPRIO, 0),
    ):
        # gVisor's kernel refuses to set some of them, which then were set from outside.
        if resource.getrlimit(kind) != (value, value):
            resource.setrlimit(kind, (value, value))
    linux.drop_capabilities()
    linux.prctl(linux.PR_SET_NO_NEW_PRIVS, 1)
    if limits["landlock"]:
        landlock.restrict(limits["landlock"], readable=("/",), writable=root.WRITABLE, devices=root.DEVICES)
    seccomp.install()


def address_space() -> int:
    """Bytes of address space of this process."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
