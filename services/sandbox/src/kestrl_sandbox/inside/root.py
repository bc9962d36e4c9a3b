"""The read-only root of all sandboxes, made once by the zygote: programs, libraries, the interpreter, four devices."""

from __future__ import annotations

import os
from collections.abc import Sequence

from kestrl_sandbox.inside import syscalls as linux

PROGRAMS = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
CONFIGURATION = ("/etc/ld.so.cache", "/etc/alternatives", "/etc/localtime")
DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
WRITABLE = ("/work", "/tmp", "/dev/shm")  # noqa: S108 - names inside the sandbox
SCRATCH = "/mnt"
USER = 1000
"""User and group inside a sandbox."""
FILES = {
    "/etc/passwd": f"root:x:0:0::/:/bin/false\nsandbox:x:{USER}:{USER}::/work:/bin/bash\n"
    f"nobody:x:65534:65534::/:/bin/false\n",
    "/etc/group": f"root:x:0:\nsandbox:x:{USER}:\nnogroup:x:65534:\n",
    "/etc/hosts": "127.0.0.1 localhost\n",
    "/etc/nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
    "/etc/resolv.conf": "",
}
_BASE = "/tmp"  # noqa: S108 - a mount point of the zygote's own mount namespace
_OLD = "/.old"


def build(prefixes: Sequence[str]) -> None:
    """Makes the root and enters it; the old one is gone afterwards. Needs a mount namespace of its own.

    Args:
        prefixes: Folders of the interpreter and its packages.
    """
    linux.mount("none", "/", flags=linux.MS_REC | linux.MS_SLAVE)
    linux.mount("tmpfs", _BASE, "tmpfs", linux.MS_NOSUID | linux.MS_NODEV, "mode=755,size=4m")
    os.mkdir(_BASE + _OLD)
    linux.pivot_root(_BASE, _BASE + _OLD)
    os.chdir("/")
    for path in PROGRAMS:
        if os.path.islink(_OLD + path):
            os.symlink(os.readlink(_OLD + path), path)
        elif os.path.isdir(_OLD + path):
            _bind_folder(path)
    for path in prefixes:
        if not os.path.exists(path):
            _bind_folder(path)
    os.makedirs("/etc", exist_ok=True)
    for path, text in FILES.items():
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
    for path in CONFIGURATION:
        if os.path.isdir(_OLD + path):
            _bind_folder(path)
        elif os.path.isfile(_OLD + path):
            _bind_file(path)
            linux.restrict_mount(path, linux.MOUNT_ATTR_RDONLY | linux.MOUNT_ATTR_NOSUID | linux.MOUNT_ATTR_NODEV)
    for path in DEVICES:
        _bind_file(path)
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        os.symlink(f"/proc/self/fd/{number}", f"/dev/{name}")
    os.symlink("/proc/self/fd", "/dev/fd")
    for path in (*WRITABLE, SCRATCH, "/proc", "/var"):
        os.makedirs(path, exist_ok=True)
    os.symlink("/tmp", "/var/tmp")  # noqa: S108


def mount_proc(*, processes_only: bool = False) -> bool:
    """Mounts /proc of this process's PID namespace; False where a container forbids it."""
    try:
        linux.mount(
            "proc",
            "/proc",
            "proc",
            linux.MS_NOSUID | linux.MS_NODEV | linux.MS_NOEXEC,
            "subset=pid" if processes_only else "",
        )
    except PermissionError:
        return False
    return True


def seal() -> None:
    """Detaches the old root and makes the new one read-only."""
    linux.unmount(_OLD)
    os.rmdir(_OLD)
    linux.mount(
        "none", "/", flags=linux.MS_REMOUNT | linux.MS_BIND | linux.MS_RDONLY | linux.MS_NOSUID | linux.MS_NODEV
    )


def add_private_folders(megabytes: int, inodes: int) -> None:
    """Gives a sandbox, in a mount namespace of its own, its writable folders: one tmpfs with one quota."""
    linux.mount(
        "tmpfs",
        SCRATCH,
        "tmpfs",
        linux.MS_NOSUID | linux.MS_NODEV,
        f"mode=755,size={megabytes}m,nr_inodes={inodes},uid={USER},gid={USER}",
    )
    for path in WRITABLE:
        source = f"{SCRATCH}/{os.path.basename(path)}"
        os.mkdir(source, 0o700)
        linux.mount(source, path, flags=linux.MS_BIND)
    # SCRATCH stays mounted: unmounting it would wait for all CPUs, some milliseconds.


def _bind_folder(path: str) -> None:
    if not os.path.isdir(_OLD + path):
        return
    os.makedirs(path, exist_ok=True)
    linux.mount(_OLD + path, path, flags=linux.MS_BIND | linux.MS_REC)
    linux.restrict_mount(path, linux.MOUNT_ATTR_RDONLY | linux.MOUNT_ATTR_NOSUID | linux.MOUNT_ATTR_NODEV)


def _bind_file(path: str) -> None:
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "w", encoding="utf-8"):
        pass
    linux.mount(_OLD + path, path, flags=linux.MS_BIND)
