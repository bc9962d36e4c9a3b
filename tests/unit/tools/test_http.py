"""Tools of HTTP servers, against a real server: requests, outcomes, retries, sessions, and the bounds of egress."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp.abc import AbstractResolver, ResolveResult
from tests.fakes.mounted_secret import MountedSecret
from tests.fakes.ports import free_port
from tests.unit.tools.http_sample import DOCUMENT, Shop, shop_server
from yarl import URL

from kestrl._shared.plan.settings.tools import EndpointEntry, HttpEntry, SecretText, ToolEntry
from kestrl.errors import Boundary, FailureError, KestrlError, UserInputError
from kestrl.testing.tool_provider import check_tool_provider
from kestrl.tools import ToolError
from kestrl.tools.provider import NO_KWARGS, ToolProvider
from kestrl_tools.catalogue import load_tools, provider_of, providers_of, stop_all, unavailable
from kestrl_tools.http.client import HttpClient
from kestrl_tools.http.egress import Egress
from kestrl_tools.http.provider import HttpProvider
from kestrl_tools.http.requests import HttpRequest
from kestrl_tools.servers import ServerUnavailable
from kestrl_tools.tool_threads import ToolThreads


@pytest.fixture
async def shop() -> AsyncGenerator[Shop]:
    async with shop_server() as served:
        yield served


def entry(shop: Shop, *tools: str, **options: Any) -> ToolEntry:
    server: dict[str, Any] = {"openapi": f"{shop.origin}/openapi.json", "headers": {"X-Key": "k"}, "seconds": 10.0}
    return ToolEntry(name="shop", http=HttpEntry(**{**server, **options}), tools=tools or None)


@asynccontextmanager
async def running(tool: ToolEntry) -> AsyncGenerator[Any]:
    tools = await load_tools([tool], ToolThreads())
    (provider,) = providers_of(tools)
    try:
        await provider.start()
        yield provider
    finally:
        await stop_all([provider])


@asynccontextmanager
async def opened(tool: ToolEntry) -> AsyncGenerator[Any]:
    async with running(tool) as provider:
        session = await provider.open(NO_KWARGS)
        try:
            yield session
        finally:
            await session.close()


async def test_a_server_conforms(shop: Shop) -> None:
    def make() -> ToolProvider:
        return provider_of(entry(shop), "spec.tools[0]", ToolThreads())

    await check_tool_provider(
        make,
        {"getItem": {"id": "a"}, "items_add": {"name": "lamp"}, "visits": {}, "large": {}},
        invalid_create_kwargs={"x": 1},
        slow=("get_sleep", {}),
    )


async def test_arguments_are_sent_in_their_places(shop: Shop) -> None:
    async with opened(entry(shop)) as session:
        shop.requests.clear()
        arguments = {"id": "a b/ü", "id_query": True, "fields": ["x&y", "z"], "tags": [1, 2], "where": {"a": 1}}
        result: Any = await session.call("getItem", {**arguments, "X-Trace": "t"}, {})
        path = "/api/items/a%20b%2F%C3%BC?fields=x%26y&fields=z&tags=1,2&where=%7B%22a%22%3A%201%7D&id=true"
        assert result.data["structured"] == {"path": path, "body": ""}
        assert result.data["status"] == 200
        assert json.loads(result.text) == result.data["structured"]
        await session.call("items_add", {"name": "lamp", "price": None}, {"name": "chair"})
        await session.call("putItem", {"id": "7", "body": {"name": "lamp"}}, {})
    got, added, put = shop.requests
    assert (got["headers"]["X-Key"], got["headers"]["X-Trace"]) == ("k", "t")
    assert (added["method"], added["path"], json.loads(added["body"])) == (
        "POST",
        "/api/items",
        {"name": "chair", "price": None},
    )
    assert (put["method"], put["path"], json.loads(put["body"])) == ("PUT", "/api/items/7", {"name": "lamp"})


async def test_the_model_sees_parameters_without_what_is_fixed(shop: Shop) -> None:
    tools = await load_tools([entry(shop)], ToolThreads())
    await stop_all(providers_of(tools))
    schema = tools["getItem"].schema
    assert schema.description == "Gets an item."
    assert schema.parameters["properties"]["id"] == {"type": "string", "description": "Its id."}
    assert list(schema.parameters["properties"]) == ["id", "fields", "tags", "where", "X-Trace", "id_query"]
    assert schema.parameters["required"] == ["id"]
    assert schema.parameters["additionalProperties"] is False
    body = tools["putItem"].schema.parameters  # its `id` would be the path's
    assert set(body["properties"]) == {"id", "body"}
    assert body["properties"]["body"]["required"] == ["name"]
    assert "created" not in body["properties"]["body"]["properties"]
    flat = tools["items_add"].schema.parameters
    assert flat["properties"]["price"] == {"type": ["number", "null"], "exclusiveMinimum": 0}


@pytest.mark.parametrize("value", ["", ".", "..", "../secret", "a/../..", "..\\x"])
async def test_an_argument_cannot_leave_its_place_in_the_path(shop: Shop, value: str) -> None:
    async with opened(entry(shop, "getItem")) as session:
        shop.requests.clear()
        with pytest.raises(ToolError, match="argument 'id' must be neither empty nor"):
            await session.call("getItem", {"id": value}, {})
        with pytest.raises(ToolError, match="argument 'X-Trace' must have printable ASCII"):
            await session.call("getItem", {"id": "a", "X-Trace": "a\r\nHost: b"}, {})
    assert not shop.requests


async def test_outcomes_of_calls(serve: Any, shop: Shop) -> None:
    async with serve(entry(shop, seconds=1.0), call_seconds=10) as client:
        session = await client.open()
        assert {tool.environment for tool in await client.list()} == {"shop"}
        refused = await client.call(session, "status", {"code": 404})
        assert (refused.outcome, refused.text) == ("tool_error", 'HTTP 404 Not Found: {"detail": "no such item"}')
        assert (await client.call(session, "status", {"code": "a"})).outcome == "schema_violation"
        empty = await client.call(session, "status", {"code": 204})
        assert (empty.outcome, empty.text) == ("ok", "[HTTP 204 No Content, without content]")
        assert (await client.call(session, "image")).text == "[content of type image/png, 4 bytes, is not shown]"
        failures = {
            ("status", 500): (Boundary.INFRASTRUCTURE, "tool_server_unavailable", "answers with 500"),
            ("status", 429): (Boundary.INFRASTRUCTURE, "tool_server_unavailable", "answers with 429"),
            ("post_status", 500): (Boundary.INFRASTRUCTURE, "tool_server_unavailable", r"attempts: 1,"),
            ("status", 304): (Boundary.TOOL, "tool_result_invalid", "answers with 304"),
            ("drop", None): (Boundary.INFRASTRUCTURE, "tool_server_unavailable", "connection was lost"),
            ("post_drop", None): (Boundary.INFRASTRUCTURE, "tool_server_unavailable", r"attempts: 1,"),
            ("get_sleep", None): (Boundary.TOOL, "tool_deadline", "no response within 1 s"),
        }
        for (name, code), (boundary, kind, message) in failures.items():
            with pytest.raises(FailureError, match=message) as caught:
                await client.call(session, name, {} if code is None else {"code": code})
            assert (caught.value.boundary, caught.value.code) == (boundary, kind), name
            assert caught.value.retryable == (boundary is Boundary.INFRASTRUCTURE)


async def test_a_server_that_refuses_for_a_time_is_asked_again(shop: Shop) -> None:
    tools = await load_tools([entry(shop, "status", "post_status", seconds=30.0)], ToolThreads())
    (provider,) = providers_of(tools)
    try:
        session: Any = await provider.open(NO_KWARGS)
        for tool, statuses in {"status": [503, 500, 429, 502], "post_status": [429, 503]}.items():
            shop.statuses, before = list(statuses), len(shop.requests)
            assert (await session.call(tool, {"code": 200}, {})).data["status"] == 200
            assert len(shop.requests) - before == len(statuses) + 1
        with pytest.raises(ServerUnavailable, match="answers with 500"):
            await session.call("post_status", {"code": 500}, {})
        assert "answers with 500" in provider.health()
        assert unavailable(tools) == {"shop": 1}
        await session.call("status", {"code": 204}, {})
        assert unavailable(tools) == {"shop": 0}
        await session.close()
    finally:
        await stop_all([provider])


async def test_a_server_that_is_away_is_waited_for(shop: Shop) -> None:
    endpoint = EndpointEntry(name="ping", description="Pings.", method="GET", path="/ping")
    away = HttpEntry(endpoints=(endpoint,), base_url=f"http://127.0.0.1:{free_port()}", seconds=3.0)
    async with opened(ToolEntry(name="away", http=away)) as session:
        with pytest.raises(ServerUnavailable, match=r"ping: cannot be reached.*attempts: ([2-9]|1\d), time limit: 3 s"):
            await session.call("ping", {}, {})


async def test_more_calls_than_requests_wait_and_say_so(shop: Shop) -> None:
    client = HttpClient("shop", Egress([("127.0.0.1", shop.port)], ()), concurrency=1, max_bytes=1000)
    sleep, ping = (
        HttpRequest(method="GET", url=URL(f"{shop.origin}/api/{path}"), headers={}) for path in ("sleep", "x")
    )
    async with client.session() as session:
        slow = asyncio.ensure_future(client.ask(session, sleep, {}, seconds=60))
        await shop.asleep.wait()
        with pytest.raises(ServerUnavailable, match=r"all 1 requests \(http.concurrency\) were in use"):
            await client.ask(session, ping, {}, seconds=0.2)
        slow.cancel()
        await asyncio.wait({slow})
        assert (await client.ask(session, ping, {}, seconds=30)).status == 200
    await client.close()


async def test_episodes_have_cookies_and_a_header_of_their_own(shop: Shop) -> None:
    async with running(entry(shop, "visits", session_header="X-Session")) as provider:
        sessions = [await provider.open(NO_KWARGS) for _ in range(2)]
        found = [[(await one.call("visits", {}, {})).data["structured"] for _ in range(2)] for one in sessions]
        for one in sessions:
            await one.close()
    assert [[visit["visits"] for visit in visits] for visits in found] == [[1, 2], [1, 2]]
    ids = [{visit["session"] for visit in visits} for visits in found]
    assert len(ids[0]) == len(ids[1]) == 1
    assert all(len(next(iter(each))) > 16 for each in ids)
    assert ids[0] != ids[1]


async def test_a_long_response_is_cut_with_a_marker(shop: Shop) -> None:
    async with opened(entry(shop, "large", max_response_bytes=1001)) as session:
        result: Any = await session.call("large", {}, {})
    assert result.text == "ä" * 500 + "\n[cut after 1001 bytes]"
    assert result.data == {"status": 200, "truncated": True}


async def test_secrets_go_to_their_server_only(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KESTRL_TOOL_SECRET_0", "s3cret")
    secret = {"Authorization": SecretText(variable="KESTRL_TOOL_SECRET_0", prefix="Bearer ")}
    async with shop_server() as other:
        allowed = (f"127.0.0.1:{other.port}",)
        async with opened(entry(shop, "redirect", secret_headers=secret, allow_hosts=allowed)) as session:
            result: Any = await session.call("redirect", {"to": f"{other.origin}/next?a=1"}, {})
            assert result.data["structured"]["path"] == "/next?a=1"
            back: Any = await session.call("redirect", {"to": "/api/items/9"}, {})
            assert back.data["structured"]["path"] == "/api/items/9"
    assert {request["headers"].get("Authorization") for request in shop.requests} == {"Bearer s3cret"}
    assert not {"Authorization", "X-Key"} & set(other.requests[0]["headers"])


async def test_a_rotated_secret_is_sent_from_the_next_call_on(
    shop: Shop, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    mounted = MountedSecret(tmp_path / "mounted")
    monkeypatch.setenv("KESTRL_USER_SECRETS", str(mounted.folder))
    monkeypatch.setenv("KESTRL_TOOL_SECRET_0", "canary-of-the-start")
    mounted.write({"KESTRL_TOOL_SECRET_0": "canary-old\n"})
    secret = {"X-Session": SecretText(variable="KESTRL_TOOL_SECRET_0", prefix="Token ")}
    async with opened(entry(shop, "visits", secret_headers=secret)) as session:
        for present in ("canary-old", "canary-new"):
            mounted.write({"KESTRL_TOOL_SECRET_0": present})
            result: Any = await session.call("visits", {}, {})
            assert result.data["structured"]["session"] == "Token [redacted]"
            assert shop.requests[-1]["headers"]["X-Session"] == f"Token {present}"


async def test_a_secret_that_a_server_repeats_reaches_nobody(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KESTRL_TOOL_SECRET_0", "canary-0123")
    secret = {"X-Session": SecretText(variable="KESTRL_TOOL_SECRET_0", prefix="Token ")}
    allowed = (f"127.0.0.1:{shop.port}",)
    async with opened(entry(shop, "visits", "redirect", secret_headers=secret, allow_hosts=allowed)) as session:
        result: Any = await session.call("visits", {}, {})
        assert result.data["structured"]["session"] == "Token [redacted]"
        assert "canary" not in result.text
        with pytest.raises(KestrlError) as caught:
            await session.call("redirect", {"to": "file:///canary-0123"}, {})
        assert "canary" not in str(caught.value) + caught.value.failure().message
    assert shop.requests[-1]["headers"]["X-Session"] == "Token canary-0123"


@pytest.mark.parametrize(
    "place", ["http://127.0.0.1:1/", "http://localhost:{port}/", "file:///etc/passwd", "http://169.254.169.254/latest"]
)
async def test_a_redirect_to_another_place_is_refused(shop: Shop, place: str) -> None:
    async with opened(entry(shop, "redirect")) as session:
        with pytest.raises(KestrlError, match="the manifest does not allow that host and port") as caught:
            await session.call("redirect", {"to": place.format(port=shop.port)}, {})
        assert (caught.value.boundary, caught.value.code) == (Boundary.TOOL, "tool_egress_denied")
        with pytest.raises(KestrlError, match="more than 5 redirects"):
            await session.call("redirect", {"to": "/api/loop"}, {})


PRIVATE = ("127.0.0.1", "10.0.0.7", "192.168.1.1", "100.64.0.1", "::1", "fd00::1", "2002:7f00:1::")
PRIVATE_IPV4_IN_IPV6 = ("::ffff:127.0.0.1", "64:ff9b::a00:1")
NEVER = ("169.254.169.254", "168.63.129.16", "fd00:ec2::254", "224.0.0.1", "0.0.0.0", "fe80::1")


class Names(AbstractResolver):
    """A resolver of names that answers with one address after another, as a name that is rebound."""

    def __init__(self, *addresses: str) -> None:
        self.addresses = list(addresses)
        self.asked = 0

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        address = self.addresses[min(self.asked, len(self.addresses) - 1)]
        self.asked += 1
        kind = socket.AF_INET6 if ":" in address else socket.AF_INET
        return [ResolveResult(hostname=host, host=address, port=port, family=kind, proto=0, flags=0)]

    async def close(self) -> None:
        return None


async def resolved_call(port: int, host: str, names: Names, *private: str) -> object:
    endpoint = EndpointEntry(name="ping", description="Pings.", method="GET", path="/ping")
    server = HttpEntry(endpoints=(endpoint,), base_url=f"http://{host}:{port}", private_networks=private, seconds=10.0)
    provider = HttpProvider(ToolEntry(name="named", http=server), server, None, names=names)
    await provider.list_tools()
    session = await provider.open(NO_KWARGS)
    try:
        return await session.call("ping", {}, {})
    finally:
        await session.close()
        await provider.stop()


@pytest.mark.parametrize(
    "address",
    [*PRIVATE, *PRIVATE_IPV4_IN_IPV6, *NEVER],
)
async def test_a_public_name_with_another_address_is_refused(shop: Shop, address: str) -> None:
    names = Names(address)
    with pytest.raises(KestrlError, match=r"api.example.com is refused: it has the address .* not public") as caught:
        await resolved_call(shop.port, "api.example.com", names)
    assert caught.value.code == "tool_egress_denied"
    assert names.asked == 1
    assert not shop.requests


@pytest.mark.parametrize("address", ["169.254.169.254", "fd00:ec2::254", "168.63.129.16", "0.0.0.0"])
@pytest.mark.parametrize("host", ["metadata.google.internal", "metadata"])
async def test_metadata_services_are_never_reached(host: str, address: str) -> None:
    with pytest.raises(KestrlError, match="is refused: it has the address"):
        await resolved_call(80, host, Names(address), "0.0.0.0/0", "::/0")
    with pytest.raises(KestrlError, match="an address that no tool may reach"):
        await resolved_call(80, f"[{address}]" if ":" in address else address, Names("127.0.0.1"))


@pytest.mark.parametrize(
    ("host", "private"),
    [
        ("api.example.com", ("127.0.0.0/8",)),
        ("search.tools.svc", ()),
        ("search.tools.svc.cluster.local", ()),
        ("s", ()),
    ],
)
async def test_private_addresses_are_reached_where_listed(shop: Shop, host: str, private: tuple[str, ...]) -> None:
    await resolved_call(shop.port, host, Names("127.0.0.1"), *private)
    assert len(shop.requests) == 1


async def test_the_address_that_was_checked_is_the_one_connected_to(shop: Shop) -> None:
    """The second answer would be refused: nothing asks for it between the check and the connection."""
    names = Names("127.0.0.1", "10.0.0.7")
    await resolved_call(shop.port, "api.example.com", names, "127.0.0.1/32")
    assert names.asked == 1


async def test_endpoints_of_the_manifest_are_tools(shop: Shop) -> None:
    find = EndpointEntry(
        name="find",
        description="Finds things.",
        method="GET",
        path="/things/{kind}",
        parameters={"kind": {"type": "string"}, "limit": {"type": "integer", "minimum": 1}},
        required=("kind",),
    )
    add = EndpointEntry(
        name="add", description="Adds.", method="POST", path="/things", parameters={"name": {"type": "string"}}
    )
    server = HttpEntry(endpoints=(find, add), base_url=f"{shop.origin}/v1/", seconds=10.0)
    async with opened(ToolEntry(name="things", http=server)) as session:
        await session.call("find", {"kind": "a", "limit": 3}, {})
        await session.call("add", {"name": "b"}, {})
        await session.call("add", {}, {})
    sent = [(request["method"], request["path"], request["body"]) for request in shop.requests]
    assert sent == [
        ("GET", "/v1/things/a?limit=3", ""),
        ("POST", "/v1/things", '{"name": "b"}'),
        ("POST", "/v1/things", "{}"),
    ]


async def test_a_document_that_cannot_be_read_is_named_by_field(shop: Shop, tmp_path: Path) -> None:
    (tmp_path / "old.yaml").write_text("swagger: '2.0'\npaths: {}\n")
    (tmp_path / "broken.yaml").write_text("openapi: [\n")
    cases = {
        "missing.yaml": "No such file",
        "old.yaml": "its version is 'swagger 2.0'; convert it to OpenAPI 3.0 or 3.1",
        "broken.yaml": "it is neither JSON nor YAML",
        f"{shop.origin}/api/status/404": "the server answers with 404 Not Found",
        f"{shop.origin}/api/redirect?to=http://127.0.0.1:1/": "the manifest does not allow that host and port",
    }
    for place, message in cases.items():
        server = HttpEntry(openapi=place, base_url=shop.origin, seconds=10.0)
        with pytest.raises(UserInputError, match=rf"spec.tools\[0\].http.openapi: .*{message}"):
            await load_tools([ToolEntry(name="shop", http=server)], ToolThreads(), folder=str(tmp_path))
    with pytest.raises(
        UserInputError, match=r"spec.tools\[0\].tools: shop has no tool getItems \(it has: drop, getItem, "
    ):
        await load_tools([entry(shop, "getItems")], ToolThreads())


async def test_the_server_of_a_document_must_be_where_the_document_is(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    for address in ("http://127.0.0.1:1/v1", "https://{region}.example.com", "http://h:port"):
        monkeypatch.setitem(DOCUMENT, "servers", [{"url": address}])
        with pytest.raises(
            UserInputError, match=r"spec.tools\[0\].http.baseUrl: is missing, and the document's server"
        ):
            await load_tools([entry(shop)], ToolThreads())


async def test_what_fastapi_describes_can_be_called() -> None:
    fastapi: Any = pytest.importorskip("fastapi")
    uvicorn: Any = pytest.importorskip("uvicorn")
    app: Any = fastapi.FastAPI()

    async def add_item(name: str, count: int = 1, tags: list[str] | None = None) -> dict[str, Any]:
        """Adds an item."""
        return {"name": name, "count": count, "tags": tags}

    app.post("/items/{name}")(add_item)
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="warning", lifespan="off"))
    listening = socket.create_server(("127.0.0.1", 0))
    serving = asyncio.create_task(server.serve(sockets=[listening]))
    address = f"http://127.0.0.1:{listening.getsockname()[1]}"
    try:
        tool = ToolEntry(name="items", http=HttpEntry(openapi=f"{address}/openapi.json", seconds=20.0))
        async with opened(tool) as session:
            name = "add_item_items__name__post"
            result: Any = await session.call(name, {"name": "lamp", "count": 2, "body": ["a"]}, {})
            with pytest.raises(ToolError, match="HTTP 422"):
                await session.call(name, {"name": "lamp", "count": "two"}, {})
    finally:
        server.should_exit = True
        await serving
    assert result.data["structured"] == {"name": "lamp", "count": 2, "tags": ["a"]}


@pytest.fixture
def mounted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> MountedSecret:
    """A Secret as the kubelet mounts it, with the key `old`."""
    secret = MountedSecret(tmp_path / "mounted")
    monkeypatch.setenv("KESTRL_USER_SECRETS", str(secret.folder))
    secret.write({"KESTRL_TOOL_SECRET_0": "canary-old"})
    return secret


def keyed(shop: Shop, *tools: str, seconds: float = 20.0) -> ToolEntry:
    key = {"X-Session": SecretText(variable="KESTRL_TOOL_SECRET_0")}
    server = HttpEntry(
        openapi=f"{shop.origin}/openapi.json", headers={"X-Key": "k"}, secret_headers=key, seconds=seconds
    )
    return ToolEntry(name="shop", http=server, tools=tools)


async def test_a_credential_that_was_accepted_is_waited_for(shop: Shop, mounted: MountedSecret) -> None:
    async with opened(keyed(shop, "visits", "post_status")) as session:
        await session.call("visits", {}, {})
        shop.accepted = "canary-new"
        calling = asyncio.create_task(session.call("post_status", {"code": 200}, {}))
        for _ in ("the call", "the proof"):
            await shop.refused.acquire()
        mounted.write({"KESTRL_TOOL_SECRET_0": "canary-new"})
        result: Any = await calling
        assert result.data["status"] == 200
        assert [request["path"] for request in shop.requests[2:]] == [
            "/api/status/200",
            "/api/visits",
            "/api/status/200",
        ], "a refused call, the proof, and the call again"
        assert "Cookie" not in shop.requests[3]["headers"], "the proof is nobody's episode"


async def test_one_that_is_not_replaced_in_time_is_a_failure_that_can_be_retried(
    shop: Shop, mounted: MountedSecret
) -> None:
    async with opened(keyed(shop, "visits", seconds=1.0)) as session:
        await session.call("visits", {}, {})
        shop.accepted = "canary-new"
        with pytest.raises(KestrlError, match=r"refuses the credential of http\.secretHeaders") as caught:
            await session.call("visits", {}, {})
    failure = caught.value.failure()
    assert (failure.boundary, failure.code, failure.retryable) == (Boundary.TOOL, "tool_unauthorized", True)
    assert "canary" not in failure.message


async def test_a_call_that_is_refused_alone_is_the_models(shop: Shop, mounted: MountedSecret) -> None:
    """Else a model could end its episodes as failures."""
    async with opened(keyed(shop, "visits", "status")) as session:
        await session.call("visits", {}, {})
        with pytest.raises(ToolError, match="HTTP 401"):
            await session.call("status", {"code": 401}, {})
        assert shop.requests[-1]["path"] == "/api/visits"


async def test_the_refusal_of_a_credential_that_never_was_accepted_is_the_models(
    shop: Shop, mounted: MountedSecret
) -> None:
    async with opened(keyed(shop, "visits")) as session:
        shop.accepted = "another"
        with pytest.raises(ToolError, match="HTTP 401"):
            await session.call("visits", {}, {})
