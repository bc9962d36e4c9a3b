"""Calls between `<tool_call>` and `</tool_call>`: JSON objects (hermes), or XML (Qwen3-Coder and Qwen3.5 on)."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

from kestrl.formats import Marker, Schemas, ToolCallFormat, Turn, WrittenCall
from kestrl.formats.objects import ARGUMENTS, read_json, read_object, stray_calls, write_json, write_object
from kestrl.tools.references import alternatives, properties_of

BEGIN, END = "<tool_call>", "</tool_call>"
OUTSIDE = f"it does not stand between {BEGIN} and {END}"
MAX_LITERAL = 65_536
"""Characters of a Python literal that are parsed: the parser's memory grows with them."""


def between(
    pieces: Sequence[str], begin: str, end: str, read: Callable[[str], Sequence[WrittenCall]]
) -> tuple[str, list[WrittenCall]]:
    """Text outside pairs of markers, and the calls inside. A call that is not closed is unfinished."""
    content: list[str] = []
    calls: list[WrittenCall] = []
    inside: list[str] | None = None
    for piece in pieces:
        marker = piece if isinstance(piece, Marker) else ""
        if marker == begin:
            if inside is not None:
                calls.append(WrittenCall(raw="".join(inside), unfinished=True))
            inside = []
        elif inside is None:
            content += [] if marker == end else [piece]
        elif marker == end:
            calls += read("".join(inside))
            inside = None
        else:
            inside.append(piece)
    if inside is not None:
        calls.append(WrittenCall(raw="".join(inside), unfinished=True))
    return "".join(content).strip(), calls


class Hermes(ToolCallFormat):
    """One JSON object with `name` and `arguments` in each pair of markers: Qwen2.5, Qwen3, Hermes and many others."""

    name = "hermes"
    markers = (BEGIN, END)
    example = 'write <tool_call>{"name": "<tool>", "arguments": {<arguments>}}</tool_call> with valid JSON inside'
    hints = (BEGIN, "arguments")

    def read(self, pieces: Sequence[str], schemas: Schemas, *, cut: bool) -> Turn:
        del cut
        content, calls = between(pieces, BEGIN, END, lambda raw: [read_object(raw)])
        content, strays = stray_calls(content, schemas, ARGUMENTS, OUTSIDE)
        return Turn(content=content, calls=[*calls, *strays])

    def write(self, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
        return "\n".join(f"{BEGIN}\n{write_object(name, arguments)}\n{END}" for name, arguments in calls)


_FUNCTION = re.compile(r"\s*<function=(?P<name>[^>\n]+)>(?P<body>.*)</function>\s*", re.DOTALL)
_OPENED = re.compile(r"<parameter=(?P<name>[^>\n]+)>")
_PARAMETER = re.compile(
    r"\s*<parameter=(?P<name>[^>\n]+)>(?P<value>.*?)</parameter>(?=\s*(?:<parameter=|$))", re.DOTALL
)


class QwenXml(ToolCallFormat):
    """A function and its parameters as XML in each pair of markers: Qwen3-Coder, Qwen3.5, Qwen3.6, Nemotron 3.

    Values are text and are converted by the tool's JSON Schema.
    """

    name = "qwen_xml"
    markers = (BEGIN, END)
    example = (
        "write <tool_call>\n<function=<tool>>\n<parameter=<name>>\n<value>\n</parameter>\n</function>\n</tool_call>, "
        "one <parameter=...> for each argument"
    )
    hints = (BEGIN, "<function=")

    def read(self, pieces: Sequence[str], schemas: Schemas, *, cut: bool) -> Turn:
        del cut
        content, calls = between(pieces, BEGIN, END, lambda raw: [_read_xml(raw, schemas)])
        content, bare = _bare_xml(content, schemas)
        return Turn(content=content, calls=[*calls, *bare])

    def write(self, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
        return "\n".join(_write_xml(name, arguments) for name, arguments in calls)


def _write_xml(name: str, arguments: Mapping[str, Any]) -> str:
    parameters = "".join(
        f"<parameter={key}>\n{value if isinstance(value, str) else write_json(value)}\n</parameter>\n"
        for key, value in arguments.items()
    )
    return f"{BEGIN}\n<function={name}>\n{parameters}</function>\n{END}"


def _read_xml(raw: str, schemas: Schemas) -> WrittenCall:
    function = _FUNCTION.fullmatch(raw)
    if function is None:
        return WrittenCall(raw=raw, problem="it is not of the form <function=...> ... </function>")
    name, body = function["name"].strip(), function["body"]
    schema = schemas.get(name, {})
    properties = properties_of(schema)
    arguments: dict[str, Any] = {}
    position = 0
    for match in _PARAMETER.finditer(body):
        if match.start() != position:
            break
        position = match.end()
        key = match["name"].strip()
        opened = _OPENED.search(match["value"])
        if opened is not None and opened["name"].strip() in properties:
            problem = f"</parameter> is missing between {key!r} and {opened['name'].strip()!r}"
            return WrittenCall(raw=raw, name=name, problem=problem)
        if key in arguments:
            return WrittenCall(raw=raw, name=name, problem=f"the parameter {key!r} is there twice")
        arguments[key] = _value(_without_frame(match["value"]), properties.get(key, {}), schema)
    if body[position:].strip():
        return WrittenCall(
            raw=raw,
            name=name,
            problem=f"what follows is not <parameter=...> ... </parameter>: {body[position:].strip()[:80]}",
        )
    return WrittenCall(raw=raw, name=name, arguments=arguments)


_BARE = re.compile(r"<function=(?P<name>[^>\n]+)>")


def _bare_xml(text: str, schemas: Schemas) -> tuple[str, list[WrittenCall]]:
    """A text without the functions in it that name an offered tool, and these as calls that cannot be read.

    Models omit `<tool_call>`. Where it is a control token, text without it may also repeat what somebody else wrote, so
    that nothing is executed, and the model gets an error.
    """
    starts = [match.start() for match in _BARE.finditer(text) if match["name"].strip() in schemas]
    if not starts:
        return text, []
    content, calls, position = [text[: starts[0]]], list[WrittenCall](), starts[0]
    for start in starts:
        if start < position:
            continue  # in a value of the one before
        content.append(text[position:start])
        end = text.find("</function>", start)
        position = len(text) if end < 0 else end + len("</function>")
        calls.append(WrittenCall(raw=text[start:position], problem=OUTSIDE))
    content.append(text[position:])
    return "".join(content).strip(), calls


def _without_frame(text: str) -> str:
    """Strips the line breaks that templates write around a value."""
    return text.removeprefix("\n").removesuffix("\n")


def _value(text: str, schema: Any, root: Mapping[str, Any]) -> Any:
    """Converts a text to a type of the schema; unchanged if that fails, so that the tool's argument check reports
    why.
    """
    kinds = set(_kinds(schema, root))
    if not kinds or kinds == {"string"}:
        return text
    bare = text.strip()
    for reader in (read_json, _literal):
        try:
            value = reader(bare)
        except ValueError:
            continue
        if isinstance(value, str):
            continue  # the quotes are part of the text
        if _kind(value) in kinds or (_kind(value) == "integer" and "number" in kinds):
            return value
    lowered = bare.lower()
    if "boolean" in kinds and lowered in ("true", "false"):
        return lowered == "true"
    if "null" in kinds and lowered in ("null", "none"):
        return None
    return text


def _literal(text: str) -> Any:
    """Parses a Python literal: models also write single quotes and True."""
    if len(text) > MAX_LITERAL or text[:1] not in ("[", "{"):
        raise ValueError("not a literal")
    try:
        value = ast.literal_eval(text)
    except (SyntaxError, TypeError, RecursionError, MemoryError) as error:
        raise ValueError("not a literal") from error
    # Converted to JSON and back, so that sets, bytes and numbers without a JSON form are refused.
    try:
        return read_json(write_json(value))
    except TypeError as error:
        raise ValueError("not a JSON value") from error


def _kinds(schema: Any, root: Mapping[str, Any]) -> Iterator[str]:
    """JSON types that a schema allows, if declared; for an enumeration, the types of its values."""
    for entries in alternatives(schema, root):
        declared: Any = entries.get("type")
        yield from [declared] if isinstance(declared, str) else cast(list[str], declared or [])
        if declared is None:
            constants = [entries["const"]] if "const" in entries else []
            yield from (_kind(value) for value in [*entries.get("enum", ()), *constants])


def _kind(value: Any) -> str:
    match value:
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "number"
        case str():
            return "string"
        case list():
            return "array"
        case dict():
            return "object"
        case _:
            return "null"
