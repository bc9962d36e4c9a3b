"""Calls as a Python list: `[search(word="a"), answer(text="b")]`, bare (Llama 4, ToolACE) or between markers (LFM2)."""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, cast

from kestrl.formats import Marker, Schemas, ToolCallFormat, Turn, WrittenCall
from kestrl.formats.objects import read_json, write_json
from kestrl.formats.tagged import between

PAIRS = (("<|tool_call_start|>", "<|tool_call_end|>"), ("<|python_start|>", "<|python_end|>"))
MAX_LENGTH = 65_536
"""Characters of a list that are parsed: the parser's memory grows with them."""
_LIST = re.compile(r"\s*\[\s*[A-Za-z_][\w.-]*\s*\(.*", re.DOTALL)
_NAMES = {"true": True, "false": False, "null": None}
"""JSON literals, which models mix in."""


class Pythonic(ToolCallFormat):
    """Llama 3.2 and 4, ToolACE, Olmo 3 and LFM2."""

    name = "pythonic"
    markers = tuple(marker for pair in PAIRS for marker in pair)
    example = "write [<tool>(<name>=<value>, ...)], a Python list of calls with named arguments, and nothing else"

    def read(self, pieces: Sequence[str], schemas: Schemas, *, cut: bool) -> Turn:
        del schemas
        for begin, end in PAIRS:
            if any(isinstance(piece, Marker) and piece == begin for piece in pieces):
                content, calls = between(pieces, begin, end, _read)
                return Turn(content=content, calls=calls)
        text = "".join(pieces)
        if not _LIST.fullmatch(text):
            return Turn(content=text.strip())
        calls = _read(text)
        if cut and calls[-1].problem:
            return Turn(content="", calls=[WrittenCall(raw=text.strip(), unfinished=True)])
        return Turn(content="", calls=calls)

    def write(self, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
        call_texts = (
            f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})" for name, arguments in calls
        )
        return f"[{', '.join(call_texts)}]"


def _read(raw: str) -> list[WrittenCall]:
    text = raw.strip()
    if len(text) > MAX_LENGTH:
        return [WrittenCall(raw=raw, problem=f"it is longer than {MAX_LENGTH} characters")]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in the model's strings need no warning
            tree = ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return [WrittenCall(raw=raw, problem=f"it is not a list of calls: {str(error)[:200]}")]
    nodes = tree.elts if isinstance(tree, ast.List) else [tree]
    return [_call(node, text) for node in nodes] or [WrittenCall(raw=raw, problem="the list is empty")]


def _call(node: ast.expr, text: str) -> WrittenCall:
    raw = ast.get_source_segment(text, node) or text
    if not isinstance(node, ast.Call):
        return WrittenCall(raw=raw, problem="it is not a call")
    name = ast.unparse(node.func)
    if not isinstance(node.func, ast.Name | ast.Attribute):
        return WrittenCall(raw=raw, problem="it calls no tool by its name")
    if node.args or any(keyword.arg is None for keyword in node.keywords):
        return WrittenCall(raw=raw, name=name, problem="arguments must be given by name: <tool>(<name>=<value>)")
    try:
        values = {cast(str, keyword.arg): _value(keyword.value) for keyword in node.keywords}
        # Converted to JSON and back, which refuses values that cannot be sent, such as bytes or infinity.
        return WrittenCall(raw=raw, name=name, arguments=cast(dict[str, Any], read_json(write_json(values))))
    except (ValueError, TypeError, RecursionError) as error:
        return WrittenCall(raw=raw, name=name, problem=f"its arguments are not literals ({str(error)[:200]})")


def _value(node: ast.expr) -> Any:
    """The value of a literal.

    Raises:
        ValueError: The node is not a literal.
    """
    match node:
        case ast.Name(id=word) if word in _NAMES:
            return _NAMES[word]
        case ast.List(elts=elements) | ast.Tuple(elts=elements):
            return [_value(element) for element in elements]
        case ast.Dict(keys=keys, values=values):
            return {_key(key): _value(value) for key, value in zip(keys, values, strict=True)}
        case _:
            return ast.literal_eval(node)


def _key(node: ast.expr | None) -> str:
    value = None if node is None else _value(node)
    if not isinstance(value, str):
        raise ValueError("the keys of an object are text")
    return value
