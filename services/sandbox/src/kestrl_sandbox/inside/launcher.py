"""The zygote: imports what code usually needs, makes the root, and forks a leader per slot and a sandbox per run.

The service holds one end of a socket: a message with a descriptor starts a slot, `K` and its number kill one, and the
end of the socket ends everything: the zygote is process 1 of a PID namespace. It says on the socket which leader has
ended, and how: what a supervisor cannot say of itself.
"""

from __future__ import annotations

import array
import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
from collections.abc import Mapping
from typing import Any

from kestrl_sandbox.inside import frames, landlock, payload, root, supervisor, watched
from kestrl_sandbox.inside import syscalls as linux
from kestrl_sandbox.inside.confinement import SIGKILL, address_space, enter_place, enter_sandbox, enter_user_namespace

NOBODY = 65534


def main() -> None:
    """Entry point: `main` with the number of the control socket and the configuration as JSON in argv."""
    control = socket.socket(fileno=int(sys.argv[1]))
    control.set_inheritable(False)
    config: dict[str, Any] = json.loads(sys.argv[2])
    try:
        zygote = _start(control, config)
    except (OSError, ImportError) as error:
        control.sendall(frames.encode({"error": str(error), "step": type(error).__name__}))
        sys.exit(1)
    if zygote:  # the process outside, which has no rights left and only waits
        _, status = os.waitpid(zygote, 0)
        os._exit(os.waitstatus_to_exitcode(status) & 0xFF)
    _lead_slots(control, config)


def _start(control: socket.socket, config: dict[str, Any]) -> int:
    """Imports, leaves the host's view, and forks: the zygote's number in its parent, 0 in the zygote."""
    for name in config["preload"]:
        importlib.import_module(name)
    proc = os.open("/proc", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    privileged = os.geteuid() == 0 and _has_mounts()
    if privileged:
        root.build(config["prefixes"])
        linux.mount("proc", "/proc", "proc", linux.MS_NOSUID | linux.MS_NODEV | linux.MS_NOEXEC)
        root.seal()
    if os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
        linux.prctl(linux.PR_SET_DUMPABLE, 1)  # else its own files in /proc would belong to root
    enter_user_namespace(proc)
    linux.unshare(linux.CLONE_NEWNS | linux.CLONE_NEWPID | linux.CLONE_NEWNET | linux.CLONE_NEWIPC | linux.CLONE_NEWUTS)
    linux.set_hostname("sandbox")
    payload.forget_node()
    ready, report = os.pipe()
    parent = os.getpid()
    pid = os.fork()
    if pid:
        os.close(report)
        with os.fdopen(ready, "rb") as pipe:
            message = pipe.read()
        if message:
            os.waitpid(pid, 0)
            raise OSError(message.decode())
        control.close()  # its end says that the zygote has ended
        return pid
    os.close(ready)
    try:
        linux.prctl(linux.PR_SET_PDEATHSIG, SIGKILL)
        if os.getppid() == parent:
            raise OSError("no PID namespace")
        if not privileged:
            root.build(config["prefixes"])
        config["fresh_proc"] = root.mount_proc()
        if not privileged:
            root.seal()
        elif not config["fresh_proc"]:
            raise OSError("/proc cannot be mounted")
        if config["fresh_proc"]:
            os.close(proc)
            proc = os.open("/proc", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        config["proc"] = proc
    except OSError as error:
        os.write(report, str(error).encode())
        os._exit(1)
    os.close(report)
    return 0


def _has_mounts() -> bool:
    """Whether this process may mount: moves to a mount namespace of its own if so."""
    try:
        linux.unshare(linux.CLONE_NEWNS)
    except PermissionError:
        return False
    return True


def _lead_slots(control: socket.socket, config: dict[str, Any]) -> None:
    """Starts and kills leaders until the service closes the control socket."""
    limits = dict(config["limits"])
    limits["base_bytes"] = address_space() if config["fresh_proc"] else limits["memory_mb"] << 20
    limits["base_anonymous"] = watched.anonymous_memory("self") if config["fresh_proc"] else 0
    limits["landlock"] = landlock.abi()
    limits["watch_memory"] = bool(config["fresh_proc"]) and not config["cgroup"]
    limits["watch_processes"] = limits["own_user"] = False
    config["limits"] = limits
    payload.open_streams()
    payload.forget_own_modules()
    gc.collect()
    gc.freeze()
    gc.disable()  # a collection would copy the pages that all sandboxes share; the code has it again
    woken, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, _woken)
    leaders: dict[int, int] = {}
    control.sendall(frames.encode({"landlock": limits["landlock"], "proc": config["fresh_proc"]}))
    poll = select.poll()
    poll.register(control, select.POLLIN)
    poll.register(woken, select.POLLIN)
    while True:
        for descriptor, _event in poll.poll():
            if descriptor == woken:
                os.read(woken, 4096)
                _reap(control, leaders)
            elif not _command(control, leaders, config):
                os._exit(0)


def _woken(_number: int, _frame: object) -> None:
    """Handler of SIGCHLD: the wakeup descriptor does the rest."""


def _command(control: socket.socket, leaders: dict[int, int], config: Mapping[str, Any]) -> bool:
    """Carries out one command of the service; False at the end of the socket."""
    size = array.array("i").itemsize
    message, ancillary, _flags, _address = control.recvmsg(5, socket.CMSG_SPACE(size))
    if len(message) < 5:
        return False
    number = int.from_bytes(message[1:], "big")
    if message[:1] == b"K":
        pid = next((pid for pid, slot in leaders.items() if slot == number), None)
        if pid is not None:
            os.kill(pid, signal.SIGKILL)
        return True
    descriptors = array.array("i")
    for _level, _kind, data in ancillary:
        descriptors.frombytes(data[:size])
    connection = socket.socket(fileno=descriptors[0])
    pid = os.fork()
    if pid == 0:
        try:
            control.close()
            _lead(connection, config)
        finally:
            os._exit(frames.SANDBOX_BROKE)
    connection.close()
    leaders[pid] = number
    return True


def _reap(control: socket.socket, leaders: dict[int, int]) -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        number = leaders.pop(pid, None)
        if number is not None:
            control.sendall(frames.LEADER_ENDED.pack(number, os.waitstatus_to_exitcode(status)))


def _lead(connection: socket.socket, config: Mapping[str, Any]) -> None:
    """One slot: a fresh sandbox after the other, each ready before its request comes."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    linux.prctl(linux.PR_SET_PDEATHSIG, SIGKILL)
    own_pidfd = os.pidfd_open(os.getpid())
    enter_place()
    connection.sendall(frames.encode({"ready": True}))
    connection.recv(1)  # by now the service has put this process into the slot's cgroup
    while True:
        linux.unshare(linux.CLONE_NEWPID)
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                os.close(own_pidfd)
                enter_sandbox(config["proc"], config["limits"], fresh_proc=config["fresh_proc"])
                status = supervisor.serve(connection, config["limits"])
            finally:
                os._exit(status)
        linux.setns(own_pidfd, linux.CLONE_NEWPID)
        _, wait_status = os.waitpid(pid, 0)
        if wait_status != 0:
            os._exit(frames.SANDBOX_KILLED if os.WIFSIGNALED(wait_status) else frames.SANDBOX_BROKE)
