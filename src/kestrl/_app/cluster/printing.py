"""A job's object in lines for people. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from kestrl.errors import UserInputError
from kestrl.terminal import safe_line

FACTS = ("phase", "step", "policy", "converged", "reward", "idle")
"""Columns of `kubectl get` in the first line."""
ADAPTERS = "/adapters/"
"""What follows a run's folder in the address of a policy."""


def status_lines(job: Mapping[str, Any]) -> Iterator[str]:
    """What a job is and did."""
    status = job.get("status", {})
    shown = status.get("shown", {})
    facts = "  ".join(f"{name} {shown[name]}" for name in FACTS if shown.get(name))
    yield safe_line(f"{job['metadata']['name']}  {facts or 'no operator has seen it yet'}")
    if shown.get("reason"):
        yield safe_line(f"reason: {shown['reason']}")
    for item in status.get("conditions", ()):
        yield safe_line(
            f"  {item['type']:20} {item['status']:8} {item['reason']:18} {item.get('message', '')}".rstrip()
        )
    for engine in status.get("engines", ()):
        said = f": {engine['message']}" if engine.get("message") else ""
        yield safe_line(f"engine {engine['name']}: {engine['state']}, {engine.get('version') or 'no version'}{said}")
    for name, count in sorted(status.get("progress", {}).get("failures", {}).items()):
        yield safe_line(f"failures {name}: {count}")
    if crash := status.get("lastCrash"):
        yield safe_line(f"last crash: {crash['pod']} {crash['container']}: {crash['reason']} ({crash['code']})")
        yield from (f"  {safe_line(line)}" for line in crash.get("log", "").splitlines())
    if result := status.get("result"):
        yield safe_line(f"adapter: {result['uri']}")


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
