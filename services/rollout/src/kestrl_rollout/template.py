"""Chat templates, rendered without any of the text that nobody vouches for.

Every untrusted string is replaced by a mark before the template sees it. What the template writes is then pure structure, and
the marks say where each string goes and how the template wrote it there (as it is, or inside JSON). A rendering so depends only on
the *shape* of a conversation, not on what is said in it, and is computed once per shape.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import Enum
from typing import Any

from jinja2 import Environment, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from kestrl.errors import UserInputError

EDGE = "\u2003"
"""White space that no template writes. Around a mark it shows whether the template strips."""
EDGED = frozenset("m")
"""First letters of the slots whose marks have edges: what messages say. Those of a tool's schema have none."""
MARK = "KSTRL" + secrets.token_hex(6)
ODD = 'é"'
"""Inside every mark: tells raw text, JSON and ASCII-only JSON apart, since each writes it differently."""
_MARK = re.compile(
    rf"(?P<left>{EDGE}|\\u2003)?{MARK}(?P<name>[a-z]\d+)(?:(?P<raw>é\")|(?P<json>é\\\")|(?P<ascii>\\u00e9\\\"))Z"
    rf"(?P<right>{EDGE}|\\u2003)?"
)


class Written(Enum):
    """How a template wrote a string."""

    RAW = "raw"
    JSON = "json"
    """Inside a JSON string, as `tojson` does it."""
    ASCII = "ascii"
    """Inside a JSON string with `ensure_ascii`."""


@dataclass(frozen=True, slots=True)
class Slot:
    """Where an untrusted string goes."""

    name: str
    written: Written = Written.RAW
    keep_left: bool = True
    """Whether the template keeps white space at the string's start."""
    keep_right: bool = True

    def fill(self, text: str) -> str:
        """The string as it stands in the rendered text."""
        if not self.keep_left:
            text = text.lstrip()
        if not self.keep_right:
            text = text.rstrip()
        if self.written is Written.RAW:
            return text
        return json.dumps(text, ensure_ascii=self.written is Written.ASCII)[1:-1]


@dataclass(frozen=True, slots=True)
class Skeleton:
    """A rendering: structure and slots in turn."""

    text: str
    """As rendered, marks included: equal text means equal structure."""
    parts: tuple[str | Slot, ...]


def mark(name: str, *, edges: bool = False) -> str:
    """The mark for the slot `name` (a letter and a number). With edges it also shows whether the template strips."""
    text = f"{MARK}{name}{ODD}Z"
    return f"{EDGE}{text}{EDGE}" if edges else text


def find_mark(text: str, name: str, start: int) -> tuple[int, int] | None:
    """Where the mark `name` stands at or after `start`: its first character and one past its last."""
    for match in _MARK.finditer(text, start):
        if match["name"] == name:
            return match.start(), match.end()
    return None


def skeleton(text: str) -> Skeleton:
    """Takes a rendering apart.

    Raises:
        UserInputError: The template changed a mark, so what it would have done to the real text is unknown.
    """
    parts: list[str | Slot] = []
    done = 0
    for match in _MARK.finditer(text):
        parts.append(text[done : match.start()])
        written = Written.RAW if match["raw"] else Written.JSON if match["json"] else Written.ASCII
        left, right = match["left"] is not None, match["right"] is not None
        # Marks without edges are of strings that no template strips, such as those of a tool's schema.
        edges = left or right or match["name"][0] in EDGED
        parts.append(Slot(match["name"], written, left or not edges, right or not edges))
        done = match.end()
    parts.append(text[done:])
    for part in parts:
        if isinstance(part, str) and (EDGE in part or MARK[:5] in part):
            raise UserInputError(
                "the chat template cannot be proven: it rewrites what messages or tools say "
                f"(near {part[:80]!r}); name another with agent.template"
            )
    return Skeleton(text, tuple(part for part in parts if part != ""))


class _Generation(Extension):
    """`{% generation %}` marks the assistant's part for supervised training; here it only has to be understood."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's own declaration

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def _raise(message: str) -> None:
    raise TemplateError(message)


def _tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    """As transformers has it: jinja2's own escapes HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


class Template:
    """A chat template in the environment that transformers gives it."""

    def __init__(self, source: str, special: Mapping[str, str], *, started: datetime) -> None:
        environment: Environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        # The worker's start, not the moment: a prompt must not change while its conversation goes on.
        added: dict[str, Any] = {"raise_exception": _raise, "strftime_now": started.strftime}
        environment.globals.update(added)
        self._special = dict(special)
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise UserInputError(f"the chat template cannot be read: {error}") from error

    def render(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], *, generate: bool
    ) -> Skeleton:
        """The text of a marked conversation.

        Raises:
            UserInputError: The template refuses the conversation or cannot be proven.
        """
        try:
            text = self._template.render(
                messages=messages,
                tools=list(tools) or None,
                documents=None,
                add_generation_prompt=generate,
                **self._special,
            )
        except (TemplateError, TypeError, ValueError, KeyError, AttributeError, IndexError) as error:
            raise UserInputError(f"the chat template refuses the conversation: {error}") from error
        return skeleton(text)
