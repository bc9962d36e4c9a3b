"""The cgroups of a cluster's pods."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from .layout import Layout

CGROUPS = Path("/sys/fs/cgroup")


def hierarchies() -> list[Path]:
    """The roots of this machine's cgroups: one of version 2, or one for each controller of version 1."""
    if (CGROUPS / "cgroup.controllers").exists():
        return [CGROUPS]
    mounts = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    return [Path(fields[1]) for fields in mounts if fields[2] == "cgroup"]


def make_cgroups(layout: Layout) -> None:
    for root in hierarchies():
        folder = root / layout.cgroup
        folder.mkdir(exist_ok=True)
        if root != CGROUPS and (folder / "cpuset.cpus").exists():
            # A cpuset of version 1 is created empty, and then nothing may run in it.
            for name in ("cpuset.cpus", "cpuset.mems"):
                (folder / name).write_text((root / name).read_text())


def remove_cgroups(layout: Layout) -> bool:
    """Removes the cgroups; returns whether all are gone, which takes until their last process has ended."""
    for root in hierarchies():
        for folder, _, _ in os.walk(root / layout.cgroup, topdown=False):
            with suppress(OSError):
                Path(folder).rmdir()
    return not any((root / layout.cgroup).exists() for root in hierarchies())
