"""`code_interpreter` as a tool of a job, called over gRPC as the rollout worker calls it."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from tests.unit.tools.conftest import Client, served

from kestrl._shared.plan.settings.tools import ProcessEntry, ToolEntry, ToolsSettings
from kestrl.errors import Boundary, KestrlError, ToolFailure, UserInputError
from kestrl.testing.tool_provider import check_tool_provider
from kestrl.tools.provider import CodeProvider
from kestrl_sandbox.contract import Outcome, Result, SandboxFailure
from kestrl_sandbox.interpreter.observation import text_of
from kestrl_sandbox.interpreter.shared_pool import SHARED
from kestrl_sandbox.tool import CodeInterpreter, PythonInterpreter
from kestrl_tools.catalogue import load_tools
from kestrl_tools.service import run_tools
from kestrl_tools.tool_threads import ToolThreads

NAME = "code_interpreter"


@asynccontextmanager
async def interpreter(**config: Any) -> AsyncGenerator[Client]:
    entry = ToolEntry(name=NAME, use="kestrl_sandbox.tool:CodeInterpreter", config={"max_sandboxes": 2, **config})
    async with served(entry) as client:
        yield client


async def test_a_call_runs_code_and_the_model_reads_what_happened() -> None:
    async with interpreter(seconds=2, memory_mb=128) as client:
        (schema,) = await client.list()
        parameters = json.loads(schema.parameters_json)
        assert list(parameters["properties"]) == ["code", "language"]
        assert parameters["required"] == ["code"]
        session = await client.open()
        expected = {
            "print(6 * 7)": ("42", "ok"),
            "x = 20\nx + 1": ("21", "ok"),
            "pass": ("[no output]", "ok"),
            "while True: pass": ("[Timed out: the code ran longer than 2 s and was ended.]", "timeout"),
            "x = bytearray(10**9)": ("[Out of memory: the limit is 128 MB.]", "out_of_memory"),
            "import socket; socket.socket()": ("Network is unreachable\n[Exit status 1.]", "nonzero_exit"),
            "import sys; print('a'); print('b', file=sys.stderr); sys.exit(3)": (
                "a\n[stderr]\nb\n[Exit status 3.]",
                "nonzero_exit",
            ),
            "import os; os.abort()": ("[Ended by signal 6 (SIGABRT).]", "signal"),
            "print('x' * 300_000)": ("[output cut after 200000 bytes]", "ok"),
        }
        for code, (text, outcome) in expected.items():
            answer = await client.call(session, NAME, {"code": code})
            assert (answer.outcome, json.loads(answer.data_json)["outcome"]) == ("ok", outcome), answer.text
            assert answer.text.endswith(text), answer.text
        answer = await client.call(session, NAME, {"code": "echo $((1 + 1)); cat nothing", "language": "bash"})
        assert answer.text == "2\n[stderr]\ncat: nothing: No such file or directory\n[Exit status 1.]"
        refused = await client.call(session, NAME, {"code": "x" * 5_000_000})
        assert refused.outcome == "schema_violation"
        assert "5,000,012 characters, above the limit of 1,000,000" in refused.text
        assert (await client.call(session, NAME, {"code": "1", "language": "perl"})).outcome == "schema_violation"
        assert SHARED.outcomes["timeout"] >= 1
    assert SHARED.pool is None


async def test_a_session_keeps_variables_and_another_episode_has_its_own() -> None:
    async with interpreter(session=True, seconds=2) as client:
        kwargs = {NAME: {"create_kwargs": {"files": {"data.txt": "hidden"}}}}
        first, second = await client.open(kwargs=kwargs), await client.open()
        assert (await client.call(first, NAME, {"code": "x = 5\nopen('data.txt').read()"})).text == "'hidden'"
        assert (await client.call(first, NAME, {"code": "x + 1"})).text == "6"
        assert "NameError" in (await client.call(second, NAME, {"code": "x"})).text
        ended = await client.call(first, NAME, {"code": "while True: pass"})
        assert ended.text.endswith("[The session has ended: variables are lost.]")
        assert (await client.call(first, NAME, {"code": "open('data.txt').read()"})).text == "'hidden'"
        await client.close(first)
        await client.close(second)
        pool = SHARED.pool
        assert pool is not None
        assert pool.running == 0


async def test_the_service_reports_the_sandbox_that_it_uses() -> None:
    async with interpreter(backend="zygote") as client:
        used = (await client.listed()).sandboxes
        assert {name: (item.backend, item.isolation) for name, item in used.items()} == {NAME: ("zygote", "namespaces")}
        first = await client.call("s" * 24, "", opening=client.opening())
        assert first.sandboxes[NAME].backend == "zygote"
        assert not (await client.call("s" * 24, NAME, {"code": "1"})).sandboxes


async def test_a_failure_of_the_sandbox_fails_the_episode_and_may_be_retried(monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(*_arguments: object) -> Result:
        raise SandboxFailure("the node is out of processes")

    async with interpreter() as client:
        session = await client.open()
        monkeypatch.setattr("kestrl_sandbox.pool.sandbox_pool.SandboxPool.run", broken)
        with pytest.raises(KestrlError, match="out of processes") as raised:
            await client.call(session, NAME, {"code": "1"})
    assert (raised.value.boundary, raised.value.code, raised.value.retryable) == (
        Boundary.SANDBOX,
        "sandbox_failed",
        True,
    )


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"isolation": "kernel"}, "tool code_interpreter: config: no code sandbox works on this node:"),
        ({"isolation": "none"}, "isolation: there is no 'none'; there are namespaces, kernel"),
        ({"backend": "docker"}, "backend: there is no 'docker'"),
        ({"seconds": -1}, "seconds: must be above 0"),
        ({"memory_mb": 1}, "memory_mb: must be at least 16"),
    ],
)
async def test_a_config_that_cannot_be_served_ends_the_start(
    config: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")  # so that no runsc offers a kernel
    settings = ToolsSettings(
        component="tools-0",
        job="job",
        run="job-1",
        listen="127.0.0.1:0",
        tools=(ToolEntry(name=NAME, use="kestrl_sandbox.tool:CodeInterpreter", config=config),),
        call_seconds=5,
        max_sessions=5,
    )
    with pytest.raises(UserInputError, match=message):
        await run_tools(settings)


def test_output_that_is_no_text_is_readable() -> None:
    assert text_of(Result(outcome=Outcome.OK, stdout=b"\xffa\n")) == "\ufffda"


@pytest.mark.parametrize("session", [False, True])
@pytest.mark.parametrize("interpreter_class", [CodeInterpreter, PythonInterpreter])
async def test_it_conforms_as_a_provider_of_tools(interpreter_class: type[CodeProvider], session: bool) -> None:
    config = {"session": session, "max_sandboxes": 4, "seconds": 30, "memory_mb": 128}
    await check_tool_provider(
        lambda: interpreter_class(NAME, config, None),
        {NAME: {"code": "open('data.txt').read()"}},
        create_kwargs={"files": {"data.txt": "hidden"}},
        invalid_create_kwargs={"timeout": 3},
        slow=(NAME, {"code": "import time; time.sleep(25)"}),
    )
    assert (SHARED.pool, SHARED.users) == (None, 0)


async def test_a_row_cannot_replace_what_the_manifest_sets() -> None:
    provider = CodeInterpreter(NAME, {"seconds": 2}, None)
    provider.check({"memory_mb": 128})
    with pytest.raises(ToolFailure, match="the manifest's config sets seconds"):
        provider.check({"seconds": 60})


@pytest.mark.parametrize("field", [{"isolation": "kernel"}, {"backend": "bwrap"}, {"max_sandboxes": 2}])
async def test_a_row_cannot_choose_the_pool_that_all_episodes_share(field: dict[str, Any]) -> None:
    provider = CodeInterpreter(NAME, {}, None)
    (name,) = field
    with pytest.raises(ToolFailure, match=f"{name} of the pool, which all episodes share, is set by the tool's config"):
        provider.check(field)
    with pytest.raises(ToolFailure, match=name):
        await provider.open(field)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"config": {"timeout": 3}}, "use: kestrl_sandbox.tool:CodeInterpreter: its config does not fit: .*'timeout'"),
        ({"methods": ("program",)}, "methods: kestrl_sandbox.tool:CodeInterpreter is one tool"),
        (
            {"process": ProcessEntry(memory_mb=64)},
            "use: .*CodeInterpreter runs code in sandboxes of its own, .*`process`",
        ),
    ],
)
async def test_a_manifest_that_no_interpreter_fits_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserInputError, match=rf"spec\.tools\[0\]\.{message}"):
        await load_tools([ToolEntry(name=NAME, use="kestrl_sandbox.tool:CodeInterpreter", **options)], ToolThreads())


def entry(name: str, cls: str, **config: Any) -> ToolEntry:
    return ToolEntry(name=name, use=f"kestrl_sandbox.tool:{cls}", config={"max_sandboxes": 2, **config})


async def test_the_python_interpreter_takes_code_and_nothing_else() -> None:
    async with served(entry(NAME, "PythonInterpreter", seconds=2, memory_mb=128)) as client:
        (schema,) = await client.list()
        assert schema.description == "A tool for executing code."
        assert list(json.loads(schema.parameters_json)["properties"]) == ["code"]
        session = await client.open()
        expected = {
            "print(12 * 34)": "408",
            "x = 3\nx + 1": "4",
            "```python\nx = 5\nx * 2\n```": "10",
            "```\n7\n```": "7",
            "print('''```\na\n```''')": "```\na\n```",
            "while True: pass": "[Timed out: the code ran longer than 2 s and was ended.]",
        }
        for code, text in expected.items():
            answer = await client.call(session, NAME, {"code": code})
            assert (answer.outcome, answer.text) == ("ok", text)
        refused = await client.call(session, NAME, {"code": "1", "language": "bash"})
        assert refused.outcome == "schema_violation"


async def test_tools_that_run_code_share_one_pool() -> None:
    async with served(entry(NAME, "CodeInterpreter"), entry("python", "PythonInterpreter", seconds=3)) as client:
        session = await client.open()
        for name in (NAME, "python"):
            assert (await client.call(session, name, {"code": "6 * 7"})).text == "42"
        assert SHARED.users == 2
    assert (SHARED.pool, SHARED.users) == (None, 0)


async def test_tools_that_ask_for_different_pools_end_the_start() -> None:
    settings = ToolsSettings(
        component="tools-0",
        job="job",
        run="job-1",
        listen="127.0.0.1:0",
        tools=(entry(NAME, "CodeInterpreter"), entry("python", "PythonInterpreter", memory_mb=64)),
        call_seconds=5,
        max_sessions=5,
    )
    with pytest.raises(UserInputError, match="tool python: config: memory_mb: is 64, and 512 in another tool"):
        await run_tools(settings)
    assert (SHARED.pool, SHARED.users) == (None, 0)
