"""A job's object in lines for people. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from kestrl.errors import UserInputError
from kestrl.terminal import safe_line

FACTS = ("phase", "step", "policy", "converged", "reward", "idle")
"""Columns of `kubectl get` in the first line."""
ENDED = frozenset({"Succeeded", "Failed"})
"""Phases of jobs that have ended."""
ADAPTERS = "/adapters/"
"""What follows a run's folder in the address of a policy."""


def status_lines(job: Mapping[str, Any]) -> Iterator[str]:
    """What a job is and did."""
    status = job.get("status", {})
    shown_fields = status.get("shown", {})
    facts = "  ".join(f"{name} {shown_fields[name]}" for name in FACTS if shown_fields.get(name))
    yield safe_line(f"{job['metadata']['name']}  {facts or 'no operator has seen it yet'}")
    if shown_fields.get("reason"):
        yield safe_line(f"reason: {shown_fields['reason']}")
    for condition in status.get("conditions", ()):
        columns = f"{condition['type']:20} {condition['status']:8} {condition['reason']:18}"
        yield safe_line(f"  {columns} {condition.get('message', '')}".rstrip())
    for engine in status.get("engines", ()):
        version, message = engine.get("version") or "no version", engine.get("message", "")
        yield safe_line(f"engine {engine['name']}: {engine['state']}, {version}{': ' if message else ''}{message}")
    for name, count in sorted(status.get("progress", {}).get("failures", {}).items()):
        yield safe_line(f"failures {name}: {count}")
    if crash := status.get("lastCrash"):
        yield safe_line(f"last crash: {crash['pod']} {crash['container']}: {crash['reason']} ({crash['code']})")
        yield from (f"  {safe_line(line)}" for line in crash.get("log", "").splitlines())
    if result := status.get("result"):
        yield safe_line(f"adapter: {result['uri']}")


def suspension_line(job: Mapping[str, Any]) -> str:
    """What follows from a job's `spec.suspend`, which has just been set."""
    name, phase = job["metadata"]["name"], job.get("status", {}).get("shown", {}).get("phase", "")
    if phase in ENDED:
        return safe_line(f"{name} has ended ({phase}); that changes nothing")
    if job["spec"]["suspend"]:
        return safe_line(f"{name} finishes its step, writes a checkpoint and gives its devices back")
    return safe_line(f"{name} is to run, from its last checkpoint if it has one")


def run_address(job: Mapping[str, Any]) -> str:
    """The address of a job's run in object storage.

    Raises:
        UserInputError: The job has published no policy yet, by whose address the run's is known.
    """
    status, name = job.get("status", {}), job["metadata"]["name"]
    places = (status.get(field, {}).get("uri") or "" for field in ("result", "policy"))
    address = next((uri.rpartition(ADAPTERS)[0] for uri in places if ADAPTERS in uri), "")
    if not address:
        raise UserInputError(f"{name} has published no policy yet, so that its run's folder in storage is not known")
    return address
