"""gpt-oss's calls: messages to `functions.NAME` in the harmony format, reasoning and answer in channels of their
own.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kestrl.formats import Marker, Schemas, ToolCallFormat, Turn, WrittenCall
from kestrl.formats.objects import read_json, with_arguments, write_json, write_object
from kestrl.tools.shapes import json_problem

START, CHANNEL, MESSAGE, END, CALL = "<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>"
CONSTRAIN, RETURN = "<|constrain|>", "<|return|>"
PREFIX = "functions."
_RECIPIENT = re.compile(r"\bto=(?P<name>[^\s<]+)")


@dataclass(slots=True)
class _Message:
    """One message of a turn."""

    header: list[str] = field(default_factory=list[str])
    body: list[str] | None = None
    """None until `<|message|>`."""
    ended: bool = False

    @property
    def channel(self) -> str:
        for index, piece in enumerate(self.header[:-1]):
            if isinstance(piece, Marker) and piece == CHANNEL:
                return self.header[index + 1].split()[0] if self.header[index + 1].split() else ""
        return ""

    @property
    def words(self) -> str:
        """Text before any `<|message|>`: a turn that does not follow the format."""
        if self.channel or self.body is not None:
            return ""
        return "".join(piece for piece in self.header if not isinstance(piece, Marker)).strip()

    @property
    def recipient(self) -> str:
        match = _RECIPIENT.search("".join(piece if not isinstance(piece, Marker) else " " for piece in self.header))
        return "" if match is None else match["name"]


class Harmony(ToolCallFormat):
    """gpt-oss. Messages in the channels `final` and `commentary` are content, those in `analysis` are reasoning."""

    name = "harmony"
    markers = (START, CHANNEL, MESSAGE, END, CALL, CONSTRAIN, RETURN)
    example = (
        "write <|channel|>commentary to=functions.<tool> <|constrain|>json<|message|>{<arguments>}<|call|> "
        "with one valid JSON object as the message"
    )
    reasoning = None
    hints = (CHANNEL, PREFIX)
    inner_ends = (END,)

    def read(self, pieces: Sequence[str], schemas: Schemas, *, cut: bool) -> Turn:
        del schemas
        content: list[str] = []
        calls: list[WrittenCall] = []
        for message in _messages(pieces):
            body = "".join(message.body or ())
            if message.recipient:
                calls.append(_call(message, body, cut=cut))
            elif message.channel != "analysis":
                content.append(body or message.words)
        return Turn(content="\n".join(text.strip() for text in content if text.strip()), calls=calls)

    def readable(self, pieces: Sequence[str]) -> str:
        blocks: list[str] = []
        for message in _messages(pieces):
            body = "".join(message.body or ()).strip()
            if message.recipient:
                call = _call(message, body, cut=False)
                unwritable = call.arguments is None or json_problem(call.arguments)
                text = body if unwritable else write_object(call.name, call.arguments or {})
                blocks.append(f"<tool_call>\n{text}\n</tool_call>")
            elif message.channel == "analysis":
                blocks.append(f"<think>\n{body}\n</think>")
            else:
                blocks.append(body or message.words)
        return "\n".join(text for text in blocks if text)

    def write(self, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
        return f"{START}assistant".join(
            f"{CHANNEL}commentary to={PREFIX}{name} {CONSTRAIN}json{MESSAGE}{write_json(dict(arguments))}{CALL}"
            for name, arguments in calls
        )


def _messages(pieces: Sequence[str]) -> Iterator[_Message]:
    """The messages of a turn. The first has no `<|start|>`: the prompt wrote it."""
    message = _Message()
    for piece in pieces:
        marker = piece if isinstance(piece, Marker) else ""
        if marker == START:
            if message.header or message.body is not None:
                yield message
            message = _Message()
        elif marker in (END, CALL, RETURN):
            message.ended = True
            yield message
            message = _Message()
        elif marker == MESSAGE and message.body is None:
            message.body = []
        elif message.body is None:
            message.header.append(piece)
        else:
            message.body.append(piece)
    if message.header or message.body is not None:
        yield message


def _call(message: _Message, body: str, *, cut: bool) -> WrittenCall:
    name = message.recipient.removeprefix(PREFIX)
    if message.body is None or (cut and not message.ended):
        return WrittenCall(raw=body, name=name, unfinished=True)
    try:
        return with_arguments(name, read_json(body), body)
    except ValueError as error:
        return WrittenCall(raw=body, name=name, problem=str(error))
