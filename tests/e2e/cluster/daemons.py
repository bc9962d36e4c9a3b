"""The daemons of a node: their command lines and configuration files."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .certificates import AUTHORITY
from .images import PAUSE
from .kit import Kit
from .layout import API_PORT, DOMAIN, NODE_NAME, Layout

CONTROL_PLANE = ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler")
NODE = ("containerd", "kubelet", "kube-proxy", "coredns")
ETCD = "http://127.0.0.1:2379"
ETCD_PEERS = "http://127.0.0.1:2380"
CONTAINERD_SOCKET = "/run/containerd/containerd.sock"
"""The default path, which the kubelet's own statistics use as well."""
NETWORK_FOLDER = "/etc/cni/net.d"
PLUGIN_FOLDERS = ("/usr/lib/cni", "/opt/cni/bin")
REQUESTS = {"qps": 300, "burst": 600}
"""With the defaults, 20 and 30, a deployment of a thousand pods takes twice as long."""


def command_lines(layout: Layout, kit: Kit) -> dict[str, list[str]]:
    """The command lines of all daemons by name, in the order of their start."""
    lines = {
        "etcd": _etcd(layout),
        "kube-apiserver": _apiserver(layout),
        "kube-controller-manager": _controller_manager(layout),
        "kube-scheduler": [
            f"--config={layout.folder}/scheduler.json",
            "--bind-address=127.0.0.1",
            *_asks(layout, "scheduler"),
        ],
        "containerd": [f"--config={layout.folder}/containerd.toml"],
        "kubelet": _kubelet(layout),
        "kube-proxy": [f"--config={layout.folder}/proxy.json"],
        "coredns": [f"-conf={layout.folder}/Corefile"],
    }
    names = CONTROL_PLANE if layout.control_plane_only else (*CONTROL_PLANE, *NODE)
    return {name: [kit.program(name), *lines[name]] for name in names}


def write_configuration(layout: Layout) -> None:
    """Writes every file that the command lines name."""
    folder = layout.folder
    _write(folder / "scheduler.json", _scheduler_configuration(layout))
    if layout.control_plane_only:
        return
    _write(folder / "kubelet.json", _kubelet_configuration(layout))
    _write(folder / "proxy.json", _proxy_configuration(layout))
    (folder / "containerd.toml").write_text(_containerd_configuration(layout))
    (folder / "resolv.conf").write_text(f"nameserver {layout.node_address}\n")
    (folder / "Corefile").write_text(_names(layout))
    network = layout.node_folder / "etc-cni" / "net.d"
    network.mkdir(parents=True)
    _write(network / "10-pods.conflist", _pod_network(layout))


def _write(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1))


# --- the control plane


def _etcd(layout: Layout) -> list[str]:
    return [
        f"--name={NODE_NAME}",
        f"--data-dir={layout.folder}/etcd",
        f"--listen-client-urls={ETCD}",
        f"--advertise-client-urls={ETCD}",
        f"--listen-peer-urls={ETCD_PEERS}",
        f"--initial-advertise-peer-urls={ETCD_PEERS}",
        f"--initial-cluster={NODE_NAME}={ETCD_PEERS}",
        "--unsafe-no-fsync",  # it must survive a killed etcd, not a lost machine
        "--log-level=warn",
    ]


def _apiserver(layout: Layout) -> list[str]:
    keys = layout.certificates
    return [
        f"--etcd-servers={ETCD}",
        f"--secure-port={API_PORT}",
        f"--advertise-address={layout.node_address}",
        f"--service-cluster-ip-range={layout.services}",
        "--authorization-mode=Node,RBAC",
        "--enable-admission-plugins=NodeRestriction",
        "--allow-privileged=true",
        "--profiling=false",
        "--shutdown-watch-termination-grace-period=1s",
        f"--client-ca-file={keys}/{AUTHORITY}.crt",
        f"--tls-cert-file={keys}/apiserver.crt",
        f"--tls-private-key-file={keys}/apiserver.key",
        f"--kubelet-client-certificate={keys}/admin.crt",
        f"--kubelet-client-key={keys}/admin.key",
        "--kubelet-preferred-address-types=InternalIP",  # the node's name cannot be resolved
        "--service-account-issuer=https://kubernetes.default.svc",
        f"--service-account-key-file={keys}/tokens.pub",
        f"--service-account-signing-key-file={keys}/tokens.key",
        f"--requestheader-client-ca-file={keys}/{AUTHORITY}.crt",
        "--requestheader-allowed-names=front-proxy-client",
        "--requestheader-username-headers=X-Remote-User",
        "--requestheader-group-headers=X-Remote-Group",
        "--requestheader-extra-headers-prefix=X-Remote-Extra-",
        f"--proxy-client-cert-file={keys}/front-proxy.crt",
        f"--proxy-client-key-file={keys}/front-proxy.key",
    ]


def _controller_manager(layout: Layout) -> list[str]:
    keys = layout.certificates
    return [
        f"--kubeconfig={layout.kubeconfig('controller-manager')}",
        "--bind-address=127.0.0.1",
        "--leader-elect=false",
        "--use-service-account-credentials",
        f"--kube-api-qps={REQUESTS['qps']}",
        f"--kube-api-burst={REQUESTS['burst']}",
        f"--root-ca-file={keys}/{AUTHORITY}.crt",
        f"--service-account-private-key-file={keys}/tokens.key",
        f"--cluster-signing-cert-file={keys}/{AUTHORITY}.crt",
        f"--cluster-signing-key-file={keys}/{AUTHORITY}.key",
        *_asks(layout, "controller-manager"),
    ]


def _asks(layout: Layout, user: str) -> list[str]:
    """Options of a daemon that delegates authentication and authorization to the API server."""
    kubeconfig = layout.kubeconfig(user)
    return [f"--authentication-kubeconfig={kubeconfig}", f"--authorization-kubeconfig={kubeconfig}"]


def _scheduler_configuration(layout: Layout) -> dict[str, Any]:
    return {
        "apiVersion": "kubescheduler.config.k8s.io/v1",
        "kind": "KubeSchedulerConfiguration",
        "leaderElection": {"leaderElect": False},
        "clientConnection": {"kubeconfig": str(layout.kubeconfig("scheduler")), **REQUESTS},
    }


# --- the node


def _kubelet(layout: Layout) -> list[str]:
    return [
        f"--config={layout.folder}/kubelet.json",
        f"--kubeconfig={layout.kubeconfig('kubelet')}",
        f"--node-ip={layout.node_address}",
        f"--hostname-override={NODE_NAME}",
    ]


def _kubelet_configuration(layout: Layout) -> dict[str, Any]:
    keys = layout.certificates
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "address": layout.node_address,
        "tlsCertFile": f"{keys}/kubelet-server.crt",
        "tlsPrivateKeyFile": f"{keys}/kubelet-server.key",
        "authentication": {
            "anonymous": {"enabled": False},
            "webhook": {"enabled": True},
            "x509": {"clientCAFile": f"{keys}/{AUTHORITY}.crt"},
        },
        "authorization": {"mode": "Webhook"},
        "clusterDNS": [layout.node_address],
        "clusterDomain": DOMAIN,
        "resolvConf": f"{layout.folder}/resolv.conf",
        "containerRuntimeEndpoint": f"unix://{CONTAINERD_SOCKET}",
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": f"/{layout.cgroup}",
        "failCgroupV1": False,
        "failSwapOn": False,
        "oomScoreAdj": 0,  # root of a virtual machine or container may not lower it
        "podPidsLimit": 2048,
        "maxPods": 200,
        "evictionHard": {"memory.available": "100Mi", "nodefs.available": "1%", "imagefs.available": "1%"},
        "imageGCHighThresholdPercent": 100,  # imported images cannot be pulled again
        "imageGCLowThresholdPercent": 99,
        "serializeImagePulls": False,
        "nodeStatusUpdateFrequency": "1s",  # new devices show only in a status
        "nodeStatusReportFrequency": "10s",
    }


def _proxy_configuration(layout: Layout) -> dict[str, Any]:
    # The size of the connection table is machine-wide: 0 leaves it unchanged.
    untouched = {"maxPerCore": 0, "min": 0, "tcpEstablishedTimeout": "0s", "tcpCloseWaitTimeout": "0s"}
    return {
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "mode": layout.proxy_mode,
        "clusterCIDR": layout.pods,
        "hostnameOverride": NODE_NAME,
        "oomScoreAdj": 0,
        "clientConnection": {"kubeconfig": str(layout.kubeconfig("proxy"))},
        "conntrack": untouched,
        "healthzBindAddress": "127.0.0.1:10256",
    }


def _pod_network(layout: Layout) -> dict[str, Any]:
    addresses = {
        "type": "host-local",
        "ranges": [[{"subnet": layout.pods}]],
        "routes": [{"dst": "0.0.0.0/0"}],
    }
    bridge = {
        "type": "bridge",
        "bridge": "pods",
        "isGateway": True,
        "ipMasq": False,
        "hairpinMode": True,
        "ipam": addresses,
    }
    ports = {"type": "portmap", "capabilities": {"portMappings": True}}
    return {"cniVersion": "1.0.0", "name": "pods", "plugins": [bridge, ports]}


def _containerd_configuration(layout: Layout) -> str:
    plugins = next((folder for folder in PLUGIN_FOLDERS if Path(folder).is_dir()), PLUGIN_FOLDERS[0])
    return f"""version = 3
root = "{layout.folder}/containerd"
state = "{layout.folder}/containerd-state"
[grpc]
  address = "{CONTAINERD_SOCKET}"
[plugins."io.containerd.cri.v1.images".pinned_images]
  sandbox = "{PAUSE}"
[plugins."io.containerd.cri.v1.runtime"]
  restrict_oom_score_adj = true
  disable_apparmor = true
  [plugins."io.containerd.cri.v1.runtime".cni]
    bin_dirs = ["{plugins}"]
    conf_dir = "{NETWORK_FOLDER}"
  [plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc]
    runtime_type = "io.containerd.runc.v2"
    [plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc.options]
      BinaryName = "{shutil.which("runc")}"
      SystemdCgroup = false
"""


def _names(layout: Layout) -> str:
    # A second block for all other names: in the same block, `template` would answer before `kubernetes`.
    return f"""{DOMAIN}:53 in-addr.arpa:53 {{
  bind {layout.node_address}
  errors
  kubernetes {DOMAIN} in-addr.arpa {{
    kubeconfig {layout.kubeconfig()}
    pods insecure
    ttl 5
  }}
  cache 5
}}
.:53 {{
  bind {layout.node_address}
  template ANY ANY . {{
    rcode NXDOMAIN
  }}
}}
"""
