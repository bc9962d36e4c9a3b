"""Mathematical answers, read and compared by math-verify (extra `math`), which is imported by the first comparison."""

from __future__ import annotations

import gc
import logging
import os
import re
import resource
import select
import signal
import traceback
from collections.abc import Sequence
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from kestrl.rewards.boxed import canonical

_log = logging.getLogger(__name__)

CPU_SECONDS = 4
"""CPU time of one comparison. An answer that is no trap takes 0.2 s at most; one that takes longer than this, such as a
tower of powers, is not equal.
"""
WALL_SECONDS = 120
"""Time of one comparison on a machine that has nothing else left for it."""
MEMORY_BYTES = 2 * 1024**3
"""Memory that one comparison may allocate beyond that of its process."""
MAX_ANSWER = 1000
"""Maximum characters of an answer in the form in which it is recorded."""
_BOLD = re.compile(r"(?P<mark>\*\*|__)(?=\S)(?P<text>[^*_\n]+?)(?<=\S)(?P=mark)")
_COMMAND = re.compile(r"\\[A-Za-z]+|\b(?:sin|cos|tan|log|ln|exp|sqrt|pi|inf)\b")
_WORD = re.compile(r"[^\W\d_]{2,}")
"""A word, not a product of variables: those are written apart, or in LaTeX."""
_DELIMITERS = ("$", "\\boxed", "\\[", "\\(", "\\begin{")
"""What surrounds LaTeX in a text."""


class Reading(NamedTuple):
    """An answer as it was read out of a text."""

    correct: bool
    """Whether it is equal to an accepted one."""
    answer: str
    """Its form that is the same for equal answers; empty if there is none, or if it was too costly to read."""
    costly: bool = False
    """Whether it was given up: it took more than the time or memory of a comparison."""


def read(text: str, accepted: Sequence[str]) -> Reading:
    r"""Reads the answer of a text and compares it with accepted ones: `\frac{1}{2}` and 0.5, `(x+1)^2` and `x^2+2x+1`,
    sets, intervals, and what stands in `\boxed{...}`, `$...$` or `\[...\]`.

    What a model wrote may take unbounded time to evaluate, in code that no signal handler interrupts. So it is read and
    compared in a forked process with limits of CPU time and memory. What kills that process twice, or once by the limit
    of CPU time, is a property of the answer: it is not equal, and the log says so.

    Args:
        text: The answer, LaTeX or plain.
        accepted: Expressions.

    Raises:
        ImportError: math-verify is not installed.
        RuntimeError: The comparison failed; its traceback is in the log.
        TimeoutError: The comparison did not end, without taking CPU time.
    """
    expected = [_parsed(expression) for expression in accepted]
    status, answer = _forked(expected, text)
    if status < 0 and -status != signal.SIGXCPU:
        status, answer = _forked(expected, text)
    if status == 0:
        return Reading(answer[:1] == "1", answer[1:])
    if status > 0:
        raise RuntimeError("math-verify failed to compare an answer; its traceback is in the log")
    _log.warning("an answer is not equal as %s ended its comparison: %.200r", signal.Signals(-status).name, text)
    return Reading(correct=False, answer="", costly=True)


def _forked(expected: Sequence[Any], text: str) -> tuple[int, str]:
    """Exit code of a forked process that reads and compares, negative for a signal, and what it wrote."""
    receive, send = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            gc.disable()  # what it would free may belong to threads, such as gRPC's, that a forked process has not
            os.close(receive)
            reading = _reading(expected, text)
            os.write(send, f"{int(reading.correct)}{reading.answer}".encode("utf-8", "replace"))
            code = 0
        except BaseException:  # noqa: BLE001 - the forked process must not return; the parent raises
            traceback.print_exc()
        finally:
            os._exit(code)
    os.close(send)
    with os.fdopen(receive, "rb") as pipe:
        ready = _readable(receive, WALL_SECONDS)
        if not ready:
            os.kill(child, signal.SIGKILL)
        answer = pipe.read().decode("utf-8")
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if not ready:
        raise TimeoutError(f"math-verify did not end within {WALL_SECONDS} s for an answer")
    return status, answer


def _readable(descriptor: int, seconds: float) -> bool:
    """Whether something, or an end, is to be read within a time."""
    poll = select.poll()  # not select(), which takes no descriptor above 1023
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(seconds * 1000))


def _reading(expected: Sequence[Any], text: str) -> Reading:
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS + 1))
    in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (in_use + MEMORY_BYTES, in_use + MEMORY_BYTES))
    parsed = _parse(text)
    # Without its own timeouts, which are alarms of the main thread.
    correct = any(_math_verify().verify(expectation, parsed, timeout_seconds=None) for expectation in expected)
    return Reading(correct, _form(parsed))


def _form(parsed: Any) -> str:
    """Form of a parsed answer that is the same for equal ones: numbers as reduced fractions, polynomials expanded."""
    sympy: Any = import_module("sympy")  # its types are incomplete
    if not parsed:
        return ""
    value: Any = parsed[0]
    if isinstance(value, sympy.Eq):
        value = value.rhs  # x = 1/2 answers what x is
    if isinstance(value, sympy.Expr):
        expanded: Any = sympy.nsimplify(sympy.expand(value), rational=True) if value.is_number else sympy.expand(value)
        return str(expanded)[:MAX_ANSWER]
    return (canonical(value) if isinstance(value, str) else str(value))[:MAX_ANSWER]


@lru_cache(maxsize=1024)
def _parsed(expected: str) -> Any:
    """Parsed ground truth. Parsed before the fork, so that all forked processes share the parser's tables."""
    return _parse(expected)


def _parse(text: str) -> Any:
    plain = _BOLD.sub(r"\g<text>", text)
    return _math_verify().parse(f"${plain}$" if _is_formula(plain) else plain, parsing_timeout=None)


def _is_formula(text: str) -> bool:
    """Whether a text without delimiters is a formula as a whole. Without delimiters math-verify would search it for a
    number; within them the letters of words would be factors.
    """
    if "\n" in text or any(delimiter in text for delimiter in _DELIMITERS):
        return False
    return _WORD.search(_COMMAND.sub(" ", text)) is None


@lru_cache(maxsize=1)
def _math_verify() -> Any:
    import math_verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its timeouts are off
    return math_verify
