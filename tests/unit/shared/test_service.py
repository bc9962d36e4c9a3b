"""What every service's `main` does at its end."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import asyncio, logging, sys
from kestrl._shared import service

service.END_SECONDS = 0.2
logging.basicConfig()

async def stubborn():
    while True:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            pass

async def work():
    tasks.append(asyncio.create_task(stubborn(), name="mine"))
    tasks.append(asyncio.create_task(asyncio.Event().wait(), name="other"))
    await asyncio.sleep(0)

tasks = []
if sys.argv[1] == "uvloop":
    from uvloop import run
else:
    from asyncio import run
run(service._finish(work()))
print([task.cancelled() for task in tasks])
"""


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_a_task_that_ignores_its_cancellation_does_not_keep_the_process(loop: str) -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM, loop], capture_output=True, text=True, check=True, timeout=30)
    assert done.stdout.strip() == "[False, True]"
    assert "the task mine ignores its cancellation and is abandoned" in done.stderr
