#!/usr/bin/env python3
"""Flips one comparison at a time in a copy of the source, and counts the flips that tests notice.

    python scripts/flips.py src/kestrl/_shared/plan src/kestrl/_shared/spec \
        --tests tests/unit/shared/plan tests/unit/shared/spec --count 100 --seed 1

`<` becomes `<=`, `==` becomes `!=`, `in` becomes `not in`, and so on. Which comparisons are flipped follows from the
seed and the source alone. Survivors are printed as they are found; some of them change nothing that anybody can see.
"""

from __future__ import annotations

import argparse
import ast
import compileall
import os
import py_compile
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

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
SECONDS = 300
"""Longest run of the tests; a flip that makes them hang is noticed."""


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


def tests_pass(copy: Path, tests: Sequence[str]) -> bool:
    """Whether tests pass with the source in `copy`."""
    environment = {**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-n", "0", *tests]
    try:
        return subprocess.run(command, env=environment, capture_output=True, timeout=SECONDS).returncode == 0
    except subprocess.TimeoutExpired:
        return False


def is_noticed(flip: Flip, root: Path, copy: Path, tests: Sequence[str]) -> bool:
    """Whether tests fail with the flip, which is in the copy of `root` meanwhile."""
    path = copy / flip.path.relative_to(root)
    source = path.read_bytes()
    path.write_bytes(flip.apply(source))
    try:
        return not tests_pass(copy, tests)
    finally:
        path.write_bytes(source)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path, help="folders of source below one folder `src`")
    parser.add_argument("--tests", nargs="+", required=True, help="what is passed to pytest")
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--only", type=int, nargs="+", help="numbers of flips to try again, such as those that survived"
    )
    arguments = parser.parse_args()
    paths = sorted(path for folder in arguments.folders for path in folder.rglob("*.py"))
    places = [flip for path in paths for flip in flips(path)]
    chosen = random.Random(arguments.seed).sample(  # noqa: S311 - not for secrets
        places, min(arguments.count, len(places))
    )
    root = next(Path(*path.parts[: path.parts.index("src") + 1]) for path in paths)
    noticed = 0
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder, "src")
        shutil.copytree(root, copy, ignore=shutil.ignore_patterns("__pycache__"))
        # By the hash of the source: a flip within a second that leaves the size as it was would not be seen.
        compileall.compile_dir(copy, quiet=1, invalidation_mode=py_compile.PycInvalidationMode.CHECKED_HASH)
        if not tests_pass(copy, arguments.tests):
            raise SystemExit("the tests fail without a flip; repair them first")
        tried = arguments.only or range(1, len(chosen) + 1)
        for number in tried:
            flip = chosen[number - 1]
            if is_noticed(flip, root, copy, arguments.tests):
                noticed += 1
            else:
                print(f"{number:4}  survived  {flip}", flush=True)
    print(f"{noticed} of {len(tried)} flips noticed ({len(places)} places, seed {arguments.seed})")


if __name__ == "__main__":
    main()
