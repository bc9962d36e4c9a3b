"""Tools in processes of their own: a crash, a hang or too much memory ends one instance, and nothing else."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.ports import free_port

from kestrl._shared.plan.settings.tools import ProcessEntry, ToolEntry, ToolsSettings
from kestrl.errors import Boundary, FailureError, KestrlError, UserInputError
from kestrl.testing.tool_provider import check_tool_provider
from kestrl.tools.provider import NO_KWARGS, ProviderSession, ToolProvider
from kestrl_tools.catalogue import load_tools, provider_of, providers_of, stop_all
from kestrl_tools.service import run_tools
from kestrl_tools.tool_threads import ToolThreads

FOLDER = str(Path(__file__).parent)
SAMPLES = Path(__file__).with_name("process_samples.py").read_text()
METHODS = (
    "add",
    "day_of",
    "finish",
    "refuse",
    "fail",
    "leave",
    "crash",
    "hang",
    "eat",
    "pids",
    "detach",
    "environment",
)


def entry(use: str = "process_samples:Machine", memory_mb: int | None = None, **options: Any) -> ToolEntry:
    name = use.rpartition(":")[2]
    return ToolEntry(name=name, use=use, process=ProcessEntry(memory_mb=memory_mb), **options)


def maker(tool: ToolEntry) -> Any:
    def make() -> ToolProvider:
        return provider_of(tool, "spec.tools[0]", ToolThreads(), folder=FOLDER)

    return make


@asynccontextmanager
async def running(tool: ToolEntry) -> AsyncGenerator[Any]:
    tools = await load_tools([tool], ToolThreads(), folder=FOLDER)
    (provider,) = providers_of(tools)
    try:
        await provider.start()
        yield provider
    finally:
        await stop_all([provider])


@asynccontextmanager
async def served(connect: Any, *tools: ToolEntry, call_seconds: float = 10.0) -> AsyncGenerator[Any]:
    settings = ToolsSettings(
        component="tools-0",
        job="job",
        run="job-1",
        listen=f"127.0.0.1:{free_port()}",
        python_path=(FOLDER,),
        tools=tools,
        call_seconds=call_seconds,
    )
    stop = asyncio.Event()
    service = asyncio.create_task(run_tools(settings, until=stop.wait()))
    try:
        async with connect(settings.listen) as client:
            yield client
    finally:
        stop.set()
        await service


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def exists(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


async def gone(pid: int) -> None:
    """Waits until a process has ended."""
    async with asyncio.timeout(10):
        while os.path.exists(f"/proc/{pid}"):  # noqa: ASYNC110, ASYNC240, PTH110 - a process that is nobody's child here
            await asyncio.sleep(0.02)


NOTHING: dict[str, Any] = {}
SLOW = {"slow": ("hang", NOTHING)}


@pytest.mark.parametrize(
    ("tool", "calls", "options"),
    [
        (entry(methods=METHODS), {"add": {"by": 1}, "day_of": {"day": "2026-11-25"}}, SLOW),
        (entry("tool_samples:greet"), {"greet": {"name": "ann"}}, {"invalid_create_kwargs": {"x": 1}}),
        (
            entry("tool_samples:Notebook"),
            {"Notebook": {"note": "one"}},
            {"create_kwargs": {"owner": "ann"}, "invalid_create_kwargs": {"ownr": "ann"}},
        ),
    ],
    ids=["environment", "function", "class"],
)
async def test_tools_in_processes_conform(tool: ToolEntry, calls: Any, options: Any) -> None:
    await check_tool_provider(maker(tool), calls, **options)


async def test_outcomes_are_those_of_a_tool_in_the_service(connect: Any) -> None:
    async with served(connect, entry(methods=METHODS)) as client:
        session = await client.open(kwargs={"Machine": {"create_kwargs": {"owner": "ann"}}})
        assert (await client.call(session, "add", {"by": 2})).text == "2"
        assert (await client.call(session, "day_of", {"day": "2026-11-25"})).text == "Wednesday"
        assert (await client.call(session, "add", {"by": "2"})).outcome == "schema_violation"
        refused = await client.call(session, "refuse")
        assert (refused.outcome, refused.text) == ("tool_error", "not today")
        done = await client.call(session, "finish")
        assert (done.text, done.final) == ("done", True)
        assert json.loads(done.data_json) == {"owner": "ann", "index": ["started"]}
        assert await client.state(session) == {"Machine": {"count": 2}}
        with pytest.raises(FailureError, match="KeyError: 'no such key'") as caught:
            await client.call(session, "fail")
        assert (caught.value.boundary, caught.value.code) == (Boundary.TOOL, "tool_raised")
        with pytest.raises(FailureError, match="got an unexpected keyword argument 'ownr'") as caught:
            await client.open(kwargs={"Machine": {"create_kwargs": {"ownr": "ann"}}})
        assert caught.value.code == "tool_kwargs_invalid"


@pytest.mark.parametrize(
    ("tool", "code", "message"),
    [
        ("leave", "tool_process_died", "its process exited with 3"),
        ("crash", "tool_process_died", "was ended by signal 11"),
        ("hang", "tool_deadline", "longer than 2 s"),
        ("eat", "tool_out_of_memory", "exceeded process.memoryMb"),
    ],
)
async def test_what_ends_one_instance_leaves_the_others(connect: Any, tool: str, code: str, message: str) -> None:
    async with served(connect, entry(methods=METHODS, memory_mb=256), call_seconds=2) as client:
        victim, other = await client.open(), await client.open()
        await client.call(other, "add", {"by": 1})
        with pytest.raises(FailureError, match=message) as caught:
            await client.call(victim, tool)
        assert (caught.value.boundary, caught.value.code) == (Boundary.TOOL, code)
        await client.close(victim)
        assert (await client.call(other, "add", {"by": 1})).text == "2"
        assert (await client.call(await client.open(), "add", {"by": 1})).text == "1"


async def test_a_closed_or_cancelled_session_leaves_no_process() -> None:
    async with running(entry(methods=METHODS)) as provider:
        closed, hanging = await provider.open(NO_KWARGS), await provider.open(NO_KWARGS)
        left: list[int] = []
        for session in (closed, hanging):
            left += json.loads((await session.call("pids", {}, {})).text)
        await closed.close()
        work = asyncio.ensure_future(hanging.call("hang", {}, {}))
        await asyncio.wait({work}, timeout=0.2)
        work.cancel()
        await asyncio.wait({work})
        await hanging.close()
        for pid in left:
            await gone(pid)


@pytest.mark.parametrize("end", ["close", "crash", "leave", "hang"])
async def test_what_a_tool_has_detached_ends_with_its_episode(end: str) -> None:
    async with running(entry(methods=METHODS)) as provider:
        ended, other = await provider.open(NO_KWARGS), await provider.open(NO_KWARGS)
        left, kept = [int((await session.call("detach", {}, {})).text) for session in (ended, other)]
        if end != "close":
            work = asyncio.ensure_future(ended.call(end, {}, {}))
            await asyncio.wait({work}, timeout=0.2)
            work.cancel()
            await asyncio.wait({work})
        await ended.close()
        assert not exists(left)
        assert exists(kept)  # another episode's daemon goes on
        await other.close()
        assert not exists(kept)


async def test_a_process_has_no_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KESTRL_ROLLOUT_TO_TOOLS_TOKEN", "s3cret")
    monkeypatch.setenv("SERVICE_OF_MINE", "http://x")
    async with running(entry(methods=METHODS)) as provider:
        session = await provider.open(NO_KWARGS)
        found = json.loads((await session.call("environment", {}, {})).text)
        await session.close()
    assert found["SERVICE_OF_MINE"] == "http://x"
    assert "s3cret" not in found.values()


async def calls_until_it_ends(session: ProviderSession) -> None:
    """The process of an episode ends a moment after its host."""
    while True:
        await session.call("add", {"by": 1}, {})


async def test_a_killed_host_is_started_again_with_its_hooks() -> None:
    async with running(entry(methods=METHODS)) as provider:
        session = await provider.open(NO_KWARGS)
        (pid, _) = json.loads((await session.call("pids", {}, {})).text)
        host = parent_of(parent_of(pid))
        os.kill(host, signal.SIGKILL)
        with pytest.raises(KestrlError) as caught:
            await calls_until_it_ends(session)
        assert caught.value.code == "tool_process_died"
        await session.close()
        again = await provider.open(NO_KWARGS)
        result = await again.call("finish", {}, {})
        await again.close()
    assert result.data["index"] == ["started"]


@pytest.mark.parametrize(
    ("use", "config", "message"),
    [
        ("nowhere:Tool", {}, r"^spec.tools\[0\].use: cannot import 'nowhere'"),
        ("process_samples:Machine", {"ownr": 1}, r"^spec.tools\[0\].use: .*its config does not fit"),
        ("tool_exits:tool", {}, r"^spec.tools\[0\].use: .*SystemExit: 9"),
        ("tool_ends:tool", {}, r"^spec.tools\[0\].use: importing tool ended its process"),
    ],
)
async def test_what_cannot_be_imported_is_named_by_field(tmp_path: Path, use: str, config: Any, message: str) -> None:
    (tmp_path / "tool_exits.py").write_text("raise SystemExit(9)\n")
    (tmp_path / "tool_ends.py").write_text("import os\nos._exit(9)\n")
    (tmp_path / "process_samples.py").write_text(SAMPLES)
    with pytest.raises(UserInputError, match=message):
        await load_tools([entry(use, config=config)], ToolThreads(), folder=str(tmp_path))
