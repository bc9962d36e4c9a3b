"""Sandboxes claimed through a real API server with the real controller of kubernetes-sigs/agent-sandbox.

The pods are objects of the API alone: the test sets the status that a kubelet would, with the address of a real
`kestrl sandbox serve`. Rights are those of the example's Role, by a token of its ServiceAccount.
"""

from __future__ import annotations

import asyncio
import base64
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import pytest
import yaml
from tests.fakes.ports import free_port

from kestrl.tools import WarmPool
from kestrl_sandbox.config import PoolConfig
from kestrl_sandbox.contract import Run
from kestrl_sandbox.pool.sandbox_pool import SandboxPool
from kestrl_sandbox.remote.claim_objects import claim
from kestrl_sandbox.remote.claims import ClaimedSandboxes
from kestrl_sandbox.remote.cluster_api import OwnPod

from .cluster.client import Cluster, Object
from .cluster.commands import eventually
from .jobs.agent_sandbox import has_ready, running_agent_sandbox, runtime_class, warm_pool

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(900)]
TOKEN = "a-token-of-the-pool"
CLAIM = "sandboxclaims.extensions.agents.x-k8s.io"
SANDBOX = "sandboxes.agents.x-k8s.io"


@pytest.fixture(scope="module")
def controller(control_plane: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """The cluster with agent-sandbox."""
    with running_agent_sandbox(control_plane, tmp_path_factory.mktemp("agent-sandbox")):
        yield control_plane


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """The port of a real server of sandboxes."""
    chosen = free_port()
    monkeypatch.setenv("KESTRL_SANDBOX_TOKEN", TOKEN)
    command = [Path(sys.executable).with_name("kestrl"), "sandbox", "serve", "--port", str(chosen)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            assert "serving on" in server.stdout.readline()
            yield chosen
        finally:
            server.terminate()
            server.wait(30)


@dataclass(frozen=True)
class Place:
    """A namespace with the example's warm pool, whose pods are ready, and the pod of a tool service."""

    cluster: Cluster
    namespace: str
    pod: OwnPod
    pool: WarmPool

    def claims(self) -> list[Object]:
        return self.cluster.list(CLAIM, self.namespace)

    def pods_ready(self, count: int) -> bool:
        """Sets the status of the pool's pods as a kubelet does; whether there are as many."""
        pods = self.cluster.list("pods", self.namespace, "kestrl.dev/sandbox=code")
        ready = {"type": "Ready", "status": "True", "lastTransitionTime": "2026-01-01T00:00:00Z"}
        ip = "127.0.0.1"
        status = {"phase": "Running", "podIP": ip, "podIPs": [{"ip": ip}], "conditions": [ready]}
        for item in pods:
            if item["status"].get("podIP") is None:
                name = item["metadata"]["name"]
                self.cluster.patch("pod", name, {"status": status}, self.namespace, subresource="status")
        return len(pods) >= count


def account(cluster: Cluster, namespace: str, folder: Path) -> tuple[str, Path, Path]:
    """Address of the API server, a file with a token of the example's account, and the authority's certificate."""
    (found,) = yaml.safe_load(cluster.kubeconfig.read_text())["clusters"]
    server, token, authority = found["cluster"], folder / "token", folder / "ca.crt"
    place = f"--namespace={namespace}"
    token.write_text(cluster.kubectl("create", "token", "kestrl-sandbox-claims", place))
    data = server.get("certificate-authority-data")
    content = Path(server["certificate-authority"]).read_bytes() if data is None else base64.b64decode(data)
    authority.write_bytes(content)
    return server["server"], token, authority


@pytest.fixture
def place(controller: Cluster, port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    cluster, name = controller, "job-tools"
    cluster.apply(runtime_class("none"))
    with cluster.namespace("claims") as namespace:
        cluster.apply(warm_pool(2), namespace)
        containers = [{"name": "tools", "image": "none"}]
        cluster.apply(
            {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": {"containers": containers}},
            namespace,
        )
        uid = cluster.get("pod", name, namespace)["metadata"]["uid"]
        server, token, authority = account(cluster, namespace, tmp_path)
        pod = OwnPod(namespace=namespace, name=name, uid=uid, server=server, token_file=token, authority=authority)
        monkeypatch.setattr(OwnPod, "here", lambda: pod)
        pool = WarmPool(name="code", token=TOKEN, port=port, bind_seconds=60, use_seconds=600, keep_seconds=720)
        made = Place(cluster, namespace, pod, pool)
        eventually("the pool has its pods", lambda: made.pods_ready(2), 60)
        cluster.wait_for("sandboxwarmpool", "code", has_ready(2), namespace)
        yield made


async def test_a_claim_binds_a_warm_pod_and_leaves_nothing(place: Place) -> None:
    start = partial(ClaimedSandboxes.start, pool=place.pool)
    opened = await SandboxPool.start(start, PoolConfig(max_sandboxes=2))
    try:
        assert opened.capabilities.backend == "claim of code: zygote under RuntimeClass kata"
        session = await opened.session()
        await session.run(Run(code="x = 6"))
        assert (await session.run(Run(code="print(x * 7)"))).stdout == b"42\n"
        (bound,) = await asyncio.to_thread(place.claims)
        sandbox = bound["status"]["sandbox"]["name"]
        assert sandbox != bound["metadata"]["name"], "it was not taken from the warm pool"
        await session.close()
        name = bound["metadata"]["name"]
        await asyncio.to_thread(place.cluster.wait_gone, CLAIM, name, place.namespace)
        await asyncio.to_thread(place.cluster.wait_gone, SANDBOX, sandbox, place.namespace)
    finally:
        await opened.close()
    assert await asyncio.to_thread(place.claims) == []


def test_claims_go_with_the_pod_and_at_their_time(place: Place) -> None:
    cluster, now = place.cluster, datetime.now(UTC)
    cluster.apply(claim("owned", place.pod, place.pool, now))
    cluster.delete("pod", place.pod.name, place.namespace)
    cluster.wait_gone(CLAIM, "owned", place.namespace)
    timed = claim("timed", place.pod, replace(place.pool, keep_seconds=2), now)
    del timed["metadata"]["ownerReferences"]
    cluster.apply(timed)
    cluster.wait_gone(CLAIM, "timed", place.namespace)
