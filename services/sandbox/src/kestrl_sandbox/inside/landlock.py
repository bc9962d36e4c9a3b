"""Landlock: this process and all that it starts read below `/` and write below some folders only.

A second boundary beside the mount namespace: it holds when a mount is not what it should be, denies TCP (ABI 4), and
keeps signals and abstract sockets inside (ABI 6).
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from collections.abc import Sequence

from kestrl_sandbox.inside.syscalls import syscall

_CREATE, _ADD, _RESTRICT = 444, 445, 446
SCOPES = 6
"""ABI from which signals and abstract sockets stay inside."""
_READ = 0b1101
"""Execute, read files, read folders."""
_ALL_FILES = (1 << 13) - 1
_REFER, _TRUNCATE, _IOCTL_DEV = 1 << 13, 1 << 14, 1 << 15
_FILE_ONLY = 0b111 | _TRUNCATE | _IOCTL_DEV
_TCP = 0b11
_SCOPED = 0b11


def abi() -> int:
    """Version of Landlock; 0 without it."""
    try:
        return syscall(_CREATE, None, ctypes.c_size_t(0), ctypes.c_uint(1), call="landlock")
    except OSError as error:
        if error.errno in {errno.ENOSYS, errno.EOPNOTSUPP}:
            return 0
        raise


def restrict(version: int, *, readable: Sequence[str], writable: Sequence[str], devices: Sequence[str]) -> None:
    """Restricts this process.

    Args:
        version: ABI of the kernel, at least 1.
        readable: Folders below which files are read and executed.
        writable: Folders below which everything is allowed.
        devices: Single files that are read and written.
    """
    handled = _ALL_FILES
    handled |= _REFER if version >= 2 else 0
    handled |= _TRUNCATE if version >= 3 else 0
    handled |= _IOCTL_DEV if version >= 5 else 0
    attr = struct.pack("=QQQ", handled, _TCP if version >= 4 else 0, _SCOPED if version >= SCOPES else 0)
    size = 8 if version < 4 else 16 if version < SCOPES else 24
    ruleset = syscall(
        _CREATE, ctypes.create_string_buffer(attr), ctypes.c_size_t(size), ctypes.c_uint(0), call="landlock_create"
    )
    try:
        for path in readable:
            _allow(ruleset, path, _READ & handled)
        for path in writable:
            _allow(ruleset, path, handled & ~_IOCTL_DEV)
        for path in devices:
            _allow(ruleset, path, handled & _FILE_ONLY & ~1)
        syscall(_RESTRICT, ctypes.c_int(ruleset), ctypes.c_uint(0), call="landlock_restrict_self")
    finally:
        os.close(ruleset)


def _allow(ruleset: int, path: str, access: int) -> None:
    folder = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        rule = ctypes.create_string_buffer(struct.pack("=Qi", access, folder))
        syscall(_ADD, ctypes.c_int(ruleset), ctypes.c_int(1), rule, ctypes.c_uint(0), call=f"landlock_add_rule {path}")
    finally:
        os.close(folder)
