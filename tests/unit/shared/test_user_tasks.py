"""Tasks of a user's code cannot end the event loop."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import asyncio, sys
from kestrl.errors import UserCodeError
from kestrl._shared.user_tasks import contain_user_tasks, enter_user_code

async def raising():
    raise {error}

async def users():
    enter_user_code()
    unstarted = asyncio.create_task(raising())
    unstarted.cancel()
    try:
        await asyncio.gather(raising(), asyncio.sleep(0))
    except UserCodeError as error:
        print(error.boundary, error)
    async with asyncio.TaskGroup() as group:
        done = group.create_task(asyncio.sleep(0, 5))
    make = asyncio.get_running_loop().get_task_factory()
    named = make(asyncio.get_running_loop(), asyncio.sleep(0, 5), name="named")  # as Python 3.13 calls it
    assert (named.get_name(), await named) == ("named", 5)
    print(done.result(), unstarted.cancelled())

async def main():
    contain_user_tasks()
    await asyncio.create_task(users())

if sys.argv[1] == "uvloop":
    from uvloop import run
else:
    from asyncio import run
run(main())
"""


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
@pytest.mark.parametrize(
    ("error", "printed"), [("KeyboardInterrupt", "KeyboardInterrupt"), ("SystemExit(3)", "SystemExit: 3")]
)
def test_an_exception_of_a_users_task_does_not_end_the_loop(loop: str, error: str, printed: str) -> None:
    program = PROGRAM.replace("{error}", error)
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program, loop], capture_output=True, text=True, check=False, timeout=30
    )
    assert done.stdout.splitlines() == [f"user_code {printed}", "5 True"], done.stderr
    assert (done.returncode, done.stderr) == (0, "")
