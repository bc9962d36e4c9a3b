"""A thin door to obstore: paths under one prefix, bytes in and out, typed errors."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlparse

import obstore
from obstore.exceptions import BaseError
from obstore.store import LocalStore, from_url

from kestrl.errors import StorageError, UserInputError, place_error


class ObjectStore:
    """Objects under one address. Paths are relative, with `/`."""

    def __init__(self, uri: str) -> None:
        self.uri = uri.rstrip("/")
        scheme = urlparse(uri).scheme
        try:
            if scheme in {"", "file"}:
                folder = Path(urlparse(uri).path if scheme else uri)
                folder.mkdir(parents=True, exist_ok=True)
                self.uri = folder.resolve().as_uri()
                self._store: obstore.store.ObjectStore = LocalStore(folder.resolve())
            else:
                self._store = from_url(uri)
        except (BaseError, ValueError, OSError) as error:
            raise UserInputError(f"storage.uri: {uri!r} cannot be opened: {error}") from error

    def address(self, path: str) -> str:
        """The full address of an object or folder."""
        return f"{self.uri}/{path}"

    def put(self, path: str, content: bytes) -> None:
        """Writes an object whole; readers see the old one or the new one, never a part.

        Raises:
            PlaceError: It is full, read-only or not ours.
            StorageError: The store refused for another reason.
        """
        try:
            obstore.put(self._store, path, content)
        except (BaseError, OSError) as error:
            unusable = place_error(error, self.address(path))
            raise unusable or StorageError(f"cannot write {self.address(path)}: {error}") from error

    def get(self, path: str) -> bytes:
        """Reads an object whole.

        Raises:
            StorageError: It is missing (code `not_found`) or the store refused.
        """
        try:
            return bytes(obstore.get(self._store, path).bytes())
        except FileNotFoundError as error:
            raise StorageError(f"{self.address(path)} does not exist", code="not_found") from error
        except (BaseError, OSError) as error:
            raise StorageError(f"cannot read {self.address(path)}: {error}") from error

    def exists(self, path: str) -> bool:
        """Whether there is an object at `path`."""
        try:
            obstore.head(self._store, path)
        except FileNotFoundError:
            return False
        except (BaseError, OSError) as error:
            raise StorageError(f"cannot look at {self.address(path)}: {error}") from error
        return True

    def list(self, prefix: str) -> list[str]:
        """Paths of all objects under the folder `prefix`, sorted."""
        try:
            listed = self._store.list(prefix.rstrip("/"))  # pyright: ignore[reportUnknownMemberType] - Arrow types it may also give
            return sorted(str(meta["path"]) for batch in listed for meta in batch)
        except (BaseError, OSError) as error:
            raise StorageError(f"cannot list {self.address(prefix)}: {error}") from error

    def delete(self, path: str) -> None:
        """Removes an object; a missing one is no error."""
        try:
            obstore.delete(self._store, path)
        except FileNotFoundError:
            return
        except (BaseError, OSError) as error:
            raise StorageError(f"cannot delete {self.address(path)}: {error}") from error


def open_store(uri: str) -> ObjectStore:
    """Opens the store at an address.

    Raises:
        UserInputError: The address is malformed or its scheme unknown.
    """
    return ObjectStore(uri)
