"""SIGTERM while a component starts: it is not lost, and does not wait for abandoned work."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kestrl._shared.processes.stopping import EXIT_STOPPED
from kestrl_learner.concurrency import abandonable

SECONDS = 30.0


def catches_sigterm(pid: int) -> bool:
    """Whether the process has a handler for SIGTERM, as the kernel sees it."""
    status = Path(f"/proc/{pid}/status").read_text()
    caught = next(line for line in status.splitlines() if line.startswith("SigCgt:"))
    return bool(int(caught.split()[1], 16) >> (signal.SIGTERM - 1) & 1)


@pytest.mark.parametrize("module", ["learner", "inference", "rollout", "tools", "judge", "operator"])
def test_a_component_that_starts_ends_at_sigterm(module: str, tmp_path: Path) -> None:
    settings = tmp_path / "settings.json"
    option = "--config" if module == "operator" else "--settings"
    os.mkfifo(settings)  # a reader blocks, so only the signal can end the program
    with subprocess.Popen(
        [sys.executable, "-m", f"kestrl_{module}", option, str(settings)], stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            deadline = time.monotonic() + SECONDS
            while not catches_sigterm(process.pid):
                assert time.monotonic() < deadline
                time.sleep(0.005)  # the kernel has no event for it
            assert "libtorch" not in Path(f"/proc/{process.pid}/maps").read_text()
            process.send_signal(signal.SIGTERM)
            _, errors = process.communicate(timeout=SECONDS)
        finally:
            process.kill()
    assert process.returncode == EXIT_STOPPED
    assert "stopped by SIGTERM while starting" in errors


REPLACES = """
import os, signal
from kestrl._shared.processes.stopping import end_at_sigterm

end_at_sigterm()

class Raises:
    def __set_name__(self, owner, name):
        os.kill(os.getpid(), signal.SIGTERM)
        os.getpid()  # a handler runs between two instructions

class Owner:  # Python 3.11 replaces any exception of `__set_name__` by a RuntimeError
    attribute = Raises()
"""
DROPS = """
import os, signal
from kestrl._shared.processes.stopping import end_at_sigterm

end_at_sigterm()

class Raises:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGTERM)
        os.getpid()

Raises()  # an exception of `__del__` is printed and dropped
"""


@pytest.mark.parametrize("program", [REPLACES, DROPS], ids=["replaces", "drops"])
def test_sigterm_ends_a_start_where_python_replaces_exceptions(program: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=SECONDS, check=False
    )
    assert (ended.returncode, ended.stderr) == (EXIT_STOPPED, "stopped by SIGTERM while starting\n")


PROGRAM = """
import asyncio, sys, threading
from kestrl._shared.processes.stopping import leave
from kestrl_learner.concurrency import abandonable

async def main():
    load = asyncio.create_task(abandonable(threading.Event().wait, name="load"))
    await asyncio.sleep(0)
    load.cancel()
    await asyncio.wait([load])

asyncio.run(main())
print("ended")
sys.exit(leave(3))
"""


def test_a_program_does_not_wait_for_work_that_was_abandoned() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=SECONDS, check=False
    )
    assert (ended.returncode, ended.stdout) == (3, "ended\n")


async def test_abandonable_work_gives_its_result_or_its_error() -> None:
    assert await abandonable(lambda: 7, name="work") == 7

    def broken() -> None:
        raise ZeroDivisionError("here")

    with pytest.raises(ZeroDivisionError, match="here"):
        await abandonable(broken, name="work")
    async with asyncio.timeout(SECONDS):
        assert await abandonable(lambda: "again", name="work") == "again"


IMPORTED = """
import pkgutil, signal, importlib
before = {{number: signal.getsignal(number) for number in signal.valid_signals()}}
for package in {packages!r}:
    top = importlib.import_module(package)
    for module in pkgutil.walk_packages(top.__path__, package + "."):
        if not module.name.endswith("__main__") and module.name not in {skipped!r}:
            importlib.import_module(module.name)
assert {{number: signal.getsignal(number) for number in signal.valid_signals()}} == before
"""


@pytest.mark.parametrize(
    "package", ["kestrl_judge", "kestrl_learner", "kestrl_rollout", "kestrl_tools", "kestrl_inference"]
)
def test_importing_a_module_handles_no_signal(package: str) -> None:
    skipped = [
        "kestrl_learner.ledger.migrations.env",
        "kestrl_inference.inside.sglang_models.text",
        "kestrl_inference.inside.vllm_lora",
    ]
    code = IMPORTED.format(packages=[package], skipped=skipped)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
