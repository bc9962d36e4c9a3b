"""Hostile programs with a verdict each: what `kestrl sandbox check` runs on a node, and the tests in CI.

A program prints `BREACH` when it could do what no sandbox may allow, and `held` when it was refused. A check holds when
there is no breach, the run ended as expected, and an honest program runs afterwards.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kestrl_sandbox.contract import Language, Limits, Outcome, Result, Run, Sandbox, SandboxFailure

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
def refused(x86, arm):
    found = libc.syscall(*map(ctypes.c_long, (x86 if platform.machine() == 'x86_64' else arm, -1, 0, 0, 0, 0)))
    reason = errno.errorcode.get(ctypes.get_errno()) if found == -1 else found
    print('held', reason) if reason in ('EPERM', 'ENOSYS') else print('BREACH', 'the kernel has answered', reason)
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


def checks(area: str, programs: Mapping[str, str], **options: Any) -> list[Check]:
    """A check for each program by its name, all with the same options."""
    return [Check(area=area, name=name, code=code, **options) for name, code in programs.items()]


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckVerdict:
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
class CheckReport:
    """All verdicts."""

    verdicts: list[CheckVerdict] = field(default_factory=list[CheckVerdict])

    @property
    def breaches(self) -> list[CheckVerdict]:
        return [verdict for verdict in self.verdicts if not verdict.held]


async def examine(sandbox: Sandbox, checks: Sequence[Check]) -> AsyncIterator[CheckVerdict]:
    """Runs the checks, one after the other."""
    for check in checks:
        yield await examine_one(sandbox, check)


async def examine_one(sandbox: Sandbox, check: Check) -> CheckVerdict:
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
    except SandboxFailure as error:  # whatever code does, it is no failure of the sandbox
        return CheckVerdict(check=check, problem=str(error), seconds=time.monotonic() - started)
    problem = problem_of(check, result)
    after = await sandbox.run(Run(code="print(6 * 7)"))
    if not problem and after.stdout != b"42\n":
        problem = f"an honest program afterwards: {after.outcome}, {after.stderr[-200:]!r}"
    return CheckVerdict(check=check, problem=problem, detail=detail_of(result), seconds=time.monotonic() - started)


def problem_of(check: Check, result: Result) -> str:
    """What was wrong with the run of a check; empty if it held."""
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


def detail_of(result: Result) -> str:
    """How a run ended, and what it wrote of it."""
    line = next(iter(result.stdout.decode(errors="replace").splitlines()), "")
    return f"{result.outcome}{f': {line[:60]}' if line.startswith('held') else ''}"
