"""The contract of a sandbox: what runs, what comes back, and what an isolation stops."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from kestrl.errors import Boundary, KestrlError, UserInputError

MAX_CODE = 4 << 20
MAX_INPUT = 64 << 20
"""Bytes of standard input and files of one run."""
MAX_PATH = 1024
MAX_FILES = 256
MAX_OUTPUT = 64 << 20
"""Largest `Limits.output_bytes` and `Limits.file_bytes`."""


class SandboxFailure(KestrlError):
    """The sandbox itself failed, not the code in it: retried by the caller, never scored."""

    boundary = Boundary.SANDBOX
    code = "sandbox_failed"
    retryable = True


class SandboxBusy(SandboxFailure):
    """All sandboxes are in use and the queue is full."""

    code = "sandbox_busy"

    def __init__(self, message: str, *, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after
        """Seconds after which a retry may succeed."""


class Language(StrEnum):
    PYTHON = "python"
    BASH = "bash"


class Outcome(StrEnum):
    """How a run ended. Only a `SandboxFailure`, which is raised, is the sandbox's own."""

    OK = "ok"
    NONZERO_EXIT = "nonzero_exit"
    SIGNAL = "signal"
    """A signal ended it, such as SIGSEGV."""
    TIMEOUT = "timeout"
    OUT_OF_MEMORY = "out_of_memory"
    POLICY_DENIED = "policy_denied"
    """It made a system call that the sandbox forbids, or named a file outside of the sandbox."""
    CANCELLED = "cancelled"


class Echo(StrEnum):
    """What becomes of the value of a last expression."""

    NOTHING = ""
    """It is dropped, as in a program."""
    PRINT = "print"
    """It is printed, as in the interactive interpreter."""
    DISPLAY = "display"
    """It is `Result.display`, as in a notebook; only in sessions."""


class Isolation(StrEnum):
    """Least isolation that a job accepts, from the weakest."""

    NAMESPACES = "namespaces"
    """User, PID, network, mount, IPC and UTS namespaces, a read-only root, a system-call filter, no capability."""
    KERNEL = "kernel"
    """The code talks to a kernel of its own (gVisor), not to the host's."""


STRENGTH = {Isolation.NAMESPACES: 1, Isolation.KERNEL: 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What a back-end isolates on this node, as found by starting it."""

    backend: str
    isolation: Isolation
    mechanisms: Mapping[str, str]
    """By mechanism, such as `landlock: ABI 7`; `no` and the reason where it is missing."""
    start_seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of one run."""

    seconds: float = 10.0
    """Wall-clock time from the start of the code."""
    memory_mb: int | None = None
    """Address space of each process, and memory of all together; None is the pool's limit."""
    output_bytes: int = 1 << 20
    """Kept bytes of standard output, and of standard error; further output is read and dropped."""
    file_bytes: int = 16 << 20
    """Largest file that is read back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Code to run."""

    code: str
    language: Language = Language.PYTHON
    stdin: bytes = b""
    files: Mapping[str, bytes] = field(default_factory=dict[str, bytes])
    """Files to write before the start, by path: relative to `/work`, or absolute below /work, /tmp or /dev/shm."""
    echo: Echo = Echo.NOTHING
    """What becomes of the value of the last expression; for Python."""
    fetch: Sequence[str] = ()
    """Files to read back after the end."""
    limits: Limits = field(default_factory=Limits)

    def check(self) -> None:
        """Checks sizes and paths.

        Raises:
            UserInputError: They cannot be used; the message names the field.
        """
        if len(self.code) > MAX_CODE:
            raise UserInputError(f"code: has {len(self.code)} characters; at most {MAX_CODE} are run")
        size = len(self.stdin) + sum(len(content) for content in self.files.values())
        if size > MAX_INPUT:
            raise UserInputError(f"files: {size} bytes with standard input; at most {MAX_INPUT} are accepted")
        if max(len(self.files), len(self.fetch)) > MAX_FILES:
            raise UserInputError(f"files: more than {MAX_FILES}")
        for name, paths in (("files", list(self.files)), ("fetch", list(self.fetch))):
            for path in paths:
                problem = path_problem(path)
                if problem:
                    raise UserInputError(f"{name}: the path {path[:80]!r} {problem}")
        limits = self.limits
        if not 0 < limits.seconds <= 3600:
            raise UserInputError(f"seconds: must be above 0 and at most 3600, is {limits.seconds}")
        if limits.memory_mb is not None and limits.memory_mb < 16:
            raise UserInputError(f"memory_mb: must be at least 16, is {limits.memory_mb}")
        for name, size in (("output_bytes", limits.output_bytes), ("file_bytes", limits.file_bytes)):
            if not 0 <= size <= MAX_OUTPUT:
                raise UserInputError(f"{name}: must be from 0 to {MAX_OUTPUT}, is {size}")


def path_problem(path: str) -> str:
    """Why a path cannot be used; empty if it can."""
    if not path or path.endswith("/"):
        return "names no file"
    if "\0" in path:
        return "has a NUL character"
    try:
        size = len(path.encode("utf-8", "surrogateescape"))
    except UnicodeEncodeError:
        return "has a character that no file name has"
    if size > MAX_PATH:
        return f"is longer than {MAX_PATH} bytes"
    if ".." in path.split("/"):
        return "has a part `..`"
    return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """Result of a run."""

    outcome: Outcome
    exit_code: int | None = None
    """Exit status; None where a signal or the sandbox ended it."""
    signal: int | None = None
    stdout: bytes = b""
    stderr: bytes = b""
    stdout_truncated: bool = False
    stderr_truncated: bool = False
    seconds: float = 0.0
    """From the start of the code to its end."""
    files: Mapping[str, bytes] = field(default_factory=dict[str, bytes])
    missing: Mapping[str, str] = field(default_factory=dict[str, str])
    """Files that could not be read back, with the reason."""
    display: str | None = None
    """Value of the last expression with `Echo.DISPLAY`."""
    error: Mapping[str, str] | None = None
    """Exception that ended a session's cell: its `type`, `text` and `traceback`."""
    message: str = ""
    """What happened, for the model, where the outcome is not OK."""

    @property
    def truncated(self) -> bool:
        return self.stdout_truncated or self.stderr_truncated


class SandboxSession(Protocol):
    """A sandbox that keeps its state between runs: variables, files, background processes."""

    async def run(self, run: Run) -> Result:
        """Runs code in the session.

        Raises:
            SandboxFailure: The sandbox failed; the state is lost.
        """
        ...

    async def close(self) -> None:
        """Ends everything in the session; idempotent."""
        ...


class Sandbox(Protocol):
    """A back-end."""

    @property
    def capabilities(self) -> Capabilities: ...

    async def run(self, run: Run) -> Result:
        """Runs code in a fresh sandbox of its own.

        Raises:
            SandboxBusy: There is no place, also not in the queue.
            SandboxFailure: The sandbox failed.
        """
        ...

    async def session(self) -> SandboxSession:
        """Opens a session."""
        ...

    async def close(self) -> None:
        """Ends everything; nothing is left behind."""
        ...
