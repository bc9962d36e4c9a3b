"""The pod of a tool service and its requests to the Kubernetes API server."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.fakes.kubernetes import FakeKubernetes

from kestrl.errors import UserInputError
from kestrl_sandbox.remote.claim_objects import CLAIMS
from kestrl_sandbox.remote.cluster_api import ApiRefused, ClusterApi, ClusterUnreachable, OwnPod


def test_outside_of_a_pod_nothing_is_claimed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    monkeypatch.setattr("kestrl_sandbox.remote.cluster_api.ACCOUNT", tmp_path)
    with pytest.raises(UserInputError, match=r"sandbox.claim: this process runs in no pod"):
        OwnPod.here()


def test_a_pod_is_found_by_what_the_kubelet_gives_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, text in {"token": "t", "namespace": "team-a\n", "ca.crt": ""}.items():
        (tmp_path / name).write_text(text)
    monkeypatch.setattr("kestrl_sandbox.remote.cluster_api.ACCOUNT", tmp_path)
    found = {"KUBERNETES_SERVICE_HOST": "fd00::1", "KUBERNETES_SERVICE_PORT": "443"}
    for name, text in {**found, "KESTRL_REPLICA": "p", "KESTRL_POD_UID": "u"}.items():
        monkeypatch.setenv(name, text)
    pod = OwnPod.here()
    assert (pod.namespace, pod.name, pod.uid, pod.server) == ("team-a", "p", "u", "https://[fd00::1]:443")
    assert (pod.token_file.read_text(), pod.authority) == ("t", tmp_path / "ca.crt")
    assert "token" not in repr(pod)


async def test_a_rotated_token_is_used(tmp_path: Path) -> None:
    token = tmp_path / "token"
    async with FakeKubernetes() as cluster:
        pod = OwnPod(namespace="team-a", name="p", uid="u", server=cluster.url, token_file=token, authority=None)
        api = ClusterApi(pod)
        for text in ("first", "second"):
            token.write_text(text)
            assert (await api.request("GET", "apps/v1/deployments"))["kind"] == "DeploymentList"
        assert [request.user for request in cluster.requests("list")] == ["first", "second"]
        with pytest.raises(ApiRefused, match="404") as refused:
            await api.request("GET", CLAIMS, "none")
        assert (refused.value.status, refused.value.retryable) == (404, True)
        cluster.fail("list", "deployments", status=503)
        with pytest.raises(ClusterUnreachable, match="503"):
            await api.request("GET", "apps/v1/deployments")
        await cluster.stop()
        with pytest.raises(ClusterUnreachable, match="ClientConnector"):
            await api.request("GET", "apps/v1/deployments")
        await api.close()
