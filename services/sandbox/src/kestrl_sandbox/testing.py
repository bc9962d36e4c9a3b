"""Conformance suite of `Sandbox`: what tools, graders and the HTTP API rely on, for a back-end of one's own.

What a sandbox must hold back is the matter of `kestrl sandbox check`; this suite is about what it returns.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from kestrl_sandbox.contract import Language, Limits, Outcome, Run, Sandbox, SandboxFailure

AT_ONCE = 4
SECONDS = 1.0
"""Limit of the run that never ends by itself."""
OUTPUT = 1000
"""Limit in bytes of the run that prints more."""


async def check_sandbox(make: Callable[[], Awaitable[Sandbox]]) -> None:
    """Checks a sandbox, and closes it.

    Args:
        make: Starts the sandbox, with places for `AT_ONCE` runs at once.

    Raises:
        AssertionError: A property does not hold; the message names it.
        SandboxFailure: The sandbox cannot be used.
    """
    sandbox = await make()
    try:
        assert sandbox.capabilities.backend, "a back-end says what it is"
        await _check_outcomes(sandbox)
        await _check_limits(sandbox)
        await _check_files(sandbox)
        await _check_runs_at_once(sandbox)
        await _check_cancellation(sandbox)
        await _check_sessions(sandbox)
    finally:
        await sandbox.close()
    await sandbox.close()  # twice is once


async def _check_outcomes(sandbox: Sandbox) -> None:
    outcome = await sandbox.run(Run(code="import sys\nprint(input())\nprint('e', file=sys.stderr)", stdin=b"line\n"))
    assert (outcome.outcome, outcome.exit_code) == (Outcome.OK, 0), "a program that ends is ok, with exit status 0"
    assert (outcome.stdout, outcome.stderr) == (b"line\n", b"e\n"), (
        "input is passed, and both outputs are returned apart"
    )
    assert not outcome.message, "nothing is said about a program that is ok"
    failed = await sandbox.run(Run(code="print('x')\nraise SystemExit(7)"))
    assert (failed.outcome, failed.exit_code, failed.stdout) == (Outcome.NONZERO_EXIT, 7, b"x\n"), (
        "another exit status is returned with the output"
    )
    assert failed.message, "what went wrong is said"
    killed = await sandbox.run(Run(code="import os; os.kill(os.getpid(), 9)"))
    assert (killed.outcome, killed.exit_code) == (Outcome.SIGNAL, None), "a signal is no exit status"
    shell = await sandbox.run(Run(code="echo $((6 * 7)); exit 3", language=Language.BASH))
    assert (shell.outcome, shell.exit_code, shell.stdout) == (Outcome.NONZERO_EXIT, 3, b"42\n"), "a shell runs, too"


async def _check_limits(sandbox: Sandbox) -> None:
    code = "import time\nprint('begun', flush=True)\ntime.sleep(600)"
    late = await sandbox.run(Run(code=code, limits=Limits(seconds=SECONDS)))
    assert (late.outcome, late.stdout) == (Outcome.TIMEOUT, b"begun\n"), "a run ends at its limit, with its output"
    code = f"print('x' * {OUTPUT * 100})\nprint('end')"
    long = await sandbox.run(Run(code=code, limits=Limits(output_bytes=OUTPUT)))
    assert (long.outcome, long.stdout) == (Outcome.OK, b"x" * OUTPUT), "output is read to its end, and cut at the limit"
    assert (long.stdout_truncated, long.stderr_truncated) == (True, False), "what was cut says so"


async def _check_files(sandbox: Sandbox) -> None:
    data = bytes(range(256))
    code = "data = open('in.bin', 'rb').read()\nopen('out.bin', 'wb').write(data[::-1])"
    outcome = await sandbox.run(Run(code=code, files={"in.bin": data}, fetch=["out.bin", "none.txt"]))
    assert outcome.outcome is Outcome.OK, f"files are written before the start: {outcome.stderr!r}"
    assert outcome.files == {"out.bin": data[::-1]}, "files are read back byte by byte"
    assert set(outcome.missing) == {"none.txt"}, "a file that is not there is named, and no error"
    outcome = await sandbox.run(Run(code="import os; print(os.path.exists('/work/out.bin'))"))
    assert outcome.stdout == b"False\n", "the next run finds nothing of the one before"


async def _check_runs_at_once(sandbox: Sandbox) -> None:
    runs = [Run(code=f"print({number})") for number in range(AT_ONCE)]
    outcomes = await asyncio.gather(*(sandbox.run(run) for run in runs))
    assert [outcome.stdout for outcome in outcomes] == [b"%d\n" % number for number in range(AT_ONCE)], (
        "each of several runs at once gets its own output"
    )


async def _check_cancellation(sandbox: Sandbox) -> None:
    for _ in range(2 * AT_ONCE):
        run = asyncio.create_task(sandbox.run(Run(code="import time; time.sleep(600)")))
        await asyncio.sleep(0)  # it has begun
        run.cancel()
        await asyncio.wait([run])
    outcome = await sandbox.run(Run(code="print('next')"))
    assert outcome.stdout == b"next\n", "runs whose callers are gone hold no place"


async def _check_sessions(sandbox: Sandbox) -> None:
    first, second = await sandbox.session(), await sandbox.session()
    try:
        await first.run(Run(code="x = 41\nopen('kept.txt', 'w').write('kept')"))
        outcome = await first.run(Run(code="print(x + 1, open('kept.txt').read())"))
        assert outcome.stdout == b"42 kept\n", "a session keeps variables and files"
        outcome = await first.run(Run(code="1 / 0"))
        assert outcome.error is not None, "an exception of a cell is returned"
        assert outcome.error["type"] == "ZeroDivisionError", "with its type"
        outcome = await first.run(Run(code="print(x)"))
        assert outcome.stdout == b"41\n", "an exception does not end a session"
        outcome = await second.run(Run(code="import os\nprint('x' in globals(), os.path.exists('kept.txt'))"))
        assert outcome.stdout == b"False False\n", "sessions share nothing"
    finally:
        for session in (first, second):
            await session.close()
            await session.close()  # twice is once
    try:
        await first.run(Run(code="print(x)"))
    except SandboxFailure:
        return
    raise AssertionError("a session that was closed runs nothing")
