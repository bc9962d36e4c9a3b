"""Results of MCP calls as results of tools."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import mcp_types as types

from kestrl.tools import ToolError, ToolResult


def result_of(tool: str, result: types.CallToolResult) -> ToolResult:
    """Text for the model, and the structured content as facts for the reward.

    Raises:
        ToolError: The server reports that the tool refused the call (`isError`), in its words.
    """
    structured: Any = result.structured_content
    text = _text(result.content) or ("" if structured is None else json.dumps(structured, ensure_ascii=False))
    if result.is_error:
        raise ToolError(text or f"{tool} refused the call without a message.")
    return ToolResult(text=text, data={} if structured is None else {"structured": structured})


def _text(content: Sequence[types.ContentBlock]) -> str:
    return "\n".join(_part(block) for block in content)


def _part(block: types.ContentBlock) -> str:
    match block:
        case types.TextContent(text=text):
            return text
        case types.EmbeddedResource(resource=types.TextResourceContents(text=text)):
            return text
        case types.ResourceLink():
            return f"[resource {block.uri}: {block.name}]"
        case types.ImageContent() | types.AudioContent():
            return f"[{block.type} of type {block.mime_type} is not shown]"
        case _:
            return f"[content of type {block.type} is not shown]"
