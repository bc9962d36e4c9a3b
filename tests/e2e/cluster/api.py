"""A small client of the Kubernetes API on the standard library, for calls that must be fast or long-lived, as the
cluster's administrator."""

from __future__ import annotations

import http.client
import json
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from .certificates import AUTHORITY

Object = dict[str, Any]
REQUEST_SECONDS = 5.0
Unreachable = (OSError, http.client.HTTPException)
"""Exceptions raised for a server that does not exist, or disappears meanwhile."""


class Refused(RuntimeError):
    """The server refused a request."""

    def __init__(self, status: int, path: str, answer: bytes) -> None:
        super().__init__(f"{path}: {status} {answer.decode(errors='replace')}")
        self.status = status


class Api:
    """A connection to a server, with a folder of certificates."""

    def __init__(self, server: str, certificates: Path) -> None:
        self._place = urlsplit(server).netloc
        self._trust = ssl.create_default_context(cafile=certificates / f"{AUTHORITY}.crt")
        self._trust.load_cert_chain(certificates / "admin.crt", certificates / "admin.key")

    def ask(self, path: str) -> bytes:
        """The answer to a GET.

        Raises:
            Refused: The status is not a success.
        """
        return self._request("GET", path, None)

    def get(self, path: str) -> Object:
        return _object(self.ask(path))

    def create(self, path: str, made: Object) -> Object:
        """Creates an object; returns it as stored."""
        return _object(self._request("POST", path, made))

    def watch(self, path: str, version: str, seconds: int) -> Iterator[tuple[str, Object]]:
        """Changes of a collection after a resource version: their types and objects, until the server ends the
        stream."""
        connection = self._connect(seconds + REQUEST_SECONDS)
        try:
            connection.request("GET", f"{path}?watch=1&resourceVersion={version}&timeoutSeconds={seconds}")
            answer = connection.getresponse()
            if answer.status != http.HTTPStatus.OK:
                raise Refused(answer.status, path, answer.read())
            for line in answer:
                event = json.loads(line)
                yield event["type"], event["object"]
        finally:
            connection.close()

    def _request(self, method: str, path: str, body: Object | None) -> bytes:
        connection = self._connect(REQUEST_SECONDS)
        try:
            headers = {"content-type": "application/json", "accept": "application/json"}
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            answer = connection.getresponse()
            read = answer.read()
            if answer.status >= http.HTTPStatus.MULTIPLE_CHOICES:
                raise Refused(answer.status, path, read)
            return read
        finally:
            connection.close()

    def _connect(self, seconds: float) -> http.client.HTTPSConnection:
        return http.client.HTTPSConnection(self._place, timeout=seconds, context=self._trust)


def _object(answer: bytes) -> Object:
    found: Object = json.loads(answer)
    return found
