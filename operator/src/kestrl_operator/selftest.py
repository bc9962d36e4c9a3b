"""`python -m kestrl_operator.selftest --namespace NS --manifest FILE`: runs a job on the cluster and reports its
result, for `helm test`.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kestrl._shared.safe_yaml import read as read_yaml
from kestrl._shared.service import exit_code
from kestrl._shared.spec import read_job
from kestrl.errors import KestrlError, UserInputError
from kestrl_operator.apiserver.client import Api, Conflict
from kestrl_operator.apiserver.kinds import JOB

POLL_SECONDS = 2.0


class SelfTestFailed(KestrlError):
    """The job did not succeed."""

    code = "self_test_failed"


def main() -> int:
    """Runs the self-test; the exit code is 0 only if the job succeeded."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--namespace", required=True)
    parser.add_argument("--manifest", type=Path, required=True)
    parser.add_argument("--timeout", type=float, default=1200.0, help="seconds")
    parser.add_argument("--keep", action="store_true", help="leave the job in the cluster")
    arguments = parser.parse_args()

    def run() -> None:
        read_job(arguments.manifest)  # validated here, before the cluster is called
        job: dict[str, Any] = read_yaml(arguments.manifest.read_text())
        asyncio.run(_run(arguments.namespace, job, arguments.timeout, keep=arguments.keep))

    return exit_code(run)


async def _run(namespace: str, job: dict[str, Any], timeout: float, *, keep: bool) -> None:
    name = job["metadata"]["name"]
    job["metadata"] = {**job["metadata"], "namespace": namespace}
    api = Api()
    try:
        try:
            created_job = await api.create(JOB, job)
        except Conflict as error:
            raise UserInputError(f"{namespace}/{name} exists already; delete it, then test again") from error
        try:
            await _succeeded(api, namespace, name, timeout)
        finally:
            if not keep:
                await api.delete(JOB, namespace, name, uid=created_job["metadata"]["uid"])
    finally:
        await api.close()


async def _succeeded(api: Api, namespace: str, name: str, timeout: float) -> None:
    last_line = ""
    status: Mapping[str, Any] = {}
    try:
        async with asyncio.timeout(timeout):
            while True:
                status = (await api.get(JOB, name, namespace)).get("status", {})
                last_line = _print(status, last_line)
                accepted = _condition(status, "Accepted")
                if accepted["reason"] == "Invalid":
                    raise SelfTestFailed(f"the job is not accepted: {accepted['message']}")
                success = _condition(status, "Succeeded")
                if success["status"] == "True":
                    return
                if success["status"] == "False" and success["reason"] != "Running":
                    raise SelfTestFailed(f"{success['reason']}: {success.get('message', '')}\n{table(status)}")
                await asyncio.sleep(POLL_SECONDS)
    except TimeoutError as error:
        raise SelfTestFailed(f"not ended after {timeout:g} s\n{table(status)}") from error


def _condition(status: Mapping[str, Any], kind: str) -> Mapping[str, str]:
    unknown = {"status": "Unknown", "reason": ""}
    return next((item for item in status.get("conditions", ()) if item["type"] == kind), unknown)


def _print(status: Mapping[str, Any], before: str) -> str:
    """Prints the columns of `kubectl get` when they have changed."""
    columns = status.get("shown", {})
    line = "  ".join(
        f"{name} {columns[name]}" for name in ("phase", "step", "policy", "converged", "reward") if columns.get(name)
    )
    if line and line != before:
        print(line, flush=True)  # noqa: T201 - the log of the test's pod
    return line


def table(status: Mapping[str, Any]) -> str:
    """The conditions as a table."""
    return "\n".join(
        f"  {item['type']:20} {item['status']:8} {item['reason']:16} {item.get('message', '')}"
        for item in status.get("conditions", ())
    )


if __name__ == "__main__":
    sys.exit(main())
