"""A Kubernetes node in namespaces of its own, on this machine.

Process 1 of these namespaces is `catatonit -P`. Killing it ends every daemon and container, and frees their mounts,
links, rules and sysctls: nothing clashes with the machine's own ports and nothing is left behind. Daemons are entered
into the namespaces by `nsenter`, which waits outside for each of them. A veth pair joins node and machine: the machine
reaches pods and services by their own addresses; pods reach the machine by `Layout.host_address`.

The state of a running cluster is in its folder's `state.json`, so that any process can find it.
"""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .api import Api, Refused, Unreachable
from .cgroups import remove_cgroups
from .commands import CommandFailed, eventually, run
from .kit import Kit
from .layout import API_PORT, NODE_NAME, Layout
from .processes import Process, in_cgroup, spawn

START_SECONDS = 90.0
STOP_SECONDS = 30.0
END_SECONDS = 20.0
NAMESPACES = ("--mount", "--net", "--pid", "--uts", "--ipc")


@dataclass
class Daemon:
    """A program in the node."""

    command: list[str]
    process: Process
    """The `nsenter` that waits for it."""

    def own(self) -> Process | None:
        """The process of the program itself."""
        return self.process.child() if self.process.is_alive() else None


@dataclass
class State:
    """The state of a running cluster."""

    layout: Layout
    kit: Kit
    keeper: Process
    """Waits outside for process 1, and ends it when it is killed."""
    first: Process
    daemons: dict[str, Daemon]
    complete: bool = False
    """Whether the cluster was brought up completely."""

    def save(self) -> None:
        state = asdict(self)
        unfinished = self.layout.folder / "state.json.new"
        unfinished.write_text(json.dumps(state, default=str, indent=1))
        unfinished.rename(_state_file(self.layout.folder))

    @staticmethod
    def load(folder: Path) -> State | None:
        """The state of a cluster; None if there is none, or if it has no processes yet."""
        try:
            state: dict[str, Any] = json.loads(_state_file(folder).read_text())
        except FileNotFoundError:
            return None
        layout = state["layout"] | {name: Path(state["layout"][name]) for name in ("checkout", "environment")}
        return State(
            Layout(**layout),
            Kit(Path(state["kit"]["folder"])),
            Process(**state["keeper"]),
            Process(**state["first"]),
            {name: Daemon(one["command"], Process(**one["process"])) for name, one in state["daemons"].items()},
            state.get("complete", True),
        )


def _state_file(folder: Path) -> Path:
    return folder / "state.json"


@dataclass(frozen=True, slots=True)
class Node:
    """A running node, identified by its folder."""

    folder: Path

    @property
    def state(self) -> State:
        state = State.load(self.folder)
        if state is None:
            raise RuntimeError(f"there is no cluster in {self.folder}")
        return state

    @property
    def layout(self) -> Layout:
        return self.state.layout

    def api(self) -> Api:
        layout = self.layout
        return Api(layout.server, layout.certificates)

    # --- daemons

    def start(self, name: str, command: Sequence[str] = ()) -> None:
        """Starts a daemon that does not run: one of Kubernetes', or another by its command.

        Waits until an API server is ready.

        Raises:
            TimeoutError: It did not become ready.
        """
        state = self.state
        words = list(command) or state.daemons[name].command
        if name in state.daemons and state.daemons[name].process.is_alive():
            raise RuntimeError(f"{name} is running")
        log = state.layout.logs / f"{name}.log"
        process = spawn([*_entering(state.first), *words], log, _environment(state))
        state.daemons[name] = Daemon(words, process)
        state.save()
        if name == "kube-apiserver":
            api = self.api()
            eventually("the API server is ready", lambda: is_ready(api), START_SECONDS)

    def stop(self, name: str) -> None:
        """Ends a daemon like its service manager: SIGTERM, and SIGKILL if that does not help."""
        if self._runs(name):
            self._own(name).send(signal.SIGTERM)
            if not self.state.daemons[name].process.wait(STOP_SECONDS):
                self.kill(name)

    def kill(self, name: str) -> None:
        """Kills a daemon with SIGKILL; it stays down until it is started."""
        daemon = self.state.daemons[name]
        self._own(name).send(signal.SIGKILL)
        daemon.process.send(signal.SIGCONT)  # it stopped itself if the daemon was frozen
        if not daemon.process.wait(STOP_SECONDS):
            raise TimeoutError(f"{name} does not end")

    def restart(self, name: str) -> None:
        self.stop(name)
        self.start(name)

    def freeze(self, name: str) -> None:
        """Freezes a daemon: it keeps its connections and answers nothing."""
        own, waiting = self._own(name), self.state.daemons[name].process
        own.send(signal.SIGSTOP)
        # nsenter stops itself with its child; before that, it would miss SIGCONT
        eventually(f"{name} is frozen", lambda: own.is_stopped() and waiting.is_stopped(), STOP_SECONDS)

    def thaw(self, name: str) -> None:
        own, waiting = self._own(name), self.state.daemons[name].process
        own.send(signal.SIGCONT)
        waiting.send(signal.SIGCONT)
        eventually(f"{name} goes on", lambda: not own.is_stopped() and not waiting.is_stopped(), STOP_SECONDS)

    def revive(self) -> None:
        """Waits for a cluster that another process is bringing up, and starts and thaws all daemons.

        Raises:
            TimeoutError: The node did not become ready again.
        """
        eventually("the cluster is up", lambda: self.state.complete, START_SECONDS)
        for name, runs in self.runs().items():
            if runs:
                self.thaw(name)
            else:
                self.start(name)
        if not self.layout.control_plane_only:
            api = self.api()
            eventually("the node is ready", lambda: node_is_ready(api), START_SECONDS)

    @contextmanager
    def cut_off(self, address: str) -> Generator[None]:
        """Drops the packets from a pod's address to the API server, as behind a broken switch: its connections stay
        open."""
        rule = ("INPUT", "--source", address, "--protocol", "tcp", "--dport", str(API_PORT), "--jump", "DROP")
        run(*self.entering("iptables", "--wait", "--insert", *rule))
        try:
            yield
        finally:
            run(*self.entering("iptables", "--wait", "--delete", *rule))

    def kill_container(self, container: str) -> int:
        """Kills every process of a container with SIGKILL, by its id: to the kubelet it looks like a crash. Returns
        their number."""
        found = in_cgroup(container)
        for process in found:
            process.send(signal.SIGKILL)
        return len(found)

    def forget(self, name: str) -> None:
        """Ends a daemon that is not Kubernetes' own, for good."""
        self.stop(name)
        state = self.state
        state.daemons.pop(name, None)
        state.save()

    def runs(self) -> dict[str, bool]:
        """The daemons, and whether they run."""
        return {name: daemon.own() is not None for name, daemon in self.state.daemons.items()}

    def memory(self) -> dict[str, int]:
        """Resident bytes of each daemon."""
        found = {name: daemon.own() for name, daemon in self.state.daemons.items()}
        return {name: own.memory() if own else 0 for name, own in found.items()}

    def log(self, name: str) -> str:
        """The log of a daemon, over its restarts; empty before its first start."""
        path = self.folder / "logs" / f"{name}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def _runs(self, name: str) -> bool:
        return self.runs().get(name, False)

    def _own(self, name: str) -> Process:
        own = self.state.daemons[name].own()
        if own is None:
            raise RuntimeError(f"{name} does not run")
        return own

    # --- the whole

    def is_alive(self) -> bool:
        state = State.load(self.folder)
        return state is not None and state.first.is_alive()

    def entering(self, *command: str) -> list[str]:
        """A command line that runs a command in the node's namespaces."""
        return [*_entering(self.state.first), *command]

    def down(self) -> None:
        """Ends everything and removes what is left.

        Raises:
            TimeoutError: Something could not be removed.
        """
        state = State.load(self.folder)
        if state is not None:
            _end(state)
            layout = state.layout
            if Path("/sys/class/net", layout.link).exists():
                with suppress(CommandFailed):  # it is removed with the node's network, a moment later
                    run("ip", "link", "delete", layout.link)
            eventually("the cgroups are empty", lambda: remove_cgroups(layout), END_SECONDS)
        eventually(f"{self.folder} is removed", lambda: _remove(self.folder), END_SECONDS)


def _entering(first: Process) -> list[str]:
    return [program_path("nsenter"), f"--target={first.pid}", *NAMESPACES, "--wd=/", "--"]


def program_path(program: str) -> str:
    return shutil.which(program) or program


def _environment(state: State) -> dict[str, str]:
    """The daemons' environment. The programs of the kit find each other; Python programs find this package."""
    return {
        "PATH": f"{state.kit.folder}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "HOME": str(state.layout.folder),
        "LANG": "C.UTF-8",
        "GOGC": "200",  # memory is available; a sixth of the API server's time was garbage collection
        "PYTHONPATH": str(state.layout.checkout),
    }


def is_ready(api: Api) -> bool:
    with suppress(*Unreachable, Refused):
        return api.ask("/readyz") == b"ok"
    return False


def node_is_ready(api: Api) -> bool:
    with suppress(*Unreachable, Refused):
        conditions = api.get(f"/api/v1/nodes/{NODE_NAME}")["status"].get("conditions", [])
        return any(item["type"] == "Ready" and item["status"] == "True" for item in conditions)
    return False


def _end(state: State) -> None:
    """Kills process 1. The kernel ends everything else in its namespace, and then each `nsenter` outside ends by
    itself.

    Killing the `nsenter` processes would leave their children to the machine's process 1, which may be slow.
    """
    state.first.send(signal.SIGKILL)
    waiting = [state.keeper, *(daemon.process for daemon in state.daemons.values())]
    for process in waiting:
        process.send(signal.SIGCONT)  # one with a frozen daemon has stopped itself
    for process in waiting:
        if not process.wait(END_SECONDS):
            process.send(signal.SIGKILL)
            process.wait(END_SECONDS)


def _remove(folder: Path) -> bool:
    """Removes a folder; returns whether it is gone. A mount of the node's may last a moment longer than its
    processes."""
    with suppress(OSError):
        shutil.rmtree(folder)
    return not folder.exists()
