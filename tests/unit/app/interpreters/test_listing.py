"""Tasks of environments, listed by code of others."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from kestrl._app.interpreters.listing import listed_rows
from kestrl.errors import UserInputError


def interpreter(folder: Path, script: str) -> str:
    """A program in the place of an interpreter: its fourth argument is the file for the rows."""
    path = folder / "python"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


def test_the_code_of_tasks_inherits_no_credential(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    monkeypatch.setenv("KESTRL_STORAGE_SECRET", "secret")
    python = interpreter(tmp_path, """printf '{"variables": "%s"}\\n' "$(env | cut -d= -f1 | tr '\\n' ' ')" >"$4\"""")
    (row,) = listed_rows(python, {}, field="TASKSET t", variables={"HTTPS_PROXY": "http://proxy"})
    variables = set(row["variables"].split())
    assert {"HOME", "PATH", "PYTHONPATH", "HTTPS_PROXY"} <= variables
    assert variables.isdisjoint({"HF_TOKEN", "KESTRL_STORAGE_SECRET"})


def test_what_the_code_of_tasks_started_ends_with_the_listing(tmp_path: Path) -> None:
    python = interpreter(tmp_path, """sleep 600 & echo "{\\"pid\\": $!}" >"$4\"""")
    (row,) = listed_rows(python, {}, field="TASKSET t")
    with pytest.raises(ProcessLookupError):
        os.kill(row["pid"], signal.SIGKILL)


def test_a_listing_that_fails_names_its_last_line(tmp_path: Path) -> None:
    python = interpreter(tmp_path, "echo first >&2; echo 'error: no such task set' >&2; exit 3")
    with pytest.raises(UserInputError, match=r"^TASKSET t: its tasks cannot be listed: no such task set$"):
        listed_rows(python, {}, field="TASKSET t")
