"""The script behind `make test` and `make test-all`, with a Makefile of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / "scripts" / "run_stages.py"
MAKEFILE = """
first: ; @if test -p pipe; then cat pipe; fi; echo first
fails: ; @echo fails; false
images: ; @echo "about images" >&2; echo some; echo there.tar; {ends}
cluster: ; @echo "cluster has <$$KESTRL_E2E_IMAGES>"
"""


def staged(folder: Path, *stages: str, ends: str = "true") -> tuple[int, list[str]]:
    (folder / "Makefile").write_text(MAKEFILE.format(ends=ends))
    plain = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "KESTRL_E2E"))}
    done = subprocess.run(
        [sys.executable, SCRIPT, *stages], cwd=folder, env=plain, stdout=subprocess.PIPE, text=True, check=False
    )
    return done.returncode, done.stdout.splitlines()


def test_every_stage_runs_even_after_a_failure(tmp_path: Path) -> None:
    code, lines = staged(tmp_path, "fails", "first")
    assert code == 1
    assert lines[:4] == ["== make fails", "fails", "== make first", "first"]
    assert [line.split()[:2] for line in lines[5:]] == [["FAILED", "fails"], ["ok", "first"]]


@pytest.mark.parametrize(("ends", "passed"), [("echo made > pipe", "there.tar"), ("echo made > pipe; false", "")])
def test_what_a_stage_needs_is_made_beside_the_ones_before(tmp_path: Path, ends: str, passed: str) -> None:
    """The first stage waits for what is made beside it."""
    os.mkfifo(tmp_path / "pipe")
    code, lines = staged(tmp_path, "first", "cluster", ends=ends)
    assert code == 0
    assert f"cluster has <{passed}>" in lines


def test_a_stage_that_runs_first_makes_what_it_needs_itself(tmp_path: Path) -> None:
    assert "cluster has <>" in staged(tmp_path, "cluster")[1]
