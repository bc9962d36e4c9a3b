"""`kestrl` as a person runs it, in a process that is a copy of one in which its libraries are imported.

Importing them takes most of the time of a command that is refused, and hundreds of tests run one. A copy has arguments,
variables, folder, output and exit code of its own, and imports the program itself.
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

PROGRAM = "kestrl._app.cli.main"
LIBRARIES = (
    "typer",
    "rich.console",
    "rich.live",
    "rich.table",
    "yaml",
    "kestrl.storage",
    "kestrl._shared.plan.planning",
)
"""What most commands import. None starts a thread or reads variables when it is imported."""

WHOLE = "the whole text: "
"""How the last line of an error that is not shown whole begins."""


def run_program(
    *arguments: str | Path, cwd: Path | None = None, env: Mapping[str, str] | None = None, timeout: float = 50
) -> subprocess.CompletedProcess[str]:
    """Runs a command to its end.

    Args:
        arguments: Of the program.
        cwd: Its folder; that of the test by default.
        env: All its variables; those of the test by default.
        timeout: In seconds, after which the test fails.
    """
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as error:
        command = {
            "arguments": [*map(str, arguments)],
            "folder": str(cwd or Path.cwd()),
            "variables": dict(os.environ if env is None else env),
        }
        code = _original().run(command, [output.fileno(), error.fileno()], timeout)
        texts = []
        for file in (output, error):
            file.seek(0)
            texts.append(file.read())
    return subprocess.CompletedProcess(command["arguments"], code, *texts)


def whole_text(printed: str) -> str:
    """What a command printed of an error, with the whole text where that is in a file, which the last line names."""
    *_, last = printed.splitlines() or [""]
    return printed + Path(last.removeprefix(WHOLE)).read_text() if last.startswith(WHOLE) else printed


class _Original:
    """The process that copies are made of."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(theirs.fileno())],
                cwd=Path(__file__).parents[1],
                pass_fds=[theirs.fileno()],
            )
        self._socket = ours

    def run(self, command: Mapping[str, Any], outputs: list[int], timeout: float) -> int:
        """The exit code of a command; negative if a signal ended it."""
        ours, theirs = socket.socketpair()
        with ours:
            with theirs:
                socket.send_fds(self._socket, [b"\0"], [theirs.fileno(), *outputs])
            ours.sendall(json.dumps(command).encode() + b"\n")
            ours.settimeout(timeout)
            answers = ours.makefile()
            pid = int(answers.readline())
            try:
                return int(answers.readline())
            except TimeoutError:
                os.kill(pid, signal.SIGKILL)
                raise


@cache
def _original() -> _Original:
    return _Original()


def _serve(requests: socket.socket) -> None:
    """Makes a copy for each request, until the test process ends."""
    for name in LIBRARIES:
        importlib.import_module(name)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # each copy's parent is the one that waits for it
    while True:
        message, descriptors, _, _ = socket.recv_fds(requests, 1, 3)
        if not message:
            return
        if os.fork() == 0:
            _watch(socket.socket(fileno=descriptors[0]), descriptors[1:], requests)
        for descriptor in descriptors:
            os.close(descriptor)


def _watch(answers: socket.socket, outputs: list[int], requests: socket.socket) -> NoReturn:
    """Runs the command in a child, and reports its pid and its exit code."""
    requests.close()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    command = json.loads(answers.makefile().readline())
    pid = os.fork()
    if pid == 0:
        answers.close()
        _become(command, outputs)
    answers.sendall(f"{pid}\n".encode())
    _, status = os.waitpid(pid, 0)
    answers.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())
    os._exit(0)


def _become(command: Mapping[str, Any], outputs: list[int]) -> NoReturn:
    nothing = os.open(os.devnull, os.O_RDONLY)
    for target, source in enumerate([nothing, *outputs]):
        os.dup2(source, target)
    os.closerange(3, max(nothing, *outputs) + 1)
    os.environ.clear()
    os.environ.update(command["variables"])
    os.chdir(command["folder"])
    sys.argv = [PROGRAM, *command["arguments"]]
    sys.path[0] = command["folder"]  # as `python -m` has it
    runpy.run_module(PROGRAM, run_name="__main__", alter_sys=True)
    sys.exit(0)


if __name__ == "__main__":
    with socket.socket(fileno=int(sys.argv[1])) as connection:
        _serve(connection)
