"""Runs the code, in the process that `confine` has taken all rights from."""

from __future__ import annotations

import ast
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

from kestrl_sandbox.inside.output import Output
from kestrl_sandbox.inside.reports import LONGEST_TEXT, Ended

BASH = "/bin/bash"
LONGEST_ARGUMENT = 100_000
"""Bytes of a script that are passed as an argument; a longer one is written to a file."""
FILE_NAME = "/work/main.py"

_OWN = "kestrl_sandbox"


def forget_own_modules() -> None:
    """Removes this package from the modules that code finds."""
    for name in [name for name in sys.modules if name.partition(".")[0] == _OWN]:
        del sys.modules[name]


def forget_node() -> None:
    """Removes what modules have remembered of the node since they were imported: its name and its network address."""
    for module, attribute in (("platform", "_uname_cache"), ("uuid", "_node")):
        if module in sys.modules:
            setattr(sys.modules[module], attribute, None)


def fresh_main() -> types.ModuleType:
    """A new `__main__`, and random numbers of this sandbox's own: the zygote's state is everybody's."""
    gc.enable()
    random.seed()
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed()
    for name in ("exit", "quit"):
        setattr(builtins, name, sys.exit)  # `site` has them, and is not loaded
    module = types.ModuleType("__main__")
    module.__dict__["__builtins__"] = builtins
    sys.modules["__main__"] = module
    return module


def run_python(code: str, module: types.ModuleType, echo: str) -> Ended:
    """Runs code in a module; `echo` says what becomes of the value of a last expression."""
    linecache.cache[FILE_NAME] = (len(code), None, code.splitlines(keepends=True), FILE_NAME)
    try:
        if not echo:
            exec(compile(code, FILE_NAME, "exec", dont_inherit=True), module.__dict__)  # noqa: S102 - the purpose of a sandbox
            return Ended()
        return Ended(display=_run_echoing(code, module.__dict__, echo))
    except SystemExit as error:
        return Ended(_exit_status(error))
    except BaseException as error:  # noqa: BLE001 - reported as the interpreter would
        error_report = {"type": type(error).__name__, "text": _text(error), "traceback": _print_traceback(error)}
        return Ended(1, isinstance(error, MemoryError), error=error_report)


def _run_echoing(code: str, namespace: dict[str, Any], echo: str) -> str | None:
    tree = compile(code, FILE_NAME, "exec", ast.PyCF_ONLY_AST, dont_inherit=True)  # no frame of `ast` in a traceback
    assert isinstance(tree, ast.Module)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, FILE_NAME, "exec", dont_inherit=True), namespace)  # noqa: S102
    if not isinstance(last, ast.Expr):
        return None
    value = eval(compile(ast.Expression(last.value), FILE_NAME, "eval", dont_inherit=True), namespace)  # noqa: S307
    if echo == "print":
        if value is not None and getattr(sys.stdout, "line_begun", False):
            sys.stdout.write("\n")  # the value stands on a line of its own
        sys.displayhook(value)
        return None
    return None if value is None else repr(value)[:LONGEST_TEXT]


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except BaseException:  # noqa: BLE001 - an exception of the code may raise anything
        return ""


def _exit_status(error: SystemExit) -> int:
    if error.code is None:
        return 0
    if isinstance(error.code, int):
        return error.code & 0xFF
    _complain(str(error.code))
    return 1


def _complain(text: str) -> None:
    try:
        sys.stderr.write(text if text.endswith("\n") else text + "\n")
    except (OSError, ValueError, AttributeError, MemoryError):
        return  # the code has closed or replaced it


def _print_traceback(error: BaseException) -> str:
    """Prints a traceback without the frames of this module, and returns it."""
    frame = error.__traceback__
    while frame is not None and frame.tb_frame.f_code.co_filename == __file__:
        frame = frame.tb_next
    try:
        text = "".join(traceback.format_exception(type(error), error, frame))
    except (MemoryError, RecursionError, OSError, ValueError, AttributeError):
        text = f"{type(error).__name__}\n"
    _complain(text)
    return text


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


def open_streams() -> None:
    """Python's standard streams on descriptors 0, 1 and 2, as a new interpreter would have them on pipes.

    Done once, before a fork: what lies behind the descriptors is each sandbox's own.
    """
    copies = [os.dup(number) for number in range(3)]
    reading, writing = os.pipe()
    for number, end in enumerate((reading, writing, writing)):
        os.dup2(end, number)
    new_streams()
    for number, before in enumerate(copies):
        os.dup2(before, number)
    for descriptor in (*copies, reading, writing):
        os.close(descriptor)


def new_streams() -> tuple[Any, Any]:
    """New streams on descriptors 0, 1 and 2 in the place of Python's own: those for output."""
    buffer = open(1, "wb", closefd=False)  # noqa: SIM115
    output = Output(buffer, encoding="utf-8", errors="surrogateescape")
    errors = open(2, "w", 1, encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
    restore_streams((output, errors))
    return output, errors


def restore_streams(streams: tuple[Any, Any]) -> None:
    """Makes streams Python's own for output, whichever the code has put there, and reads input anew."""
    sys.stdin = sys.__stdin__ = open(0, encoding="utf-8", errors="surrogateescape", closefd=False)  # type: ignore[misc]  # noqa: SIM115
    sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__ = streams  # type: ignore[misc]


def settle_streams(streams: tuple[Any, Any]) -> bool:
    """Flushes the streams of a session at the end of a cell; False, and no later cell shows it, if that failed."""
    flush()
    settled = True
    for stream in streams:
        try:
            stream.flush()
        except (OSError, ValueError):
            settled = False
            stream.buffer.raw.close()  # else what is left in it would be written when it is freed
    return settled
