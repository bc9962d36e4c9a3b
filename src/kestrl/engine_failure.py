"""Why an engine could not start, as a file: written by the engine's processes, read by whoever starts or watches it.

vLLM's server ends with "Engine core initialization failed. See root cause above", and the cause is some hundred lines further up in the
log of another process. Only the standard library: it is imported in vLLM's processes.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

VARIABLE = "KESTRL_ENGINE_FAILURE"
"""The file's path, for the engine's processes."""
CODE = "engine_cannot_start"
LONGEST = 2000
"""Characters of a message that are kept."""
STARTERS = ("vllm.v1.engine.core", "vllm.v1.executor.multiproc_executor")
"""The loggers of vLLM's processes that start."""
STARTING = "failed to start."
"""How the messages end with which vLLM's processes log what kept them from starting."""
ELSEWHERE = "root cause"
"""What an error's text holds that only points to another process's."""
PASSING = (MemoryError, ConnectionError, TimeoutError, OSError, RuntimeError)
"""Kinds of errors that another start may not meet: memory that others held, ports, networks, devices."""
LASTING = (FileNotFoundError, IsADirectoryError, NotADirectoryError, NotImplementedError, RecursionError)
"""Kinds of those that every start meets: files that are missing, or what the engine cannot do."""
BUSY = ("free memory on device", "address already in use", "out of memory")
"""Texts of errors of any kind that another start may not meet."""
MISFIT = (
    "cannot find any model weights",
    "exceeds dimension size",
    "size mismatch",
    "does not appear to have a file",
    "error(s) in loading",
    "is not a local folder",
)
"""Texts of errors of passing kinds that tell of a model that does not fit."""


class EngineStartFailure(NamedTuple):
    """What kept an engine from starting."""

    message: str
    """The root cause, with the error's type."""
    lasting: bool
    """Whether every further start would end the same."""


def chain(error: BaseException) -> Iterator[BaseException]:
    """An error and those that it came from, the root last."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        current = current.__cause__ or (None if current.__suppress_context__ else current.__context__)


def lasts(error: BaseException) -> bool:
    """Whether a start with the same model and arguments meets the error again."""
    text = str(error).lower()
    if any(busy in text for busy in BUSY):
        return False
    if isinstance(error, LASTING) or any(misfit in text for misfit in MISFIT):
        return True
    return not isinstance(error, PASSING)


def failure_of(error: BaseException) -> EngineStartFailure:
    """An error as it is reported: the last of its chain says what was wrong with the model or the arguments, the root why."""
    root = list(chain(error))[-1]
    told = f"{type(error).__name__}: {error}"
    if root is not error:
        told += f" (from {type(root).__name__}: {root})"
    return EngineStartFailure(told[:LONGEST], lasts(error) and lasts(root))


def write_down(error: BaseException) -> None:
    """Writes down why this process could not start, unless the error only points elsewhere or nobody asked."""
    path = os.environ.get(VARIABLE)
    if not path or not isinstance(error, Exception) or ELSEWHERE in str(error).lower():
        return
    partial = Path(f"{path}.{os.getpid()}")
    try:
        partial.write_text(json.dumps(failure_of(error)._asdict()))
        partial.replace(path)
    except OSError as problem:  # the engine's own error must not be hidden by it
        sys.stderr.write(f"{path} cannot be written: {problem}\n")


def read(path: Path) -> EngineStartFailure | None:
    """What the last start ended with; None where nothing is known."""
    try:
        return EngineStartFailure(**json.loads(path.read_text()))
    except (OSError, ValueError, TypeError):
        return None


def forget(environment: Mapping[str, str]) -> None:
    """Removes what an earlier start of the engine with this environment wrote."""
    if path := environment.get(VARIABLE):
        Path(path).unlink(missing_ok=True)


class _Starting(logging.Filter):
    """Records what vLLM's processes log as the reason that they do not start. A filter: vLLM configures its handlers anew later."""

    def filter(self, record: logging.LogRecord) -> bool:
        if record.exc_info and record.exc_info[1] is not None and record.getMessage().endswith(STARTING):
            write_down(record.exc_info[1])
        return True


def install() -> None:
    """Has this process of an engine write down what keeps it from starting."""
    if not os.environ.get(VARIABLE):
        return
    for name in STARTERS:
        logging.getLogger(name).addFilter(_Starting())
    shown = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        write_down(error)
        shown(kind, error, trace)

    sys.excepthook = hook
