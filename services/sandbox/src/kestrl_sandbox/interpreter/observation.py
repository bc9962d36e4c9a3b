"""What the model reads of a run, and what a reward may know of it."""

from __future__ import annotations

from kestrl_sandbox.contract import Outcome, Result


def text_of(result: Result, *, lost: bool = False) -> str:
    """What the model reads: output, errors, and how the code ended where that was not well."""
    parts = [result.stdout.decode(errors="replace")]
    if result.stdout_truncated:
        parts.append(f"[output cut after {len(result.stdout)} bytes]")
    if result.stderr:
        parts.append("[stderr]\n" + result.stderr.decode(errors="replace"))
    if result.stderr_truncated:
        parts.append(f"[stderr cut after {len(result.stderr)} bytes]")
    if result.message:
        parts.append(f"[{result.message}]")
    if lost:
        parts.append("[The session has ended: variables are lost.]")
    text = "\n".join(part.rstrip("\n") for part in parts if part)
    return text or "[no output]"


def facts(result: Result) -> dict[str, object]:
    """What a reward may know: `ToolCall.data`."""
    return {
        "outcome": result.outcome.value,
        "exit_code": result.exit_code,
        "signal": result.signal,
        "seconds": round(result.seconds, 4),
        "truncated": result.truncated,
        "ok": result.outcome is Outcome.OK,
    }
