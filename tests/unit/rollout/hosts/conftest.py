"""Agents outside of the worker: programs, functions and services that call a served episode."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

CLIENT = """
import json, os, sys, urllib.error, urllib.request

def chat(base_url, key, messages, **more):
    body = json.dumps({"model": "policy", "messages": messages, **more}).encode()
    headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
    request = urllib.request.Request(f"{base_url}/chat/completions", body, headers)
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)["choices"][0]["message"]["content"]
"""
"""A client of the chat API from the standard library."""

EPISODE = """
request = json.load(sys.stdin)
messages = request["row"]["messages"]
said = chat(os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"], messages)
"""
"""A program's first turn."""


@pytest.fixture
def client_module(tmp_path: Path) -> Path:
    """A folder with the module `client`."""
    (tmp_path / "client.py").write_text(CLIENT, encoding="utf-8")
    return tmp_path


@pytest.fixture
def program_stage(make_stage: Any, client_module: Path) -> Callable[..., Awaitable[Any]]:
    """A stage whose agent is a program: one turn, then the given lines."""

    async def make(lines: str, settings: Any = None, **outside: Any) -> Any:
        source = f"from client import *\n{EPISODE}{textwrap.dedent(lines)}"
        (client_module / "program.py").write_text(source, encoding="utf-8")
        return await make_stage(
            outside={"command": [sys.executable, "-S", "program.py"], **outside},
            python_path=(str(client_module),),
            **(settings or {}),
        )

    return make


@pytest.fixture
def function_stage(make_stage: Any, client_module: Path) -> Callable[..., Awaitable[Any]]:
    """A stage whose agent is `agent` of the given module, in a process of its own."""

    async def make(source: str, **outside: Any) -> Any:
        (client_module / "functions.py").write_text(
            f"from client import *\n{textwrap.dedent(source)}", encoding="utf-8"
        )
        return await make_stage(
            outside={"run": "functions:agent", **outside}, python_path=(str(client_module),), concurrency=8
        )

    return make
