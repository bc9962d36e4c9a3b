"""The command `kestrl ui`: what it shows, and what it refuses."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kestrl._app.cli.main import app
from kestrl._app.page.server import listener
from kestrl.errors import UserInputError


def ui(*arguments: str | Path, error: str = "") -> str:
    """What the command prints; with `error`, it must fail with this text."""
    result = CliRunner().invoke(app, ["ui", *map(str, arguments)])
    if error:
        assert isinstance(result.exception, UserInputError), result.exception
        assert error in str(result.exception)
    elif result.exception is not None:
        raise result.exception
    return result.stdout


def test_a_folder_a_run_and_an_address_are_exported(runs: Path, tmp_path: Path) -> None:
    whole, one, address = tmp_path / "whole", tmp_path / "one", tmp_path / "address"
    assert "pages in" in ui(runs, "--export", whole)
    ui("job-1", "--runs", runs, "--export", one)
    ui((runs / "job-1").as_uri(), "--export", address)
    folders = [sorted(path.name for path in (folder / "runs").iterdir()) for folder in (whole, one, address)]
    assert folders == [["empty-1", "job-1"], ["job-1"], ["job-1"]]


def test_what_cannot_be_shown_is_one_error(runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ui("nothing", "--runs", runs, error="no run 'nothing'")
    ui("--runs", tmp_path / "missing", error="there is no folder")
    (tmp_path / "file").write_text("")
    ui(runs, "--export", tmp_path / "file", error="cannot be written")
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    monkeypatch.delitem(sys.modules, "kestrl._app.page.server")
    ui(runs, "--export", tmp_path / "out", error="pip install 'kestrl[ui]'")


def test_it_listens_on_the_loopback_and_names_a_port_in_use() -> None:
    with listener(0) as listening:
        host, port = listening.getsockname()
        assert host == "127.0.0.1"
        with socket.create_connection((host, port)):
            pass
        with pytest.raises(UserInputError, match=f"127.0.0.1:{port} cannot be used"):
            listener(port)
