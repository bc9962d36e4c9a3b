"""Jobs of a namespace, read and changed by the program kubectl: it has the user's contexts, proxies and log-in."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from kestrl.errors import KestrlError, UserInputError

KIND = "agentrljobs.kestrl.dev"
REQUEST_SECONDS = 30
LONGEST_ERROR = 2000
"""Characters of an error of kubectl that are kept."""
LOG_LINE = re.compile(r"[EIW]\d{4} ")
"""Beginning of the lines of kubectl's own log, which repeat its error."""
FIXABLE = ("NotFound", "Invalid", "BadRequest", "context was not found", "does not exist")
"""Words of errors that another command line avoids."""


class ClusterRefused(KestrlError):
    """The API server refused a request, or did not answer."""

    code = "cluster_refused"


@dataclass(frozen=True, slots=True, kw_only=True)
class Jobs:
    """The jobs of a namespace; None stands for what kubectl has by itself."""

    namespace: str | None = None
    context: str | None = None

    def get(self, name: str) -> Mapping[str, Any]:
        """A job's object.

        Raises:
            UserInputError: There is no such job, namespace or context, or no kubectl.
            ClusterRefused: The API server refused the request, or did not answer.
        """
        found: Mapping[str, Any] = json.loads(self._output("get", KIND, name, "--output=json"))
        return found

    def table(self) -> str:
        """The jobs, as `kubectl get` prints them; raises as `get` does."""
        return self._output("get", KIND)

    def suspend(self, name: str, *, suspended: bool) -> None:
        """Has a job suspended or resumed; raises as `get` does."""
        patch = json.dumps({"spec": {"suspend": suspended}})
        self._output("patch", KIND, name, "--type=merge", f"--patch={patch}")

    def log_lines(self, job: str, role: str | None, *, lines: int, follow: bool) -> Iterator[str]:
        """Lines of the logs of a job's pods, each with its pod and container; raises as `get` does."""
        labels = {"kestrl.dev/job": job, **({} if role is None else {"kestrl.dev/role": role})}
        selector = ",".join(f"{name}={value}" for name, value in labels.items())
        options = ["--all-containers", "--prefix", f"--tail={lines}", "--max-log-requests=100"]
        command = self._command("logs", f"--selector={selector}", *options, *(["--follow"] if follow else []))
        with _started(command) as program:
            assert program.stdout is not None
            yield from (line.rstrip("\n") for line in program.stdout)
            _, errors = program.communicate()
        if program.returncode:
            raise refusal(errors)

    def _output(self, *arguments: str) -> str:
        command = self._command(*arguments, f"--request-timeout={REQUEST_SECONDS}s")
        with _started(command) as program:
            output, errors = program.communicate()
        if program.returncode:
            raise refusal(errors)
        return output

    def _command(self, *arguments: str) -> Sequence[str]:
        named = {"namespace": self.namespace, "context": self.context}
        return ["kubectl", *(f"--{name}={value}" for name, value in named.items() if value), *arguments]


@contextmanager
def _started(command: Sequence[str]) -> Iterator[subprocess.Popen[str]]:
    """A program that is ended with the block."""
    try:
        program = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace")  # noqa: S603 - no shell
    except FileNotFoundError:
        raise UserInputError("kubectl is not on the PATH; jobs of a cluster are read by it") from None
    with program:
        try:
            yield program
        finally:
            if program.poll() is None:
                program.terminate()


def refusal(errors: str) -> KestrlError:
    """The error for what kubectl said. Pure."""
    lines = [line for line in errors.splitlines() if line.strip() and not LOG_LINE.match(line)]
    text = "\n".join(lines)[:LONGEST_ERROR] or "kubectl failed without a word"
    return UserInputError(text) if any(word in text for word in FIXABLE) else ClusterRefused(text)
