"""The operator's connection to the API server, against a server that records its requests."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import kopf
import pytest
import yaml
from aiohttp import web

from kestrl.errors import UserInputError
from kestrl_operator.apiserver import client as module
from kestrl_operator.apiserver import connection
from kestrl_operator.apiserver.client import JOB, NODE, Api, ApiProblem, Conflict, Gone, path
from kestrl_operator.apiserver.connection import log_in

PREFIX = "/k8s/clusters/c-1"
"""Some clusters are reached through a proxy, below a path."""


class Server:
    """Answers every request as configured, and records it."""

    def __init__(self, folder: Path) -> None:
        self.asked: list[web.Request] = []
        self.status, self.body = 200, '{"kind": "AgentRLJob"}'
        self._runner = web.AppRunner(self._app())
        self.kubeconfig = folder / "kubeconfig"
        self.url = ""

    def _app(self) -> web.Application:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._answer)
        return app

    async def _answer(self, request: web.Request) -> web.Response:
        self.asked.append(request)
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
    monkeypatch.setattr(module, "LOGIN_SECONDS", 0.0)
    await client.get(JOB, "it", "team-a")
    assert [request.headers["Authorization"] for request in server.asked] == [
        "Bearer first",
        "Bearer first",
        "Bearer second",
    ]


async def test_a_credential_that_disappears_fails_the_request(
    server: Server, client: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LOGIN_SECONDS", 0.0)
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
def test_an_invalid_kubeconfig_is_a_user_error(content: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "kubeconfig"
    file.write_text(content)
    monkeypatch.setenv("KUBECONFIG", str(file))
    with pytest.raises(UserInputError, match=r"no cluster: .*KUBECONFIG"):
        log_in()


def test_an_invalid_certificate_is_a_user_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = kubeconfig("https://127.0.0.1:1", "t")
    config["clusters"][0]["cluster"]["certificate-authority"] = str(tmp_path / "nowhere.crt")
    (tmp_path / "kubeconfig").write_text(yaml.safe_dump(config))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
    with pytest.raises(UserInputError, match=r"no cluster: FileNotFoundError.*KUBECONFIG"):
        Api()


def test_neither_a_pod_nor_a_kubeconfig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBECONFIG", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(UserInputError, match="run in a pod, or set KUBECONFIG"):
        log_in()


@pytest.mark.parametrize(
    ("host", "server"),
    [
        ("10.96.0.1", "https://10.96.0.1:6443"),
        ("fd00::1", "https://[fd00::1]:6443"),
        ("", "https://kubernetes.default.svc"),
    ],
)
def test_a_pod_uses_the_api_server_address_of_its_environment(
    host: str, server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pod = kopf.ConnectionInfo(server="https://kubernetes.default.svc", token="pods")
    monkeypatch.setattr(kopf, "login_with_service_account", lambda **_: pod)
    monkeypatch.setenv(connection.HOST, host)
    monkeypatch.setenv(connection.PORT, "6443")
    assert (log_in().server, log_in().token) == (server, "pods")


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ((NODE, None), "/api/v1/nodes"),
        ((NODE, None, "a"), "/api/v1/nodes/a"),
        ((JOB, "b", "a", "status"), "/apis/kestrl.dev/v1alpha1/namespaces/b/agentrljobs/a/status"),
    ],
)
def test_paths(given: Any, wanted: str) -> None:
    assert path(*given) == wanted
