"""Runs the code, in the process that `confine` has taken all rights from."""

from __future__ import annotations

import atexit
import builtins
import gc
import linecache
import os
import random
import sys
import threading
import traceback
import types
from typing import Any

BASH = "/bin/bash"
LONGEST_ARGUMENT = 100_000
"""Bytes of a script that are passed as an argument; a longer one is written to a file."""
FILE_NAME = "/work/main.py"

_OWN = "kestrl_sandbox"


def fresh_main() -> types.ModuleType:
    """A new `__main__`."""
    gc.enable()
    module = types.ModuleType("__main__")
    module.__dict__["__builtins__"] = builtins
    sys.modules["__main__"] = module
    for name in [name for name in sys.modules if name.partition(".")[0] == _OWN]:
        del sys.modules[name]
    return module


def run_python(code: str, module: types.ModuleType) -> tuple[int, bool]:
    """Runs code in a module: exit status, as the interpreter would have it, and whether memory ran out."""
    lines = code.splitlines(keepends=True)
    linecache.cache[FILE_NAME] = (len(code), None, lines, FILE_NAME)
    try:
        exec(compile(code, FILE_NAME, "exec", dont_inherit=True), module.__dict__)  # noqa: S102 - this is what a sandbox is for
    except SystemExit as error:
        return _exit_status(error), False
    except BaseException as error:  # noqa: BLE001 - reported as the interpreter would
        _print_traceback(error)
        return 1, isinstance(error, MemoryError)
    return 0, False


def _exit_status(error: SystemExit) -> int:
    if error.code is None:
        return 0
    if isinstance(error.code, int):
        return error.code & 0xFF
    _complain(str(error.code))
    return 1


def _complain(text: str) -> None:
    try:
        sys.stderr.write(text + "\n")
    except (OSError, ValueError, AttributeError, MemoryError):
        return  # the code has closed or replaced it


def _print_traceback(error: BaseException) -> None:
    """Prints a traceback without the frames of this module."""
    frame = error.__traceback__
    inner = None if frame is None else frame.tb_next
    try:
        traceback.print_exception(type(error), error, inner)
    except (MemoryError, RecursionError, OSError, ValueError, AttributeError):
        _complain(f"{type(error).__name__}")


def finish(status: int) -> int:
    """What the interpreter does at its end: waits for threads, runs exit handlers, flushes."""
    try:
        threading._shutdown()  # type: ignore[attr-defined]  # pyright: ignore[reportUnknownMemberType, reportAttributeAccessIssue]
        atexit._run_exitfuncs()  # pyright: ignore[reportPrivateUsage] - what the interpreter calls at its end
    except BaseException as error:  # noqa: BLE001 - handlers of the code may raise anything
        _print_traceback(error)
    return 120 if not flush() and status == 0 else status


def flush() -> bool:
    """Flushes what has been printed; False if that failed."""
    flushed = True
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):
            flushed = False
    return flushed


def exec_bash(code: str) -> None:
    """Replaces this process by bash."""
    os.execve(BASH, ["bash", "--noprofile", "--norc", *_script(code)], dict(os.environ))  # noqa: S606


def _script(code: str) -> list[str]:
    if len(code.encode("utf-8", "surrogateescape")) <= LONGEST_ARGUMENT and "\0" not in code:
        return ["-c", code]
    path = f"/tmp/.main-{os.getpid()}.sh"  # noqa: S108 - private to this sandbox
    with open(path, "w", encoding="utf-8", errors="surrogateescape") as file:
        file.write(code)
    return [path]


def run_bash(code: str) -> int:
    """Runs bash beside this process, which a session keeps: its exit status, 128 + N for signal N."""
    child = os.fork()
    if child == 0:
        try:
            exec_bash(code)
        finally:
            os._exit(127)
    _, status = os.waitpid(child, 0)
    code_or_signal = os.waitstatus_to_exitcode(status)
    return code_or_signal if code_or_signal >= 0 else 128 - code_or_signal


def reopen_streams() -> None:
    """Python's standard streams on descriptors 0, 1 and 2, as a new interpreter would have them."""
    options: dict[str, Any] = {"encoding": "utf-8", "closefd": False}
    sys.stdin = sys.__stdin__ = open(0, errors="surrogateescape", **options)  # type: ignore[misc]  # noqa: SIM115
    sys.stdout = sys.__stdout__ = open(1, "w", errors="surrogateescape", **options)  # type: ignore[misc]  # noqa: SIM115
    sys.stderr = sys.__stderr__ = open(2, "w", 1, errors="backslashreplace", **options)  # type: ignore[misc]  # noqa: SIM115


def reseed() -> None:
    """Gives this sandbox random numbers of its own: the zygote's state is everybody's."""
    random.seed()
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed()
