"""Record of why this engine could not start: a file that the runner and the engine agent read.

vLLM's server ends with "Engine core initialization failed. See root cause above", and the cause is some hundred lines
further up in the log of another process.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, NoReturn

VARIABLE = "KESTRL_ENGINE_FAILURE"
"""Environment variable with the path of the file."""
EXIT_INPUT = 2
"""Exit code of a component whose input is invalid."""
LONGEST = 2000
"""Maximum length of a message in characters."""
STARTERS = ("vllm.v1.engine.core", "vllm.v1.executor.multiproc_executor")
"""Loggers of vLLM that report failed starts."""
STARTING = "failed to start."
"""Suffixes of the messages with which vLLM's processes log why they did not start."""
ELSEWHERE = ("root cause", "scheduler died during initialization", "see the error messages above")
"""Texts of errors that only refer to the error of another process."""
PASSING = (MemoryError, ConnectionError, TimeoutError, OSError, RuntimeError)
"""Types of transient errors: memory used by other programs, ports, networks, devices."""
LASTING = (FileNotFoundError, IsADirectoryError, NotADirectoryError, NotImplementedError, RecursionError)
"""Types of permanent errors: missing files, or features that the engine does not have."""
BUSY = (
    "free memory on device",
    "address already in use",
    "out of memory",
    "error in memory profiling",
    "no available memory for the cache blocks",
)
"""Texts of transient errors of any type: other programs of the device take and free memory meanwhile."""
MISFIT = (
    "cannot find any model weights",
    "exceeds dimension size",
    "size mismatch",
    "must match the size of tensor",
    "does not appear to have a file",
    "error(s) in loading",
    "is not a local folder",
)
"""Texts that make an error of a transient type permanent: the model does not fit."""


class StartFailure(NamedTuple):
    """Why an engine did not start."""

    message: str
    """The root cause, with the error's type."""
    lasting: bool
    """Whether every further start would fail in the same way."""


def chain(error: BaseException) -> Iterator[BaseException]:
    """An error and its causes, the root cause last."""
    visited: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in visited:
        visited.add(id(current))
        yield current
        current = current.__cause__ or (None if current.__suppress_context__ else current.__context__)


def lasts(error: BaseException) -> bool:
    """Whether the error recurs on every start with the same model and arguments."""
    text = str(error).lower()
    if any(busy in text for busy in BUSY):
        return False
    if isinstance(error, LASTING) or any(misfit in text for misfit in MISFIT):
        return True
    return not isinstance(error, PASSING)


def failure_of(error: BaseException) -> StartFailure:
    """Message of an error: the outermost error names what is wrong with the model or the arguments, the root cause
    why.
    """
    root = list(chain(error))[-1]
    message = f"{type(error).__name__}: {error}"
    if root is not error:
        message += f" (from {type(root).__name__}: {root})"
    return StartFailure(message[:LONGEST], lasts(error) and lasts(root))


def write_down(error: BaseException) -> None:
    """Writes why this process could not start, unless the error only refers to another process or no file is
    configured.
    """
    if isinstance(error, Exception) and not any(text in str(error).lower() for text in ELSEWHERE):
        _write(failure_of(error))


def refuse(message: str) -> NoReturn:
    """Ends this process because no start with its arguments can succeed; records why."""
    _write(StartFailure(message[:LONGEST], lasting=True))
    sys.stderr.write(f"error: {message}\n")
    sys.exit(EXIT_INPUT)


def _write(failure: StartFailure) -> None:
    path = os.environ.get(VARIABLE)
    if not path:
        return
    partial = Path(f"{path}.{os.getpid()}")
    try:
        partial.write_text(json.dumps(failure._asdict()))
        partial.replace(path)
    except OSError as problem:  # must not hide the engine's own error
        sys.stderr.write(f"{path} cannot be written: {problem}\n")


class _Starting(logging.Filter):
    """Log filter that records why a process of vLLM does not start. Not a handler, since vLLM replaces handlers
    later.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        if record.exc_info and record.exc_info[1] is not None and record.getMessage().endswith(STARTING):
            write_down(record.exc_info[1])
        return True


def install() -> None:
    """Makes this engine process record why it does not start."""
    if not os.environ.get(VARIABLE):
        return
    for name in STARTERS:
        logging.getLogger(name).addFilter(_Starting())
    default_hook = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        write_down(error)
        default_hook(kind, error, trace)

    sys.excepthook = hook
