"""A Kubernetes node in namespaces of its own, on this machine.

Process 1 of these namespaces is `catatonit -P`. Killing it ends every daemon and container, and frees the mounts, links, rules and
sysctls that they made: nothing clashes with the machine's own ports and nothing stays behind. Daemons are entered into the namespaces
by `nsenter`, which waits outside for each of them. A veth pair joins node and machine: from the machine, pods and services are reached
by their own addresses; from pods, the machine by `Layout.host_address`.

Everything about a running cluster is in its folder's `state.json`, so that any process can find it.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
from collections.abc import Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .api import Api, Refused, Unreachable
from .certificates import make_certificates
from .commands import CommandFailed, eventually, run
from .daemons import command_lines, write_configuration
from .images import kestrl_archive, pause_archive
from .kit import Kit
from .layout import API_PORT, NODE_NAME, RUNS, Layout, free_net, locked_runs
from .objects import LABEL, NAMESPACE, injection, probe, storage_class, volume_name, volumes
from .processes import Process, in_cgroup, spawn, tail

START_SECONDS = 90.0
STOP_SECONDS = 30.0
END_SECONDS = 20.0
NAMESPACES = ("--mount", "--net", "--pid", "--uts", "--ipc")
CGROUPS = Path("/sys/fs/cgroup")
BEGIN = """
set -e
mount --make-rshared /
# runc takes cgroups for version 2 where it sees such a mount, though it has no controllers.
if mountpoint -q /sys/fs/cgroup/unified; then umount /sys/fs/cgroup/unified; fi
own() { mkdir -p "$OWN/$1" "$2"; mount --bind "$OWN/$1" "$2"; mount --make-rshared "$2"; }
own kubelet /var/lib/kubelet
own cni /var/lib/cni
own pod-logs /var/log/pods
own container-logs /var/log/containers
own run-netns /run/netns
own run-containerd /run/containerd
own etc-cni /etc/cni
# The kubelet sets these for the whole machine unless it finds them as it wants them: here it does.
mkdir "$OWN/sysctl"
pretend() { if [ -e "/proc/sys/$1" ]; then name=$(echo "$1" | tr / .); echo "$2" >"$OWN/sysctl/$name"; mount --bind "$OWN/sysctl/$name" "/proc/sys/$1"; fi; }
pretend kernel/panic 10
pretend kernel/panic_on_oops 1
pretend vm/overcommit_memory 1
pretend kernel/keys/root_maxkeys 1000000
pretend kernel/keys/root_maxbytes 25000000
echo 1 >/proc/sys/net/ipv4/ip_forward
echo 1 >/proc/sys/net/ipv4/conf/all/route_localnet
if [ -e /proc/sys/net/bridge/bridge-nf-call-iptables ]; then echo 1 >/proc/sys/net/bridge/bridge-nf-call-iptables; fi
hostname "$NODE"
ip link set lo up
echo ready >&3
exec catatonit -P 3>&-
"""
"""What process 1 does first. The folders that it covers are Kubernetes' default ones; the machine keeps its own."""
NEEDED = (
    *("runc", "catatonit", "busybox", "iptables", "nft", "conntrack", "openssl", "ip"),
    *("nsenter", "unshare", "setpriv", "mountpoint", "lscpu"),
)


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
        told = asdict(self)
        unfinished = self.layout.folder / "state.json.new"
        unfinished.write_text(json.dumps(told, default=str, indent=1))
        unfinished.rename(_state_file(self.layout.folder))

    @staticmethod
    def load(folder: Path) -> State | None:
        """None where there is no cluster, or one that did not get as far as having processes."""
        try:
            told: dict[str, Any] = json.loads(_state_file(folder).read_text())
        except FileNotFoundError:
            return None
        layout = told["layout"] | {name: Path(told["layout"][name]) for name in ("checkout", "environment")}
        return State(
            Layout(**layout),
            Kit(Path(told["kit"]["folder"])),
            Process(**told["keeper"]),
            Process(**told["first"]),
            {name: Daemon(one["command"], Process(**one["process"])) for name, one in told["daemons"].items()},
            told.get("complete", True),
        )


def _state_file(folder: Path) -> Path:
    return folder / "state.json"


def missing() -> list[str]:
    """Programs that a node needs and this machine lacks."""
    return [name for name in NEEDED if shutil.which(name) is None]


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
            eventually("the API server is ready", lambda: _is_ready(api), START_SECONDS)

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
        """Waits for a cluster that somebody is just bringing up, and undoes what was done to the daemons: all run, and answer.

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
            eventually("the node is ready", lambda: _node_is_ready(api), START_SECONDS)

    @contextmanager
    def cut_off(self, address: str) -> Generator[None]:
        """What a pod of this address sends the API server is lost, as behind a broken switch: its connections stay open, and silent."""
        rule = ("INPUT", "--source", address, "--protocol", "tcp", "--dport", str(API_PORT), "--jump", "DROP")
        run(*self.entering("iptables", "--wait", "--insert", *rule))
        try:
            yield
        finally:
            run(*self.entering("iptables", "--wait", "--delete", *rule))

    def kill_container(self, container: str) -> None:
        """SIGKILLs every process of a container, by its id: kubelet hears of it as of any crash."""
        for process in in_cgroup(container):
            process.send(signal.SIGKILL)

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
            eventually("the cgroups are empty", lambda: _remove_cgroups(layout), END_SECONDS)
        eventually(f"{self.folder} is removed", lambda: _remove(self.folder), END_SECONDS)


def _entering(first: Process) -> list[str]:
    return [_path("nsenter"), f"--target={first.pid}", *NAMESPACES, "--wd=/", "--"]


def _path(program: str) -> str:
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


# --- up


def find(name: str) -> Node | None:
    """The running cluster of a name."""
    node = Node(RUNS / name)
    return node if node.is_alive() else None


def running() -> list[Node]:
    """All clusters of this machine."""
    return [node for node in _all() if node.is_alive()]


def _all() -> list[Node]:
    """Also those that ended by themselves."""
    return [Node(folder) for folder in sorted(RUNS.glob("*")) if folder.is_dir()]


def bring_up(
    kit: Kit,
    *,
    name: str,
    net: int | None = None,
    control_plane_only: bool = False,
    leashed: bool = False,
    proxy_mode: str = "iptables",
) -> Node:
    """Starts a cluster, and returns when pods can be made.

    Args:
        kit: Its programs.
        name: Its folder's.
        net: Number of its networks (see `layout`); a free one without it.
        control_plane_only: No kubelet: objects only.
        leashed: It dies with this process.
        proxy_mode: kube-proxy's: iptables or nftables.

    Raises:
        RuntimeError: There is one of this name, or what is needed is not there.
        TimeoutError: A part of it did not start; notes tell the end of its log.
    """
    node = Node(RUNS / name)
    with ThreadPoolExecutor(1) as beside, ExitStack() as undo:
        with locked_runs():
            if node.is_alive():
                raise RuntimeError(f"a cluster {name} is up")
            sweep()
            layout = Layout(
                name=name,
                net=free_net() if net is None else net,
                control_plane_only=control_plane_only,
                leashed=leashed,
                proxy_mode=proxy_mode,
            )
            undo.callback(node.down)
            images = None if control_plane_only else beside.submit(_archives, layout, kit)
            _begin(layout, kit)
        try:
            _bring_up(node, layout, kit, images)
        except (TimeoutError, CommandFailed, Refused) as error:
            for log in sorted(layout.logs.glob("*.log")):
                error.add_note(f"--- {log.name}\n{tail(log, 8)}")
            raise
        undo.pop_all()
    return node


def sweep() -> None:
    """Removes what is left of clusters that ended by themselves, as leashed ones do."""
    for node in _all():
        if not node.is_alive():
            node.down()


def _archives(layout: Layout, kit: Kit) -> list[Path]:
    return [pause_archive(kit.images), kestrl_archive(kit.images, layout.environment)]


def _begin(layout: Layout, kit: Kit) -> None:
    """Makes the folder, the namespaces and the link: from then on, the cluster can be found and ended."""
    layout.logs.mkdir(parents=True)
    layout.folder.chmod(0o711)  # pods reach their volumes through it
    layout.node_folder.mkdir()
    reading, writing = os.pipe()
    leash = [_path("setpriv"), "--pdeathsig=KILL"] if layout.leashed else []
    command = [*leash, _path("unshare"), *NAMESPACES, "--fork", "--kill-child", "--mount-proc", "--propagation=private"]
    env = {"PATH": os.environ["PATH"], "OWN": str(layout.node_folder), "NODE": NODE_NAME}
    keeper = spawn([*command, "--", "/bin/sh", "-c", BEGIN], layout.logs / "node.log", env, ready=writing)
    os.close(writing)
    with os.fdopen(reading) as ready:
        answer = ready.readline()
    first = keeper.child()
    if not answer or first is None:
        keeper.wait(END_SECONDS)
        raise RuntimeError(f"the node's namespaces: {tail(layout.logs / 'node.log')}")
    State(layout, kit, keeper, first, {}).save()
    _make_cgroups(layout)
    _link(layout, first)


def _link(layout: Layout, first: Process) -> None:
    run("ip", "link", "add", layout.link, "type", "veth", "peer", "name", "eth0", "netns", str(first.pid))
    host = (
        f"address add {layout.host_address}/24 dev {layout.link}",
        f"link set {layout.link} up",
        f"route add {layout.pods} via {layout.node_address}",
        f"route add {layout.services} via {layout.node_address}",
    )
    node = (
        f"address add {layout.node_address}/24 dev eth0",
        "link set eth0 up",
        f"route add default via {layout.host_address}",
    )
    inside = ("nsenter", f"--target={first.pid}", "--net", "ip", "-batch", "-")
    run(*inside, given="\n".join(node))
    run("ip", "-batch", "-", given="\n".join(host))


def _bring_up(node: Node, layout: Layout, kit: Kit, images: Future[list[Path]] | None) -> None:
    make_certificates(layout)
    write_configuration(layout)
    lines = command_lines(layout, kit)
    # What asks nobody starts beside the API server, and the others when it is ready: they would give up, or try again ever later.
    for name in sorted(lines, key=("etcd", "containerd", "kube-apiserver", *lines).index):
        node.start(name, lines[name])
    api = node.api()
    _furnish(api, layout)
    if images is not None:
        _import(layout, kit, images.result())
        eventually("the node is ready", lambda: _node_is_ready(api), START_SECONDS)
        eventually("names are resolved", lambda: _accepts(layout.node_address, 53), START_SECONDS)
        eventually("services are routed", lambda: _accepts(layout.kubernetes_service, 443), START_SECONDS)
    state = node.state
    state.complete = True
    state.save()


def _import(layout: Layout, kit: Kit, archives: Sequence[Path]) -> None:
    ctr = (kit.program("ctr"), "--address", str(layout.containerd_socket), "--namespace", "k8s.io")
    eventually("containerd answers", lambda: _succeeds(*ctr, "version"), START_SECONDS)
    for archive in archives:
        run(*ctr, "images", "import", "--local", archive)


def _furnish(api: Api, layout: Layout) -> None:
    """Gives a fresh cluster its objects; waits until the API applies its policy to pods."""
    api.create("/apis/storage.k8s.io/v1/storageclasses", storage_class())
    for item in volumes(layout):
        api.create("/api/v1/persistentvolumes", item)
    policy, binding = injection(layout)
    api.create("/apis/admissionregistration.k8s.io/v1/mutatingadmissionpolicies", policy)
    api.create("/apis/admissionregistration.k8s.io/v1/mutatingadmissionpolicybindings", binding)
    api.create("/api/v1/namespaces", {"metadata": {"name": NAMESPACE, "labels": {LABEL: "true"}}})
    eventually("the checkout is mounted", lambda: _mounts(api, NAMESPACE), START_SECONDS)


def _is_ready(api: Api) -> bool:
    with suppress(*Unreachable, Refused):
        return api.ask("/readyz") == b"ok"
    return False


def _node_is_ready(api: Api) -> bool:
    with suppress(*Unreachable, Refused):
        conditions = api.get(f"/api/v1/nodes/{NODE_NAME}")["status"].get("conditions", [])
        return any(item["type"] == "Ready" and item["status"] == "True" for item in conditions)
    return False


def _mounts(api: Api, namespace: str) -> bool:
    """Whether a pod would see the checkout; none can be made before its namespace has an account for it."""
    with suppress(Refused):
        pod = api.create(f"/api/v1/namespaces/{namespace}/pods?dryRun=All", probe(namespace))
        return any(item["name"] == volume_name(0) for item in pod["spec"].get("volumes", []))
    return False


def _succeeds(*command: str) -> bool:
    with suppress(CommandFailed):
        run(*command, seconds=10)
        return True
    return False


def _accepts(host: str, port: int) -> bool:
    with suppress(OSError), socket.create_connection((host, port), timeout=1):
        return True
    return False


# --- down


def _end(state: State) -> None:
    """Kills process 1. The kernel ends everything else in its namespace, and who waits for it outside then ends by itself.

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


def hierarchies() -> list[Path]:
    """The roots of this machine's cgroups: one of version 2, or one for each controller of version 1."""
    if (CGROUPS / "cgroup.controllers").exists():
        return [CGROUPS]
    mounts = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    return [Path(fields[1]) for fields in mounts if fields[2] == "cgroup"]


def _make_cgroups(layout: Layout) -> None:
    for root in hierarchies():
        folder = root / layout.cgroup
        folder.mkdir(exist_ok=True)
        if root != CGROUPS and (folder / "cpuset.cpus").exists():
            # A set of version 1 begins empty, and then nothing may run in it.
            for name in ("cpuset.cpus", "cpuset.mems"):
                (folder / name).write_text((root / name).read_text())


def _remove_cgroups(layout: Layout) -> bool:
    """Whether they are gone; each can go once its last process has."""
    for root in hierarchies():
        for folder, _, _ in os.walk(root / layout.cgroup, topdown=False):
            with suppress(OSError):
                Path(folder).rmdir()
    return not any((root / layout.cgroup).exists() for root in hierarchies())


def _remove(folder: Path) -> bool:
    """Whether it is gone; a mount of the node's may last a moment longer than its processes."""
    with suppress(OSError):
        shutil.rmtree(folder)
    return not folder.exists()
