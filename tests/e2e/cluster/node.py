"""A Kubernetes node in namespaces of its own, on this machine.

Process 1 of these namespaces is `catatonit -P`. Killing it ends every daemon and container, and frees the mounts,
links, rules and sysctls that they made: nothing clashes with the machine's own ports and nothing stays behind. Daemons
are entered into the namespaces by `nsenter`, which waits outside for each of them. A veth pair joins node and machine:
from the machine, pods and services are reached by their own addresses; from pods, the machine by `Layout.host_address`.

Everything about a running cluster is in its folder's `state.json`, so that any process can find it.
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
    """One of the programs in the node."""

    command: list[str]
    process: Process
    """The `nsenter` that waits for it."""

    def own(self) -> Process | None:
        """The program itself."""
        return self.process.child() if self.process.is_alive() else None


@dataclass
class State:
    """What is running."""

    layout: Layout
    kit: Kit
    keeper: Process
    """Waits outside for process 1, and takes it along."""
    first: Process
    daemons: dict[str, Daemon]
    complete: bool = False
    """Whether it came up altogether."""

    def save(self) -> None:
        state = asdict(self)
        unfinished = self.layout.folder / "state.json.new"
        unfinished.write_text(json.dumps(state, default=str, indent=1))
        unfinished.rename(_state_file(self.layout.folder))

    @staticmethod
    def load(folder: Path) -> State | None:
        """None where there is no cluster, or one that did not get as far as having processes."""
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
    """A running one, known by its folder."""

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
        """Starts a daemon that does not run: one of Kubernetes' again, or another by its command.

        For the API server it waits until that is ready.

        Raises:
            TimeoutError: It did not get ready.
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
        """Ends a daemon as its service manager would: SIGTERM, and SIGKILL if that does not help."""
        if self._runs(name):
            self._own(name).send(signal.SIGTERM)
            if not self.state.daemons[name].process.wait(STOP_SECONDS):
                self.kill(name)

    def kill(self, name: str) -> None:
        """SIGKILL, as an outage would. It stays away until it is started."""
        daemon = self.state.daemons[name]
        self._own(name).send(signal.SIGKILL)
        daemon.process.send(signal.SIGCONT)  # it stopped itself if the daemon was frozen
        if not daemon.process.wait(STOP_SECONDS):
            raise TimeoutError(f"{name} does not end")

    def restart(self, name: str) -> None:
        self.stop(name)
        self.start(name)

    def freeze(self, name: str) -> None:
        """It keeps its connections and answers nobody."""
        own, waiting = self._own(name), self.state.daemons[name].process
        own.send(signal.SIGSTOP)
        # nsenter stops itself with its child; before that, it would miss being told to go on.
        eventually(f"{name} is frozen", lambda: own.is_stopped() and waiting.is_stopped(), STOP_SECONDS)

    def thaw(self, name: str) -> None:
        own, waiting = self._own(name), self.state.daemons[name].process
        own.send(signal.SIGCONT)
        waiting.send(signal.SIGCONT)
        eventually(f"{name} goes on", lambda: not own.is_stopped() and not waiting.is_stopped(), STOP_SECONDS)

    def revive(self) -> None:
        """Waits for a cluster that somebody is just bringing up, and undoes what was done to the daemons: all run, and
        answer.

        Raises:
            TimeoutError: The node did not get ready again.
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
        """What a pod of this address sends the API server is lost, as behind a broken switch: its connections stay
        open, and silent."""
        rule = ("INPUT", "--source", address, "--protocol", "tcp", "--dport", str(API_PORT), "--jump", "DROP")
        run(*self.entering("iptables", "--wait", "--insert", *rule))
        try:
            yield
        finally:
            run(*self.entering("iptables", "--wait", "--delete", *rule))

    def kill_container(self, container: str) -> int:
        """SIGKILLs every process of a container, by its id: kubelet hears of it as of any crash. Returns how many there
        were."""
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
        """Which daemons there are, and whether they run."""
        return {name: daemon.own() is not None for name, daemon in self.state.daemons.items()}

    def memory(self) -> dict[str, int]:
        """Bytes of each daemon that are in memory."""
        found = {name: daemon.own() for name, daemon in self.state.daemons.items()}
        return {name: own.memory() if own else 0 for name, own in found.items()}

    def log(self, name: str) -> str:
        """All that a daemon wrote, over its restarts; nothing before its first start."""
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
        """Ends everything and removes what is left of it.

        Raises:
            TimeoutError: Something of it did not go away.
        """
        state = State.load(self.folder)
        if state is not None:
            _end(state)
            layout = state.layout
            if Path("/sys/class/net", layout.link).exists():
                with suppress(CommandFailed):  # it goes by itself with the node's network, a moment later
                    run("ip", "link", "delete", layout.link)
            eventually("the cgroups are empty", lambda: remove_cgroups(layout), END_SECONDS)
        eventually(f"{self.folder} is removed", lambda: _remove(self.folder), END_SECONDS)


def _entering(first: Process) -> list[str]:
    return [program_path("nsenter"), f"--target={first.pid}", *NAMESPACES, "--wd=/", "--"]


def program_path(program: str) -> str:
    return shutil.which(program) or program


def _environment(state: State) -> dict[str, str]:
    """Of the daemons. The programs of the kit find each other; Python's find this package."""
    return {
        "PATH": f"{state.kit.folder}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "HOME": str(state.layout.folder),
        "LANG": "C.UTF-8",
        "GOGC": "200",  # memory there is; a sixth of the API server's time went into collecting it
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
    """Kills process 1. The kernel ends everything else in its namespace, and who waits for it outside then ends by
    itself.

    Killing those who wait would leave what they wait for to the machine's process 1, which may take its time.
    """
    state.first.send(signal.SIGKILL)
    waiting = [state.keeper, *(daemon.process for daemon in state.daemons.values())]
    for process in waiting:
        process.send(signal.SIGCONT)  # one with a frozen daemon had stopped itself
    for process in waiting:
        if not process.wait(END_SECONDS):
            process.send(signal.SIGKILL)
            process.wait(END_SECONDS)


def _remove(folder: Path) -> bool:
    """Whether it is gone; a mount of the node's may last a moment longer than its processes."""
    with suppress(OSError):
        shutil.rmtree(folder)
    return not folder.exists()
