"""Writes the locks of engines that ship with KestRL: those of `LOCKED` in `kestrl/_app/engines/builds.py`."""

from __future__ import annotations

import sys
from pathlib import Path

from kestrl._app.engines.builds import LOCKED, Wanted, lock_name
from kestrl._app.engines.resolving import resolve

LOCKS = Path(__file__).parents[1] / "src" / "kestrl" / "_app" / "engines" / "locks"
OPTIONS = ("--universal", "--python-version", "3.11")
"""For every supported version of Python."""


def main() -> None:
    LOCKS.mkdir(exist_ok=True)
    for (engine, device), versions in LOCKED.items():
        for version in versions:
            wanted = Wanted(engine=engine, version=version, device=device)
            name = lock_name(engine, version, device)
            (LOCKS / name).write_text(resolve(wanted, sys.executable, OPTIONS)[1], encoding="utf-8")
            print(name)


if __name__ == "__main__":
    main()
