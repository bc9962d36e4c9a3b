"""A temporary folder is removed by its owner, or by the next one if its owner was killed."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from kestrl_sandbox.backends import locked_folder
from kestrl_sandbox.backends.locked_folder import LockedFolder

OWNER = """
import sys, tempfile
tempfile.tempdir = sys.argv[1]
from kestrl_sandbox.backends.locked_folder import LockedFolder
print(LockedFolder("mine-").path, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(locked_folder, "YOUNG_SECONDS", 0.0)
    return tmp_path


def folders(place: Path) -> list[str]:
    return sorted(path.name for path in place.iterdir())


def test_an_owner_removes_its_folder(place: Path) -> None:
    folder = LockedFolder("mine-")
    (folder.path / "state").mkdir()
    folder.remove()
    folder.remove()
    assert folders(place) == []


def test_a_folder_of_a_killed_owner_is_removed_by_the_next(place: Path) -> None:
    command = [sys.executable, "-c", OWNER, str(place)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        theirs = Path(process.stdout.readline().strip())
        first = LockedFolder("mine-")
        assert theirs.is_dir()  # its owner lives
        process.kill()
        process.wait()
    second = LockedFolder("mine-")
    assert folders(place) == sorted([first.path.name, second.path.name])


def test_other_folders_are_left_alone(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (place / "yours-1").mkdir()
    (place / "elsewhere").mkdir()
    (place / "mine-link").symlink_to(place / "elsewhere")
    (place / "mine-file").touch()
    own = LockedFolder("mine-")
    assert folders(place) == sorted(["yours-1", "elsewhere", "mine-link", "mine-file", own.path.name])
    monkeypatch.setattr(locked_folder, "YOUNG_SECONDS", 60.0)
    (place / "mine-young").mkdir()
    LockedFolder("mine-")
    assert (place / "mine-young").is_dir()


def test_a_folder_of_another_user_is_left_alone(place: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root makes folders of other users")
    (place / "mine-1").mkdir()
    os.chown(place / "mine-1", 12345, 12345)
    LockedFolder("mine-")
    assert (place / "mine-1").is_dir()
