"""Linux calls that Python's standard library does not have, through libc's `syscall`."""

from __future__ import annotations

import ctypes
import errno
import os
import stat
import struct

CLONE_NEWNS = 0x00020000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000

MS_RDONLY = 1
MS_NOSUID = 2
MS_NODEV = 4
MS_NOEXEC = 8
MS_REMOUNT = 32
MS_BIND = 4096
MS_REC = 16384
MS_PRIVATE = 1 << 18
MS_SLAVE = 1 << 19
MNT_DETACH = 2

MOUNT_ATTR_RDONLY = 1
MOUNT_ATTR_NOSUID = 2
MOUNT_ATTR_NODEV = 4
AT_FDCWD = -100
AT_RECURSIVE = 0x8000

PR_SET_PDEATHSIG = 1
PR_SET_DUMPABLE = 4
PR_CAPBSET_DROP = 24
PR_SET_SECCOMP = 22
PR_SET_NO_NEW_PRIVS = 38
PR_CAP_AMBIENT = 47
PR_CAP_AMBIENT_CLEAR_ALL = 4

RESOLVE_NO_MAGICLINKS = 0x02
RESOLVE_NO_SYMLINKS = 0x04
RESOLVE_BENEATH = 0x08

_MACHINE = os.uname().machine
_NUMBERS = {
    "x86_64": {"pivot_root": 155, "capset": 126},
    "aarch64": {"pivot_root": 41, "capset": 91},
}.get(_MACHINE, {})
_OPENAT2 = 437
_MOUNT_SETATTR = 442
_CAPABILITY_VERSION_3 = 0x20080522

_libc = ctypes.CDLL(None, use_errno=True)


def checked(result: int, call: str) -> int:
    """Returns the result of a libc function, or raises its errno."""
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{call}: {os.strerror(number)}")
    return result


def syscall(number: int, *arguments: object, call: str) -> int:
    """Makes a system call."""
    return checked(_libc.syscall(ctypes.c_long(number), *arguments), call)


def unshare(flags: int) -> None:
    checked(_libc.unshare(flags), "unshare")


def setns(fd: int, kind: int) -> None:
    checked(_libc.setns(fd, kind), "setns")


def mount(source: str, target: str, kind: str = "", flags: int = 0, options: str = "") -> None:
    result = _libc.mount(
        source.encode(),
        target.encode(),
        kind.encode() or None,
        ctypes.c_ulong(flags),
        options.encode() or None,
    )
    checked(result, f"mount {target}")


def restrict_mount(target: str, attributes: int) -> None:
    """Sets attributes of a mount and of all below it (Linux 5.12)."""
    attr = ctypes.create_string_buffer(struct.pack("=QQQQ", attributes, 0, 0, 0))
    syscall(
        _MOUNT_SETATTR,
        ctypes.c_int(AT_FDCWD),
        target.encode(),
        ctypes.c_uint(AT_RECURSIVE),
        attr,
        ctypes.c_size_t(32),
        call=f"mount_setattr {target}",
    )


def unmount(target: str) -> None:
    checked(_libc.umount2(target.encode(), MNT_DETACH), f"umount {target}")


def pivot_root(new: str, old: str) -> None:
    syscall(_NUMBERS["pivot_root"], new.encode(), old.encode(), call="pivot_root")


def set_hostname(name: str) -> None:
    checked(_libc.sethostname(name.encode(), ctypes.c_size_t(len(name))), "sethostname")


def prctl(option: int, argument: int = 0, pointer: object = 0) -> None:
    if isinstance(pointer, int):
        pointer = ctypes.c_ulong(pointer)
    result = _libc.prctl(option, ctypes.c_ulong(argument), pointer, ctypes.c_ulong(0), ctypes.c_ulong(0))
    checked(result, f"prctl {option}")


def drop_capabilities() -> None:
    """Empties all capability sets of this process, the bounding set included."""
    number = 0
    while _libc.prctl(PR_CAPBSET_DROP, number, 0, 0, 0) == 0:  # until EINVAL: the kernel has no further one
        number += 1
    try:
        prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL)
    except OSError as error:
        if error.errno != errno.EINVAL:  # a kernel without ambient capabilities, such as gVisor's
            raise
    header = ctypes.create_string_buffer(struct.pack("=Ii", _CAPABILITY_VERSION_3, 0))
    data = ctypes.create_string_buffer(24)
    syscall(_NUMBERS["capset"], header, data, call="capset")


def _has_openat2() -> bool:
    open_how = ctypes.create_string_buffer(struct.pack("=QQQ", os.O_PATH | os.O_CLOEXEC, 0, 0))
    try:
        descriptor = syscall(_OPENAT2, ctypes.c_int(AT_FDCWD), b"/", open_how, ctypes.c_size_t(24), call="openat2")
    except OSError as error:
        if error.errno == errno.ENOSYS:
            return False
        raise
    os.close(descriptor)
    return True


HAS_OPENAT2 = _has_openat2()
"""Whether the kernel has openat2; gVisor's does not."""


def _walk_beneath(folder: int, path: str, flags: int, mode: int) -> int:
    """Opens a path folder by folder, each without following a link."""
    *folders, name = [part for part in path.split("/") if part not in {"", "."}] or ["."]
    if ".." in {*folders, name}:
        raise OSError(errno.EXDEV, "leads out of the folder")
    current = os.dup(folder)
    try:
        for part in folders:
            if stat.S_ISLNK(os.stat(part, dir_fd=current, follow_symlinks=False).st_mode):
                raise OSError(errno.ELOOP, "is a symbolic link")
            subfolder = os.open(part, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=current)
            os.close(current)
            current = subfolder
        return os.open(name, flags | os.O_NOFOLLOW, mode, dir_fd=current)
    finally:
        os.close(current)


def open_beneath(folder: int, path: str, flags: int, mode: int = 0) -> int:
    """Opens a path below a folder, through no symbolic link: by openat2, or folder by folder where there is none."""
    if not HAS_OPENAT2:
        return _walk_beneath(folder, path, flags | os.O_CLOEXEC, mode)
    resolve = RESOLVE_BENEATH | RESOLVE_NO_SYMLINKS | RESOLVE_NO_MAGICLINKS
    open_how = ctypes.create_string_buffer(struct.pack("=QQQ", flags | os.O_CLOEXEC, mode, resolve))
    return syscall(
        _OPENAT2, ctypes.c_int(folder), os.fsencode(path), open_how, ctypes.c_size_t(24), call=f"open {path!r}"
    )
