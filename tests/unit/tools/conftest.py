"""A real tool service, over real gRPC."""

from __future__ import annotations

import asyncio
import importlib
import json
import secrets
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.ports import free_port

from kestrl._shared.credentials import Secret
from kestrl._shared.plan.settings.tools import ToolEntry, ToolsSettings
from kestrl._shared.rpc import call, channel
from kestrl.api.tools.v1 import tools_pb2 as pb
from kestrl.api.tools.v1 import tools_pb2_grpc as stubs
from kestrl_tools.service import run_tools


@pytest.fixture
def samples(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module of sample tools, fresh, and importable by name as a user's would be."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    monkeypatch.delitem(sys.modules, "tool_samples", raising=False)
    return importlib.import_module("tool_samples")


class Client:
    """What the rollout worker does."""

    def __init__(self, stub: stubs.ToolServiceStub, stop: Callable[[], Awaitable[None]]) -> None:
        self._stub = stub
        self.stop = stop

    async def list(self) -> list[pb.ToolSchema]:
        return list((await self.listed()).tools)

    async def listed(self) -> pb.ListToolsResponse:
        request = pb.ListToolsRequest()
        return await call(
            self._stub.ListTools,
            request,
            pb.ListToolsResponse,
            timeout=30,
            peer="tools",
            token=Secret.ROLLOUT_TO_TOOLS.here(),
            wait=True,
        )

    def opening(
        self, *tools: str, kwargs: Mapping[str, Any] | None = None, lifetime: float = 60, raw: str | None = None
    ) -> pb.Opening:
        text = json.dumps(kwargs or {}) if raw is None else raw
        return pb.Opening(episode_id="episode-1", tools=tools, tools_kwargs_json=text, lifetime=lifetime)

    async def open(self, *tools: str, **options: Any) -> str:
        """Opens a session and returns its id: a call of no tool opens it and does no more."""
        session = secrets.token_urlsafe(24)
        assert (await self.call(session, "", opening=self.opening(*tools, **options))).outcome == "unknown_tool"
        return session

    async def call(
        self,
        session: str,
        name: str,
        arguments: Any = None,
        *,
        raw: str | None = None,
        opening: pb.Opening | None = None,
    ) -> pb.CallResponse:
        text = json.dumps({} if arguments is None else arguments) if raw is None else raw
        request = pb.CallRequest(session_id=session, name=name, arguments_json=text, opening=opening)
        return await call(
            self._stub.Call,
            request,
            pb.CallResponse,
            timeout=30,
            peer="tools",
            token=Secret.ROLLOUT_TO_TOOLS.here(),
            wait=opening is not None,
        )

    async def prompt(self, session: str, opening: pb.Opening) -> str:
        answer = await call(
            self._stub.Open,
            pb.OpenRequest(session_id=session, opening=opening),
            pb.OpenResponse,
            timeout=30,
            peer="tools",
            token=Secret.ROLLOUT_TO_TOOLS.here(),
            wait=True,
        )
        return answer.prompt

    async def state(self, session: str, opening: pb.Opening | None = None) -> Any:
        request = pb.GetStateRequest(session_id=session, opening=opening)
        answer = await call(
            self._stub.GetState,
            request,
            pb.GetStateResponse,
            timeout=30,
            peer="tools",
            wait=True,
            token=Secret.ROLLOUT_TO_TOOLS.here(),
        )
        return json.loads(answer.state_json)

    async def close(self, session: str) -> None:
        await call(
            self._stub.Close,
            pb.CloseRequest(session_id=session),
            pb.CloseResponse,
            timeout=30,
            peer="tools",
            token=Secret.ROLLOUT_TO_TOOLS.here(),
        )


@asynccontextmanager
async def served(
    *tools: ToolEntry, call_seconds: float = 20.0, max_sessions: int = 100, folder: str | None = None
) -> AsyncIterator[Client]:
    settings = ToolsSettings(
        component="tools-0",
        job="job",
        run="job-1",
        listen=f"127.0.0.1:{free_port()}",
        tools=tools,
        call_seconds=call_seconds,
        max_sessions=max_sessions,
        python_path=() if folder is None else (folder,),
    )
    stop = asyncio.Event()
    service = asyncio.create_task(run_tools(settings, until=stop.wait()))

    async def end() -> None:
        stop.set()
        await service

    async with channel(settings.listen) as connection:
        try:
            yield Client(stubs.ToolServiceStub(connection), end)
        finally:
            await end()


@asynccontextmanager
async def connected(address: str) -> AsyncIterator[Client]:
    async def end() -> None:
        raise AssertionError("this service is not the client's to stop")

    async with channel(address) as connection:
        yield Client(stubs.ToolServiceStub(connection), end)


@pytest.fixture
def connect() -> Any:
    """`async with connect(address) as client`."""
    return connected


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.fixture
def serve(samples: Any) -> Any:
    """`async with serve(ToolEntry(...), ...) as client`."""
    return served
