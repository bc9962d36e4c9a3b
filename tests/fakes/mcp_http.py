"""An MCP server on streamable HTTP that takes one credential, and none for a tool of another owner."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

TOOLS = ("echo", "foreign")


@dataclass
class McpHttpServer:
    """What the server accepts, and what it was asked."""

    accepted: str
    """The header `Authorization` of requests that are answered."""
    url: str = ""
    requests: list[tuple[str, int]] = field(default_factory=list[tuple[str, int]])
    """Method of the protocol and status of each answer."""

    async def answer(self, request: web.Request) -> web.StreamResponse:
        """The answer to a POST."""
        message: dict[str, Any] = await request.json()
        method: str = message["method"]
        params: dict[str, Any] = message.get("params") or {}
        foreign = method == "tools/call" and params["name"] == "foreign"
        if request.headers.get("Authorization") != self.accepted or foreign:
            return self._answered(method, web.Response(status=401, headers={"WWW-Authenticate": "Bearer"}))
        if "id" not in message:
            return self._answered(method, web.Response(status=202))
        body = {"jsonrpc": "2.0", "id": message["id"], "result": _result(method, params)}
        return self._answered(method, web.json_response(body))

    def _answered(self, method: str, response: web.Response) -> web.Response:
        self.requests.append((method, response.status))
        return response


def _result(method: str, params: dict[str, Any]) -> dict[str, Any]:
    match method:
        case "initialize":
            return {
                "protocolVersion": "2025-06-18",
                "capabilities": {"tools": {}},
                "serverInfo": {"name": "keyed", "version": "1"},
            }
        case "tools/list":
            return {"tools": [{"name": name, "description": name, "inputSchema": {"type": "object"}} for name in TOOLS]}
        case _:
            return {"content": [{"type": "text", "text": params["name"]}]}


@asynccontextmanager
async def serving_mcp(accepted: str) -> AsyncGenerator[McpHttpServer]:
    """A server that takes this header `Authorization`."""
    server = McpHttpServer(accepted)
    app = web.Application()
    app.router.add_post("/mcp", server.answer)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0][:2]
        server.url = f"http://{host}:{port}/mcp"
        yield server
    finally:
        await runner.cleanup()
