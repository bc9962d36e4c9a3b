"""The paths, addresses and names of one cluster on this machine.

A cluster with net number N has 10.N.0.0/24 between host and node, 10.(N-1).0.0/16 for pods and 10.(N+1).0.0/16 for
services.
"""

from __future__ import annotations

import hashlib
import ipaddress
import json
import os
import sys
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from fcntl import LOCK_EX, flock
from pathlib import Path

from kestrl._app.engines.builds import DEFAULTS, wanted_engine
from kestrl._app.engines.installing import find_installed
from kestrl._app.engines.store import engines_folder

from .commands import run

CHECKOUT = Path(__file__).resolve().parents[3]
RUNS = Path(os.environ.get("KESTRL_E2E_STATE", "/var/tmp/kestrl-e2e"))
"""On a disk: a file system in memory would hold images and the pods' scratch volumes."""
NETS = (245, 241, 237, 233, 229, 225, 221, 217)
"""The available net numbers; the first whose networks are not in use is taken."""
NODE_NAME = "node"
DOMAIN = "cluster.local"
API_PORT = 6443


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The settings of one cluster, and the values derived from them."""

    name: str
    net: int
    control_plane_only: bool = False
    ends_with_parent: bool = False
    """Whether the cluster ends with the process that brought it up."""
    proxy_mode: str = "iptables"
    checkout: Path = CHECKOUT
    environment: Path = Path(sys.prefix)
    """The virtual environment that pods have mounted."""

    @property
    def engine(self) -> Path:
        """The environment of the engine, which pods have mounted, too."""
        return find_installed(engines_folder(), wanted_engine("vllm==" + DEFAULTS["vllm", "cpu"], "cpu")).path.resolve()

    @property
    def folder(self) -> Path:
        return RUNS / self.name

    @property
    def certificates(self) -> Path:
        return self.folder / "certificates"

    @property
    def logs(self) -> Path:
        return self.folder / "logs"

    @property
    def volumes(self) -> Path:
        return self.folder / "volumes"

    @property
    def node_folder(self) -> Path:
        """The node's own folders in place of the host's folders that it must not share."""
        return self.folder / "node"

    @property
    def containerd_socket(self) -> Path:
        return self.node_folder / "run-containerd" / "containerd.sock"

    def kubeconfig(self, user: str = "admin") -> Path:
        return self.folder / f"{user}.kubeconfig"

    @property
    def link(self) -> str:
        """The host's end of the veth pair."""
        return f"kestrl{self.net}"

    @property
    def cgroup(self) -> str:
        """The folder of the pods in every cgroup hierarchy."""
        return f"e2e-{self.name}"

    @property
    def host_address(self) -> str:
        return f"10.{self.net}.0.1"

    @property
    def node_address(self) -> str:
        return f"10.{self.net}.0.2"

    @property
    def pods(self) -> str:
        return f"10.{self.net - 1}.0.0/16"

    @property
    def services(self) -> str:
        return f"10.{self.net + 1}.0.0/16"

    @property
    def kubernetes_service(self) -> str:
        """The API's service address, the first in the range."""
        return f"10.{self.net + 1}.0.1"

    @property
    def server(self) -> str:
        return f"https://{self.node_address}:{API_PORT}"


def default_name(*, control_plane_only: bool = False) -> str:
    """The cluster's default name. Each checkout has clusters of its own, since their pods see its files."""
    kind = "-control-plane" if control_plane_only else ""
    return f"kestrl-{hashlib.sha256(str(CHECKOUT).encode()).hexdigest()[:6]}{kind}"


def networks(net: int) -> list[ipaddress.IPv4Network]:
    return [ipaddress.IPv4Network(f"10.{number}.0.0/16") for number in (net - 1, net, net + 1)]


def free_net() -> int:
    """A net number none of whose networks this machine has a route to.

    Raises:
        RuntimeError: None is left.
    """
    listed = json.loads(run("ip", "-json", "-4", "route", "show", "table", "all"))
    routed = [ipaddress.IPv4Network(route["dst"]) for route in listed if route["dst"] != "default"]
    for net in NETS:
        if not any(mine.overlaps(other) for mine in networks(net) for other in routed):
            return net
    raise RuntimeError("no net number is free: are there unused clusters?")


@contextmanager
def locked_runs() -> Generator[None]:
    """An exclusive lock while a name or a net number is chosen. The folder belongs to root: others could put links into
    one of theirs."""
    RUNS.mkdir(mode=0o711, parents=True, exist_ok=True)
    if RUNS.lstat().st_uid != os.getuid():
        raise PermissionError(f"{RUNS} belongs to somebody else")
    with (RUNS / ".lock").open("w") as lock:
        flock(lock, LOCK_EX)
        yield
