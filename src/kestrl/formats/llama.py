"""Llama 3's calls: bare JSON objects with `name` and `parameters`, several separated by semicolons, perhaps behind
`<|python_tag|>`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from kestrl.formats import Marker, Schemas, ToolCallFormat, Turn, WrittenCall
from kestrl.formats.objects import call_of, names_tool, objects, write_object

TAG = "<|python_tag|>"
KEYS = ("parameters", "arguments")
_BEGINNING = re.compile(r'\{\s*"(?:name|type|id|function|parameters|arguments)"\s*:')
"""How a call that cannot be read begins. Other text that is not JSON is an answer."""
MAX_CALLS = 256
"""Maximum calls read from one turn; text after the last one is content."""


class Llama3Json(ToolCallFormat):
    """Llama 3.1 to 3.3, and others trained on their template."""

    name = "llama3_json"
    markers = (TAG,)
    example = 'write {"name": "<tool>", "parameters": {<arguments>}} with valid JSON and nothing else'
    hints = ('{"name":', '"parameters":')

    def read(self, pieces: Sequence[str], schemas: Schemas, *, cut: bool) -> Turn:
        tagged = any(isinstance(piece, Marker) and piece == TAG for piece in pieces)
        text = "".join(piece for piece in pieces if not (isinstance(piece, Marker) and piece == TAG))
        content: list[str] = []
        calls: list[WrittenCall] = []
        position = 0
        for start, end, value in objects(text):
            if len(calls) == MAX_CALLS:
                break
            call = _read(text, start, end, value, schemas, cut=cut)
            if call is not None:
                content.append(text[position:start])
                calls.append(call)
                position = end
                if isinstance(value, ValueError):
                    break  # what follows belongs to it
        content.append(text[position:])
        prose = "".join(content)
        if tagged and not calls and prose.strip():
            calls, prose = (
                [WrittenCall(raw=prose.strip(), problem='it is not a JSON object with "name" and "parameters"')],
                "",
            )
        return Turn(content=prose.strip(" \t\r\n;") if calls else prose.strip(), calls=calls)

    def write(self, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
        return "; ".join(write_object(name, arguments, KEYS[0]) for name, arguments in calls)


def _read(text: str, start: int, end: int, value: Any, schemas: Schemas, *, cut: bool) -> WrittenCall | None:
    """The call that an object is; None for one that is an answer."""
    raw = text[start:end]
    if isinstance(value, ValueError):
        if not _BEGINNING.match(raw) or '"name"' not in raw:
            return None
        return WrittenCall(raw=raw, unfinished=True) if cut else WrittenCall(raw=raw, problem=str(value))
    is_call = isinstance(value, dict) and "name" in value and any(key in value for key in KEYS)
    return call_of(value, raw, KEYS) if is_call or names_tool(value, schemas, KEYS) else None
