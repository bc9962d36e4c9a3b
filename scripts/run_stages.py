"""`python scripts/run_stages.py STAGE...`: runs every stage (a target of the Makefile) even after failures, and prints
a summary.

What a later stage needs is made beside the first ones, at a low priority: it takes only the time that they leave.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from typing import IO, NamedTuple


class Preparation(NamedTuple):
    """What a stage needs: a target of the Makefile, and the variable for the last line that it prints."""

    target: str
    variable: str


PREPARATIONS = {"cluster": Preparation("images", "KESTRL_E2E_IMAGES")}
NICENESS = 15


class Background:
    """A preparation under way. Where it fails, the stage does the work itself, and reports why it cannot."""

    def __init__(self, preparation: Preparation) -> None:
        self._preparation = preparation
        self._output: IO[str] = tempfile.TemporaryFile("w+")  # noqa: SIM115 - open as long as the process
        command = ["nice", "-n", str(NICENESS), *make(preparation.target)]
        self._process = subprocess.Popen(command, stdout=self._output)

    def result(self) -> dict[str, str]:
        """Waits for its end; the variable, empty where there is nothing to pass on."""
        code = self._process.wait()
        self._output.seek(0)
        lines = self._output.read().split("\n")
        self._output.close()
        last = next((line for line in reversed(lines) if line), "")
        return {self._preparation.variable: last} if code == 0 and last else {}


def make(target: str) -> list[str]:
    return ["make", "--no-print-directory", target]


def run(stage: str, variables: Mapping[str, str]) -> int:
    """The exit code of a stage."""
    print(f"== make {stage}", flush=True)
    return subprocess.run(make(stage), check=False, env={**os.environ, **variables}).returncode


def main(stages: list[str]) -> int:
    """The exit code: 1 if any stage failed."""
    background = {stage: Background(PREPARATIONS[stage]) for stage in stages[1:] if stage in PREPARATIONS}
    results: list[tuple[str, int, float]] = []
    for stage in stages:
        began = time.monotonic()
        variables = background[stage].result() if stage in background else {}
        results.append((stage, run(stage, variables), time.monotonic() - began))
    print("== stages")
    for stage, code, seconds in results:
        print(f"{'ok' if code == 0 else 'FAILED':<8}{stage:<16}{seconds:7.0f} s")
    return int(any(code for _, code, _ in results))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
