"""Requests of calls: arguments in path, query, headers and body. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from yarl import URL

from kestrl.tools import ToolError
from kestrl.tools.shapes import is_list
from kestrl_tools.http.operations import ArgumentPlace, Operation, Parameter

IDEMPOTENT = frozenset({"GET", "PUT", "DELETE"})
"""Methods that may be sent again although the first request may have been executed (RFC 9110, 9.2.2)."""
PATH_CHARACTERS = "/{}%:@!$&'()*+,;=~"
"""Characters of a declared path that are kept, besides letters, digits and `_.-`."""
HEADER_VALUE = re.compile(r"[ -~]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpRequest:
    """A request."""

    method: str
    url: URL
    headers: Mapping[str, str]
    """Headers from arguments, and the type of the body."""
    body: bytes | None = None

    @property
    def idempotent(self) -> bool:
        return self.method in IDEMPOTENT


def request_of(operation: Operation, base_url: str, arguments: Mapping[str, Any]) -> HttpRequest:
    """The request of a call.

    Args:
        operation: The operation.
        base_url: URL before its path.
        arguments: Arguments by the names for the model, which match the schema.

    Raises:
        ToolError: A value cannot be sent in its place; the message is for the model.
    """
    path, query, headers = quote(operation.path, safe=PATH_CHARACTERS), list[str](), dict[str, str]()
    properties: dict[str, Any] | None = {} if operation.body else None
    body: bytes | None = None
    for item in operation.parameters:
        if item.name not in arguments:
            continue
        value = arguments[item.name]
        match item.place:
            case ArgumentPlace.PATH:
                path = path.replace(f"{{{item.key}}}", _segment(item, value))
            case ArgumentPlace.QUERY:
                query += _pairs(item, value)
            case ArgumentPlace.HEADER:
                headers[item.key] = _header(item, value)
            case ArgumentPlace.PROPERTY:
                properties = {**(properties or {}), item.key: value}
            case ArgumentPlace.BODY:
                body = _json(value)
    if properties is not None:
        body = _json(properties)
    if body is not None:
        headers["Content-Type"] = "application/json"
    url = base_url.rstrip("/") + path + ("?" if query else "") + "&".join(query)
    return HttpRequest(method=operation.method, url=URL(url, encoded=True), headers=headers, body=body)


def _json(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode("utf-8", "replace")


def _segment(item: Parameter, value: Any) -> str:
    """A value as a part of the path, which it cannot leave."""
    texts = _texts(item, value)
    for text in texts or [""]:
        if not text or any(part in (".", "..") for part in re.split(r"[/\\]", text)):
            raise ToolError(f"argument {item.name!r} must be neither empty nor have '.' or '..' as a part of a path")
    return ",".join(map(_quoted, texts))


def _pairs(item: Parameter, value: Any) -> Iterator[str]:
    name = _quoted(item.key)
    texts = [_quoted(text) for text in _texts(item, value)]
    if item.explode or len(texts) < 2:
        yield from (f"{name}={text}" for text in texts)
    else:
        yield f"{name}={','.join(texts)}"


def _header(item: Parameter, value: Any) -> str:
    text = ",".join(_texts(item, value))
    if not HEADER_VALUE.fullmatch(text):
        raise ToolError(f"argument {item.name!r} must have printable ASCII characters only")
    return text


def _texts(item: Parameter, value: Any) -> list[str]:
    """A value, or each item of a list, as text; null is none."""
    if item.as_json:
        return [json.dumps(value, ensure_ascii=False)]
    values = value if is_list(value) else [value]
    if any(isinstance(element, list | dict) for element in values):
        raise ToolError(f"argument {item.name!r} must be a text, a number, true or false, or a list of these")
    return [element if isinstance(element, str) else json.dumps(element) for element in values if element is not None]


def _quoted(text: str) -> str:
    return quote(text, safe="", errors="replace")
