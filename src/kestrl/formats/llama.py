"""Llama 3's calls: bare JSON objects with `name` and `parameters`, several separated by semicolons, perhaps behind
`<|python_tag|>`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, cast

from kestrl.formats import Marker, Schemas, ToolCallFormat, Turn, WrittenCall
from kestrl.formats.objects import call_of, raw_json, write_object

TAG = "<|python_tag|>"
KEYS = ("parameters", "arguments")
_OPENING = re.compile(r'\{\s*"name"\s*:')
"""How a call begins. JSON without a tool name is an answer."""
MAX_CALLS = 256
"""Maximum calls read from one turn; text after the last one is content."""


class Llama3Json(ToolCallFormat):
    """Llama 3.1 to 3.3, and others trained on their template."""

    name = "llama3_json"
    markers = (TAG,)
    example = 'write {"name": "<tool>", "parameters": {<arguments>}} with valid JSON and nothing else'
    hints = ('{"name":', '"parameters":')

    def read(self, pieces: Sequence[str], schemas: Schemas, *, cut: bool) -> Turn:
        del schemas
        tagged = any(isinstance(piece, Marker) and piece == TAG for piece in pieces)
        text = "".join(piece for piece in pieces if not (isinstance(piece, Marker) and piece == TAG))
        content: list[str] = []
        calls: list[WrittenCall] = []
        done = 0
        for opening in _OPENING.finditer(text):
            if opening.start() < done:
                continue
            if len(calls) == MAX_CALLS:
                break
            content.append(text[done : opening.start()])
            call, done = _read(text, opening.start(), cut=cut)
            if call is None:
                content.append(text[opening.start() : done])
            else:
                calls.append(call)
        content.append(text[done:])
        said = "".join(content)
        if tagged and not calls and said.strip():
            calls, said = (
                [WrittenCall(raw=said.strip(), problem='it is not a JSON object with "name" and "parameters"')],
                "",
            )
        return Turn(content=said.strip(" \t\r\n;") if calls else said.strip(), calls=calls)

    def write(self, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
        return "; ".join(write_object(name, arguments, KEYS[0]) for name, arguments in calls)


def _read(text: str, start: int, *, cut: bool) -> tuple[WrittenCall | None, int]:
    """The call that begins at `start` and where it ends; None for an object that is not a call."""
    try:
        value, end = raw_json(text, start)
    except ValueError as error:
        raw = text[start:]
        if cut:
            return WrittenCall(raw=raw, unfinished=True), len(text)
        return WrittenCall(raw=raw, problem=str(error)), len(text)
    if not any(key in cast(dict[str, Any], value) for key in KEYS):
        return None, end
    return call_of(value, text[start:end], KEYS), end
