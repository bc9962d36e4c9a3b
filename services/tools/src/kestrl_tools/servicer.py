"""The gRPC service of tools: conversion of messages."""
# ruff: noqa: ARG002 - gRPC hands each a request and a context

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NoReturn, cast

from kestrl._shared.rpc.codec import sandboxes_to_proto
from kestrl.api.tools.v1 import tools_pb2 as pb
from kestrl.api.tools.v1 import tools_pb2_grpc as stubs
from kestrl.errors import ToolFailure
from kestrl_tools.catalogue import JobTool, sandboxes_of, server_digests
from kestrl_tools.environments.provider import is_environment, takes_turns
from kestrl_tools.sessions import Opening, Sessions

MAX_ARGUMENTS = 1_000_000
"""Maximum characters of the arguments of a call as JSON, as of an observation."""


class ToolServicer(stubs.ToolServiceServicer):
    """ListTools, Open, Call, GetState, Close. The tools have been started."""

    def __init__(self, tools: Mapping[str, JobTool], sessions: Sessions) -> None:
        self._schemas = [
            pb.ToolSchema(
                name=tool.schema.name,
                description=tool.schema.description,
                parameters_json=json.dumps(tool.schema.parameters, ensure_ascii=False),
                environment=tool.provider.name if tool.provider.environment else "",
                has_state=tool.provider.has_state,
                has_prompt=tool.provider.has_prompt,
                of_environment=is_environment(tool.provider),
                acts=takes_turns(tool.provider, tool.schema.name),
            )
            for tool in tools.values()
        ]
        self._digests = server_digests(tools)
        self._sandboxes = sandboxes_to_proto(sandboxes_of(tools))
        self._sessions = sessions

    async def ListTools(self, request: pb.ListToolsRequest, context: Any) -> pb.ListToolsResponse:
        return pb.ListToolsResponse(tools=self._schemas, digests=self._digests, sandboxes=self._sandboxes)

    async def Open(self, request: pb.OpenRequest, context: Any) -> pb.OpenResponse:
        prompt = await self._sessions.prompt(request.session_id, _opening(request.opening))
        return pb.OpenResponse(prompt=prompt, sandboxes=self._sandboxes)

    async def Call(self, request: pb.CallRequest, context: Any) -> pb.CallResponse:
        opening = _opening(request.opening) if request.HasField("opening") else None
        answer = await self._sessions.call(
            request.session_id, request.name, _arguments(request.arguments_json), opening
        )
        return pb.CallResponse(
            outcome=answer.outcome,
            text=answer.text,
            final=answer.final,
            data_json=answer.data_json,
            sandboxes={} if opening is None else self._sandboxes,
        )

    async def GetState(self, request: pb.GetStateRequest, context: Any) -> pb.GetStateResponse:
        opening = _opening(request.opening) if request.HasField("opening") else None
        state = await self._sessions.state(request.session_id, opening)
        return pb.GetStateResponse(state_json=json.dumps(state, ensure_ascii=False))

    async def Close(self, request: pb.CloseRequest, context: Any) -> pb.CloseResponse:
        await self._sessions.close(request.session_id)
        return pb.CloseResponse()


def _arguments(text: str) -> object:
    """Parses arguments as JSON; invalid JSON, or too much of it, is passed on as text, which no schema accepts."""
    if len(text) > MAX_ARGUMENTS:
        return f"{len(text):,} characters, above the limit of {MAX_ARGUMENTS:,}"
    try:
        return json.loads(text or "{}", parse_constant=_refuse)
    except (ValueError, RecursionError):
        return text


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


def _opening(opening: pb.Opening) -> Opening:
    return Opening(
        episode_id=opening.episode_id,
        tools=opening.tools,
        kwargs=_kwargs(opening),
        lifetime=opening.lifetime,
        digests=dict(opening.digests),
    )


def _kwargs(opening: pb.Opening) -> Mapping[str, Any]:
    try:
        kwargs: Any = json.loads(opening.tools_kwargs_json or "{}")
    except (ValueError, RecursionError) as error:
        raise ToolFailure(
            f"{opening.episode_id}: tools_kwargs: not JSON: {error}", code="tool_kwargs_invalid"
        ) from error
    if not isinstance(kwargs, dict) or not all(_is_kwargs(value) for value in cast(dict[str, Any], kwargs).values()):
        raise ToolFailure(
            f"{opening.episode_id}: tools_kwargs: must be an object that maps tool names to "
            f"{{create_kwargs, execute_kwargs}}, "
            "both objects",
            code="tool_kwargs_invalid",
        )
    return cast(dict[str, Any], kwargs)


def _is_kwargs(value: Any) -> bool:
    if value is None:
        return True
    if not isinstance(value, dict):
        return False
    kwargs = cast(dict[str, Any], value)
    return set(kwargs) <= {"create_kwargs", "execute_kwargs"} and all(
        kwargs_of_kind is None or isinstance(kwargs_of_kind, dict) for kwargs_of_kind in kwargs.values()
    )
