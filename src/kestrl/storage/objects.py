"""A thin wrapper of obstore: paths under one prefix, bytes in and out, typed errors, bounded time."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError, GenericError, PermissionDeniedError, UnauthenticatedError
from obstore.store import LocalStore, from_url

from kestrl.errors import (
    PlaceError,
    StorageError,
    StorageInaccessible,
    StorageUnavailable,
    UserInputError,
    place_error,
)
from kestrl.redaction import Redactor, credentials_of
from kestrl.storage.credentials import client_options, mounted_configuration, opened_with
from kestrl.storage.layout import CHECKPOINTS
from kestrl.storage.uris import file_uri, is_local, local_path, scheme_of

if TYPE_CHECKING:
    from obstore.store import ClientConfig, RetryConfig

RETRIES: RetryConfig = {
    "max_retries": 8,
    "backoff": {"init_backoff": timedelta(milliseconds=100), "max_backoff": timedelta(seconds=5), "base": 2},
    "retry_timeout": timedelta(seconds=60),
}
"""Requests without an answer or with a 5xx are retried for a minute; then the failure is raised."""
REQUEST_SECONDS = 60
REFUSED = re.compile(r"status code: 40[13]\b")
"""Text of obstore's error for a forbidden listing; other requests have an error type."""
ATTEMPTS = re.compile(r" in \S+s, after \d+ retries, max_retries: \d+, retry_timeout: \S+ +")
CAUSE = re.compile(r'\bmessage: "(?P<message>[^"]+)"')
STATUS = re.compile(r"status code: (?P<status>\d{3})\b")
LATER = frozenset({408, 425, 429})
"""HTTP statuses below 500 of temporary failures."""
OS_ERROR = re.compile(r"\(os error (?P<number>\d+)\)")
AWAY = frozenset(
    {errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENOTCONN, errno.EREMOTEIO}
)
"""Errors of a network file system while its server is unavailable."""
S3_ERROR = re.compile(r"<Error>\s*<Code>(?P<code>[^<]*)</Code>\s*<Message>(?P<message>[^<]*)</Message>")


class ObjectVersion(NamedTuple):
    """What identifies the content of an object without reading it."""

    tag: str
    """Differs when the object is written again."""
    modified: float
    """Unix seconds at which it was written."""


class FolderListing(NamedTuple):
    """What lies directly in a folder, by name."""

    folders: list[str]
    objects: dict[str, ObjectVersion]


def _client(mounted: Mapping[str, str]) -> ClientConfig:
    # An endpoint without TLS is intended: a store on loopback or inside a cluster.
    variables = {**os.environ, **mounted}
    plain = variables.get("AWS_ENDPOINT_URL", variables.get("AWS_ENDPOINT", "")).startswith("http://")
    bounds: ClientConfig = {"connect_timeout": "5s", "timeout": f"{REQUEST_SECONDS}s", "allow_http": plain}
    return cast("ClientConfig", {**client_options(mounted), **bounds})


class ObjectStore:
    """Objects under one address. Paths are relative, with `/`.

    Credentials in a folder (`kestrl.storage.credentials`) are read for every request, so that a changed one counts at
    once.

    Args:
        uri: Address, or a plain path.
        create: Whether a missing local folder is created.

    Raises:
        UserInputError: The address cannot be opened.
    """

    def __init__(self, uri: str, *, create: bool = True) -> None:
        self.uri = uri.rstrip("/")
        self._address, self._mounted = uri, mounted_configuration(scheme_of(uri))
        self._redactor = _redactor(self._mounted)
        try:
            if is_local(uri):
                folder = local_path(uri)
                if create:
                    folder.mkdir(parents=True, exist_ok=True)
                elif not folder.is_dir():
                    raise UserInputError(f"storage.uri: the folder {folder} does not exist")
                self.uri = file_uri(folder)
                self._opened: obstore.store.ObjectStore = LocalStore(folder.resolve())
            else:
                self._opened = _remote(uri, self._mounted)
        except (BaseError, ValueError, OSError) as error:
            reason = self._redactor.text(str(error))
            raise UserInputError(f"storage.uri: {uri!r} cannot be opened: {reason}") from error

    @property
    def _store(self) -> obstore.store.ObjectStore:
        """The store with the present credentials.

        Raises:
            StorageInaccessible: They are malformed.
        """
        mounted = mounted_configuration(scheme_of(self._address))
        if mounted != self._mounted:
            try:
                # Two threads may both open it; each uses what it has opened.
                opened = _remote(self._address, mounted)
            except (BaseError, ValueError) as error:
                reason = _redactor(mounted).text(_short(error))
                raise StorageInaccessible(
                    f"{self.uri}: cannot be opened with its changed credentials; check them: {reason}"
                ) from error
            self._opened, self._mounted, self._redactor = opened, mounted, _redactor(mounted)
        return self._opened

    def address(self, path: str) -> str:
        """The full address of an object or folder."""
        return f"{self.uri}/{path}"

    def check(self) -> None:
        """Sends one request, so that configuration errors are reported before anything starts.

        Raises:
            StorageInaccessible: The bucket does not exist or is not accessible.
            StorageUnavailable: The store does not answer.
        """
        self.list(CHECKPOINTS)

    def put(self, path: str, content: bytes, *, create: bool = False) -> None:
        """Writes an object atomically; readers see the old or the new content.

        Args:
            path: Path of the object.
            content: Content of the object.
            create: Only if the object does not exist; decided by the store, so one of two writers succeeds.

        Raises:
            StorageInaccessible: The store denies access, or the bucket does not exist.
            PlaceError: The store is full or read-only.
            StorageUnavailable: The store is temporarily unavailable.
            StorageError: The object exists (code `exists`), or the store refused for another reason.
        """
        try:
            obstore.put(self._store, path, content, mode="create" if create else "overwrite")
        except AlreadyExistsError as error:
            raise StorageError(f"{self.address(path)} exists already", code="exists") from error
        except (BaseError, OSError) as error:
            raise self._refused("write", path, error) from error

    def _refused(self, verb: str, path: str, error: Exception) -> PlaceError | StorageError:
        where = self.address(path)
        answer = self._redactor.text(_short(error))
        if isinstance(error, PermissionDeniedError | UnauthenticatedError) or REFUSED.search(str(error)):
            denied = PlaceError if is_local(self.uri) else StorageInaccessible
            return denied(
                f"{where}: access is denied; check the credentials (AWS_ACCESS_KEY_ID and the like): {answer}"
            )
        if "NoSuchBucket" in answer:
            return StorageInaccessible(f"{where}: there is no such bucket; create it, or name another in storage.uri")
        kind = StorageUnavailable if self._may_pass(error) else StorageError
        return place_error(error, where) or kind(f"cannot {verb} {where}: {answer}")

    def _may_pass(self, error: Exception) -> bool:
        """Whether a later retry of the request may succeed."""
        text = str(error)
        if is_local(self.uri):
            match = OS_ERROR.search(text)
            number = error.errno if isinstance(error, OSError) and error.errno else int(match["number"]) if match else 0
            return number in AWAY
        answered = STATUS.search(text)
        if answered is not None:
            status = int(answered["status"])
            return status >= 500 or status in LATER
        # Without an answer, only failures of the transport have this type.
        return isinstance(error, GenericError)

    def get(self, path: str) -> bytes:
        """Reads an object.

        Raises:
            StorageInaccessible: The store denies access, or the bucket does not exist.
            StorageUnavailable: The store is temporarily unavailable.
            StorageError: The object is missing (code `not_found`), or the store refused.
        """
        return bytes(self.view(path))

    def view(self, path: str) -> memoryview:
        """Reads an object without copying it, which takes a third of the time for 20 MB. Raises as `get` does."""
        try:
            return memoryview(obstore.get(self._store, path).bytes())
        except FileNotFoundError as error:
            raise self._missing(path, error) from error
        except (BaseError, OSError) as error:
            raise self._refused("read", path, error) from error

    def get_range(self, path: str, start: int, length: int) -> bytes:
        """Reads some bytes of an object. Raises as `get` does."""
        try:
            return bytes(obstore.get_range(self._store, path, start=start, length=length))
        except FileNotFoundError as error:
            raise self._missing(path, error) from error
        except (BaseError, OSError) as error:
            raise self._refused("read", path, error) from error

    def get_ranges(self, path: str, spans: Sequence[tuple[int, int]]) -> list[bytes]:
        """Reads the bytes from the first to before the last of each pair, with few requests. Raises as `get` does."""
        starts, ends = [start for start, _ in spans], [end for _, end in spans]
        try:
            return [bytes(chunk) for chunk in obstore.get_ranges(self._store, path, starts=starts, ends=ends)]
        except FileNotFoundError as error:
            raise self._missing(path, error) from error
        except (BaseError, OSError) as error:
            raise self._refused("read", path, error) from error

    def size(self, path: str) -> int:
        """Bytes of an object. Raises as `get` does."""
        return int(self._head(path)["size"])

    def version(self, path: str) -> ObjectVersion:
        """What identifies the present content of an object. Raises as `get` does."""
        return _version(self._head(path))

    def _head(self, path: str) -> Mapping[str, Any]:
        try:
            return cast("Mapping[str, Any]", obstore.head(self._store, path))
        except FileNotFoundError as error:
            raise self._missing(path, error) from error
        except (BaseError, OSError) as error:
            raise self._refused("look at", path, error) from error

    def _missing(self, path: str, error: FileNotFoundError) -> PlaceError | StorageError:
        if "NoSuchBucket" in str(error):
            return self._refused("read", path, error)
        return StorageError(f"{self.address(path)} does not exist", code="not_found")

    def exists(self, path: str) -> bool:
        """Whether there is an object at `path`."""
        try:
            obstore.head(self._store, path)
        except FileNotFoundError:
            return False
        except (BaseError, OSError) as error:
            raise self._refused("look at", path, error) from error
        return True

    def list(self, prefix: str) -> list[str]:
        """Paths of all objects under the folder `prefix`, sorted."""
        try:
            batches = self._store.list(prefix.rstrip("/"))  # pyright: ignore[reportUnknownMemberType] - Arrow types it may also give
            return sorted(str(meta["path"]) for batch in batches for meta in batch)
        except (BaseError, OSError) as error:
            raise self._refused("list", prefix, error) from error

    def folder(self, prefix: str = "") -> FolderListing:
        """What lies directly in the folder `prefix`; empty for one that does not exist."""
        try:
            listing = obstore.list_with_delimiter(self._store, prefix.rstrip("/") or None)  # pyright: ignore[reportUnknownMemberType] - as in `list`
        except (BaseError, OSError) as error:
            raise self._refused("list", prefix, error) from error
        return FolderListing(
            folders=sorted(str(path).rpartition("/")[2] for path in listing["common_prefixes"]),
            objects={str(meta["path"]).rpartition("/")[2]: _version(meta) for meta in listing["objects"]},
        )

    def versions(self, prefix: str) -> dict[str, ObjectVersion]:
        """Version of each object under the folder `prefix`, by path, sorted."""
        try:
            batches = self._store.list(prefix.rstrip("/"))  # pyright: ignore[reportUnknownMemberType] - as in `list`
            every = {str(meta["path"]): _version(meta) for batch in batches for meta in batch}
        except (BaseError, OSError) as error:
            raise self._refused("list", prefix, error) from error
        return dict(sorted(every.items()))

    def delete(self, path: str) -> None:
        """Deletes an object; a missing one is not an error."""
        try:
            obstore.delete(self._store, path)
        except FileNotFoundError:
            return
        except (BaseError, OSError) as error:
            raise self._refused("delete", path, error) from error


def _version(meta: Mapping[str, Any]) -> ObjectVersion:
    modified = meta["last_modified"].timestamp()
    return ObjectVersion(str(meta["e_tag"] or f"{modified}-{meta['size']}"), modified)


def _redactor(mounted: Mapping[str, str]) -> Redactor:
    """Knows the credentials: a store repeats them in errors, as does a lost connection to a URL with a signature."""
    return Redactor(credentials_of({**os.environ, **mounted}))


def _remote(uri: str, mounted: Mapping[str, str]) -> obstore.store.ObjectStore:
    opening: Any = partial(from_url, uri, client_options=_client(mounted), retry_config=RETRIES)

    def open_with(configuration: dict[str, str]) -> obstore.store.ObjectStore:
        opened: obstore.store.ObjectStore = opening(config=configuration) if configuration else opening()
        return opened

    return opened_with(open_with, mounted)


def _short(error: Exception) -> str:
    """Answer of the store, or reason of a failed request, without the request and the number of attempts."""
    text, _, source = str(error).partition("\n\nDebug source")
    answered = S3_ERROR.search(text)
    if answered is not None:
        return f"{answered['code']}: {answered['message']}"
    cause = CAUSE.search(source)
    return ATTEMPTS.sub("", text) + (f" ({cause['message']})" if cause else "")


def open_store(uri: str, *, create: bool = True) -> ObjectStore:
    """Opens the store at an address; without `create`, a local folder that is missing is an error.

    Raises:
        UserInputError: The address is malformed, its scheme unknown, or its folder missing.
    """
    return ObjectStore(uri, create=create)
