"""Downloads of single files, complete or absent; those whose digest is known in parts, bounded in size and time."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from kestrl.errors import StorageError, UserInputError
from kestrl.storage.objects import ObjectStore

PART = 16 * 2**20
"""Bytes of one request, which the time limit of requests bounds."""
SAY_SECONDS = 10.0
"""Seconds between two lines on how far a download is."""


class Download(NamedTuple):
    """What bounds a download, and the field that names it."""

    field: str
    """Such as spec.data.files[0]."""
    most: int
    """Bytes that the file may have."""
    seconds: float


def fetch(
    address: str,
    digest: str,
    target: Path,
    bounds: Download,
    *,
    opened: Callable[[str], ObjectStore],
    say: Callable[[str], None],
) -> None:
    """Downloads a file; one that is there is complete and is kept.

    Args:
        address: Address of the object.
        digest: The sha256 of its content.
        target: The file.
        bounds: What bounds the download.
        opened: Opens the store at an address.
        say: Takes lines on how far it is.

    Raises:
        UserInputError: It is larger than the manifest states, or has another digest.
        StorageError: It does not exist, cannot be read, or is not there in time.
        OSError: The disk is full.
    """
    if target.is_file():
        return
    place, _, name = address.rpartition("/")
    store = opened(place)
    size = store.size(name)
    if size > bounds.most:
        raise UserInputError(
            f"{bounds.field}.size: {address} has {_mib(size)}, above the {_mib(bounds.most)} of the manifest; raise it"
        )
    with _complete(target) as partial:
        content = _download(store, name, size, partial, bounds, say)
        if content != digest:
            raise UserInputError(
                f"{bounds.field}.uri: {address} has the sha256 {content}, and the manifest says {digest}: it "
                "was written again; name the digest of the file that you mean, in the rows as well"
            )


def fetch_object(address: str, target: Path, *, opened: Callable[[str], ObjectStore]) -> None:
    """Downloads an object in place of what the target was.

    Args:
        address: Its address.
        target: The file.
        opened: Opens the store at an address.

    Raises:
        StorageError: It does not exist, cannot be read, or was written again meanwhile.
        OSError: The disk is full.
    """
    place, _, name = address.rpartition("/")
    store = opened(place)
    with _complete(target) as partial:
        write_object(store, name, partial)


def write_object(store: ObjectStore, name: str, target: Path) -> str:
    """Writes an object of any size to a file, a part in memory at a time; returns its digest.

    Raises:
        StorageError: It does not exist, cannot be read, or was written again meanwhile (code `changed`).
        OSError: The disk is full.
    """
    content, version, size = hashlib.sha256(), store.version(name), store.size(name)
    with target.open("wb") as file:
        for start in range(0, size, PART):
            part = store.get_range(name, start, min(PART, size - start))
            content.update(part)
            file.write(part)
    if store.version(name) != version:
        raise StorageError(
            f"{store.address(name)} was written again while it was downloaded", code="changed", retryable=True
        )
    return content.hexdigest()


@contextmanager
def _complete(target: Path) -> Generator[Path]:
    """A file beside the target, which takes its place at the end; nothing is left of it after an error."""
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.{time.time_ns()}.partial")
    try:
        yield partial
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)


def _download(
    store: ObjectStore, name: str, size: int, partial: Path, bounds: Download, say: Callable[[str], None]
) -> str:
    """Writes an object to a file and returns its digest."""
    content = hashlib.sha256()
    began = last = time.monotonic()
    say(f"downloading {store.address(name)}, {_mib(size)}, for up to {bounds.seconds:g} s")
    with partial.open("wb") as file:
        for start in range(0, size, PART):
            now = time.monotonic()
            if now - began > bounds.seconds:
                raise StorageError(
                    f"{store.address(name)} was not downloaded within {bounds.seconds:g} s ({_mib(start)} of "
                    f"{_mib(size)}); raise {bounds.field}.timeout",
                    code="slow",
                    retryable=True,
                )
            if now - last > SAY_SECONDS:
                last = now
                say(f"{store.address(name)}: {_mib(start)} of {_mib(size)}")
            part = store.get_range(name, start, min(PART, size - start))
            content.update(part)
            file.write(part)
    return content.hexdigest()


def digest_of(path: Path) -> str:
    """The digest of a local file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _mib(size: int) -> str:
    return f"{size / 2**20:.1f} MiB"
