"""The job's tools by MCP: streamable HTTP without sessions, each POST answered with JSON. Pure.

The worker writes the few messages itself: the SDK's server would bring a web framework, and half a second of imports,
into every worker.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from kestrl.episode import CallOutcome, ToolCall
from kestrl.tools import ToolSchema
from kestrl.tools.shapes import json_problem
from kestrl_rollout.gateway.failures import GatewayProblem
from kestrl_rollout.gateway.fields import Refused, read_object

PATH = "mcp"
VERSIONS = ("2024-11-05", "2025-03-26", "2025-06-18", "2025-11-25")
"""Revisions of the protocol; a client that proposes another is offered the newest."""
PARSE_ERROR, NO_METHOD, INVALID_PARAMS, FAILED = -32700, -32601, -32602, -32603


@dataclass(frozen=True, slots=True)
class McpAnswer:
    """What is answered at once."""

    status: int
    body: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class ToolRequest:
    """A call of a tool, which is yet to be made."""

    id: str | int
    name: str
    arguments: Mapping[str, Any]


def read(body: bytes, tools: Sequence[ToolSchema]) -> McpAnswer | ToolRequest:
    """Reads a message of a client, and answers it unless it calls a tool."""
    try:
        message = read_object(body)
    except Refused as refused:
        return McpAnswer(400, _error(None, PARSE_ERROR, str(refused)))
    number, method = message.get("id"), message.get("method")
    if not isinstance(number, str | int) or not isinstance(method, str):
        return McpAnswer(202)  # a notification, or the response to a request that was never made
    params: Any = message.get("params") or {}
    if not isinstance(params, dict):
        return McpAnswer(200, _error(number, INVALID_PARAMS, "params is not an object"))
    arguments = cast("dict[str, Any]", params)
    match method:
        case "initialize":
            version = arguments.get("protocolVersion")
            return McpAnswer(200, _result(number, _initialized(version if version in VERSIONS else VERSIONS[-1])))
        case "ping":
            return McpAnswer(200, _result(number, {}))
        case "tools/list":
            return McpAnswer(200, _result(number, {"tools": [_listed(tool) for tool in tools]}))
        case "tools/call":
            return _tool_request(number, arguments)
        case _:
            return McpAnswer(200, _error(number, NO_METHOD, f"{method} is not served"))


def _tool_request(number: str | int, params: Mapping[str, Any]) -> McpAnswer | ToolRequest:
    name, raw_arguments = params.get("name"), params.get("arguments")
    if not isinstance(name, str) or not name:
        return McpAnswer(200, _error(number, INVALID_PARAMS, "name is not the name of a tool"))
    if raw_arguments is not None and not isinstance(raw_arguments, dict):
        return McpAnswer(200, _error(number, INVALID_PARAMS, "arguments is not an object"))
    arguments = cast("dict[str, Any]", raw_arguments or {})
    if problem := json_problem(arguments):
        return McpAnswer(200, _error(number, INVALID_PARAMS, f"arguments: {problem}"))
    return ToolRequest(number, name, arguments)


def answered(request: ToolRequest, call: ToolCall) -> dict[str, Any]:
    """The answer of a tool; its `data` is for rewards, and no part of it."""
    content = [{"type": "text", "text": call.text}]
    return _result(request.id, {"content": content, "isError": call.outcome is not CallOutcome.OK})


def failed(request: ToolRequest, problem: GatewayProblem) -> dict[str, Any]:
    """The error of a call that has no answer: not a result, so that no client takes its message for the tool's."""
    return _error(request.id, FAILED, problem.message, {"code": problem.code})


def _initialized(version: str) -> dict[str, Any]:
    return {
        "protocolVersion": version,
        "capabilities": {"tools": {}},
        "serverInfo": {"name": "kestrl", "version": "1"},
    }


def _listed(tool: ToolSchema) -> dict[str, Any]:
    schema = {"type": "object", **tool.parameters}
    return {"name": tool.name, "description": tool.description, "inputSchema": schema}


def _result(number: str | int, result: Mapping[str, Any]) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": number, "result": result}


def _error(number: str | int | None, code: int, message: str, data: Mapping[str, Any] | None = None) -> dict[str, Any]:
    error = {"code": code, "message": message, **({"data": data} if data else {})}
    return {"jsonrpc": "2.0", "id": number, "error": error}


def written(body: Mapping[str, Any]) -> bytes:
    """A message as JSON."""
    return json.dumps(body).encode()
