"""What the processes of a sandbox use, as /proc shows it. Their names are the code's, and may hold anything."""

from __future__ import annotations

import os
from collections.abc import Mapping

_ENDED = (FileNotFoundError, ProcessLookupError)


def used_memory(base: int) -> int:
    """Bytes of memory of all processes of the sandbox, each without what it shares with the zygote."""
    return sum(max(0, anonymous_memory(name) - base) for name in _processes())


def running_threads() -> int:
    """Threads of all processes of the sandbox, without the supervisor."""
    return sum(_status(name).get(b"Threads", 0) for name in _processes())


def anonymous_memory(pid: str) -> int:
    """Bytes of anonymous and shared memory of a process; 0 when it has ended."""
    status = _status(pid)
    names = (b"RssAnon", b"RssShmem") if b"RssAnon" in status else (b"VmRSS",)  # gVisor's kernel gives the sum alone
    return sum(status.get(name, 0) << 10 for name in names)


def _processes() -> list[str]:
    return [name for name in os.listdir("/proc") if name.isdigit() and name != "1"]


def _status(pid: str) -> Mapping[bytes, int]:
    """Numbers of a process's status; none when it has ended."""
    try:
        with open(f"/proc/{pid}/status", "rb") as file:
            lines = file.read().split(b"\n")  # at no other character: the kernel escapes this one alone in a name
    except _ENDED:
        return {}
    sizes: dict[bytes, int] = {}
    for line in lines[1:]:
        name, _, text = line.partition(b":")
        number = text.split()[:1]
        if number and number[0].isdigit():
            sizes[name] = int(number[0])
    return sizes
