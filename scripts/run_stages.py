"""`python scripts/run_stages.py STAGE...`: runs every stage (a target of the Makefile) even after failures, and prints
a summary."""

from __future__ import annotations

import subprocess
import sys
import time


def main(stages: list[str]) -> int:
    """The exit code: 1 if any stage failed."""
    results: list[tuple[str, int, float]] = []
    for stage in stages:
        began = time.monotonic()
        print(f"== make {stage}", flush=True)
        results.append(
            (
                stage,
                subprocess.run(["make", "--no-print-directory", stage], check=False).returncode,
                time.monotonic() - began,
            )
        )
    print("== stages")
    for stage, code, seconds in results:
        print(f"{'ok' if code == 0 else 'FAILED':<8}{stage:<16}{seconds:7.0f} s")
    return int(any(code for _, code, _ in results))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
