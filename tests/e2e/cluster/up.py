"""Bringing a cluster up: its namespaces, its link to this machine, its daemons, and its first objects."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path

from .api import Api, Refused
from .certificates import make_certificates
from .cgroups import make_cgroups
from .commands import CommandFailed, eventually, run
from .daemons import command_lines, write_configuration
from .images import engine_archive, kestrl_archive, pause_archive
from .kit import Kit
from .layout import NODE_NAME, RUNS, Layout, free_net, locked_runs
from .node import END_SECONDS, NAMESPACES, START_SECONDS, Node, State, node_is_ready, program_path
from .objects import LABEL, NAMESPACE, injection, probe, storage_class, volume_name, volumes
from .processes import Process, spawn, tail

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
pretend() {
    if [ -e "/proc/sys/$1" ]; then
        name=$(echo "$1" | tr / .)
        echo "$2" >"$OWN/sysctl/$name"
        mount --bind "$OWN/sysctl/$name" "/proc/sys/$1"
    fi
}
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
"""The first steps of process 1. The folders that it covers are Kubernetes' default ones; the machine keeps its own."""
NEEDED = (
    *("runc", "catatonit", "busybox", "iptables", "nft", "conntrack", "openssl", "ip"),
    *("nsenter", "unshare", "setpriv", "mountpoint", "lscpu"),
)


def missing() -> list[str]:
    """Programs that a node needs and that are missing on this machine."""
    return [name for name in NEEDED if shutil.which(name) is None]


def find(name: str) -> Node | None:
    """The running cluster of a name."""
    node = Node(RUNS / name)
    return node if node.is_alive() else None


def running() -> list[Node]:
    """All clusters of this machine."""
    return [node for node in _all() if node.is_alive()]


def _all() -> list[Node]:
    """All clusters, including those that have ended by themselves."""
    return [Node(folder) for folder in sorted(RUNS.glob("*")) if folder.is_dir()]


def bring_up(
    kit: Kit,
    *,
    name: str,
    net: int | None = None,
    control_plane_only: bool = False,
    ends_with_parent: bool = False,
    proxy_mode: str = "iptables",
) -> Node:
    """Starts a cluster; returns when pods can be created.

    Args:
        kit: The programs.
        name: Name of its folder.
        net: Number of its networks (see `layout`); a free one if None.
        control_plane_only: Without a kubelet, for objects only.
        ends_with_parent: Whether it ends with this process.
        proxy_mode: Mode of kube-proxy: iptables or nftables.

    Raises:
        RuntimeError: The name is in use, or a program is missing.
        TimeoutError: A part of it did not start; notes have the end of its log.
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
                ends_with_parent=ends_with_parent,
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
    """Removes the remains of clusters that ended with their parent process."""
    for node in _all():
        if not node.is_alive():
            node.down()


def _archives(layout: Layout, kit: Kit) -> list[Path]:
    services = kestrl_archive(kit.images, layout.environment)
    return [pause_archive(kit.images), services, engine_archive(kit.images, layout.engine)]


def _begin(layout: Layout, kit: Kit) -> None:
    """Creates the folder, the namespaces and the link: from then on, the cluster can be found and ended."""
    layout.logs.mkdir(parents=True)
    layout.folder.chmod(0o711)  # pods reach their volumes through it
    layout.node_folder.mkdir()
    reading, writing = os.pipe()
    parent_death = [program_path("setpriv"), "--pdeathsig=KILL"] if layout.ends_with_parent else []
    command = [
        *parent_death,
        program_path("unshare"),
        *NAMESPACES,
        "--fork",
        "--kill-child",
        "--mount-proc",
        "--propagation=private",
    ]
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
    make_cgroups(layout)
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
    # Daemons without dependencies start beside the API server, the others when it is ready: they would give up, or back
    # off.
    for name in sorted(lines, key=("etcd", "containerd", "kube-apiserver", *lines).index):
        node.start(name, lines[name])
    api = node.api()
    _furnish(api, layout)
    if images is not None:
        import_images(layout, kit, images.result())
        eventually("the node is ready", lambda: node_is_ready(api), START_SECONDS)
        eventually("names are resolved", lambda: accepts(layout.node_address, 53), START_SECONDS)
        eventually("services are routed", lambda: accepts(layout.kubernetes_service, 443), START_SECONDS)
    state = node.state
    state.complete = True
    state.save()


def import_images(layout: Layout, kit: Kit, archives: Sequence[Path], *named: str) -> None:
    """Imports images into the node; `named` are further arguments of `ctr images import`."""
    ctr = (kit.program("ctr"), "--address", str(layout.containerd_socket), "--namespace", "k8s.io")
    eventually("containerd answers", lambda: _succeeds(*ctr, "version"), START_SECONDS)
    for archive in archives:
        run(*ctr, "images", "import", "--local", *named, archive)


def _furnish(api: Api, layout: Layout) -> None:
    """Creates the first objects of a cluster; waits until the API applies its policy to pods."""
    api.create("/apis/storage.k8s.io/v1/storageclasses", storage_class())
    for item in volumes(layout):
        api.create("/api/v1/persistentvolumes", item)
    policy, binding = injection(layout)
    api.create("/apis/admissionregistration.k8s.io/v1/mutatingadmissionpolicies", policy)
    api.create("/apis/admissionregistration.k8s.io/v1/mutatingadmissionpolicybindings", binding)
    api.create("/api/v1/namespaces", {"metadata": {"name": NAMESPACE, "labels": {LABEL: "true"}}})
    eventually("the checkout is mounted", lambda: _mounts(api, NAMESPACE), START_SECONDS)


def _mounts(api: Api, namespace: str) -> bool:
    """Whether a pod would have the checkout mounted; none can be created before its namespace has a ServiceAccount."""
    with suppress(Refused):
        pod = api.create(f"/api/v1/namespaces/{namespace}/pods?dryRun=All", probe(namespace))
        return any(item["name"] == volume_name(0) for item in pod["spec"].get("volumes", []))
    return False


def _succeeds(*command: str) -> bool:
    with suppress(CommandFailed):
        run(*command, seconds=10)
        return True
    return False


def accepts(host: str, port: int) -> bool:
    """Whether a server listens there."""
    with suppress(OSError), socket.create_connection((host, port), timeout=1):
        return True
    return False
