"""The operator's connection to the API server, against a server that records its requests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml
from aiohttp import web
from kubernetes.aio.config import incluster_config

from kestrl.errors import UserInputError
from kestrl_operator.apiserver import client as client_module
from kestrl_operator.apiserver import connection
from kestrl_operator.apiserver.client import Api, ApiProblem, Conflict, Gone
from kestrl_operator.apiserver.connection import log_in, watch_login
from kestrl_operator.apiserver.kinds import JOB, NODE, POD, REVIEW

PREFIX = "/k8s/clusters/c-1"
"""Some clusters are reached through a proxy, below a path."""


class Server:
    """Answers every request as configured, and records it."""

    def __init__(self, folder: Path) -> None:
        self.asked: list[web.Request] = []
        self.status, self.body, self.hangs = 200, '{"kind": "AgentRLJob"}', False
        self._runner = web.AppRunner(self._app(), shutdown_timeout=0.1)
        self.kubeconfig = folder / "kubeconfig"
        self.url = ""

    def _app(self) -> web.Application:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._answer)
        return app

    async def _answer(self, request: web.Request) -> web.Response:
        self.asked.append(request)
        if self.hangs:
            await asyncio.Event().wait()
        return web.Response(status=self.status, text=self.body)

    async def start(self) -> None:
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}{PREFIX}"
        self.write(token="first")

    async def stop(self) -> None:
        await self._runner.cleanup()

    def write(self, *, token: str) -> None:
        self.kubeconfig.write_text(yaml.safe_dump(kubeconfig(self.url, token)))


def kubeconfig(url: str, token: str) -> dict[str, Any]:
    return {
        "current-context": "here",
        "contexts": [{"name": "here", "context": {"cluster": "it", "user": "me"}}],
        "clusters": [{"name": "it", "cluster": {"server": url}}],
        "users": [{"name": "me", "user": {"token": token}}],
    }


@pytest.fixture
async def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Server]:
    made = Server(tmp_path)
    await made.start()
    monkeypatch.setenv("KUBECONFIG", str(made.kubeconfig))
    yield made
    await made.stop()


@pytest.fixture
async def client(server: Server) -> AsyncIterator[Api]:
    assert server.url
    made = Api()
    yield made
    await made.close()


async def test_a_request_names_the_object_and_the_field_manager(server: Server, client: Api) -> None:
    await client.get(JOB, "it", "team-a")
    assert server.asked[0].path == f"{PREFIX}/apis/kestrl.dev/v1alpha1/namespaces/team-a/agentrljobs/it"
    assert server.asked[0].headers["Authorization"] == "Bearer first"


async def test_a_rotated_token_is_used_before_the_old_one_expires(
    server: Server, client: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    await client.get(JOB, "it", "team-a")
    server.write(token="second")
    await client.get(JOB, "it", "team-a")
    monkeypatch.setattr(connection, "LOGIN_SECONDS", 0.0)
    await client.get(JOB, "it", "team-a")
    assert [request.headers["Authorization"] for request in server.asked] == [
        "Bearer first",
        "Bearer first",
        "Bearer second",
    ]


async def test_a_credential_that_disappears_fails_the_request(
    server: Server, client: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "LOGIN_SECONDS", 0.0)
    await client.get(JOB, "it", "team-a")
    server.kubeconfig.unlink()
    with pytest.raises(ApiProblem, match="get AgentRLJob it: no cluster") as raised:
        await client.get(JOB, "it", "team-a")
    assert raised.value.retryable


@pytest.mark.parametrize(
    ("status", "body", "kind", "retryable", "words"),
    [
        (404, '{"kind": "Status", "message": "no such job"}', Gone, False, "no such job"),
        (409, '{"kind": "Status", "message": "it has changed"}', Conflict, True, "it has changed"),
        (422, '{"kind": "Status", "message": "spec.x: wrong"}', ApiProblem, False, "spec.x: wrong"),
        (429, '{"kind": "Status", "message": "slower"}', ApiProblem, True, "slower"),
        (500, '{"message": "failed to create typed patch object (x)"}', ApiProblem, False, "typed patch"),
        (502, "<html>a proxy's page</html>", ApiProblem, True, "HTTP 502: <html>a proxy's page"),
        (200, "<html>a proxy's page</html>", ApiProblem, True, "DecodeError"),
    ],
)
async def test_an_answer_that_is_not_an_object_is_in_the_message(
    server: Server, client: Api, status: int, body: str, kind: type[ApiProblem], *, retryable: bool, words: str
) -> None:
    server.status, server.body = status, body
    with pytest.raises(ApiProblem) as raised:
        await client.get(JOB, "it", "team-a")
    assert type(raised.value) is kind
    assert raised.value.retryable is retryable
    assert words in str(raised.value)
    assert str(raised.value).startswith("get AgentRLJob it: ")


async def test_a_list_reads_all_pages(server: Server, client: Api) -> None:
    server.body = '{"metadata": {"continue": "more"}, "items": [{"metadata": {"name": "a"}}]}'
    names = []
    async for item in client.list(NODE, None, labels="x=y", fields={"spec.z": "1"}):
        names.append(item["metadata"]["name"])
        server.body = '{"metadata": {}, "items": null}'
    assert names == ["a"]
    assert dict(server.asked[1].query) == {
        "limit": "500",
        "labelSelector": "x=y",
        "fieldSelector": "spec.z=1",
        "continue": "more",
    }


async def test_a_refused_connection_is_reported_with_the_address(server: Server, client: Api) -> None:
    await server.stop()
    with pytest.raises(ApiProblem, match=r"127\.0\.0\.1") as raised:
        await client.get(JOB, "it", "team-a")
    assert raised.value.retryable
    assert raised.value.status is None


@pytest.mark.parametrize(
    "content",
    [
        "{",
        "- a list",
        "just words",
        "current-context: here",
        yaml.safe_dump({**kubeconfig("https://x", "t"), "current-context": "elsewhere"}),
        yaml.safe_dump({**kubeconfig("https://x", "t"), "clusters": []}),
        yaml.safe_dump({**kubeconfig("", "t")}),
        "",
    ],
)
async def test_an_invalid_kubeconfig_is_a_user_error(
    content: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "kubeconfig"
    file.write_text(content)
    monkeypatch.setenv("KUBECONFIG", str(file))
    with pytest.raises(UserInputError, match=r"no cluster: .*KUBECONFIG"):
        await Api().get(JOB, "it", "team-a")


@pytest.mark.parametrize("content", [None, "no certificate"])
async def test_an_invalid_certificate_is_a_user_error(
    content: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = kubeconfig("https://127.0.0.1:1", "t")
    config["clusters"][0]["cluster"]["certificate-authority"] = str(tmp_path / "ca.crt")
    if content is not None:
        (tmp_path / "ca.crt").write_text(content)
    (tmp_path / "kubeconfig").write_text(yaml.safe_dump(config))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
    with pytest.raises(UserInputError, match=r"no cluster: .*KUBECONFIG"):
        await Api().get(JOB, "it", "team-a")


async def test_neither_a_pod_nor_a_kubeconfig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBECONFIG", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(UserInputError, match="run in a pod, or set KUBECONFIG"):
        await Api().get(JOB, "it", "team-a")


@pytest.mark.parametrize(
    ("host", "server"),
    [
        ("10.96.0.1", "https://10.96.0.1:6443"),
        ("fd00::1", "https://[fd00::1]:6443"),
        ("", "https://kubernetes.default.svc:6443"),
    ],
)
async def test_a_pod_uses_the_api_server_address_of_its_environment(
    host: str, server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "token").write_text("pods")
    (tmp_path / "ca.crt").write_text("a certificate")
    monkeypatch.setattr(incluster_config, "SERVICE_TOKEN_FILENAME", str(tmp_path / "token"))
    monkeypatch.setattr(incluster_config, "SERVICE_CERT_FILENAME", str(tmp_path / "ca.crt"))
    monkeypatch.setenv(connection.HOST, host)
    monkeypatch.setenv(connection.PORT, "6443")
    streams = await watch_login()
    assert (streams.server, streams.as_http_headers()["Authorization"]) == (server, "Bearer pods")
    client = await log_in()
    assert (client.host, client.api_key["BearerToken"]) == (server, "bearer pods")


async def test_kopf_logs_in_as_the_client_does(server: Server) -> None:
    streams = await watch_login()
    assert (streams.server, streams.as_http_headers()) == (server.url, {"Authorization": "Bearer first"})


async def test_concurrent_first_calls_log_in_once(client: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    logged_in = []

    async def counted() -> Any:
        logged_in.append(1)
        return await log_in()

    monkeypatch.setattr(connection, "log_in", counted)
    await asyncio.gather(*(client.get(JOB, "it", "team-a") for _ in range(5)))
    assert logged_in == [1]


async def test_calls_ask_for_the_paths_of_the_api(server: Server, client: Api) -> None:
    await client.apply_status("team-a", "it", 7, {"shown": {}})
    await client.get(NODE, "a")
    await client.create(REVIEW, {"metadata": {}})
    await client.delete(POD, "team-a", "p", uid="u")
    server.body = '{"metadata": {}, "items": []}'
    assert [item async for item in client.list(NODE, None)] == []
    assert [item async for item in client.marks(POD, "team-a")] == []
    assert [(request.method, request.path.removeprefix(PREFIX)) for request in server.asked] == [
        ("PATCH", "/apis/kestrl.dev/v1alpha1/namespaces/team-a/agentrljobs/it/status"),
        ("GET", "/api/v1/nodes/a"),
        ("POST", "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"),
        ("DELETE", "/api/v1/namespaces/team-a/pods/p"),
        ("GET", "/api/v1/nodes"),
        ("GET", "/api/v1/namespaces/team-a/pods"),
    ]
    assert dict(server.asked[0].query) == {"fieldManager": "kestrl-operator", "force": "true"}
    assert server.asked[0].content_type == "application/apply-patch+yaml"
    assert dict(server.asked[3].query) == {"propagationPolicy": "Background", "uid": "u"}
    assert "PartialObjectMetadataList" in server.asked[5].headers["Accept"]


async def test_a_server_that_does_not_answer_in_time_is_reported(
    server: Server, client: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    unread = {"serialize": False, "_request_timeout": aiohttp.ClientTimeout(total=0.1)}
    monkeypatch.setattr(client_module, "UNREAD", unread)
    server.hangs = True
    with pytest.raises(ApiProblem, match=r"does not answer: .*Timeout") as raised:
        await client.get(JOB, "it", "team-a")
    assert raised.value.retryable
