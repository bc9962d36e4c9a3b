"""Hostile programs with a verdict each: what `kestrl sandbox check` runs on a node, and the tests in CI.

A program prints `BREACH` when it could do what no sandbox may allow, and `held` when it was refused. A check holds when
there is no breach, the run ended as expected, and an honest program runs afterwards.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

from kestrl_sandbox.contract import Language, Limits, Outcome, Result, Run, Sandbox
from kestrl_sandbox.pool.slots import SlotLost

SECONDS = 5.0
"""Limit of a check's run; one that spins or sleeps takes it whole."""
PRELUDE = """
import os, sys, ctypes, errno, socket, platform
libc = ctypes.CDLL(None, use_errno=True)
def attempt(work, *arguments):
    try:
        found = work(*arguments)
    except (OSError, PermissionError) as error:
        print('held', type(error).__name__, error.errno)
    else:
        print('BREACH', repr(found)[:200])
def call(x86, arm, *arguments):
    number = x86 if platform.machine() == 'x86_64' else arm
    found = libc.syscall(ctypes.c_long(number), *[ctypes.c_long(a) if isinstance(a, int) else a for a in arguments])
    print('held', errno.errorcode.get(ctypes.get_errno())) if found == -1 else print('BREACH', found)
"""
ENDED = frozenset({Outcome.OK, Outcome.NONZERO_EXIT, Outcome.SIGNAL, Outcome.POLICY_DENIED, Outcome.OUT_OF_MEMORY})
"""Outcomes of a program that the sandbox, or its own error, has ended before its time."""
ANY = ENDED | {Outcome.TIMEOUT}


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One hostile program."""

    area: str
    name: str
    code: str
    language: Language = Language.PYTHON
    outcomes: frozenset[Outcome] = ENDED
    """Outcomes that hold."""
    says_held: bool = True
    """Whether a run that was not ended by the sandbox must print `held`."""
    stdin: bytes = b""
    seconds: float = SECONDS
    truncated: bool = False
    """Whether the output must be cut."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Result of a check."""

    check: Check
    problem: str = ""
    """What was wrong; empty if it held."""
    detail: str = ""
    seconds: float = 0.0

    @property
    def held(self) -> bool:
        return not self.problem


@dataclass(slots=True)
class Report:
    """All verdicts."""

    verdicts: list[Verdict] = field(default_factory=list[Verdict])

    @property
    def breaches(self) -> list[Verdict]:
        return [verdict for verdict in self.verdicts if not verdict.held]


async def examine(sandbox: Sandbox, checks: Sequence[Check]) -> AsyncIterator[Verdict]:
    """Runs the checks, one after the other."""
    for check in checks:
        yield await examine_one(sandbox, check)


async def examine_one(sandbox: Sandbox, check: Check) -> Verdict:
    """Runs a check, and an honest program after it."""
    started = time.monotonic()
    code = PRELUDE + check.code if check.language is Language.PYTHON else check.code
    run = Run(
        code=code,
        language=check.language,
        stdin=check.stdin,
        limits=Limits(seconds=check.seconds, output_bytes=1 << 16),
    )
    try:
        result = await sandbox.run(run)
    except SlotLost as error:
        return Verdict(check=check, problem=str(error), seconds=time.monotonic() - started)
    problem = _problem(check, result)
    after = await sandbox.run(Run(code="print(6 * 7)"))
    if not problem and after.stdout != b"42\n":
        problem = f"an honest program afterwards: {after.outcome}, {after.stderr[-200:]!r}"
    return Verdict(check=check, problem=problem, detail=_detail(result), seconds=time.monotonic() - started)


def _problem(check: Check, result: Result) -> str:
    if b"BREACH" in result.stdout + result.stderr:
        return result.stdout.decode(errors="replace").strip()[:300]
    if result.outcome not in check.outcomes:
        return f"ended as {result.outcome} ({result.message}) {result.stderr[-300:].decode(errors='replace')}"
    ended_by_sandbox = result.outcome in {Outcome.POLICY_DENIED, Outcome.TIMEOUT, Outcome.OUT_OF_MEMORY}
    if check.says_held and not ended_by_sandbox and b"held" not in result.stdout:
        return f"did not get to its attempt: {result.stderr[-300:].decode(errors='replace')}"
    if check.truncated and not result.truncated:
        return "its output was not cut"
    return ""


def _detail(result: Result) -> str:
    line = next(iter(result.stdout.decode(errors="replace").splitlines()), "")
    return f"{result.outcome}{f': {line[:60]}' if line.startswith('held') else ''}"


async def neighbours(sandbox: Sandbox) -> Verdict:
    """Two sandboxes at once: neither finds the other's files, processes, sockets or shared memory."""
    check = Check(area="tenancy", name="two sandboxes at once", code=_LOOK)
    started = time.monotonic()
    leaving = asyncio.create_task(sandbox.run(Run(code=PRELUDE + _LEAVE, limits=Limits(seconds=10))))
    looking = await sandbox.run(Run(code=PRELUDE + _LOOK, limits=Limits(seconds=10)))
    left = await leaving
    problem = _problem(check, looking)
    if not problem and left.stdout != b"left\n":
        problem = f"the neighbour did not run: {left.stderr[-200:].decode(errors='replace')}"
    return Verdict(check=check, problem=problem, detail=_detail(looking), seconds=time.monotonic() - started)


_LEAVE = """
import time, subprocess
for folder in ('/tmp', '/dev/shm', '/work', '/var/tmp'):
    open(folder + '/canary', 'w').write('secret')
server = socket.socket(socket.AF_UNIX); server.bind(chr(0) + 'canary'); server.listen()
child = subprocess.Popen(['sleep', '0.4'])
child.wait()
print('left')
"""
_LOOK = """
import time
for _ in range(10):
    for folder in ('/tmp', '/dev/shm', '/work', '/var/tmp'):
        if os.path.exists(folder + '/canary'): print('BREACH', folder)
    others = [n for n in os.listdir('/proc') if n.isdigit() and int(n) not in (1, os.getpid())]
    if others: print('BREACH', [open(f'/proc/{n}/cmdline').read() for n in others])
    try:
        socket.socket(socket.AF_UNIX).connect(chr(0) + 'canary')
        print('BREACH', 'abstract socket')
    except OSError:
        pass
    time.sleep(.03)
print('held')
"""
