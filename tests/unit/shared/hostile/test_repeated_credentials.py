"""A server that repeats the credential it was sent: no kind of client passes it on.

Each test has a real server, and looks at all that a person, the model or a later process gets.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import pytest
from tests.fakes.echo_server import FORMS, echoing
from tests.unit.judge.rulers import group, ruler_entry, score

from kestrl._shared.plan.settings.tools import EndpointEntry, HttpEntry, McpEntry, SecretText, ToolEntry
from kestrl.engines import Generate
from kestrl.engines.vllm import Vllm
from kestrl.errors import EngineFailure, KestrlError, UserInputError
from kestrl.storage import open_store
from kestrl.tools import ToolError
from kestrl_inference.engine import CONTROL_KEY, Engine
from kestrl_judge.ruler.scorer import RulerScorer
from kestrl_rollout.engine.client import EngineAddress, EngineClient
from kestrl_tools.catalogue import load_tools, providers_of, stop_all
from kestrl_tools.tool_threads import ToolThreads

CANARY = "sk-canary/+0123456789"


def check_hidden(*texts: object) -> None:
    """The texts have no form of the credential, nor its first half."""
    shown = " ".join(str(text) for text in texts)
    assert "[redacted]" in shown
    for name, form in FORMS.items():
        encoded = form(CANARY).strip("='\"")
        assert encoded not in shown, name
    assert CANARY[:11] not in shown


def endpoints(url: str) -> HttpEntry:
    return HttpEntry(
        base_url=url,
        endpoints=(EndpointEntry(name="t", description="d", method="GET", path="/a"),),
        secret_headers={"X-Api-Key": SecretText(variable="KESTRL_TOOL_SECRET_0", prefix="Bearer ")},
        private_networks=("127.0.0.0/8",),
        seconds=0.5,
    )


@pytest.mark.parametrize("status", [200, 301, 401, 503])
async def test_an_http_tool(status: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("KESTRL_TOOL_SECRET_0", CANARY)
    caplog.set_level(logging.DEBUG, logger="kestrl_tools")
    seen: list[str] = []
    async with echoing(status, seen) as url:
        tools = await load_tools([ToolEntry(name="h", http=endpoints(url))], ToolThreads())
        provider = tools["t"].provider
        await provider.start()
        session = await provider.open({})
        shown: list[object] = []
        try:
            result: Any = await session.call("t", {}, {})
            shown += [result.text, json.dumps(result.data)]
        except (ToolError, KestrlError) as error:
            shown += [error, getattr(error, "__cause__", "")]
        shown += [provider.health(), caplog.text, "[redacted]"]
        await stop_all(providers_of(tools))
    assert f"Bearer {CANARY}" in seen
    check_hidden(*shown)


async def test_the_document_of_an_http_tool(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KESTRL_TOOL_SECRET_0", CANARY)
    async with echoing(401, []) as url:
        server = endpoints(url).model_copy(update={"openapi": f"{url}/openapi.json", "endpoints": (), "base_url": None})
        with pytest.raises(UserInputError) as caught:
            await load_tools([ToolEntry(name="h", http=server)], ToolThreads())
    check_hidden(caught.value)


@pytest.mark.parametrize("status", [200, 401, 500])
async def test_an_mcp_server(status: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("KESTRL_TOOL_SECRET_0", CANARY)
    caplog.set_level(logging.INFO)
    seen: list[str] = []
    secret = {"Authorization": SecretText(variable="KESTRL_TOOL_SECRET_0", prefix="Bearer ")}
    async with echoing(status, seen) as url:
        entry = ToolEntry(name="m", mcp=McpEntry(url=f"{url}/mcp", secret_headers=secret))
        with pytest.raises(UserInputError) as caught:
            await load_tools([entry], ToolThreads())
    assert f"Bearer {CANARY}" in seen
    check_hidden(caught.value, caught.value.__cause__, "[redacted]")


@pytest.mark.parametrize("status", [200, 401, 403])
async def test_a_judge(status: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("KESTRL_JUDGE_KEY_0", CANARY)
    caplog.set_level(logging.DEBUG, logger="kestrl_judge")
    monkeypatch.setattr("kestrl_judge.ruler.client.ATTEMPTS", 1)
    seen: list[str] = []
    async with echoing(status, seen) as url:
        entry = ruler_entry(url)
        keyed = entry.judges[0].model_copy(update={"key_variable": "KESTRL_JUDGE_KEY_0"})
        scorer = RulerScorer(entry.model_copy(update={"judges": (keyed,)}), salt="run")
        await scorer.open()
        scored = await score(scorer, group("4", "5"))
        await scorer.close()
    assert f"Bearer {CANARY}" in seen
    logged = [record.getMessage() for record in caplog.records if record.name.startswith("kestrl_judge")]
    check_hidden(scored.verdicts, json.dumps(scored.details), *logged, "[redacted]")


@pytest.mark.parametrize("status", [200, 400, 500])
async def test_an_engine(status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CONTROL_KEY, CANARY)
    request = Generate(
        id="r", policy="p", prompt_ids=[1], temperature=1.0, top_p=1.0, top_k=0, max_tokens=4, seed=1, stop_token_ids=[]
    )
    async with echoing(status, []) as url:
        async with EngineClient(CANARY, Vllm()) as client:
            with pytest.raises(EngineFailure) as sampled:
                await client.generate(EngineAddress(name="engine-0", url=url), request)
        engine = Engine(url, "base", Vllm(), timeout=5)
        with pytest.raises(EngineFailure) as listed:
            await engine.adapters()
        await engine.close()
    check_hidden(sampled.value, listed.value, "[redacted]")


STORES: Mapping[str, tuple[str, Mapping[str, str]]] = {
    "s3": (
        "s3://bucket/prefix",
        {
            "AWS_ACCESS_KEY_ID": "an-access-key-id",
            "AWS_SECRET_ACCESS_KEY": "a-secret-access-key",
            "AWS_SESSION_TOKEN": CANARY,
            "AWS_REGION": "us-east-1",
            "AWS_ENDPOINT": "{url}",
        },
    ),
}


@pytest.mark.parametrize("status", [400, 401, 403])
@pytest.mark.parametrize("kind", STORES)
async def test_a_store(kind: str, status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    uri, variables = STORES[kind]
    seen: list[str] = []
    async with echoing(status, seen) as url:
        for name, value in variables.items():
            monkeypatch.setenv(name, value.replace("{url}", url))
        store = await asyncio.to_thread(open_store, uri)
        for work in (lambda: store.get("a"), lambda: store.put("a", b"1"), lambda: store.list("a")):
            with pytest.raises(KestrlError) as caught:
                await asyncio.to_thread(work)
            check_hidden(caught.value, "[redacted]")
    assert any("canary" in value for value in seen)


async def test_a_collector_of_spans() -> None:
    program = """
import sys
from kestrl._shared.log_lines import start_log
from kestrl._shared.telemetry import set_up, span
start_log()
set_up("tools-0", job="j", run="r", endpoint=sys.argv[1])
with span("a"):
    pass
from opentelemetry import trace
trace.get_tracer_provider().force_flush()
"""
    environment = {
        **os.environ,
        "OTEL_EXPORTER_OTLP_HEADERS": f"x-key={CANARY}",
        "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf",
    }
    seen: list[str] = []
    async with echoing(401, seen) as url:
        done = await asyncio.to_thread(
            subprocess.run,
            [sys.executable, "-c", program, url],
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
            env=environment,
        )
    assert CANARY in seen
    assert "wrong key" in done.stderr
    check_hidden(done.stderr)
