"""A folder that several pods share, with models that one of them has downloaded: each is complete or absent.

One process downloads a model while the others wait for its lock, which the kernel gives back when it is killed. Every
download has a name of its own and takes the model's place when it is complete: where a file system's locks do not reach
other machines, models are downloaded twice and none is mixed.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import re
import shutil
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

from kestrl.storage.models import is_published, read_model_manifest
from kestrl.storage.objects import ObjectStore

UNLOCKABLE = frozenset({errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL})
"""Errors of file systems without locks."""
DIGITS = 32
"""Digits of a digest in a folder's name."""
NOT_OF_A_NAME = re.compile(r"[^A-Za-z0-9._-]+")


def stored_name(store: ObjectStore, uri: str) -> str:
    """Name of the present content of a folder in storage: that of a model that was published has the digest of its
    manifest, any other one that of the versions of its objects. What is written there later has another name.

    Raises:
        StorageError: The storage cannot be read.
    """
    if is_published(store):
        digest = read_model_manifest(store).sha256
    else:
        tags = {path: version.tag for path, version in store.versions("").items()}
        digest = hashlib.sha256(json.dumps([uri, tags]).encode()).hexdigest()
    segment = NOT_OF_A_NAME.sub("-", uri.rstrip("/").rpartition("/")[2]).lstrip(".")
    return f"{segment[:64]}-{digest[:DIGITS]}"


def shared_folder(cache: Path, name: str, download: Callable[[Path], None], say: Callable[[str], None]) -> Path:
    """The folder of a name, which is downloaded if it is missing. What a killed process has left of it is removed.

    Args:
        cache: Folder of the folders.
        name: Name of the content, which never changes.
        download: Downloads it into a folder that does not exist.
        say: Takes a line when another process downloads it.

    Raises:
        StorageError: What the download raises.
        OSError: The disk is full, or refuses.
    """
    target = cache / name
    with exclusive(cache, name, say) as holds_lock:
        if holds_lock:
            for leftover in cache.glob(f".{name}.*.partial"):
                shutil.rmtree(leftover)
        if not target.exists():
            partial = cache / f".{name}.{uuid4().hex}.partial"
            download(partial)
            _put(partial, target)
    return target


@contextmanager
def exclusive(cache: Path, name: str, say: Callable[[str], None]) -> Generator[bool]:
    """Keeps other processes out of a name until the end of the block; False where the file system has no locks.

    Args:
        cache: Folder of the lock, which is created.
        name: Name of what is downloaded.
        say: Takes a line when another process has the lock.
    """
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / f".{name}.lock").open("a") as lock:
        try:
            _acquire(lock.fileno(), name, say)
        except OSError as error:
            if error.errno not in UNLOCKABLE:
                raise
            yield False
        else:
            yield True  # closing the file gives the lock back


def _acquire(lock: int, name: str, say: Callable[[str], None]) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        say(f"waiting for another pod, which downloads {name}")
        fcntl.flock(lock, fcntl.LOCK_EX)


def _put(partial: Path, target: Path) -> None:
    """Moves a complete folder to its place; where another process was faster, its folder stays."""
    try:
        partial.rename(target)
    except OSError:
        if not target.is_dir():
            raise
        shutil.rmtree(partial)
