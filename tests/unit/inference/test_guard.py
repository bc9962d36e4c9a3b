"""The guard as what it is: an ASGI application around another."""

from __future__ import annotations

import ast
import asyncio
import inspect
import json
import signal
import subprocess
import sys
import time
from typing import Any

import pytest

from kestrl._shared.plan.engines import ROUTES, routes
from kestrl.engines import DRAINING
from kestrl.engines.vllm import Vllm
from kestrl_inference.inside import guard
from kestrl_inference.inside.guard import IDLE_HEADER, ControlGuard, IdleCount

DATA, CONTROL = "the-data-key", "the-control-key"


class Server:
    """What lies behind the guard."""

    def __init__(self) -> None:
        self.reached: list[str] = []
        self.fails = False

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.reached.append(scope.get("path", scope["type"]))
        if self.fails:
            raise RuntimeError("the engine is gone")
        if scope["type"] == "http":
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"{}"})


@pytest.fixture
def server() -> Server:
    return Server()


@pytest.fixture
def guarded(server: Server, monkeypatch: pytest.MonkeyPatch) -> ControlGuard:
    monkeypatch.setenv(guard.DATA_KEY, DATA)
    monkeypatch.setenv(guard.CONTROL_KEY, CONTROL)
    monkeypatch.setenv(guard.ROUTES, routes(Vllm()))
    return ControlGuard(server)


async def ask(app: ControlGuard, method: str, path: str, *headers: tuple[bytes, bytes]) -> tuple[int, Any]:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    await app({"type": "http", "method": method, "path": path, "headers": list(headers)}, receive, send)
    return sent[0]["status"], json.loads(b"".join(message.get("body", b"") for message in sent))


def key(value: str) -> tuple[bytes, bytes]:
    return b"authorization", f"Bearer {value}".encode()


GENERATE = ("POST", "/inference/v1/generate")
LOAD = ("POST", "/v1/load_lora_adapter")


@pytest.mark.parametrize(
    ("route", "without", "data", "control"),
    [
        (("GET", "/health"), 200, 200, 200),
        (("GET", "/metrics"), 200, 200, 200),
        (("GET", "/ping"), 200, 200, 200),
        (GENERATE, 401, 200, 200),
        (("POST", "/inference/v1/abort_requests"), 401, 200, 200),  # of a request by its id
        (("GET", "/v1/models"), 401, 200, 200),
        (("POST", "/v1/completions"), 401, 200, 200),
        (("POST", "/v1/chat/completions"), 401, 200, 200),
        (LOAD, 401, 403, 200),
        (("POST", "/v1/unload_lora_adapter"), 401, 403, 200),
        (("POST", "/adapters"), 401, 403, 200),
        (("DELETE", "/adapters/job.1"), 401, 403, 200),
        (("POST", "/pause"), 401, 403, 200),
        (("POST", "/collective_rpc"), 401, 403, 200),
        # Routes of the development mode, which is on where the engine shares its device in turns.
        (("POST", "/sleep"), 401, 403, 200),
        (("POST", "/wake_up"), 401, 403, 200),
        (("GET", "/is_sleeping"), 401, 403, 200),
        (("POST", "/release_kv_cache_memory"), 401, 403, 200),
        (("POST", "/update_weights"), 401, 403, 200),
        (("POST", "/sleep/"), 401, 403, 200),
        (("GET", "/openapi.json"), 401, 403, 200),
        (("POST", "/health"), 401, 403, 200),
        (("DELETE", "/v1/models"), 401, 403, 200),
        (("POST", "/inference/v1/generate/"), 401, 403, 200),
        (("POST", "/abort_requests"), 401, 403, 200),
        (("POST", "//v1/load_lora_adapter"), 401, 403, 200),
        (("GET", "/a-route-of-the-next-version"), 401, 403, 200),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
async def test_each_key_opens_its_routes(
    guarded: ControlGuard, server: Server, route: tuple[str, str], without: int, data: int, control: int
) -> None:
    answers = [(await ask(guarded, *route, *headers))[0] for headers in ([], [key(DATA)], [key(CONTROL)])]
    assert answers == [without, data, control]
    assert len(server.reached) == answers.count(200), "what is refused never reaches the server"


@pytest.mark.parametrize(
    "header",
    [
        key("wrong"),
        key(DATA + "x"),
        key(DATA[:-1]),
        key(""),
        (b"authorization", DATA.encode()),
        (b"authorization", b"Basic " + DATA.encode()),
        (b"authorization", b"Bearer \xff\xfe"),
        (b"x-api-key", DATA.encode()),
    ],
    ids=["wrong", "longer", "shorter", "empty", "no scheme", "another scheme", "not ASCII", "another header"],
)
async def test_nothing_else_opens_the_data_routes(guarded: ControlGuard, server: Server, header: Any) -> None:
    status, body = await ask(guarded, *GENERATE, header)
    assert status in {401, 403}
    assert body["error"]["code"] == status
    assert "key" in body["error"]["message"]
    assert server.reached == []


async def test_a_refusal_does_not_tell_the_keys(guarded: ControlGuard) -> None:
    _, body = await ask(guarded, *LOAD, key(DATA))
    assert DATA not in str(body)
    assert CONTROL not in str(body)


async def test_start_and_end_of_the_server_pass(guarded: ControlGuard, server: Server) -> None:
    await guarded({"type": "lifespan"}, None, None)  # type: ignore[arg-type]
    assert server.reached == ["lifespan"]


async def test_websockets_are_shut(guarded: ControlGuard, server: Server) -> None:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    await guarded({"type": "websocket", "path": "/v1/realtime", "headers": [key(CONTROL)]}, None, send)  # type: ignore[arg-type]
    assert sent == [{"type": "websocket.close", "code": 1008}]
    assert server.reached == []


@pytest.mark.parametrize("missing", [guard.DATA_KEY, guard.CONTROL_KEY])
def test_a_server_without_keys_does_not_start(server: Server, monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    monkeypatch.setenv(guard.DATA_KEY, DATA)
    monkeypatch.setenv(guard.CONTROL_KEY, CONTROL)
    monkeypatch.setenv(missing, "")
    with pytest.raises(RuntimeError, match="must be set"):
        ControlGuard(server)


@pytest.mark.parametrize(
    "value",
    [
        "",
        "{}",
        "[]",
        '{"open": [], "data": [1], "abort": []}',
        '{"open": null, "data": []}',
        '{"open": [], "data": []}',
    ],
)
def test_a_server_without_routes_does_not_start(
    guarded: ControlGuard, server: Server, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv(guard.ROUTES, value)
    with pytest.raises(RuntimeError, match="KESTRL_ENGINE_ROUTES must have the engine's routes"):
        ControlGuard(server)


def test_the_plan_names_the_variable_as_the_guard_does() -> None:
    assert ROUTES == guard.ROUTES


def test_it_needs_nothing_but_the_standard_library() -> None:
    tree = ast.parse(inspect.getsource(guard))
    modules = [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    modules += [name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names]
    assert {module.split(".")[0] for module in modules} <= sys.stdlib_module_names


class Held(Server):
    """A server that answers when it is released."""

    def __init__(self) -> None:
        super().__init__()
        self.arrived, self.released = asyncio.Event(), asyncio.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.arrived.set()
        await self.released.wait()
        await super().__call__(scope, receive, send)


async def test_a_draining_engine_takes_no_turn_and_finishes_those_that_run(guarded: ControlGuard) -> None:
    now, server = 100.0, Held()
    app = ControlGuard(server, lambda: now)
    turn = asyncio.create_task(ask(app, *GENERATE, key(DATA)))
    await server.arrived.wait()
    assert (await ask(app, *guard.DRAIN, key(DATA)))[0] == 403, "only the agent may"
    assert await ask(app, *guard.DRAIN, key(CONTROL)) == (200, {"running": 1})
    status, body = await ask(app, *GENERATE, key(DATA))
    assert (status, body["error"]["type"], body["error"]["code"]) == (503, DRAINING, 503)
    assert server.reached == []
    server.released.set()
    assert await turn == (200, {})
    assert await ask(app, *guard.DRAIN, key(CONTROL)) == (200, {"running": 0})
    assert (await ask(app, "GET", "/health"))[0] == 200
    assert (await ask(app, *GENERATE, key(CONTROL)))[0] == 200, "the agent may still compare"


async def test_an_engine_that_nobody_drains_any_more_takes_turns_again(guarded: ControlGuard, server: Server) -> None:
    now = 100.0
    app = ControlGuard(server, lambda: now)
    await ask(app, *guard.DRAIN, key(CONTROL))
    now += guard.DRAIN_SECONDS - 0.1
    assert (await ask(app, *GENERATE, key(DATA)))[0] == 503
    now += 0.2
    assert (await ask(app, *GENERATE, key(DATA)))[0] == 200


async def test_a_drain_ends_when_the_engine_is_awake_again(guarded: ControlGuard) -> None:
    await ask(guarded, *guard.DRAIN, key(CONTROL))
    assert (await ask(guarded, *GENERATE, key(DATA)))[0] == 503
    assert [(await ask(guarded, *guard.RESUME, *headers))[0] for headers in ([], [key(DATA)])] == [401, 403]
    assert (await ask(guarded, *GENERATE, key(DATA)))[0] == 503, "who may not end it has not"
    assert (await ask(guarded, *guard.RESUME, key(CONTROL)))[0] == 200
    assert (await ask(guarded, *GENERATE, key(DATA)))[0] == 200


async def test_a_draining_engine_still_ends_a_request(guarded: ControlGuard, server: Server) -> None:
    abort = Vllm().abort("a-turn")
    assert abort is not None
    await ask(guarded, *guard.DRAIN, key(CONTROL))
    assert (await ask(guarded, *GENERATE, key(DATA)))[0] == 503
    assert (await ask(guarded, abort.method, abort.path))[0] == 401
    assert (await ask(guarded, abort.method, abort.path, key(DATA)))[0] == 200
    assert server.reached == [abort.path]


ENDED = """
import asyncio
from kestrl_inference.inside.guard import END, ControlGuard

async def send(message):
    print(message.get("status"), flush=True)

async def ask(token):
    headers = [(b"authorization", b"Bearer " + token)]
    await ControlGuard(None)({"type": "http", "method": END[0], "path": END[1], "headers": headers}, None, send)

async def main():
    for token in (b"", b"the-data-key", b"the-control-key"):
        await ask(token)

asyncio.run(main())
"""


@pytest.mark.usefixtures("guarded")
def test_the_agent_alone_ends_a_server_whose_memory_is_not_known() -> None:
    ended = subprocess.run([sys.executable, "-c", ENDED], capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == -signal.SIGKILL
    assert [line for line in ended.stdout.split() if line != "None"] == ["401", "403"]


def test_workers_know_the_refusal_of_a_draining_engine() -> None:
    assert guard.DRAINING == DRAINING


def test_seconds_without_a_request_are_counted_by_a_scripted_clock() -> None:
    now = 100.0
    count = IdleCount(lambda: now)

    def counted() -> list[float]:
        return [float(part) for part in count.header()[1].split()]

    now = 103.0
    assert counted() == [3.0, 3.0]
    count.begin()
    now = 105.0
    count.begin()
    now = 106.0
    count.end()
    assert counted() == [3.0, 6.0], "one of two requests goes on"
    now = 108.0
    count.end()
    now = 112.0
    assert counted() == [7.0, 12.0]


async def test_the_agent_alone_gets_the_idle_time_and_a_failing_request_ends(
    server: Server, guarded: ControlGuard
) -> None:
    started: list[Any] = []

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            started.append(dict(message["headers"]).get(IDLE_HEADER))

    async def requested(path: str, method: str, *headers: tuple[bytes, bytes]) -> None:
        await guarded({"type": "http", "method": method, "path": path, "headers": list(headers)}, None, send)  # type: ignore[arg-type]

    await requested("/health", "GET")
    assert started == [None]
    server.fails = True
    with pytest.raises(RuntimeError):
        await requested(GENERATE[1], GENERATE[0], key(DATA))
    server.fails = False
    before = time.monotonic()
    await requested("/health", "GET", key(CONTROL))
    while time.monotonic() - before < 0.01:
        pass  # the header has milliseconds
    await requested("/health", "GET", key(CONTROL))
    first, second = (float(header.split()[0]) for header in started[1:])
    assert second > first, "a request that never ends would stop the count"
