"""Equality of mathematical answers, by math-verify (extra `math`), which is imported by the first comparison."""

from __future__ import annotations

import logging
import os
import resource
import traceback
from functools import lru_cache
from pathlib import Path
from typing import Any

CPU_SECONDS = 2
"""CPU time of one comparison. An answer that takes longer, such as a tower of powers, is not equal."""
MEMORY_BYTES = 2 * 1024**3
"""Memory that one comparison may allocate beyond that of its process."""
_EQUAL, _DIFFERENT, _FAILED = range(3)


def equal(expected: str, given: str) -> bool:
    r"""Whether two expressions, in LaTeX or as plain text, are equal: `\frac{1}{2}` and `0.5`, `(x+1)^2` and
    `x^2+2x+1`.

    What a model wrote may take unbounded time to evaluate, in code that no signal handler interrupts. So it is compared
    in a forked process with limits of CPU time and memory.

    Raises:
        ImportError: math-verify is not installed.
        RuntimeError: The comparison failed; its traceback is in the log.
    """
    parsed = _parsed(expected)
    child = os.fork()
    if child == 0:
        code = _FAILED
        try:
            code = _compare(parsed, given)
        except BaseException:  # noqa: BLE001 - the forked process must not return; the parent raises
            traceback.print_exc()
        finally:
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code == _FAILED:
        raise RuntimeError("math-verify failed to compare an answer; its traceback is in the log")
    return code == _EQUAL


def _compare(expected: Any, given: str) -> int:
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))
    in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (in_use + MEMORY_BYTES, in_use + MEMORY_BYTES))
    # Without its own timeouts, which are alarms of the main thread.
    same = _math_verify().verify(expected, _parse(given), timeout_seconds=None)
    return _EQUAL if same else _DIFFERENT


@lru_cache(maxsize=1024)
def _parsed(expected: str) -> Any:
    """Parsed ground truth. Parsed before the fork, so that all forked processes share the parser's tables."""
    return _parse(expected)


def _parse(text: str) -> Any:
    # As LaTeX, of which plain numbers and expressions are a part; without delimiters it would be searched for a number.
    delimited = text if "$" in text or "\\boxed" in text or "\n" in text else f"${text}$"
    return _math_verify().parse(delimited, parsing_timeout=None)


@lru_cache(maxsize=1)
def _math_verify() -> Any:
    import math_verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its timeouts are off
    return math_verify
