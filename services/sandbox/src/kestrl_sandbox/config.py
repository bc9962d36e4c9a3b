"""Size, limits and surroundings of sandboxes, the same for every back-end."""

from __future__ import annotations

import os
import sys
import sysconfig
from dataclasses import dataclass, field
from pathlib import Path

PRELOAD = (
    "base64",
    "bisect",
    "collections",
    "copy",
    "csv",
    "dataclasses",
    "datetime",
    "decimal",
    "fractions",
    "functools",
    "heapq",
    "io",
    "itertools",
    "json",
    "math",
    "numbers",
    "operator",
    "os",
    "random",
    "re",
    "resource",
    "statistics",
    "string",
    "struct",
    "textwrap",
    "time",
    "traceback",
    "typing",
)
SOURCE = Path(__file__).parents[1]
ENVIRONMENT = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "HOME": "/work",
    "LANG": "C.UTF-8",
    "TMPDIR": "/tmp",  # noqa: S108 - inside the sandbox
    "USER": "sandbox",
    "MALLOC_ARENA_MAX": "2",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
}


def default_size() -> int:
    return max(8, 4 * len(os.sched_getaffinity(0)))


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolConfig:
    """Size and limits of a pool, for all of its sandboxes."""

    max_sandboxes: int = field(default_factory=default_size)
    """Sandboxes that run at the same time, sessions included."""
    max_waiting: int = 1024
    """Runs that wait for a sandbox; a further one is refused as busy."""
    memory_mb: int = 512
    """Largest `Limits.memory_mb`."""
    disk_mb: int = 64
    """Quota of /work, /tmp and /dev/shm together."""
    inodes: int = 8192
    processes: int = 64
    open_files: int = 256
    preload: tuple[str, ...] = PRELOAD
    """Modules that are imported already when code starts."""


def prefixes() -> list[str]:
    """Folders of this interpreter and of its packages, shortest first, without what lies below another."""
    folders = {sys.base_prefix, sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    outermost: list[str] = []
    for path in sorted(map(os.path.realpath, folders), key=len):
        if not any(path == prefix or path.startswith(prefix + "/") for prefix in [*outermost, "/usr"]):
            outermost.append(path)
    return outermost
