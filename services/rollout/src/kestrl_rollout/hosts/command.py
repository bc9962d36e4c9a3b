"""A program that runs one episode: the request on its standard input, the result on the last line of its output."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from signal import Signals

from kestrl._shared.processes.guarded import kept_variables
from kestrl.agents.runs import RunResult, invalid
from kestrl.errors import UserInputError, encodable
from kestrl_rollout.hosts.host import MAX_RESULT, RunEnded, RunRequest, read_result
from kestrl_rollout.hosts.program import Program

MAX_ERRORS = 16 * 1024
"""Bytes of stderr that are kept."""
NOT_STARTED = 127
RAISED = re.compile(r"^([A-Za-z_][\w.]*)(?::\s|$)")
TRACEBACK = "Traceback (most recent call last):"


class CommandHost:
    """Starts a program for every episode."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        variables: Mapping[str, str],
        folder: str | None,
        inherited: Mapping[str, str] | None = None,
    ) -> None:
        """Describes it.

        Args:
            command: Program and arguments.
            variables: Environment variables of the manifest.
            folder: Folder of the manifest, in which it runs; None for the worker's.
            inherited: Other environment variables; None for `kept_variables`.

        Raises:
            UserInputError: There is no such program.
        """
        self._inherited = kept_variables() if inherited is None else dict(inherited)
        place = {**self._inherited, **variables}.get("PATH", os.defpath)
        path = str(Path(folder or ".", command[0])) if "/" in command[0] else command[0]
        if shutil.which(path, path=place) is None:
            raise UserInputError(
                f"agent.command: there is no program {command[0]!r}; install it, or give its path from the manifest's "
                "folder"
            )
        self._command, self._variables, self._folder = tuple(command), variables, folder
        self.field, self.name = "agent.command", Path(command[0]).name
        self._title = f"{self.field} {self.name}"

    async def run(self, request: RunRequest) -> RunResult:
        with tempfile.TemporaryDirectory(prefix="kestrl-agent-", ignore_cleanup_errors=True) as name:
            scratch = Path(name)
            request_file, result = scratch / "request.json", scratch / "result.json"
            request_file.write_bytes(request.to_json())
            variables = {
                **self._inherited,
                "TMPDIR": name,
                **self._variables,
                **episode_variables(request),
                "KESTRL_RESULT": str(result),
            }
            out, errors, status = await self._ended(request_file, variables)
            returned = _returned(result, out)
            if len(returned) > MAX_RESULT:
                raise invalid(self._title, f"its result has more than {MAX_RESULT} bytes")
            if status:
                raise self._failed(status, returned, errors.decode("utf-8", "replace"))
            return read_result(self._title, returned) if returned else RunResult()

    async def _ended(self, request_file: Path, variables: Mapping[str, str]) -> tuple[bytes, bytes, int]:
        """Output, errors and status of the program, once it has ended with all that it started."""
        with request_file.open("rb") as stdin:
            program = Program.start(
                self._command,
                variables=variables,
                folder=self._folder,
                stdin=stdin,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
        try:
            out, errors = await program.output(MAX_RESULT + 1, MAX_ERRORS)
        finally:
            await program.kill()
        return out, errors, program.process.returncode

    def _failed(self, status: int, returned: bytes, errors: str) -> RunEnded:
        last = next((line.strip() for line in reversed(errors.splitlines()) if line.strip()), "")[:500]
        if status == NOT_STARTED:
            return RunEnded(f"{self._title}: cannot be started; {last}", code="agent_not_started")
        described = _described(self._title, returned)
        if described is not None:
            return described
        number = status - 128
        if number in set(Signals):
            ending = f"was ended by {Signals(number).name}"
            return RunEnded(f"{self._title}: {ending}; {last}", names=[f"exit:{status}"], code="agent_killed")
        raised = raised_name(errors)
        names = [f"exit:{status}", *([raised] if raised else ())]
        text = encodable(f"{self._title}: ended with status {status}; {last or 'it wrote nothing to stderr'}")
        return RunEnded(text, names=names, code="agent_raised" if raised else "agent_exited")


def episode_variables(request: RunRequest) -> dict[str, str]:
    """Where a program finds its episode: for clients of OpenAI and Anthropic, and for others."""
    base_url, key = request.base_url, request.key
    return {
        "OPENAI_BASE_URL": base_url,
        "OPENAI_API_KEY": key,
        "ANTHROPIC_BASE_URL": base_url.removesuffix("/v1"),
        "ANTHROPIC_API_KEY": key,
        "KESTRL_BASE_URL": base_url,
        "KESTRL_API_KEY": key,
        "KESTRL_MCP_URL": request.mcp_url,
        "KESTRL_DEADLINE": f"{request.deadline:.3f}",
    }


def _returned(result: Path, out: bytes) -> bytes:
    """The result: the file, or else the last line of the output if it is a JSON object."""
    if result.is_file():
        with result.open("rb") as file:
            return file.read(MAX_RESULT + 1)
    last = out.rstrip().rpartition(b"\n")[2].strip()
    cut = len(out) > MAX_RESULT and b"\n" not in out.rstrip()
    return out if cut and last.endswith(b"}") else last if last.startswith(b"{") else b""


def _described(agent: str, returned: bytes) -> RunEnded | None:
    """The error that a failed program describes in its result."""
    if b'"error"' not in returned:
        return None
    try:
        read_result(agent, returned)
    except RunEnded as end:
        return end
    return None


def raised_name(errors: str) -> str:
    """Class of the exception that ended a program in Python, from the traceback at the end of its stderr."""
    _, marker, trace = errors.rpartition(TRACEBACK)
    if not marker:
        return ""
    lines = trace.splitlines()
    frames = [index for index, line in enumerate(lines) if line.startswith("  ")]
    for line in lines[frames[-1] + 1 if frames else 0 :]:
        if match := RAISED.match(line):
            return match[1]
    return ""
