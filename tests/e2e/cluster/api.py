"""A small client of the Kubernetes API, for what must be quick or lasting: the standard library, as the cluster's
administrator."""

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
"""What a server that is not there, or goes away meanwhile, shows as."""


class Refused(RuntimeError):
    """The server's answer was no."""

    def __init__(self, status: int, path: str, answer: bytes) -> None:
        super().__init__(f"{path}: {status} {answer.decode(errors='replace')}")
        self.status = status


class Api:
    """Knows a server and a folder of certificates."""

    def __init__(self, server: str, certificates: Path) -> None:
        self._place = urlsplit(server).netloc
        self._trust = ssl.create_default_context(cafile=certificates / f"{AUTHORITY}.crt")
        self._trust.load_cert_chain(certificates / "admin.crt", certificates / "admin.key")

    def ask(self, path: str) -> bytes:
        """The answer to a GET.

        Raises:
            Refused: The status is not one of success.
        """
        return self._request("GET", path, None)

    def get(self, path: str) -> Object:
        return _object(self.ask(path))

    def create(self, path: str, made: Object) -> Object:
        """Posts an object; gives it as the server has it then."""
        return _object(self._request("POST", path, made))

    def watch(self, path: str, version: str, seconds: int) -> Iterator[tuple[str, Object]]:
        """Changes of a collection after a resource version: their types and the objects, until the server ends it."""
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
