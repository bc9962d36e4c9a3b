"""Programs under a guard: nothing of them is left, and they see no credential."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kestrl._shared.processes.guarded import GuardedProcess, kept_variables, variables_without_ours

FAMILY = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
print(child.pid, flush=True)
child.wait()
"""


def is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


async def test_killing_a_program_ends_what_it_started_in_another_session() -> None:
    program = GuardedProcess.start([sys.executable, "-c", FAMILY], variables=kept_variables(), stdout=subprocess.PIPE)
    with program.process.stdout as output:  # type: ignore[union-attr]
        descendant = int(output.readline())
        assert not is_gone(descendant)
        await program.kill()
    assert is_gone(descendant)
    assert program.wait() == 128 + 9
    await program.kill()  # it has ended


def test_released_it_ends_without_being_waited_for() -> None:
    program = GuardedProcess.start([sys.executable, "-c", FAMILY], variables=kept_variables(), stdout=subprocess.PIPE)
    with program.process.stdout as output:  # type: ignore[union-attr]
        output.readline()
        program.release()
        program.release()
        assert program.wait() == 128 + 9


def test_a_program_that_cannot_be_started_leaves_no_pipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ends: list[int] = []
    make = os.pipe

    def pipe() -> tuple[int, int]:
        ends.extend(pair := make())
        return pair

    monkeypatch.setattr(os, "pipe", pipe)
    with pytest.raises(FileNotFoundError):
        GuardedProcess.start(["true"], variables={}, folder=tmp_path / "missing")
    assert len(ends) >= 2
    for end in ends:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(end)


@pytest.mark.parametrize("ours", [True, False], ids=["code of the job", "code of others"])
def test_a_program_gets_no_credential_of_ours(monkeypatch: pytest.MonkeyPatch, ours: bool) -> None:
    monkeypatch.setenv("KESTRL_JUDGE_TOKEN", "secret")
    monkeypatch.setenv("MY_SETTING", "7")
    monkeypatch.setenv("TMPDIR", "/var/tmp")
    variables = variables_without_ours() if ours else kept_variables()
    code = "import json, os; print(json.dumps(dict(os.environ)))"
    program = GuardedProcess.start([sys.executable, "-c", code], variables=variables, stdout=subprocess.PIPE)
    environment = json.loads(program.process.communicate()[0])
    program.release()
    assert "KESTRL_JUDGE_TOKEN" not in environment
    assert environment["TMPDIR"] == "/var/tmp"
    assert environment.get("MY_SETTING") == ("7" if ours else None)
