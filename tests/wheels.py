"""Files of other projects, read from their wheels on PyPI: tests compare with the originals without keeping copies."""

from __future__ import annotations

import fcntl
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
UV = ROOT / ".tools" / "bin" / "uv"
UNPACKED = ROOT / ".tools" / "wheels"
INSTALL_SECONDS = 120.0
"""Time limit of a command that installs; 4 to 11 s were seen."""
INSTALLS = pytest.mark.timeout(600)
"""Mark of a test that may be the first to install a package: it waits for a registry, or for another process that does.
"""


def unpacked(requirement: str) -> Path:
    """The folder with the files of `requirement`, such as `verl==0.9.1`, without its dependencies.

    The wheel is downloaded once for a checkout. Nothing of it is imported by being here.

    Raises:
        subprocess.CalledProcessError: The wheel cannot be installed; uv's own words are on standard error.
    """
    folder = UNPACKED / requirement
    UNPACKED.mkdir(parents=True, exist_ok=True)
    with (UNPACKED / f".{requirement}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two processes of pytest-xdist ask at once
        if not folder.exists():
            partial = UNPACKED / f"{requirement}.partial"
            shutil.rmtree(partial, ignore_errors=True)  # of an interrupted installation
            install = (UV, "pip", "install", "--quiet", "--no-deps", "--target", partial, requirement)
            subprocess.run(install, check=True, timeout=INSTALL_SECONDS)
            partial.rename(folder)
    return folder
