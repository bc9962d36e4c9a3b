"""Programs of Kubernetes are built and their modules found where only `make kit` has installed a Go."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from tests import go
from tests.e2e.cluster import kit


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder of the checkout's tools, beside a PATH without a Go."""
    system = tmp_path / "system"
    system.mkdir()
    for program in ("sh", "cat", "sha256sum", "cut", "dirname", "mkdir", "flock", "touch"):
        path = shutil.which(program)
        assert path is not None
        (system / program).symlink_to(path)
    monkeypatch.setenv("PATH", str(system))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "tools"
    folder.mkdir()
    monkeypatch.setattr(go, "INSTALLED", folder)
    return folder


def write_program(path: Path, script: str) -> None:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def test_the_go_of_the_path_comes_first(installed: Path, tmp_path: Path) -> None:
    write_program(installed / "go", "")
    assert go.go() == str(installed / "go")
    write_program(tmp_path / "system" / "go", "")
    assert go.go() == str(tmp_path / "system" / "go")


def test_modules_are_found_by_the_installed_go(installed: Path, tmp_path: Path) -> None:
    write_program(installed / "go", f"""[ "$3 $4" = "mod download" ] && echo '{{"Dir": "{tmp_path}"}}'""")
    assert kit.module_folder("sigs.k8s.io/kwok") == tmp_path


def test_kueue_is_built_by_the_installed_go(installed: Path, tmp_path: Path) -> None:
    write_program(installed / "go", f"""echo "$1" > {tmp_path}/called""")
    assert kit.build_kueue().parent.parent == tmp_path / "cache" / "kestrl" / "kueue"
    assert (tmp_path / "called").read_text() == "build\n"


def test_without_a_go_it_is_said_what_installs_one(installed: Path) -> None:
    with pytest.raises(FileNotFoundError, match=rf"no go on the PATH or in {installed}: make kit installs one"):
        kit.module_folder("sigs.k8s.io/kwok")
