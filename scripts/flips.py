#!/usr/bin/env python3
"""Flips one comparison at a time in a copy of the source, and counts the flips that tests notice.

    python scripts/flips.py src/kestrl/_shared/plan src/kestrl/_shared/spec \
        --tests tests/unit/shared/plan tests/unit/shared/spec --count 100 --seed 1

`<` becomes `<=`, `==` becomes `!=`, `in` becomes `not in`, and so on. Which comparisons are flipped follows from the
seed and the source alone. Survivors are printed as they are found; some of them change nothing that anybody can see.

Tests are collected once, and each flip is made in a fork with the code of its function replaced: most flips are noticed
in less time than the imports take. One that is not, or that no function has, is tried again in a process of its own.
"""

from __future__ import annotations

import argparse
import ast
import gc
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import pairwise
from pathlib import Path
from types import CodeType, FunctionType

import pytest

OPPOSITES: dict[type[ast.cmpop], str] = {
    ast.Lt: "<=",
    ast.LtE: "<",
    ast.Gt: ">=",
    ast.GtE: ">",
    ast.Eq: "!=",
    ast.NotEq: "==",
    ast.Is: "is not",
    ast.IsNot: "is",
    ast.In: "not in",
    ast.NotIn: "in",
}
SECONDS = 900
"""Longest run of the tests in a process of their own; a flip that makes them hang is noticed."""
OPTIONS = ("-q", "-s", "-n", "0")


@dataclass(frozen=True)
class Flip:
    """A comparison with another operator; columns are in bytes, as in the syntax tree."""

    path: Path
    line: int
    start: int
    end: int
    operator: str

    def apply(self, source: bytes) -> bytes:
        lines = source.split(b"\n")
        line = lines[self.line - 1]
        lines[self.line - 1] = line[: self.start] + f" {self.operator} ".encode() + line[self.end :]
        return b"\n".join(lines)

    def __str__(self) -> str:
        line = self.path.read_text().split("\n")[self.line - 1].strip()
        return f"{self.path}:{self.line}: {line}  ->  {self.operator}"


def flips(path: Path) -> Iterator[Flip]:
    """The comparisons of a file with two sides and an operator between them on one line, without parentheses."""
    source = path.read_bytes()
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Compare) or len(node.ops) != 1:
            continue
        left, right, end = node.left, node.comparators[0], node.left.end_lineno
        opposite = OPPOSITES.get(type(node.ops[0]))
        if opposite is None or end is None or left.end_col_offset is None or end != right.lineno:
            continue
        between = source.split(b"\n")[end - 1][left.end_col_offset : right.col_offset]
        if b"(" not in between and b")" not in between:
            yield Flip(path, end, left.end_col_offset, right.col_offset, opposite)


class Attempt(IntEnum):
    """How a fork ended."""

    SURVIVED = 0
    NOTICED = 1
    FLIPPED_NOTHING = 2
    BROKE = 3
    """The fork itself failed, so that nothing is known of the flip."""


class Forks:
    """A plugin of pytest that runs the collected tests once for each flip, each time in a fork."""

    def __init__(self, chosen: Mapping[int, Flip], root: Path, copy: Path, tests: Sequence[str]) -> None:
        self._chosen, self._root, self._copy, self._tests = chosen, root, copy, tests
        self.noticed = 0

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        if session.testsfailed or self._attempt(session, None) is not Attempt.SURVIVED:
            raise pytest.UsageError("the tests fail without a flip; repair them first")
        for number, flip in self._chosen.items():
            if self._attempt(session, flip) is Attempt.NOTICED or self._is_noticed_alone(flip):
                self.noticed += 1
            else:
                print(f"{number:4}  survived  {flip}", flush=True)
        return True

    def _attempt(self, session: pytest.Session, flip: Flip | None) -> Attempt:
        pid = os.fork()
        if not pid:
            attempt = Attempt.BROKE
            try:
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, 1)
                os.dup2(nowhere, 2)
                attempt = self._run(session, flip)
            finally:
                os._exit(attempt)
        attempt = Attempt(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        if attempt is Attempt.BROKE:
            raise pytest.UsageError(f"the tests could not be run with {flip}")
        return attempt

    def _run(self, session: pytest.Session, flip: Flip | None) -> Attempt:
        if flip is not None and not replaced(self._copy / flip.path.relative_to(self._root), flip):
            return Attempt.FLIPPED_NOTHING
        for item, following in pairwise([*session.items, None]):
            session.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            if session.testsfailed:
                return Attempt.NOTICED
        return Attempt.SURVIVED

    def _is_noticed_alone(self, flip: Flip) -> bool:
        """Whether tests fail in a process of their own: some have read at their import what the flip changes."""
        path = self._copy / flip.path.relative_to(self._root)
        source = path.read_bytes()
        path.write_bytes(flip.apply(source))
        environment = {**os.environ, "PYTHONPATH": str(self._copy)}
        command = [sys.executable, "-m", "pytest", *OPTIONS, "-x", *self._tests]
        try:
            return subprocess.run(command, env=environment, capture_output=True, timeout=SECONDS).returncode != 0
        except subprocess.TimeoutExpired:
            return True
        finally:
            path.write_bytes(source)


def replaced(path: Path, flip: Flip) -> bool:
    """Replaces the code of the functions of an imported file that the flip changes; returns whether there are some."""
    module = compile(flip.apply(path.read_bytes()), str(path), "exec", dont_inherit=True)
    flipped = {(code.co_qualname, code.co_firstlineno): code for code in codes(module)}
    found_some = False
    for function in gc.get_objects():
        if not isinstance(function, FunctionType) or function.__code__.co_filename != str(path):
            continue
        code = flipped.get((function.__code__.co_qualname, function.__code__.co_firstlineno))
        if code is not None and code != function.__code__:
            function.__code__ = code
            found_some = True
    return found_some


def codes(code: CodeType) -> Iterator[CodeType]:
    """A code object and all within it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from codes(constant)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path, help="folders of source below one folder `src`")
    parser.add_argument("--tests", nargs="+", required=True, help="what is passed to pytest")
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    paths = sorted(path for folder in arguments.folders for path in folder.rglob("*.py"))
    places = [flip for path in paths for flip in flips(path)]
    count = min(arguments.count, len(places))
    chosen = random.Random(arguments.seed).sample(places, count)  # noqa: S311 - not for secrets
    root = next(Path(*path.parts[: path.parts.index("src") + 1]) for path in paths)
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder, "src")
        shutil.copytree(root, copy, ignore=shutil.ignore_patterns("__pycache__"))
        # No byte-code: a flip within a second that leaves the size as it was would not be seen.
        sys.dont_write_bytecode = True
        os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
        sys.path.insert(0, str(copy))
        forks = Forks(dict(enumerate(chosen, 1)), root, copy, arguments.tests)
        # Even quieter: this process only collects, and pytest would say that no tests ran.
        if status := pytest.main([*OPTIONS, "-q", *arguments.tests], plugins=[forks]):
            raise SystemExit(int(status))
    print(f"{forks.noticed} of {count} flips noticed ({len(places)} places, seed {arguments.seed})")


if __name__ == "__main__":
    main()
