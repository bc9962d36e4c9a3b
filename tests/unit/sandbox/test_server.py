"""`kestrl sandbox serve`, used by SandboxFusion's own client and over plain HTTP."""

from __future__ import annotations

import asyncio
import base64
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import pytest_asyncio
from aiohttp.test_utils import TestClient, TestServer
from sandbox_fusion import (
    RunCodeRequest,
    RunJupyterRequest,
    RunStatus,
    run_code,
    run_jupyter,
)

from kestrl_sandbox.backends.zygote import Zygote
from kestrl_sandbox.config import PoolConfig
from kestrl_sandbox.contract import Outcome, Run, SandboxFailure
from kestrl_sandbox.pool.sandbox_pool import SandboxPool
from kestrl_sandbox.remote.server import application

TOKEN = "a-long-token"
Client = Any


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(pool: SandboxPool) -> AsyncIterator[Client]:
    async with TestClient(TestServer(application(pool, TOKEN))) as opened:
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
