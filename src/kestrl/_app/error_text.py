"""What is printed of an error: at most six lines, the cause first; the whole text of a longer one is kept in a file."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from kestrl._app.interpreters.places import data_folder
from kestrl.errors import SeveralProblems, text_of
from kestrl.terminal import safe

MOST_LINES = 6
LONGEST_LINE = 400
"""Characters of a line; a longer one is shown without its middle, since the cause is first and the fix is last."""
MOST_KEPT = 20
"""Texts that are kept; the oldest are removed."""
VARIABLE = "KESTRL_ERRORS"
"""Environment variable with another folder for the whole texts."""


def error_lines(error: BaseException, *, text: str = "", keep: bool = False, limit: int = MOST_LINES) -> list[str]:
    """The lines to print of an error; the last one names the file with the whole text, where they are not all of it.

    Args:
        error: The error.
        text: The message, if it is not the error's own.
        keep: Whether the whole text, which has the traceback, is kept in any case.
        limit: How many lines there may be.
    """
    text = text or text_of(error) or type(error).__name__
    problems = error.texts if isinstance(error, SeveralProblems) else [text]
    lines = abridged(problems, limit)
    if not keep and lines == text.splitlines():
        return [safe(line) for line in lines]
    lines = abridged(problems, limit - 1)
    whole_text = _whole(error, text)
    path = _kept(whole_text)
    if path is None:  # there is no file: nothing is lost
        return [safe(line) for line in (whole_text if keep else text).splitlines()]
    return [*(safe(line) for line in lines), f"the whole text: {path}"]


def abridged(problems: Sequence[str], limit: int) -> list[str]:
    """At most `limit` lines of problems: all, if they fit; else the first problems, a line each, and how many follow.

    A single problem of many lines is shown by its first lines and its last one.
    """
    lines = [line for problem in problems for line in problem.splitlines()]
    if len(lines) <= limit:
        return [_without_middle(line) for line in lines]
    if len(problems) == 1:
        head = [_without_middle(line) for line in lines[: limit - 2]]
        return [*head, f"... ({len(lines) - limit + 1} more lines)", _without_middle(lines[-1])]
    head = [_without_middle(_one_line(problem)) for problem in problems]
    return head if len(head) <= limit else [*head[: limit - 1], f"... and {len(head) - limit + 1} more problems"]


def _one_line(problem: str) -> str:
    first, *following = problem.splitlines() or [""]
    return f"{first} ... {following[-1]}" if following else first


def _without_middle(line: str) -> str:
    if len(line) <= LONGEST_LINE:
        return line
    half = LONGEST_LINE // 2 - 3
    return f"{line[:half]} ... {line[-half:]}"


def _whole(error: BaseException, text: str) -> str:
    """The message, and where it came from."""
    return f"{text}\n\n{''.join(traceback.format_exception(error))}"


def _kept(text: str) -> Path | None:
    """A new file with a text; None if there is no folder that can be written to."""
    folder = data_folder("errors", VARIABLE)
    if not folder.is_absolute():  # the user has no home
        return None
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = _write_new(folder, text)
        for old in sorted(folder.glob("*.txt"))[:-MOST_KEPT]:
            old.unlink(missing_ok=True)
    except OSError:
        return None
    return path


def _write_new(folder: Path, text: str) -> Path:
    while True:
        path = folder / f"{datetime.now(UTC):%Y%m%dT%H%M%S.%f}.txt"  # sorted by time
        try:
            with path.open("x", encoding="utf-8", errors="replace") as file:
                file.write(text)
        except FileExistsError:
            continue
        return path
