"""A real HTTP server on 127.0.0.1 whose endpoints answer in every way a server can, and its OpenAPI document."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

DOCUMENT: dict[str, Any] = {
    "openapi": "3.1.0",
    "info": {"title": "Shop", "version": "1"},
    "servers": [{"url": "/api"}],
    "paths": {
        "/items/{id}": {
            "parameters": [{"$ref": "#/components/parameters/Id"}],
            "get": {
                "operationId": "getItem",
                "summary": "Gets an item.",
                "parameters": [
                    {"name": "fields", "in": "query", "schema": {"type": "array", "items": {"type": "string"}}},
                    {
                        "name": "tags",
                        "in": "query",
                        "explode": False,
                        "schema": {"type": "array", "items": {"type": "integer"}},
                    },
                    {"name": "where", "in": "query", "content": {"application/json": {"schema": {"type": "object"}}}},
                    {"name": "X-Trace", "in": "header", "schema": {"type": "string"}},
                    {"name": "X-Key", "in": "header", "required": True, "schema": {"type": "string"}},
                    {"name": "Authorization", "in": "header", "schema": {"type": "string"}},
                    {"name": "id", "in": "query", "description": "Another id.", "schema": {"type": "boolean"}},
                    {"name": "session", "in": "cookie", "schema": {"type": "string"}},
                ],
            },
            "put": {
                "operationId": "putItem",
                "requestBody": {
                    "required": True,
                    "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Item"}}},
                },
            },
        },
        "/items": {
            "post": {
                "operationId": "items/add",
                "requestBody": {
                    "required": True,
                    "content": {"application/json; charset=utf-8": {"schema": {"$ref": "#/components/schemas/Item"}}},
                },
            }
        },
        "/status/{code}": {
            "get": {
                "operationId": "status",
                "parameters": [{"name": "code", "in": "path", "schema": {"type": "integer"}}],
            },
            "post": {
                "operationId": "post_status",
                "parameters": [{"name": "code", "in": "path", "schema": {"type": "integer"}}],
            },
        },
        "/sleep": {"get": {}},
        "/redirect": {
            "get": {
                "operationId": "redirect",
                "parameters": [{"name": "to", "in": "query", "required": True, "schema": {"type": "string"}}],
            }
        },
        "/visits": {"get": {"operationId": "visits"}},
        "/large": {"get": {"operationId": "large"}},
        "/image": {"get": {"operationId": "image"}},
        "/drop": {"get": {"operationId": "drop"}, "post": {"operationId": "post_drop"}},
    },
    "components": {
        "parameters": {
            "Id": {"name": "id", "in": "path", "required": True, "schema": {"type": "string"}, "description": "Its id."}
        },
        "schemas": {
            "Item": {
                "type": "object",
                "required": ["name", "created"],
                "properties": {
                    "id": {"type": "string"},
                    "name": {"type": "string"},
                    "price": {"$ref": "#/components/schemas/Price"},
                    "created": {"type": "string", "readOnly": True},
                },
            },
            "Price": {"type": ["number", "null"], "exclusiveMinimum": 0},
        },
    },
}


class Shop:
    """The server."""

    def __init__(self) -> None:
        self.port = 0
        self.requests: list[dict[str, Any]] = []
        """Method, path with query, headers and body of each request."""
        self.statuses: list[int] = []
        """What `status` answers with first."""
        self.asleep = asyncio.Event()
        self.accepted: str | None = None
        """The only accepted value of the header X-Session; None for any."""
        self.refused = asyncio.Semaphore(0)
        """Released for each other value that was refused."""

    @property
    def origin(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def answer(self, request: web.Request) -> web.StreamResponse:
        body = (await request.read()).decode()
        self.requests.append(
            {"method": request.method, "path": request.raw_path, "headers": dict(request.headers), "body": body}
        )
        if self.accepted is not None and request.headers.get("X-Session") != self.accepted:
            self.refused.release()
            return web.json_response({"detail": "unknown key"}, status=401)
        match request.path.split("/")[1:]:
            case ["openapi.json"]:
                return web.json_response(DOCUMENT)
            case ["api", "status", code]:
                return self._status(int(code))
            case ["api", "sleep"]:
                self.asleep.set()
                await asyncio.sleep(60)
            case ["api", "redirect"]:
                raise web.HTTPFound(request.query["to"])
            case ["api", "loop"]:
                raise web.HTTPFound("/api/loop")
            case ["api", "visits"]:
                return self._visits(request)
            case ["api", "large"]:
                return web.Response(body="ä".encode() * 100_000, content_type="text/plain", charset="utf-8")
            case ["api", "image"]:
                return web.Response(body=b"\x89PNG", content_type="image/png")
            case ["api", "drop"]:
                assert request.transport is not None
                request.transport.close()
            case _:
                pass
        return web.json_response({"path": request.raw_path, "body": body})

    def _status(self, code: int) -> web.Response:
        status = self.statuses.pop(0) if self.statuses else code
        if status == 204:
            return web.Response(status=204)
        return web.json_response({"detail": "no such item"}, status=status, headers={"Retry-After": "0"})

    def _visits(self, request: web.Request) -> web.Response:
        count = int(request.cookies.get("visits", "0")) + 1
        response = web.json_response({"visits": count, "session": request.headers.get("X-Session", "")})
        response.set_cookie("visits", str(count))
        return response


@asynccontextmanager
async def shop_server() -> AsyncGenerator[Shop]:
    shop = Shop()
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", shop.answer)
    runner = web.AppRunner(app, shutdown_timeout=1, handler_cancellation=True)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    shop.port = runner.addresses[0][1]
    try:
        yield shop
    finally:
        await runner.cleanup()
