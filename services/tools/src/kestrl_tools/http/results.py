"""Responses as results of tools."""

from __future__ import annotations

import json
import re
from typing import Any, NoReturn

from kestrl.errors import ToolFailure
from kestrl.tools import ToolError, ToolResult
from kestrl.tools.shapes import json_problem
from kestrl_tools.http.client import Response

JSON = re.compile(r"application/([\w.+-]+\+)?json")
TEXT = re.compile(
    r"text/.*|application/([\w.+-]+\+)?(json|xml|yaml)|application/(x-yaml|javascript|x-ndjson|jsonl|x-www-form-urlencoded)"
)


def result_of(tool: str, response: Response) -> ToolResult:
    """Text for the model; status, parsed JSON and whether it was cut as facts for the reward.

    Raises:
        ToolError: The server refuses the request (4xx), in its words.
        ToolFailure: The response is neither a success nor a refusal.
    """
    if response.status >= 400:
        raise ToolError(f"HTTP {response.status} {response.reason}: {_text(response)}")
    if not 200 <= response.status < 300:
        raise ToolFailure(f"{tool}: the server answers with {response.status}", code="tool_result_invalid")
    data: dict[str, Any] = {"status": response.status, "truncated": response.truncated}
    if JSON.fullmatch(response.kind) and not response.truncated:
        data["structured"] = _structured(response.text)
    return ToolResult(text=_text(response), data=data)


def _structured(text: str) -> object:
    """The JSON of a response; None for what cannot be passed on as JSON, which the model sees as it is."""
    try:
        value: object = json.loads(text, parse_constant=_refused)
    except (ValueError, RecursionError):
        return None
    return None if json_problem(value) else value


def _text(response: Response) -> str:
    if not response.body:
        return f"[HTTP {response.status} {response.reason}, without content]"
    if not TEXT.fullmatch(response.kind):
        truncation = " or more" if response.truncated else ""
        return f"[content of type {response.kind}, {len(response.body)} bytes{truncation}, is not shown]"
    return f"{response.text}\n[cut after {len(response.body)} bytes]" if response.truncated else response.text


def _refused(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")
