"""A `uv` that makes environments without packages, and a folder for them."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import pytest

from kestrl._app.interpreters import uv

FAKE_UV = """\
import os, pathlib, sys
log = pathlib.Path(os.environ["FAKE_UV"])
with log.open("a") as file:
    print(*sys.argv[1:], file=file)
if os.environ.get("FAKE_UV_FAILS") == sys.argv[1]:
    sys.exit("error: Failed to fetch\\n  Caused by: no route to host")
if sys.argv[1] == "venv":
    folder = pathlib.Path(sys.argv[-1])
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "python").symlink_to(sys.executable)
if os.environ.get("FAKE_UV_DIES") == sys.argv[1]:
    os.kill(os.getppid(), 9)
"""


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Installs with a `uv` that only makes an environment without packages; returns the file with its calls."""
    program, script = tmp_path / "uv", tmp_path / "fake_uv.py"
    script.write_text(FAKE_UV)
    # Not by its first line, in which an interpreter's path has no space.
    program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {shlex.quote(str(script))} "$@"\n')
    program.chmod(0o755)
    monkeypatch.setattr(uv, "uv_program", lambda: str(program))
    monkeypatch.setenv("FAKE_UV", str(tmp_path / "calls"))
    return tmp_path / "calls"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "my engines"
