"""Results from what a supervisor answers."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from typing import Any

from kestrl_sandbox.contract import Outcome, Result, Run

DENIED = "Denied: the code made a system call that the sandbox forbids."
BROKEN = "Denied: the code ended the supervisor of its sandbox."
GONE = "The code did not run: what an earlier call left had ended the session."
_SHELL_SIGNAL = 128
"""What a shell adds to the number of the signal that ended its program."""


def result_of(run: Run, header: Mapping[str, Any], body: bytes, *, memory_killed: bool = False) -> Result:
    """Result of a run."""
    kind = header["kind"]
    if kind == "refused":
        return Result(outcome=Outcome.POLICY_DENIED, message=f"Denied: the file {header['reason']}.")
    if kind == "gone":
        return Result(outcome=Outcome.NONZERO_EXIT, message=GONE)
    stdout, stderr = header["stdout"], header["stderr"]
    outcome, message = outcome_of(run, kind, header["code"], memory_killed=memory_killed)
    files, unfetched = _files(run, header["files"], body[stdout + stderr :])
    return Result(
        outcome=outcome,
        message=message,
        exit_code=header["code"] if kind in {"exited", "memory"} and outcome is not Outcome.TIMEOUT else None,
        signal=header["code"] if kind == "signaled" else None,
        stdout=body[:stdout],
        stderr=body[stdout : stdout + stderr],
        stdout_truncated=header["stdout_total"] > stdout,
        stderr_truncated=header["stderr_total"] > stderr,
        seconds=header["seconds"],
        files=files,
        missing=unfetched,
        display=header["display"],
        error=header["error"],
    )


def outcome_of(run: Run, kind: str, code: int, *, memory_killed: bool) -> tuple[Outcome, str]:
    """Outcome of a run and its message for the model."""
    memory = f"Out of memory: the limit is {run.limits.memory_mb} MB."
    match kind, code:
        case "timeout", _:
            return Outcome.TIMEOUT, f"Timed out: the code ran longer than {run.limits.seconds:g} s and was ended."
        case "processes", _:
            return Outcome.POLICY_DENIED, "Denied: the code started more processes and threads than are allowed."
        case "memory", _:
            return Outcome.OUT_OF_MEMORY, memory
        case "signaled", signal.SIGKILL if memory_killed:
            return Outcome.OUT_OF_MEMORY, memory
        case ("signaled", signal.SIGSYS) | ("exited", 159):
            return Outcome.POLICY_DENIED, DENIED
        case "signaled", _:
            return Outcome.SIGNAL, f"Ended by signal {code} ({signal_name(code)})."
        case _, 0:
            return Outcome.OK, ""
        case _ if memory_killed and code == _SHELL_SIGNAL + signal.SIGKILL:
            return Outcome.OUT_OF_MEMORY, memory
        case _:
            return Outcome.NONZERO_EXIT, f"Exit status {code}."


def signal_name(number: int) -> str:
    """Name of a signal, such as SIGSEGV."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return "unknown"


def broken() -> Result:
    """Result of code whose sandbox ended without an answer, and not from outside."""
    return Result(outcome=Outcome.POLICY_DENIED, message=BROKEN)


def late(run: Run, seconds: float) -> Result:
    """Result of code whose sandbox did not answer at its limit."""
    outcome, message = outcome_of(run, "timeout", 0, memory_killed=False)
    return Result(outcome=outcome, message=message, seconds=seconds)


def out_of_memory(run: Run) -> Result:
    """Result of code whose sandbox the kernel ended for its memory."""
    outcome, message = outcome_of(run, "memory", 0, memory_killed=True)
    return Result(outcome=outcome, message=message, exit_code=_SHELL_SIGNAL + signal.SIGKILL)


def _files(run: Run, entries: list[Mapping[str, Any]], content: bytes) -> tuple[dict[str, bytes], dict[str, str]]:
    files: dict[str, bytes] = {}
    unfetched: dict[str, str] = {}
    offset = 0
    for path, entry in zip(run.fetch, entries, strict=True):
        if entry["error"]:
            unfetched[path] = entry["error"]
            continue
        files[path] = content[offset : offset + entry["size"]]
        offset += entry["size"]
    return files, unfetched
