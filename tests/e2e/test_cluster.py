"""The harness itself, on which the other tests of a real Kubernetes rely."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from .cluster import layout as layouts
from .cluster.cgroups import hierarchies
from .cluster.choice import usable_kit
from .cluster.client import Cluster, has_condition
from .cluster.commands import CommandFailed, eventually
from .cluster.devices import NVIDIA
from .cluster.host_server import HostServer, Response
from .cluster.images import USER
from .cluster.kit import build_kit, find_kit
from .cluster.layout import NODE_NAME, RUNS, free_net, networks
from .cluster.node import Node
from .cluster.up import bring_up, running

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(240)]
HELD: dict[str, Any] = {
    "runAsNonRoot": True,
    "runAsUser": USER,
    "runAsGroup": USER,
    "fsGroup": USER,
    "seccompProfile": {"type": "RuntimeDefault"},
}
CONFINED: dict[str, Any] = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "capabilities": {"drop": ["ALL"]},
}
SERVER = "import http.server as h; h.ThreadingHTTPServer(('', 8080), h.SimpleHTTPRequestHandler).serve_forever()"
FETCH = "import sys, urllib.request as u; print(*(u.urlopen(url, timeout=10).status for url in sys.argv[1:]))"
BRIEFLY = FETCH.replace("timeout=10", "timeout=3")


def pod(cluster: Cluster, name: str, *command: str, **more: Any) -> dict[str, Any]:
    """A pod as restricted as the project's own."""
    container = {
        "name": "main",
        "image": cluster.image,
        "imagePullPolicy": "Never",
        "command": list(command),
        "securityContext": CONFINED,
        **more.pop("container", {}),
    }
    spec = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": 0,
        "securityContext": HELD,
        "containers": [container],
        **more,
    }
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "labels": {"app": name}}, "spec": spec}


def output(cluster: Cluster, namespace: str, made: dict[str, Any]) -> str:
    """The output of a pod that succeeds."""
    name = made["metadata"]["name"]
    cluster.apply(made, namespace)
    ended = cluster.wait_ended(name, namespace)
    written = cluster.logs(name, namespace)
    assert ended["status"]["phase"] == "Succeeded", written
    return written


@pytest.fixture
def server(cluster: Cluster, namespace: str) -> str:
    """A pod that serves HTTP behind a Service of its name."""
    ready = {"readinessProbe": {"httpGet": {"port": 8080}, "periodSeconds": 1}, "workingDir": "/usr"}
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "server"},
        "spec": {"selector": {"app": "server"}, "ports": [{"port": 80, "targetPort": 8080}]},
    }
    serving = pod(cluster, "server", "python", "-c", SERVER, container=ready)
    cluster.apply([serving, pod(cluster, "asking", "sleep", "600"), service], namespace)
    for name in ("server", "asking"):
        cluster.wait_ready(name, namespace)

    def served() -> bool:
        try:  # by another pod: a pod that calls itself by its Service needs a network with hairpin routing
            return cluster.exec("asking", "python", "-c", FETCH, "http://server/", namespace=namespace) == "200\n"
        except CommandFailed as error:
            if "urlopen error" not in error.complaint:
                raise
            return False

    eventually("name and address of the Service are known, which may take a second more", served, 90)
    return "server"


@pytest.fixture
def on_host(pod_routes: Cluster) -> Iterator[str]:
    """The address of an HTTP server in this process."""

    with HostServer(pod_routes, lambda _: Response()) as serving:
        yield f"http://{pod_routes.host_address}:{serving.server_port}/"


def test_the_kit_is_found_where_its_builder_puts_it() -> None:
    assert find_kit() == build_kit()


def test_the_node_is_ready_and_of_the_version_that_was_built(cluster: Cluster) -> None:
    (node,) = (found for found in cluster.list("node") if found["metadata"]["name"] == NODE_NAME)
    assert has_condition(node, "Ready")
    assert (
        node["status"]["nodeInfo"]["kubeletVersion"]
        == json.loads(cluster.kubectl("version", "-o", "json"))["serverVersion"]["gitVersion"]
    )


def test_a_confined_pod_finds_the_checkout_in_place(host_paths: Cluster, namespace: str) -> None:
    code = "import os, sys, kestrl; print(os.getuid(), sys.executable, kestrl.__file__, sep=chr(10))"
    made = pod(host_paths, "imports", "python", "-c", code)
    made["spec"]["initContainers"] = [{**made["spec"]["containers"][0], "name": "before"}]
    lines = output(host_paths, namespace, made), host_paths.logs("imports", namespace, container="before")
    assert lines[0] == lines[1]
    user, python, module = lines[0].splitlines()  # a path may hold a space
    assert int(user) == USER
    assert Path(python) == Path(sys.prefix) / "bin" / "python"
    assert Path(module).is_relative_to(layouts.CHECKOUT)


def test_nothing_of_the_image_or_the_checkout_can_be_written(host_paths: Cluster, namespace: str) -> None:
    places = ["/usr/touched", "/touched", f"{layouts.CHECKOUT}/touched", f"{sys.prefix}/touched"]
    code = f"""
for place in {places}:
    try:
        open(place, "w")
    except OSError as error:
        print(error.errno)
"""
    assert output(host_paths, namespace, pod(host_paths, "writes", "python", "-c", code)).split() == ["30"] * len(
        places
    )


OF_SERVICES = ("torch", "transformers", "peft", "obstore", "grpc", "pyarrow", "kestrl_inference", "kestrl_learner")
OF_ENGINES = ("torch", "vllm", "transformers", "kestrl_inference.inside.launcher")


def test_everything_that_pods_run_can_be_imported_in_one(host_paths: Cluster, namespace: str) -> None:
    volume: dict[str, Any] = {"name": "tmp", "emptyDir": {}}
    for name, image, modules in (
        ("services", host_paths.image, OF_SERVICES),
        ("engines", host_paths.engine_image, OF_ENGINES),
    ):
        container = {
            "image": image,
            "env": [{"name": "HOME", "value": "/tmp"}],
            "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}],
        }
        code = f"import {', '.join(modules)}; import subprocess; subprocess.run(['lscpu', '--json'], check=True)"
        imports = pod(host_paths, name, "python", "-c", code, container=container, volumes=[volume])
        host_paths.apply(imports, namespace)
        ended = host_paths.wait_ended(name, namespace, seconds=120)
        assert ended["status"]["phase"] == "Succeeded", host_paths.logs(name, namespace)


def test_pods_outside_labelled_namespaces_are_left_alone(host_paths: Cluster) -> None:
    made = json.dumps(pod(host_paths, "plain", "true"))
    output = host_paths.kubectl("create", "--dry-run=server", "-n", "default", "-o", "json", "-f", "-", given=made)
    assert not [volume for volume in json.loads(output)["spec"]["volumes"] if "hostPath" in volume]


def test_services_have_names(cluster: Cluster, namespace: str, server: str) -> None:
    names = [
        f"{server}",
        f"{server}.{namespace}",
        f"{server}.{namespace}.svc",
        f"{server}.{namespace}.svc.cluster.local",
    ]
    made = pod(cluster, "client", "python", "-c", FETCH, *(f"http://{name}/" for name in names))
    assert output(cluster, namespace, made).split() == ["200"] * len(names)


def test_this_process_reaches_pods_and_services(pod_routes: Cluster, namespace: str, server: str) -> None:
    address = pod_routes.get("pod", server, namespace)["status"]["podIP"]
    service = pod_routes.get("service", server, namespace)["spec"]["clusterIP"]
    for url in (f"http://{address}:8080/", f"http://{service}/"):
        with urllib.request.urlopen(url, timeout=30) as answer:
            assert answer.status == 200


def test_pods_reach_a_server_of_this_process(cluster: Cluster, namespace: str, on_host: str) -> None:
    assert output(cluster, namespace, pod(cluster, "caller", "python", "-c", FETCH, on_host)) == "200\n"


def test_commands_run_in_pods(cluster: Cluster, namespace: str, server: str) -> None:
    assert cluster.exec(server, "id", "-u", namespace=namespace) == f"{USER}\n"
    with pytest.raises(CommandFailed, match="ended with 3"):
        cluster.exec(server, "sh", "-c", "exit 3", namespace=namespace)


def test_a_claim_is_bound_and_written_and_its_volume_used_again(host_paths: Cluster, namespace: str) -> None:
    claim = {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": "state"},
        "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}},
    }
    volumes = [{"name": "state", "persistentVolumeClaim": {"claimName": "state"}}]
    container = {"volumeMounts": [{"name": "state", "mountPath": "/state"}]}
    made = pod(host_paths, "writer", "sh", "-c", "echo kept >/state/file", volumes=volumes, container=container)
    host_paths.apply([claim, made], namespace)
    assert host_paths.wait_ended("writer", namespace)["status"]["phase"] == "Succeeded"
    bound = host_paths.get("pvc", "state", namespace)["spec"]["volumeName"]
    folder = host_paths.node.layout.volumes / bound
    assert (folder / "file").read_text() == "kept\n"
    host_paths.delete("pod", "writer", namespace)
    host_paths.delete("pvc", "state", namespace)
    host_paths.wait_for("pv", bound, lambda found: found["status"]["phase"] == "Released")
    host_paths.renew_volumes()
    host_paths.wait_for("pv", bound, lambda found: found["status"]["phase"] == "Available")
    assert list(folder.iterdir()) == []


def test_a_network_policy_denies_all_but_what_it_allows(
    network_policies: Cluster, namespace: str, server: str, on_host: str
) -> None:
    policy = {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": "friends"},
        "spec": {
            "podSelector": {"matchLabels": {"app": server}},
            "policyTypes": ["Ingress", "Egress"],
            "ingress": [{"from": [{"podSelector": {"matchLabels": {"app": "friend"}}}], "ports": [{"port": 8080}]}],
        },
    }
    network_policies.apply(
        [policy, *(pod(network_policies, name, "sleep", "600") for name in ("friend", "stranger"))], namespace
    )

    def reaches(name: str, url: str) -> bool:
        try:
            return network_policies.exec(name, "python", "-c", BRIEFLY, url, namespace=namespace) == "200\n"
        except CommandFailed as error:
            if "timed out" not in error.complaint:
                raise
            return False

    for name in ("friend", "stranger"):
        network_policies.wait_ready(name, namespace)
    eventually("the friend is let in", lambda: reaches("friend", f"http://{server}/"), 60)
    eventually("the stranger is not", lambda: not reaches("stranger", f"http://{server}/"), 60)
    assert not reaches(server, on_host), "it may send nothing"
    eventually("the stranger may send", lambda: reaches("stranger", on_host), 60)
    network_policies.delete("networkpolicy", "friends", namespace)
    eventually("the stranger is let in", lambda: reaches("stranger", f"http://{server}/"), 60)
    assert has_condition(network_policies.get("pod", server, namespace), "Ready"), "probes are never denied"


def test_devices_are_given_to_pods_and_never_twice(fake_devices: Cluster, namespace: str) -> None:
    limits = {"resources": {"limits": {NVIDIA.name: NVIDIA.count - 1, "huawei.com/Ascend910": 1}}}
    code = "import os; print(os.environ['NVIDIA_VISIBLE_DEVICES'], os.environ['ASCEND_VISIBLE_DEVICES'], flush=True)"
    holder = pod(fake_devices, "holder", "python", "-c", f"{code}; import time; time.sleep(600)", container=limits)
    fake_devices.apply(holder, namespace)
    fake_devices.wait_ready("holder", namespace)
    eventually("it prints its devices", lambda: fake_devices.logs("holder", namespace) != "", 10)
    gpus, npus = fake_devices.logs("holder", namespace).split()
    assert len(set(gpus.split(","))) == NVIDIA.count - 1
    assert npus.startswith("Ascend910-")
    more = {"resources": {"limits": {NVIDIA.name: 2}}}
    fake_devices.apply(pod(fake_devices, "waits", "true", container=more), namespace)
    fake_devices.wait_for("pod", "waits", lambda found: has_condition(found, "PodScheduled", "False"), namespace)
    fake_devices.delete("pod", "holder", namespace)
    fake_devices.wait_ended("waits", namespace)


def test_devices_come_back_after_the_kubelet(fake_devices: Cluster, daemons: Cluster) -> None:
    registered = fake_devices.node.log("devices").count("registered nvidia.com/gpu")
    daemons.node.restart("kubelet")
    eventually(
        "the plugin registers again",
        lambda: fake_devices.node.log("devices").count("registered nvidia.com/gpu") > registered,
        90,
    )
    fake_devices.wait_for(
        "node", NODE_NAME, lambda found: found["status"]["allocatable"].get(NVIDIA.name) == str(NVIDIA.count)
    )


def test_pods_outlive_the_api_server(daemons: Cluster, namespace: str, server: str) -> None:
    before = daemons.get("pod", server, namespace)
    daemons.node.kill("kube-apiserver")
    with pytest.raises(CommandFailed):
        daemons.kubectl("get", "pods", "--request-timeout=2s")
    with urllib.request.urlopen(f"http://{before['status']['podIP']}:8080/", timeout=30) as answer:
        assert answer.status == 200
    daemons.node.start("kube-apiserver")
    after = daemons.wait_ready(server, namespace)
    assert after["metadata"]["uid"] == before["metadata"]["uid"]
    assert after["status"]["containerStatuses"][0]["restartCount"] == 0


def test_a_frozen_api_server_answers_when_it_is_thawed(daemons: Cluster) -> None:
    daemons.node.freeze("kube-apiserver")
    began = time.monotonic()
    with pytest.raises(CommandFailed):
        daemons.kubectl("get", "nodes", "--request-timeout=2s")
    assert time.monotonic() - began > 2, "it is there, and does not answer"
    daemons.node.thaw("kube-apiserver")
    eventually("it answers", lambda: daemons.list("node") != [], 90)


def test_a_wait_survives_an_outage(daemons: Cluster, namespace: str) -> None:
    made = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "late"}, "data": {"key": "value"}}

    def trouble() -> None:
        daemons.node.restart("kube-apiserver")
        daemons.apply(made, namespace)

    thread = threading.Thread(target=trouble)
    thread.start()
    found = daemons.wait_for("configmap", "late", lambda found: found["data"]["key"] == "value", namespace)
    thread.join()
    assert found["metadata"]["name"] == "late"


def test_a_wait_that_times_out_describes_the_namespace(cluster: Cluster, namespace: str) -> None:
    cluster.apply(pod(cluster, "hopeless", "true", container={"image": "localhost/none:1"}), namespace)
    waits = "{.items[*].status.containerStatuses[*].state.waiting.reason}"
    place = ("get", "pods", f"--namespace={namespace}", f"--output=jsonpath={waits}")
    eventually("the kubelet has found out", lambda: "ErrImageNeverPull" in cluster.kubectl(*place), 60)
    with pytest.raises(TimeoutError, match="hopeless") as caught:
        cluster.wait_ready("hopeless", namespace, seconds=3)
    assert "ErrImageNeverPull" in "".join(caught.value.__notes__)


def test_helm_installs_a_chart(cluster: Cluster, namespace: str, tmp_path: Path) -> None:
    (tmp_path / "templates").mkdir()
    (tmp_path / "Chart.yaml").write_text("apiVersion: v2\nname: tiny\nversion: 1.0.0\n")
    (tmp_path / "templates" / "map.yaml").write_text(
        "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: {{ .Release.Name }}}\n"
        "data: {version: {{ .Capabilities.KubeVersion }}}\n"
    )
    cluster.helm("install", "first", str(tmp_path), f"--namespace={namespace}", "--wait")
    assert cluster.get("configmap", "first", namespace)["data"]["version"].startswith("v1.")


def test_fake_nodes_run_fake_pods(fake_nodes: Cluster) -> None:
    with fake_nodes.namespace() as namespace, fake_nodes.fake_nodes(3) as nodes:
        made = pod(fake_nodes, "nowhere", "true", nodeSelector={"type": "kwok"}, tolerations=[{"operator": "Exists"}])
        fake_nodes.apply(made, namespace)
        assert fake_nodes.wait_ready("nowhere", namespace)["spec"]["nodeName"] in nodes
        fake_nodes.delete("pod", "nowhere", namespace)
    assert not fake_nodes.kubectl("get", "node", "--selector=type=kwok", "-o", "name")


def remains(node: Node, net: int, pids: list[int]) -> list[str]:
    """The remains of a deleted cluster on this machine."""
    found = [str(root / f"e2e-{node.folder.name}") for root in hierarchies()]
    found += [str(node.folder), f"/sys/class/net/kestrl{net}", *(f"/proc/{pid}" for pid in pids)]
    routes = subprocess.run(["ip", "route"], capture_output=True, text=True, check=True).stdout
    return [place for place in found if Path(place).exists()] + [
        line for line in routes.splitlines() if any(str(network)[:-5] in line for network in networks(net))
    ]


def inside(node: Node) -> list[int]:
    """Pids of everything in the node's namespaces, and of the processes that wait for it outside."""
    state = node.state
    mine = Path(f"/proc/{state.first.pid}/ns/pid").readlink()
    found = [state.keeper.pid, *(daemon.process.pid for daemon in state.daemons.values())]
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            try:
                if (process / "ns" / "pid").readlink() == mine:
                    found.append(int(process.name))
            except OSError:
                continue  # it has ended, or may not be read
    return found


def test_a_second_cluster_beside_the_first_leaves_nothing_behind(daemons: Cluster) -> None:
    settings = [Path("/proc/sys", name) for name in ("kernel/panic", "kernel/panic_on_oops", "vm/overcommit_memory")]
    before = [setting.read_text() for setting in settings]
    node = bring_up(usable_kit(), name=f"second-{os.getpid()}")
    try:
        assert node in running()
        net = node.layout.net
        assert net != daemons.node.layout.net
        pids = inside(node)
        assert len(pids) > 2 * len(node.runs())
        node.freeze("kubelet")  # a stopped process must end too
    finally:
        node.down()
    assert remains(node, net, pids) == []
    assert node not in running()
    assert [setting.read_text() for setting in settings] == before
    assert daemons.list("node"), "the first is as it was"


def test_a_cluster_bound_to_a_process_ends_with_it(tmp_path: Path) -> None:
    usable_kit()
    name = f"bound-{os.getpid()}"
    code = f"""
import os, signal
from tests.e2e.cluster.choice import usable_kit
from tests.e2e.cluster.up import bring_up
bring_up(usable_kit(), name={name!r}, control_plane_only=True, ends_with_parent=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    subprocess.run([sys.executable, "-c", code], cwd=layouts.CHECKOUT, check=False)
    node = Node(RUNS / name)
    state = node.state
    eventually("its processes end", lambda: not state.first.is_alive(), 60)
    node.down()
    assert remains(node, state.layout.net, []) == []


def test_net_numbers_in_use_are_not_given_out(daemons: Cluster) -> None:
    assert free_net() != daemons.node.layout.net
