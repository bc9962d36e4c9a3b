"""The process guard: no descendant is left when its owner ends."""

from __future__ import annotations

import fcntl
import os
import resource
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from kestrl._shared.processes import process_guard

# Starts a grandchild in a session of its own, which holds the writing end of `alive`: it is readable once all are gone.
FAMILY = """
import subprocess, sys, time
program = "import os, time; os.setsid(); os.write(1, b'up' + bytes([10])); time.sleep(600)"
child = subprocess.Popen([sys.executable, "-c", program],
                         stdout=sys.stdout, close_fds=False)
time.sleep(600)
"""


@dataclass
class Guarded:
    process: subprocess.Popen[bytes]
    guard_pipe: int
    alive: int

    def gone(self, seconds: float = 20.0) -> bool:
        """Whether every process with the pipe has ended: the kernel closes it then."""
        while True:
            ready, _, _ = select.select([self.alive], [], [], seconds)
            if not ready:
                return False
            if os.read(self.alive, 4096) == b"":
                return True


def start(code: str, grace: float = 5.0, lowest: int = 0) -> Guarded:
    """A guard whose pipe has a descriptor of at least `lowest`."""
    low_end, guard_pipe = os.pipe()
    read_end = fcntl.fcntl(low_end, fcntl.F_DUPFD_CLOEXEC, lowest)
    os.close(low_end)
    alive, output = os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", process_guard.__file__, str(read_end), str(grace), sys.executable, "-c", code],
        pass_fds=(read_end,),
        stdout=output,
    )
    os.close(read_end)
    os.close(output)
    return Guarded(process, guard_pipe, alive)


@pytest.fixture
def family() -> Iterator[Guarded]:
    guarded = start(FAMILY)
    assert os.read(guarded.alive, 3) == b"up\n"
    yield guarded
    guarded.process.kill()
    guarded.process.wait()
    os.close(guarded.alive)


def test_when_the_owner_ends_all_descendants_end(family: Guarded) -> None:
    os.close(family.guard_pipe)  # what the kernel does when the runner is killed
    assert family.gone()
    assert family.process.wait(20) == 128 + signal.SIGKILL


def test_the_grandchild_does_not_outlive_a_command_that_ends(family: Guarded) -> None:
    family.process.terminate()
    assert family.gone()
    assert family.process.wait(20) == 128 + signal.SIGTERM
    os.close(family.guard_pipe)


def test_an_owner_may_have_thousands_of_open_files() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        guarded = start("import time; time.sleep(600)", lowest=2000)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    os.close(guarded.guard_pipe)
    assert guarded.process.wait(20) == 128 + signal.SIGKILL


def test_the_exit_status_is_the_commands() -> None:
    guarded = start("import sys; sys.exit(3)")
    assert guarded.process.wait(20) == 3


def test_a_process_that_ignores_sigterm_is_killed_after_the_grace() -> None:
    guarded = start(
        "import os, signal, time; signal.signal(15, signal.SIG_IGN); os.write(1, b'up' + bytes([10])); time.sleep(600)",
        0.2,
    )
    assert os.read(guarded.alive, 3) == b"up\n"
    guarded.process.terminate()
    assert guarded.process.wait(20) == 128 + signal.SIGKILL


def test_the_command_dies_with_its_guard() -> None:
    guarded = start("import os, time; os.write(1, b'up' + bytes([10])); time.sleep(600)")
    assert os.read(guarded.alive, 3) == b"up\n"
    guarded.process.kill()
    guarded.process.wait()
    assert guarded.gone()


def test_a_command_that_cannot_start_is_reported() -> None:
    read_end, guard_pipe = os.pipe()
    done = subprocess.run(
        [sys.executable, "-I", "-S", process_guard.__file__, str(read_end), "1", "/no/such/program"],
        pass_fds=(read_end,),
        capture_output=True,
        check=False,
    )
    os.close(read_end)
    os.close(guard_pipe)
    assert done.returncode == 127
    assert b"error: cannot start /no/such/program" in done.stderr
