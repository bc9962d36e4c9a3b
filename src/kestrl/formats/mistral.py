"""Mistral's calls behind `[TOOL_CALLS]`: a JSON array of objects, or a name, `[ARGS]` and a JSON object for each
call.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from kestrl.formats import Marker, Schemas, ToolCallFormat, Turn, WrittenCall
from kestrl.formats.objects import call_of, read_json, with_arguments, write_object
from kestrl.tools.shapes import is_list, is_mapping

CALLS, ARGS, ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
_NAMED = re.compile(r"\s*(?P<name>[A-Za-z_][\w.-]*)\s*(?P<arguments>\{.*)", re.DOTALL)


class Mistral(ToolCallFormat):
    """Mistral and Mixtral since v3, Ministral, Magistral, Devstral."""

    name = "mistral"
    markers = (CALLS, ARGS, ID, "[THINK]", "[/THINK]")
    example = (
        'write [TOOL_CALLS] and then a JSON array: [{"name": "<tool>", "arguments": {<arguments>}}], '
        "or <tool>[ARGS]{<arguments>}"
    )
    reasoning = ("[THINK]", "[/THINK]")
    hints = (CALLS,)

    def read(self, pieces: Sequence[str], schemas: Schemas, *, cut: bool) -> Turn:
        del schemas
        content: list[str] = []
        calls: list[WrittenCall] = []
        inside: list[str] | None = None
        for piece in [*pieces, Marker(CALLS)]:
            if isinstance(piece, Marker) and piece == CALLS:
                if inside is not None:
                    calls += _read(inside)
                inside = []
            else:
                (content if inside is None else inside).append(piece)
        if calls and cut and calls[-1].problem:
            calls[-1] = WrittenCall(raw=calls[-1].raw, unfinished=True)
        return Turn(content="".join(content).strip(), calls=calls)

    def readable(self, pieces: Sequence[str]) -> str:
        tags = {"[THINK]": "<think>", "[/THINK]": "</think>"}
        return "".join(tags.get(piece, piece) if isinstance(piece, Marker) else piece for piece in pieces)

    def write(self, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
        return f"{CALLS}[{', '.join(write_object(name, arguments) for name, arguments in calls)}]"


def _read(pieces: Sequence[str]) -> list[WrittenCall]:
    """The calls between one `[TOOL_CALLS]` and the next."""
    raw = "".join(pieces)
    markers = [index for index, piece in enumerate(pieces) if isinstance(piece, Marker)]
    arguments = next((index for index in markers if pieces[index] == ARGS), None)
    if arguments is not None:
        first = min(markers)
        name = "".join(pieces[:first]).strip()
        id_ = "".join(pieces[first + 1 : arguments]).strip() if pieces[first] == ID else ""
        return [replace(_named(name, "".join(pieces[arguments + 1 :]), raw), id=id_)]
    match = _NAMED.fullmatch(raw)
    if match is not None:
        return [_named(match["name"], match["arguments"], raw)]
    try:
        value = read_json(raw)
    except ValueError as error:
        return [WrittenCall(raw=raw, problem=str(error))]
    call_objects = value if is_list(value) else [value]
    return [replace(call_of(call, raw), id=_id(call)) for call in call_objects] or [
        WrittenCall(raw=raw, problem="the array is empty")
    ]


def _id(value: Any) -> str:
    call_id = value.get("id") if is_mapping(value) else None
    return call_id if isinstance(call_id, str) else ""


def _named(name: str, arguments: str, raw: str) -> WrittenCall:
    if not name:
        return WrittenCall(raw=raw, problem="it has no name before [ARGS]")
    try:
        return with_arguments(name, read_json(arguments), raw)
    except ValueError as error:
        return WrittenCall(raw=raw, name=name, problem=str(error))
