"""`kestrl sandbox serve`, used by SandboxFusion's own client and over plain HTTP."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
import pytest_asyncio
from aiohttp import WSMsgType, WSServerHandshakeError
from aiohttp.test_utils import TestClient, TestServer
from sandbox_fusion import (
    RunCodeRequest,
    RunJupyterRequest,
    RunStatus,
    run_code,
    run_jupyter,
)
from tests.fakes.mounted_secret import MountedSecret

from kestrl_sandbox.backends.zygote import Zygote
from kestrl_sandbox.config import PoolConfig
from kestrl_sandbox.contract import Limits, Outcome, Run, SandboxFailure
from kestrl_sandbox.pool.sandbox_pool import SandboxPool
from kestrl_sandbox.remote.server import application
from kestrl_sandbox.remote.wire import SlotRequest

TOKEN = "a-long-token"
Client = Any


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(pool: SandboxPool) -> AsyncIterator[Client]:
    async with TestClient(TestServer(application(pool, lambda: TOKEN))) as opened:
        opened.session.headers["Authorization"] = f"Bearer {TOKEN}"
        yield opened


async def post(client: Client, path: str = "/run_code", **body: Any) -> dict[str, Any]:
    async with client.post(path, json={"language": "python", **body}) as response:
        assert response.status == 200, await response.text()
        return await response.json()


@pytest.mark.asyncio(loop_scope="module")
async def test_a_ping_needs_no_token(client: Client) -> None:
    async with client.get("/v1/ping", headers={"Authorization": ""}) as response:
        assert (response.status, await response.json()) == (200, "pong")


@pytest.mark.parametrize(
    "shown", ["", "Bearer wrong", "Basic ", "Basic !!", "Bearer", "Basic " + base64.b64encode(b"x:y").decode()]
)
@pytest.mark.asyncio(loop_scope="module")
async def test_a_request_without_the_token_is_refused(client: Client, shown: str) -> None:
    body = {"code": "1", "language": "python"}
    async with client.post("/run_code", json=body, headers={"Authorization": shown}) as response:
        assert response.status == 401


@pytest.mark.parametrize(
    ("code", "status", "run_status", "return_code", "outcome"),
    [
        ("print(123)", "Success", "Finished", 0, "ok"),
        ("assert False", "Failed", "Finished", 1, "nonzero_exit"),
        ("def", "Failed", "Finished", 1, "nonzero_exit"),
        ("import time; time.sleep(9)", "Failed", "TimeLimitExceeded", None, "timeout"),
        ("import os; os.kill(os.getpid(), 9)", "Failed", "Finished", -9, "signal"),
        ("x = bytearray(10**9)", "Failed", "Finished", 1, "out_of_memory"),
    ],
)
@pytest.mark.asyncio(loop_scope="module")
async def test_a_run(
    client: Client, code: str, status: str, run_status: str, return_code: int | None, outcome: str
) -> None:
    answer = await post(client, code=code, run_timeout=1 if outcome == "timeout" else 30)
    result = answer["run_result"]
    found = (answer["status"], result["status"], result["return_code"], answer["outcome"])
    assert found == (status, run_status, return_code, outcome)
    assert answer["compile_result"] is None


@pytest.mark.asyncio(loop_scope="module")
async def test_files_input_and_bash(client: Client) -> None:
    content = base64.b64encode(b"\0data").decode()
    answer = await post(
        client,
        language="bash",
        code="cat dir/in; cat; cp dir/in out",
        stdin="typed",
        files={"dir/in": content, "unused": None},
        fetch_files=["out", "none"],
    )
    assert answer["run_result"]["stdout"] == "\0datatyped"
    assert answer["files"] == {"out": content}


@pytest.mark.asyncio(loop_scope="module")
async def test_more_output_than_a_pipe_holds_is_no_timeout(client: Client) -> None:
    answer = await post(client, code="print('x' * 1_000_000)", run_timeout=10)
    assert (answer["status"], len(answer["run_result"]["stdout"]), answer["truncated"]) == ("Success", 1_000_001, False)


@pytest.mark.parametrize(
    ("body", "part"),
    [
        ({"language": "cobol"}, "language"),
        ({"run_timeout": 0}, "run_timeout"),
        ({"files": {"a": "no base64!"}}, "is not base64"),
        ({"files": {"../a": ""}}, "has a part `..`"),
        ({"memory_limit_MB": 10**6}, "memory_mb"),
        ({"code": None}, "code"),
    ],
)
@pytest.mark.asyncio(loop_scope="module")
async def test_an_invalid_request_names_its_field(client: Client, body: dict[str, Any], part: str) -> None:
    async with client.post("/run_code", json={"code": "1", "language": "python"} | body) as response:
        assert response.status == 422
        assert part in await response.text()


@pytest.mark.parametrize("path", ["/run_code", "/run_jupyter"])
@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b"print(1)",
        b"null",
        b"[]",
        b'{"code": "\\ud800", "language": "python"}',
        b"[" * 100_000,
        b'{"code": "1", "language": "python", "run_timeout": NaN}',
        b'{"code": "1", "language": "python", "memory_limit_MB": ' + b"9" * 5000 + b"}",
        b'{"code": "1", "language": "python", "fetch_files": ["\\u0000"], "cells": ["1"]}',
    ],
)
@pytest.mark.asyncio(loop_scope="module")
async def test_a_body_that_is_no_request_is_the_clients_error(client: Client, path: str, content: bytes) -> None:
    async with client.post(path, data=content, headers={"Content-Type": "application/json"}) as response:
        assert response.status == 422
        assert (await response.json())["detail"]


@pytest.mark.parametrize("shown", ["Bearer \udcff\udcfe", "Basic \udcff", "Basic w7/Dvw==", "Bearer é"])
@pytest.mark.asyncio(loop_scope="module")
async def test_a_token_that_is_no_text_is_refused(client: Client, shown: str) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", client.server.port)
    head = f"POST /run_code HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\nAuthorization: {shown}\r\n\r\n"
    writer.write(head.encode("utf-8", "surrogateescape"))
    assert b" 401 " in await reader.readline()
    writer.close()


FOREIGN = [
    {"Origin": "https://elsewhere.example"},
    {"Origin": "null"},
    {"Origin": ""},
    {"Origin": "http://127.0.0.1:1"},
    {"Origin": "http://[", "Host": "127.0.0.1"},
    {"Host": "elsewhere.example"},
    {"Host": "127.0.0.1.elsewhere.example"},
    {"Host": "elsewhere.example", "Origin": "http://elsewhere.example"},
    {"Host": "["},
]


@pytest.mark.parametrize("headers", FOREIGN, ids=str)
@pytest.mark.asyncio(loop_scope="module")
async def test_a_page_of_a_browser_runs_no_code(pool: SandboxPool, headers: dict[str, str]) -> None:
    body = '{"code": "print(42)", "language": "python"}'
    async with TestClient(TestServer(application(pool, None))) as open_to_all:
        plain = {"Content-Type": "text/plain", **headers}
        async with open_to_all.post("/run_code", data=body, headers=plain) as response:
            assert response.status == 403
        async with open_to_all.get("/v1/slot", headers=headers) as response:
            assert response.status == 403
        with pytest.raises(WSServerHandshakeError) as refused:
            await open_to_all.ws_connect("/v1/slot", headers=headers)
        assert refused.value.status == 403


@pytest.mark.asyncio(loop_scope="module")
async def test_a_page_of_the_server_itself_and_a_program_are_answered(pool: SandboxPool) -> None:
    body = {"code": "print(42)", "language": "python"}
    async with TestClient(TestServer(application(pool, None))) as open_to_all:
        place = f"127.0.0.1:{open_to_all.server.port}"
        for headers in ({}, {"Origin": f"http://{place}"}, {"Host": "localhost"}, {"Host": "[::1]:80"}):
            async with open_to_all.post("/run_code", json=body, headers=headers) as response:
                assert response.status == 200


@pytest.mark.asyncio(loop_scope="module")
async def test_with_a_token_a_server_has_any_name_and_no_foreign_page(client: Client) -> None:
    body = {"code": "print(42)", "language": "python"}
    async with client.post("/run_code", json=body, headers={"Host": "sandbox.svc"}) as response:
        assert response.status == 200
    async with client.post("/run_code", json=body, headers={"Origin": "https://elsewhere.example"}) as response:
        assert response.status == 403


def slot_request(**fields: Any) -> str:
    run = Run(code="x = 1", limits=Limits(seconds=5))
    return json.dumps(SlotRequest.of(run, session=True).model_dump(mode="json") | fields)


@pytest.mark.asyncio(loop_scope="module")
async def test_an_idle_session_gives_its_place_back() -> None:
    small = await SandboxPool.start(Zygote.start, PoolConfig(max_sandboxes=2))
    try:
        async with TestClient(TestServer(application(small, None, idle_seconds=0.3))) as client:
            idle = [await client.ws_connect("/v1/slot") for _ in range(2)]
            for socket in idle:
                await socket.receive()
                await socket.send_str(slot_request())
                assert json.loads((await socket.receive()).data)["result"]["outcome"] == "ok"
            assert small.running == 2
            answer = await client.post("/run_code", json={"code": "print(1)", "language": "python"})
            assert (await answer.json())["run_result"]["stdout"] == "1\n"
            for socket in idle:
                assert (await socket.receive()).type is WSMsgType.CLOSE
    finally:
        await small.close()


@pytest.mark.parametrize(
    ("fields", "part"),
    [
        ({"output_bytes": -5}, "output_bytes: must be from 0"),
        ({"file_bytes": -1}, "file_bytes: must be from 0"),
        ({"output_bytes": 10**12}, "output_bytes: must be from 0"),
        ({"code": "/w=="}, "code: is no UTF-8"),
        ({"seconds": "nan"}, "seconds: must be above 0"),
        ({"fetch": ["x\0"]}, "has a NUL character"),
    ],
)
@pytest.mark.asyncio(loop_scope="module")
async def test_a_slot_request_that_cannot_be_used_is_refused_by_its_field(
    client: Client, fields: dict[str, Any], part: str
) -> None:
    async with client.ws_connect("/v1/slot") as socket:
        await socket.receive()
        await socket.send_str(slot_request(**fields))
        assert part in json.loads((await socket.receive()).data)["refused"]


@pytest.mark.asyncio(loop_scope="module")
async def test_a_notebook_keeps_its_state_and_reports_each_cell(client: Client) -> None:
    cells = ["a = 123", "a", "print(a)", "import sys; sys.stderr.write('e')", "raise RuntimeError('no')", "a + 1"]
    answer = await post(client, "/run_jupyter", cells=cells, fetch_files=[])
    assert (answer["status"], answer["driver"]["status"]) == ("Success", "Finished")
    found = answer["cells"]
    assert [cell["display"] for cell in found] == [
        [],
        [{"text/plain": "123"}],
        [],
        [{"text/plain": "1"}],
        [],
        [{"text/plain": "124"}],
    ]
    assert (found[2]["stdout"], found[3]["stderr"]) == ("123\n", "e")
    (error,) = found[4]["error"]
    assert (error["ename"], error["evalue"], error["traceback"][-1]) == ("RuntimeError", "no", "RuntimeError: no")


@pytest.mark.parametrize("limits", [{"cell_timeout": 0.2}, {"total_timeout": 0.2}])
@pytest.mark.asyncio(loop_scope="module")
async def test_a_notebook_ends_at_its_limit(client: Client, limits: dict[str, float]) -> None:
    answer = await post(client, "/run_jupyter", cells=["1", "while True: pass", "2"], **limits)
    assert (answer["status"], answer["driver"]["status"]) == ("Failed", "TimeLimitExceeded")


@pytest.mark.asyncio(loop_scope="module")
async def test_a_failure_of_the_sandbox_is_no_result(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(*_arguments: object) -> None:
        raise SandboxFailure("out of processes")

    monkeypatch.setattr(SandboxPool, "run", broken)
    answer = await post(client, code="1")
    assert (answer["status"], "out of processes" in answer["message"]) == ("SandboxError", True)


async def test_a_flood_is_refused_with_the_time_to_wait() -> None:
    small = await SandboxPool.start(Zygote.start, PoolConfig(max_sandboxes=1, max_waiting=1))
    try:
        async with TestClient(TestServer(application(small, None))) as client:
            body = {"code": "import time; time.sleep(.5)", "language": "python"}
            answers = await asyncio.gather(*[client.post("/run_code", json=body) for _ in range(6)])
        refused = [answer for answer in answers if answer.status == 429]
        assert sorted({answer.status for answer in answers}) == [200, 429]
        assert {answer.headers["Retry-After"] for answer in refused} == {"1"}
        assert (await small.run(Run(code="print(1)"))).outcome is Outcome.OK
    finally:
        await small.close()


@contextmanager
def serving(*arguments: str, **environment: str) -> Iterator[str]:
    """Address of a `kestrl sandbox serve`."""
    command = [sys.executable, "-m", "kestrl._app.cli.main", "sandbox", "serve", "--port", "0", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | environment) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().split()[2]
        finally:
            process.send_signal(signal.SIGTERM)
            assert process.wait(20) == 0


def test_sandbox_fusions_client_works_by_changing_the_url() -> None:
    with serving(KESTRL_SANDBOX_TOKEN=TOKEN) as address:
        assert address.startswith("http://127.0.0.1:")
        endpoint = address.replace("http://", f"http://:{TOKEN}@")
        request = RunCodeRequest(code="print(input())", language="python", stdin="hi", run_timeout=5)
        result = run_code(request, endpoint=endpoint, max_attempts=1)
        assert (result.status, result.run_result.stdout) == (RunStatus.Success, "hi\n")
        failed = run_code(RunCodeRequest(code="1/0", language="python"), endpoint=endpoint, max_attempts=1)
        assert (failed.status, failed.run_result.return_code) == (RunStatus.Failed, 1)
        notebook = run_jupyter(RunJupyterRequest(cells=["a = 2", "a * 21"]), endpoint=endpoint, max_attempts=1)
        assert notebook.cells[1].display == [{"text/plain": "42"}]
        with pytest.raises(Exception, match="401"):
            run_code(request, endpoint=address, max_attempts=1)


def test_a_rotated_token_is_in_force_at_once(tmp_path: Path) -> None:
    def ask(address: str, token: str) -> int:
        request = Request(f"{address}/run_code", b"{}", {"Authorization": f"Bearer {token}"})
        try:
            with urlopen(request, timeout=20) as answer:
                return int(answer.status)
        except HTTPError as error:
            with error:
                return error.code

    secret = MountedSecret(tmp_path / "secret")
    secret.write({"KESTRL_SANDBOX_TOKEN": "before"})
    with serving(KESTRL_USER_SECRETS=str(secret.folder)) as address:
        assert [ask(address, token) for token in ("before", "after", "")] == [422, 401, 401]
        secret.write({"KESTRL_SANDBOX_TOKEN": "after"})
        assert [ask(address, token) for token in ("before", "after")] == [401, 422]
        secret.write({})
        assert [ask(address, token) for token in ("after", "")] == [401, 401], "never without a token"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--host", "0.0.0.0"], "error: --host: 0.0.0.0 can be reached from elsewhere; set KESTRL_SANDBOX_TOKEN"),
        (["--backend", "docker"], "error: backend: there is no 'docker'"),
    ],
)
def test_what_cannot_be_served_is_an_input_error(arguments: list[str], message: str) -> None:
    command = [sys.executable, "-m", "kestrl._app.cli.main", "sandbox", "serve", "--port", "0", *arguments]
    environment = {name: value for name, value in os.environ.items() if name != "KESTRL_SANDBOX_TOKEN"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert (done.returncode, message in done.stderr) == (2, True), done.stderr
