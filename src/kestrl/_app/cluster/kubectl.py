"""Jobs of a namespace, read and changed by the program kubectl: it has the user's contexts, proxies and log-in."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from tempfile import TemporaryFile
from typing import IO, Any

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
        job: Mapping[str, Any] = json.loads(self._output("get", KIND, name, "--output=json"))
        return job

    def table(self) -> str:
        """The jobs, as `kubectl get` prints them; raises as `get` does."""
        return self._output("get", KIND)

    def suspend(self, name: str, *, suspended: bool) -> Mapping[str, Any]:
        """Has a job suspended or resumed; returns its object, and raises as `get` does."""
        patch = json.dumps({"spec": {"suspend": suspended}})
        job: Mapping[str, Any] = json.loads(
            self._output("patch", KIND, name, "--type=merge", f"--patch={patch}", "--output=json")
        )
        return job

    def log_lines(self, job: str, role: str | None, *, lines: int, follow: bool) -> Iterator[str]:
        """Lines of the logs of a job's pods, each with its pod and container; raises as `get` does."""
        labels = {"kestrl.dev/job": job, **({} if role is None else {"kestrl.dev/role": role})}
        selector = ",".join(f"{name}={value}" for name, value in labels.items())
        options = ["--all-containers", "--prefix", f"--tail={lines}", "--max-log-requests=100"]
        command = self._command("logs", f"--selector={selector}", *options, *(["--follow"] if follow else []))
        with _started(command) as (program, errors):
            assert program.stdout is not None
            yield from (line.rstrip("\n") for line in program.stdout)
            _raise_for(program, errors)

    def _output(self, *arguments: str) -> str:
        command = self._command(*arguments, f"--request-timeout={REQUEST_SECONDS}s")
        with _started(command) as (program, errors):
            assert program.stdout is not None
            output = program.stdout.read()
            _raise_for(program, errors)
        return output

    def _command(self, *arguments: str) -> Sequence[str]:
        options = {"namespace": self.namespace, "context": self.context}
        return ["kubectl", *(f"--{name}={option}" for name, option in options.items() if option), *arguments]


@contextmanager
def _started(command: Sequence[str]) -> Generator[tuple[subprocess.Popen[str], IO[str]]]:
    """A program, which is ended with the block, and the file with its errors: a pipe that nobody reads would block it
    once it is full.
    """
    with TemporaryFile("w+", errors="replace") as errors:
        try:
            program = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, errors="replace")  # noqa: S603 - no shell
        except FileNotFoundError:
            raise UserInputError("kubectl is not on the PATH; jobs of a cluster are read by it") from None
        with program:
            try:
                yield program, errors
            finally:
                if program.poll() is None:
                    program.terminate()


def _raise_for(program: subprocess.Popen[str], errors: IO[str]) -> None:
    """Raises what kubectl failed with once it has ended, if it failed."""
    if program.wait():
        errors.seek(0)
        raise refusal(errors.read())


def refusal(errors: str) -> KestrlError:
    """The error in one line for what kubectl printed. Pure."""
    lines = [line.strip() for line in errors.splitlines() if line.strip() and not LOG_LINE.match(line)]
    text = " ".join(lines)[:LONGEST_ERROR] or "kubectl failed and printed no reason"
    return UserInputError(text) if any(word in text for word in FIXABLE) else ClusterRefused(text)
