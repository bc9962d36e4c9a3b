"""Files of a request: written and read below the writable folders, through no symbolic link.

The supervisor does it, inside the sandbox: no process outside follows a path that the code made.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator, Sequence

from kestrl_sandbox.inside.root import WRITABLE
from kestrl_sandbox.inside.syscalls import open_beneath

HOME = "/work"
MAX_TOTAL = 1 << 26
"""Bytes of all files of an answer."""
LONGEST_REASON = 200


def split(path: str) -> tuple[str, str]:
    """Writable folder and the path below it; a relative path is below `HOME`.

    Raises:
        OSError: EACCES, it is elsewhere.
    """
    if not path.startswith("/"):
        return HOME, path
    for folder in WRITABLE:
        if path.startswith(folder + "/"):
            return folder, path[len(folder) + 1 :]
    raise OSError(errno.EACCES, f"only {', '.join(WRITABLE)} can be written and read")


def write_all(entries: Sequence[tuple[str, int]], content: bytes) -> str:
    """Writes files; the reason if one cannot be written."""
    offset = 0
    for path, size in entries:
        try:
            _write(path, content[offset : offset + size])
        except (OSError, ValueError) as error:
            return f"{path[:80]!r} cannot be written: {_reason(error)}"
        offset += size
    return ""


def _write(path: str, content: bytes) -> None:
    folder, below = split(path)
    base = os.open(folder, os.O_PATH | os.O_CLOEXEC)
    try:
        _make_folders(base, os.path.dirname(below))
        # Without O_NONBLOCK the open of a named pipe of a session would wait for a reader.
        file = open_beneath(base, below, os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK, 0o644)
    finally:
        os.close(base)
    with os.fdopen(file, "wb") as opened:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            raise OSError(errno.EINVAL, "not a regular file")
        opened.truncate(0)
        opened.write(content)


def _make_folders(base: int, path: str) -> None:
    folder = os.dup(base)
    try:
        for name in path.split("/"):
            if name in {"", "."}:
                continue
            if name == "..":
                raise OSError(errno.EXDEV, "leads out of the folder")
            try:
                os.mkdir(name, 0o755, dir_fd=folder)
            except FileExistsError:
                pass
            subfolder = open_beneath(folder, name, os.O_PATH | os.O_DIRECTORY)
            os.close(folder)
            folder = subfolder
    finally:
        os.close(folder)


def read_all(paths: Sequence[str], limit: int) -> tuple[list[dict[str, object]], bytes]:
    """Reads files: an entry for each, with its size or the reason why it cannot be read, and their content."""
    entries: list[dict[str, object]] = []
    content = bytearray()
    for path in paths:
        try:
            data = b"".join(_read(path, min(limit, MAX_TOTAL - len(content))))
        except (OSError, ValueError) as error:
            entries.append({"size": 0, "error": _reason(error)})
            continue
        entries.append({"size": len(data), "error": ""})
        content += data
    return entries, bytes(content)


def _read(path: str, limit: int) -> Iterator[bytes]:
    folder, below = split(path)
    base = os.open(folder, os.O_PATH | os.O_CLOEXEC)
    try:
        # Without O_NONBLOCK the open of a named pipe would wait for a writer.
        file = open_beneath(base, below, os.O_RDONLY | os.O_NONBLOCK)
    finally:
        os.close(base)
    with os.fdopen(file, "rb") as opened:
        status = os.fstat(file)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "not a regular file")
        if status.st_size > limit:
            raise OSError(errno.EFBIG, f"{status.st_size} bytes; at most {limit} are read")
        yield opened.read(limit)


def _reason(error: BaseException) -> str:
    if isinstance(error, OSError) and error.errno in {errno.ELOOP, errno.EXDEV}:
        return "it leads through a symbolic link or out of the folder"
    return _described(error)[:LONGEST_REASON]


def _described(error: BaseException) -> str:
    if isinstance(error, OSError) and error.errno:
        # What `open_beneath` raises has the path before it, which the caller knows.
        return (error.strerror or "").rpartition(": ")[2] or os.strerror(error.errno)
    return str(error)
