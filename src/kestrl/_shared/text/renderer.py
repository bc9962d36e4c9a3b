"""`python -m kestrl._shared.text.renderer`: renders one chat template within bounds of time and memory.

A template is a program that comes with a model: it may loop or allocate without end, and no sandbox inside a process
can stop that. So it runs in a child process with kernel limits. Requests and answers are JSON, each a frame of
`kestrl._shared.processes`; the first request is the template, each later one a conversation.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
from collections.abc import Callable
from datetime import datetime
from functools import partial
from typing import Any

from jinja2 import Environment, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from kestrl._shared.processes import frames

CPU_SECONDS = 5.0
"""Processor time of one rendering, and of compiling the template. Past it SIGPROF ends the process."""
MEMORY_BYTES = 2**30
"""Address space of the process."""
LONGEST = 16 * 1024 * 1024
"""Largest number of characters of a rendering, which holds marks in place of message texts."""

Render = Callable[[dict[str, Any]], str]


class _Generation(Extension):
    """`{% generation %}` marks the assistant's part for supervised training; here it is only parsed."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's own declaration

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def _raise(message: str) -> None:
    raise TemplateError(message)


def _tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    """The filter of transformers; jinja2's own escapes HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def compiled(request: dict[str, Any]) -> Render:
    """Compiles the template of the first request in the environment of transformers."""
    environment: Environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    # The worker's start, not the present time: a prompt must not change during its conversation.
    started = datetime.fromisoformat(request["started"])
    added: dict[str, Any] = {"raise_exception": _raise, "strftime_now": started.strftime}
    environment.globals.update(added)
    template = environment.from_string(request["source"])

    def render(conversation: dict[str, Any]) -> str:
        text = template.render(
            messages=conversation["messages"],
            tools=conversation["tools"] or None,
            documents=None,
            add_generation_prompt=conversation["generate"],
            **request["variables"],
        )
        if len(text) > LONGEST:
            raise MemoryError
        return text

    return render


def answer(act: Callable[[], str], seconds: float) -> dict[str, str]:
    """The result of an action, or why the template refuses. All exceptions are attributed to the template."""
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        return {"text": act()}
    except MemoryError:
        return {"unbounded": f"it needs more than {MEMORY_BYTES >> 20} MiB of memory"}
    except RecursionError:
        return {"unbounded": "it recurses without end"}
    except Exception as error:  # noqa: BLE001 - see above
        return {"refused": str(error) or type(error).__name__}
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def main() -> None:
    """Serves requests until standard input ends."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the worker ends this process
    render: Render | None = None
    seconds = CPU_SECONDS

    def compile_(request: dict[str, Any]) -> str:
        nonlocal render
        render = compiled(request)
        return ""

    while (frame := frames.read_file(sys.stdin.buffer)) is not None:
        request: dict[str, Any] = json.loads(frame)
        act = compile_ if render is None else render
        seconds = request.get("cpu_seconds", seconds)
        frames.write_file(sys.stdout.buffer, json.dumps(answer(partial(act, request), seconds)).encode())


if __name__ == "__main__":
    main()
