"""What grows with the size of a job: the ledger, from 10 to 10,000 steps. Against the smallest."""

from __future__ import annotations

import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.report import Row, main

from kestrl_learner.ledger import Ledger

GROUPS = 8
LEDGER_STEPS = (10, 100, 1_000, 10_000)
LOOKED_AT = 20
"""The last steps of each, which are timed."""


def ledger(steps: int) -> tuple[float, float]:
    """Milliseconds of one step's entries after so many steps, and the process's memory."""
    with tempfile.TemporaryDirectory() as folder:
        book = Ledger(f"sqlite:///{Path(folder) / 'ledger.db'}", seed=1, size=steps * GROUPS, epochs=1, run="bench")
        book.rewind(0)
        began = 0.0
        for step in range(steps):
            if step == max(0, steps - LOOKED_AT):
                began = time.perf_counter()
            leases = [book.lease(step) for _ in range(GROUPS)]
            for lease in leases:
                assert lease is not None
                book.finish(lease)
            book.train([lease for lease in leases if lease is not None], step + 1)
        taken = 1000 * (time.perf_counter() - began) / min(steps, LOOKED_AT)
        book.close()
        return taken, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def alone(steps: int) -> tuple[float, float]:
    """In a process of its own, so that its memory is its own."""
    command = [sys.executable, "-m", "benchmarks.growth", "--only", str(steps)]
    first, second = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    return float(first), float(second)


def measure() -> Iterator[Row]:
    seen = {steps: alone(steps) for steps in LEDGER_STEPS}
    smallest = seen[LEDGER_STEPS[0]]
    for steps, (taken, memory) in seen.items():
        against = f"{LEDGER_STEPS[0]} steps"
        yield Row(
            name=f"growth/ledger/{steps}/time", value=taken, unit="ms/step", reference=smallest[0], against=against
        )
        yield Row(name=f"growth/ledger/{steps}/memory", value=memory, unit="MB", reference=smallest[1], against=against)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--only"]:
        print(*ledger(int(sys.argv[2])))
    else:
        main(__doc__, measure)
