"""Results from what a supervisor answers."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from typing import Any

from kestrl_sandbox.contract import Outcome, Result, Run, SandboxFailure

DENIED = "Denied: the code made a system call that the sandbox forbids."
_SHELL_SIGNAL = 128
"""What a shell adds to the number of the signal that ended its program."""


def result_of(run: Run, header: Mapping[str, Any], body: bytes, *, memory_killed: bool = False) -> Result:
    """Result of a run.

    Raises:
        SandboxFailure: The sandbox could not run the code.
    """
    kind = header["kind"]
    if kind == "refused":
        return Result(outcome=Outcome.POLICY_DENIED, message=f"Denied: the file {header['reason']}.")
    stdout, stderr = header["stdout"], header["stderr"]
    if kind == "unprepared":
        reason = body[stdout : stdout + stderr].decode(errors="replace") or f"exit status {header['code']}"
        raise SandboxFailure(f"the sandbox's process did not start: {reason}", code="sandbox_unprepared")
    outcome, message = outcome_of(run, kind, header["code"], memory_killed=memory_killed)
    files, missing = _files(header["files"], body[stdout + stderr :])
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
        missing=missing,
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


def _files(entries: list[Mapping[str, Any]], content: bytes) -> tuple[dict[str, bytes], dict[str, str]]:
    files: dict[str, bytes] = {}
    missing: dict[str, str] = {}
    offset = 0
    for entry in entries:
        if entry["error"]:
            missing[entry["path"]] = entry["error"]
            continue
        files[entry["path"]] = content[offset : offset + entry["size"]]
        offset += entry["size"]
    return files, missing
