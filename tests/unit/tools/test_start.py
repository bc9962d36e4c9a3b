"""Start of the service: problems of tools are reported by manifest field, in one message, with exit code 2."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kestrl._shared.plan.settings.tools import ClaimEntry, SecretText, ToolEntry, ToolsSettings
from kestrl.errors import UserInputError
from kestrl_tools.catalogue import load_tools, sandboxes_of
from kestrl_tools.lifecycle import loaded, start_all
from kestrl_tools.tool_threads import ToolThreads


def load(*entries: ToolEntry) -> dict[str, Any]:
    return asyncio.run(load_tools(entries, ToolThreads()))


@pytest.mark.parametrize(
    ("use", "config", "message"),
    [
        ("nowhere:tool", {}, r"spec.tools\[0\].use: cannot import 'nowhere'"),
        ("tool_samples:absent", {}, r"spec.tools\[0\].use: module 'tool_samples' has no 'absent'"),
        (
            "tool_samples:no_tool",
            {},
            r"spec.tools\[0\].use: tool_samples:no_tool: t: a tool is a function or a class, this is int",
        ),
        ("tool_samples:untyped", {}, "'query' has no type hint"),
        ("tool_samples:opaque", {}, "has a type without a JSON form"),
        ("tool_samples:NotCallable", {}, "has neither __call__ nor public methods"),
        ("tool_samples:greet", {"nam": "x"}, "its config does not fit: got an unexpected keyword argument 'nam'"),
        ("tool_samples:Notebook", {"ownr": "x"}, "its config does not fit"),
        ("tool_samples:VerlCounter", {"label": "x"}, "its settings go under `config`"),
        ("tool_samples:VerlCounter", {"config": {}}, "VerlCounter cannot be made: AttributeError"),
        ("tool_samples:VerlCounter", {"tool_schema": {"type": "function"}}, "tool_schema is not of the form"),
    ],
)
def test_a_tool_that_cannot_be_used_is_reported_by_field(
    samples: Any, use: str, config: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserInputError, match=message):
        load(ToolEntry(name="t", use=use, config=config))


def test_every_problem_is_reported_at_once(samples: Any) -> None:
    with pytest.raises(UserInputError) as caught:
        load(
            ToolEntry(name="a", use="nowhere:a"),
            ToolEntry(name="b", use="tool_samples:greet"),
            ToolEntry(name="c", use="x:c"),
        )
    assert [line.split(":")[0] for line in str(caught.value).splitlines()] == ["spec.tools[0].use", "spec.tools[2].use"]


async def test_the_process_serves_until_sigterm_and_closes_what_is_open(
    tmp_path: Path, connect: Any, port: int
) -> None:
    settings = ToolsSettings(
        component="tools-0",
        job="job",
        run="job-1",
        listen=f"127.0.0.1:{port}",
        python_path=(str(Path(__file__).parent),),
        tools=(ToolEntry(name="notebook", use="tool_samples:Notebook", config={"owner": "ann"}),),
        call_seconds=5,
    )
    (tmp_path / "settings.json").write_text(settings.model_dump_json())
    command = [sys.executable, "-m", "kestrl_tools", "--settings", str(tmp_path / "settings.json")]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as service:  # noqa: ASYNC220 - it starts at once
        async with connect(settings.listen) as client:
            answer = await client.call(await client.open(), "notebook", {"note": "one"})
        service.terminate()
        _, log = await asyncio.to_thread(service.communicate, timeout=20)
    assert answer.text == '["one"]'
    assert service.returncode == 0
    assert "draining: closing 1 sessions" in log
    assert "Traceback" not in log


def test_the_process_prints_one_line_and_exits_2(tmp_path: Path) -> None:
    settings = {
        "component": "tools-0",
        "job": "job",
        "run": "job-1",
        "listen": "127.0.0.1:0",
        "python_path": [str(Path(__file__).parent)],
        "tools": [{"name": "greet", "use": "tool_samples:greet"}, {"name": "t", "use": "tool_samples:gone"}],
        "call_seconds": 5,
    }
    (tmp_path / "settings.json").write_text(json.dumps(settings))
    command = [sys.executable, "-m", "kestrl_tools", "--settings", str(tmp_path / "settings.json")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert ended.returncode == 2
    assert ended.stderr == "error: spec.tools[1].use: module 'tool_samples' has no 'gone'\n"


def test_the_service_is_light() -> None:
    code = (
        "import sys, kestrl_tools.service; "
        "print([name for name in ('torch', 'transformers', 'vllm', 'numpy', 'kopf', 'kubernetes') if name in "
        "sys.modules])"
    )
    seen = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True)
    assert seen.stdout == "[]\n"


async def test_what_a_class_shares_is_started_before_the_first_session_and_stopped(serve: Any, samples: Any) -> None:
    entry = ToolEntry(name="indexed", use="tool_samples:Indexed", config={"words": ["lamp"]})
    async with serve(entry) as client:
        assert [tool.name for tool in await client.list()] == ["indexed"]
        session = await client.open()
        assert (await client.call(session, "indexed", {"word": "lamp"})).text == "true"
    assert samples.Indexed.index == []


async def test_a_hook_that_refuses_its_config_ends_the_start(samples: Any) -> None:
    entry = ToolEntry(name="indexed", use="tool_samples:Indexed", config={"words": ["bad"]})
    with pytest.raises(UserInputError, match="tool indexed: config: words: `bad` cannot be indexed"):
        async with loaded([entry], ToolThreads()) as tools:
            await start_all(tools)


def test_a_hook_has_to_be_a_class_method(samples: Any) -> None:
    with pytest.raises(UserInputError, match=r"spec.tools\[0\].use: .*start_service is called before there is an inst"):
        load(ToolEntry(name="t", use="tool_samples:Unstartable"))


@pytest.mark.parametrize(("claimed", "backend"), [(False, "mine"), (True, "claim of code by secret")])
async def test_a_users_class_claims_sandboxes_and_says_which(
    samples: Any, monkeypatch: pytest.MonkeyPatch, claimed: bool, backend: str
) -> None:
    monkeypatch.setenv("KESTRL_TOOL_SECRET_0", "secret")
    claim = ClaimEntry(
        warm_pool="code",
        token=SecretText(variable="KESTRL_TOOL_SECRET_0"),
        port=1,
        bind_seconds=1,
        use_seconds=1,
        keep_seconds=1,
    )
    entry = ToolEntry(name="runner", use="tool_samples:Runner", claim=claim if claimed else None)
    async with loaded([entry], ToolThreads()) as tools:
        await start_all(tools)
        assert {name: sandbox.backend for name, sandbox in sandboxes_of(tools).items()} == {"runner": backend}
