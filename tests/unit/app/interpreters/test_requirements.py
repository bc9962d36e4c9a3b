"""Environments of Python for lists of requirements: made once, by one process, whole or not at all."""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kestrl._app.interpreters import uv
from kestrl._app.interpreters.requirements import RECORD, environment_python
from kestrl.errors import UserInputError

FAKE_UV = """\
import os, pathlib, sys
with pathlib.Path(os.environ["FAKE_UV"]).open("a") as file:
    print(*sys.argv[1:], file=file)
if os.environ.get("FAKE_UV_FAILS") == sys.argv[1]:
    sys.exit("error: No solution found\\n  Caused by: there is no no-such-package")
if sys.argv[1] == "venv":
    folder = pathlib.Path(sys.argv[-1])
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "python").symlink_to(sys.executable)
if sys.argv[1] == "pip":
    environment = pathlib.Path(sys.argv[sys.argv.index("--python") + 1]).parents[1]
    (environment / "lib" / "python3.11" / "site-packages").mkdir(parents=True)
    (environment / "lib" / "python3.11" / "site-packages" / "module.py").touch()
"""
Environment = Callable[..., Path]


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """File with the calls of a `uv` that makes environments without packages."""
    program, script = tmp_path / "uv", tmp_path / "fake_uv.py"
    script.write_text(FAKE_UV)
    program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {shlex.quote(str(script))} "$@"\n')
    program.chmod(0o755)
    monkeypatch.setattr(uv, "uv_program", lambda: str(program))
    monkeypatch.setenv("FAKE_UV", str(tmp_path / "calls"))
    monkeypatch.setenv("KESTRL_ENVIRONMENTS", str(tmp_path / "environments"))
    return tmp_path / "calls"


def environment(*requirements: str, python: str | None = None, lines: list[str] | None = None) -> Path:
    said = [] if lines is None else lines
    return environment_python(requirements, python=python, field="spec.environment.python", say=said.append)


def test_a_list_is_installed_once_with_compiled_bytecode_whatever_its_order(calls: Path) -> None:
    lines: list[str] = []
    first = environment("a==1", "b>=2", lines=lines)
    assert subprocess.run([first, "-c", ""], check=True)
    made = calls.read_text()
    assert len(list(first.parents[1].glob("lib/*/site-packages/__pycache__/module.*.pyc"))) == 1
    assert (first.parents[1] / "lock.txt").read_text() == "a==1\nb>=2\n"
    assert len(lines) == 1
    assert lines[0].startswith("installing a==1, b>=2 in ")
    assert environment("b>=2", "a==1", lines=lines) == first
    assert calls.read_text() == made  # no uv, and so no network
    assert len(lines) == 1


def test_other_requirements_or_another_python_are_another_environment(calls: Path) -> None:
    paths = {environment("a==1"), environment("a==2"), environment("a==1", python="3.12"), environment()}
    assert len(paths) == 4
    assert "--python 3.12" in calls.read_text()


def test_two_at_once_make_one(calls: Path) -> None:
    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(environment, ["a==1"] * 2)
    assert first == second
    assert calls.read_text().count("venv --relocatable") == 1


def test_a_failure_names_the_field_and_leaves_nothing(calls: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_UV_FAILS", "pip")
    with pytest.raises(UserInputError, match=r"spec.environment.python: no-such-package cannot be installed: .*there"):
        environment("no-such-package")
    folder = calls.parent / "environments"
    assert [path.name for path in folder.iterdir()] == [".locks"]
    monkeypatch.delenv("FAKE_UV_FAILS")
    assert (environment("no-such-package").parents[1] / RECORD).is_file()
