"""Chat templates, rendered without untrusted text.

Every untrusted string is replaced by a mark before the template sees it. The template then writes structure only, and
the marks show where each string belongs and how the template writes it there (unchanged or inside JSON). A rendering
depends only on the *shape* of a conversation, not on its texts, and is computed once per shape.
"""

from __future__ import annotations

import json
import re
import secrets
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from enum import Enum
from string import ascii_letters
from typing import Any

from kestrl._shared.processes import frames
from kestrl._shared.processes.guarded import variables_without_ours
from kestrl._shared.text import renderer
from kestrl.errors import UserInputError

LONGEST_ANSWER = 6 * renderer.LONGEST + 1024
"""Bytes of a rendering as JSON, which writes a character in at most six."""
EDGE = "\u2003"
"""White space that no template writes. Around a mark it shows whether the template strips white space."""
EDGED = frozenset("m")
"""First letters of slots whose marks have edges: message texts. Marks in tool schemas have none."""
MARK = "KSTRL" + secrets.token_hex(6)
ODD = 'é"'
"""Part of every mark that is written differently in raw text, JSON and ASCII-only JSON."""
ID_MARK = "".join(secrets.choice(ascii_letters) for _ in range(5))
"""Beginning of the marks of call ids, which some templates accept only as nine letters and digits."""
_MARK = re.compile(
    rf"(?P<left>{EDGE}|\\u2003)?{MARK}(?P<name>[a-z]\d+)(?:(?P<raw>é\")|(?P<json>é\\\")|(?P<ascii>\\u00e9\\\"))Z"
    rf"(?P<right>{EDGE}|\\u2003)?|{ID_MARK}(?P<id>\d{{4}})"
)


class TemplateRefused(UserInputError):
    """The template refuses a conversation, for example one that begins with a system message."""

    code = "template_refuses"


class Written(Enum):
    """How a template wrote a string."""

    RAW = "raw"
    JSON = "json"
    """Inside a JSON string, as `tojson` does it."""
    ASCII = "ascii"
    """Inside a JSON string with `ensure_ascii`."""


@dataclass(frozen=True, slots=True)
class Slot:
    """Place of an untrusted string in a rendering."""

    name: str
    written: Written = Written.RAW
    keep_left: bool = True
    """Whether the template keeps white space at the string's start."""
    keep_right: bool = True

    def fill(self, text: str) -> str:
        """The string as written in the rendered text."""
        if not self.keep_left:
            text = text.lstrip()
        if not self.keep_right:
            text = text.rstrip()
        if self.written is Written.RAW:
            return text
        return json.dumps(text, ensure_ascii=self.written is Written.ASCII)[1:-1]


@dataclass(frozen=True, slots=True)
class Skeleton:
    """A rendering: alternating structure and slots."""

    text: str
    """The rendered text with marks: equal text means equal structure."""
    parts: tuple[str | Slot, ...]


def mark(name: str, *, edges: bool = False) -> str:
    """The mark for the slot `name` (a letter and a number). With edges it also shows whether the template strips."""
    text = f"{MARK}{name}{ODD}Z"
    return f"{EDGE}{text}{EDGE}" if edges else text


def id_mark(index: int) -> str:
    """The mark for the id of a call, a slot named `c` and the index. Nine characters up to index 9999."""
    return f"{ID_MARK}{index:04d}"


def find_mark(text: str, name: str, start: int) -> tuple[int, int] | None:
    """Where the mark `name` stands at or after `start`: its first character and one past its last."""
    for match in _MARK.finditer(text, start):
        if match["name"] == name:
            return match.start(), match.end()
    return None


def skeleton(text: str) -> Skeleton:
    """Splits a rendering into structure and slots.

    Raises:
        UserInputError: The template changed a mark, so that its effect on the real text is unknown.
    """
    parts: list[str | Slot] = []
    position = 0
    for match in _MARK.finditer(text):
        parts.append(text[position : match.start()])
        if match["id"]:
            parts.append(Slot(f"c{int(match['id'])}"))
            position = match.end()
            continue
        encoding = Written.RAW if match["raw"] else Written.JSON if match["json"] else Written.ASCII
        left_edge, right_edge = match["left"] is not None, match["right"] is not None
        # Marks without edges stand for strings that no template strips, such as those of a tool's schema.
        edges = left_edge or right_edge or match["name"][0] in EDGED
        parts.append(Slot(match["name"], encoding, left_edge or not edges, right_edge or not edges))
        position = match.end()
    parts.append(text[position:])
    for part in parts:
        if isinstance(part, str) and (EDGE in part or MARK[:5] in part):
            raise UserInputError(
                "the chat template cannot be used: it rewrites texts of messages or tools "
                f"(near {part[:80]!r}); name another with agent.template"
            )
    return Skeleton(text, tuple(part for part in parts if part != ""))


class ChatTemplate:
    """A chat template, rendered in a child process (`renderer.py`). Thread-safe."""

    def __init__(
        self,
        source: str,
        special: Mapping[str, str],
        *,
        started: datetime,
        arguments: Mapping[str, Any] | None = None,
        cpu_seconds: float = renderer.CPU_SECONDS,
    ) -> None:
        """Starts the process and compiles the template.

        Args:
            source: The template.
            special: Special tokens by their names in templates, such as `bos_token`.
            started: What `strftime_now` in the template reports.
            arguments: Variables of the template beside these.
            cpu_seconds: Bound on the CPU time of a rendering.

        Raises:
            UserInputError: It cannot be compiled, or not within the bounds of time and memory.
        """
        self.source = source
        self._cpu_seconds = cpu_seconds
        self._first = {
            "source": source,
            "variables": {**(arguments or {}), **special},
            "started": started.isoformat(),
            "cpu_seconds": cpu_seconds,
        }
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._end: Callable[[], object] = lambda: None
        with self._lock:
            self._running()

    def render(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], *, generate: bool
    ) -> Skeleton:
        """The text of a marked conversation.

        Raises:
            UserInputError: The template refuses the conversation, cannot be verified, or exceeds the bounds of time and
                memory (code `template_unbounded`).
        """
        request = {"messages": list(messages), "tools": list(tools), "generate": generate}
        with self._lock:
            answer = self._ask(self._running(), request)
        if "refused" in answer:
            raise TemplateRefused(f"the chat template refuses the conversation: {answer['refused']}")
        return skeleton(answer["text"])

    def close(self) -> None:
        """Ends the process, which a further rendering starts again."""
        with self._lock:
            self._process = None
            self._end()

    def _running(self) -> subprocess.Popen[bytes]:
        """The process, restarted if a rendering ended it."""
        if self._process is not None:
            return self._process
        process = subprocess.Popen(  # noqa: S603 - a fixed command
            [sys.executable, "-P", "-m", renderer.__name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=variables_without_ours(),
        )
        self._process, self._end = process, weakref.finalize(self, _finish, process)
        answer = self._ask(process, self._first)
        if "refused" in answer:
            raise UserInputError(f"the chat template cannot be read: {answer['refused']}")
        return process

    def _ask(self, process: subprocess.Popen[bytes], request: Mapping[str, Any]) -> dict[str, str]:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            frames.write_file(process.stdin, json.dumps(request).encode())
            frame = frames.read_file(process.stdout, LONGEST_ANSWER)
        except BrokenPipeError:
            frame = None
        answer: dict[str, str] = {"unbounded": self._died()} if frame is None else json.loads(frame)
        if "unbounded" in answer:
            raise UserInputError(
                f"the chat template cannot be used: {answer['unbounded']}; name another with agent.template",
                code="template_unbounded",
            )
        return answer

    def _died(self) -> str:
        """Why the process ended."""
        process, self._process = self._process, None
        self._end()
        assert process is not None
        if process.returncode == -signal.SIGPROF:
            return f"it takes more than {self._cpu_seconds:g} s of processor time"
        return f"its process ended with status {process.returncode}"


def _finish(process: subprocess.Popen[bytes]) -> None:
    """Ends a renderer and closes its pipes."""
    with suppress(BrokenPipeError):
        process.communicate()
