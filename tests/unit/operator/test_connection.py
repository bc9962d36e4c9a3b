"""How the operator comes to the apiserver and speaks to it, against a server of the tests' own that notes what it is asked."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import kopf
import pytest
import yaml
from aiohttp import web

from kestrl.errors import UserInputError
from kestrl_operator import api as module
from kestrl_operator import connection
from kestrl_operator.api import JOB, NODE, Api, ApiProblem, Conflict, Gone, path
from kestrl_operator.connection import log_in

PREFIX = "/k8s/clusters/c-1"
"""Some clusters are reached by way of a proxy, beneath a path."""


class Server:
    """Answers every request with what it is told to, and keeps them."""

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


async def test_a_request_names_the_object_and_us(server: Server, client: Api) -> None:
    await client.get(JOB, "it", "team-a")
    assert server.asked[0].path == f"{PREFIX}/apis/kestrl.dev/v1alpha1/namespaces/team-a/agentrljobs/it"
    assert server.asked[0].headers["Authorization"] == "Bearer first"


async def test_a_token_that_was_exchanged_is_used_before_the_old_one_ends(
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


async def test_a_credential_that_vanishes_is_a_problem_of_the_request(
    server: Server, client: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LOGIN_SECONDS", 0.0)
    server.kubeconfig.unlink()
    with pytest.raises(ApiProblem, match="get AgentRLJob it: no cluster") as told:
        await client.get(JOB, "it", "team-a")
    assert told.value.retryable


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
async def test_what_is_no_object_is_told_with_its_words(
    server: Server, client: Api, status: int, body: str, kind: type[ApiProblem], *, retryable: bool, words: str
) -> None:
    server.status, server.body = status, body
    with pytest.raises(ApiProblem) as told:
        await client.get(JOB, "it", "team-a")
    assert type(told.value) is kind
    assert told.value.retryable is retryable
    assert words in str(told.value)
    assert str(told.value).startswith("get AgentRLJob it: ")


async def test_a_list_goes_on_to_its_last_page(server: Server, client: Api) -> None:
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


async def test_nobody_there_is_told_with_the_address(server: Server, client: Api) -> None:
    await server.stop()
    with pytest.raises(ApiProblem, match=r"127\.0\.0\.1") as told:
        await client.get(JOB, "it", "team-a")
    assert told.value.retryable
    assert told.value.status is None


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
def test_a_kubeconfig_that_is_none_is_the_persons_to_mend(
    content: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "kubeconfig"
    file.write_text(content)
    monkeypatch.setenv("KUBECONFIG", str(file))
    with pytest.raises(UserInputError, match=r"no cluster: .*KUBECONFIG"):
        log_in()


def test_a_certificate_that_is_none_is_the_persons_to_mend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_a_pod_takes_the_address_that_its_kubelet_tells(
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
