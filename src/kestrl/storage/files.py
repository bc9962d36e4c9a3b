"""Published folders of adapters and models: digests, manifests, and downloads that verify every file."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel

from kestrl.errors import StorageError
from kestrl.storage.objects import ObjectStore

Document = TypeVar("Document", bound=BaseModel)
PIECE_BYTES = 1024 * 1024
"""Size of one write: ext4 of Linux 6.18 takes 7 ms for 20 MB in pieces of this size, and 57 ms in one piece."""

LONGEST_NAME = 255
"""Bytes of a file's name on the usual file systems."""


def digest(content: bytes | memoryview) -> str:
    """SHA-256 in hexadecimal."""
    return hashlib.sha256(content).hexdigest()


def read_document(store: ObjectStore, kind: type[Document], name: str, folder: str = "") -> Document:
    """Reads a manifest.

    Raises:
        StorageError: It is missing (the folder was not completely published) or malformed.
    """
    path = _inside(folder, name)
    content = store.get(path)
    try:
        return kind.model_validate_json(content)
    except ValueError as error:
        raise StorageError(f"{store.address(path)} is not a manifest: {error}", code="manifest_malformed") from error


Downloading = Callable[[ObjectStore, str, Path], str]
"""Downloads an object to a file and returns its digest."""


def fetch_files(
    store: ObjectStore,
    files: Mapping[str, str],
    target: Path,
    folder: str = "",
    *,
    download: Downloading | None = None,
) -> None:
    """Downloads files into a new local folder and verifies every digest; the folder appears only when complete. A
    folder that exists already is left as it is.

    Args:
        store: Has the files.
        files: SHA-256 of every file, by name.
        target: The local folder.
        folder: Of the files in the store.
        download: Downloads each; by default a whole file in memory.

    Raises:
        StorageError: A file is missing, its name is not one of a file in the folder, or a digest differs (code
            `digest_mismatch`). Nothing is left of the download.
    """
    for name in files:
        if not _is_file_name(name):
            raise StorageError(f"manifest names a file outside its folder: {name[:200]!r}", code="manifest_malformed")
    partial = target.with_name(f"{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # of an interrupted download
    partial.mkdir(parents=True)
    try:
        _download_all(store, files, partial, folder, download or _download)
        if not target.exists():
            partial.rename(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _is_file_name(name: str) -> bool:
    """Whether a name is one of a file in a folder: no path, no control character, and text that a disk can hold."""
    if name in {"", ".", ".."} or not name.isprintable() or "/" in name:
        return False
    return len(name.encode(errors="replace")) <= LONGEST_NAME


def _download_all(
    store: ObjectStore, files: Mapping[str, str], partial: Path, folder: str, download: Downloading
) -> None:
    for name, expected in files.items():
        path = _inside(folder, name)
        if download(store, path, partial / name) != expected:
            raise StorageError(
                f"{store.address(path)} is corrupt: its digest is not the manifest's", code="digest_mismatch"
            )


def _inside(folder: str, name: str) -> str:
    return f"{folder}/{name}" if folder else name


def _download(store: ObjectStore, path: str, target: Path) -> str:
    """Downloads an object to a file and returns its digest."""
    content = store.view(path)
    if len(content) <= PIECE_BYTES:
        _write(target, content)
        return digest(content)
    with ThreadPoolExecutor(1) as writer:
        # Written while the digest is computed: both release the GIL. A small file takes less time than starting a
        # thread.
        write_future = writer.submit(_write, target, content)
        sha256 = digest(content)
        write_future.result()
    return sha256


def _write(target: Path, content: memoryview) -> None:
    with target.open("wb", buffering=0) as file:
        while content:
            content = content[file.write(content[:PIECE_BYTES]) :]
