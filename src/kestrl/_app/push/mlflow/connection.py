"""Requests to an MLflow server: authentication as MLflow's own client has it, typed failures, bounded answers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, cast
from urllib.parse import urlsplit

import httpx2

from kestrl._app.push.target import TargetRefused, TargetUnavailable
from kestrl.errors import UserInputError
from kestrl.redaction import Redactor, credentials_of

USER, PASSWORD, TOKEN = "MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN"
CERTIFICATE, INSECURE = "MLFLOW_TRACKING_SERVER_CERT_PATH", "MLFLOW_TRACKING_INSECURE_TLS"
SECONDS = 60.0
LATER = frozenset({408, 425, 429})
"""HTTP statuses below 500 of temporary failures."""
SHOWN = 300
"""Characters of an answer that a message shows."""


class NotFound(TargetRefused):
    """The server has no such experiment or run."""

    code = "push_not_found"


class ContentRefused(TargetRefused):
    """The server refuses the content of a request."""

    code = "push_content_refused"


class MLflowConnection:
    """A connection to one server.

    Args:
        uri: Its address.
        variables: Environment variables with credentials, named as MLflow names them.

    Raises:
        UserInputError: The address or a variable is malformed.
    """

    def __init__(self, uri: str, variables: Mapping[str, str]) -> None:
        parts = urlsplit(uri)
        if parts.scheme not in {"http", "https"} or not parts.hostname:
            raise UserInputError(f"--uri: {uri!r} is no address of an MLflow server, such as http://127.0.0.1:5000")
        self.uri = uri.rstrip("/")
        self._redactor = Redactor(credentials_of(variables))
        token, user = variables.get(TOKEN), variables.get(USER)
        insecure = variables.get(INSECURE, "").lower() in {"true", "1"}
        try:
            verify: Any = False if insecure else _context(variables.get(CERTIFICATE))
            self._client = httpx2.Client(
                timeout=SECONDS,
                verify=verify,
                auth=(user, variables.get(PASSWORD, "")) if user else None,
                headers={"Authorization": f"Bearer {token}"} if token and not user else None,
            )
        except OSError as error:
            raise UserInputError(f"{CERTIFICATE}: {variables.get(CERTIFICATE)!r} cannot be used: {error}") from error

    def get(self, method: str, **parameters: str) -> dict[str, Any]:
        """The answer of a method that reads."""
        return self._json(self._sent("GET", f"/api/2.0/mlflow/{method}", params=parameters))

    def post(self, method: str, **body: Any) -> dict[str, Any]:
        """The answer of a method that writes or searches."""
        return self._json(self._sent("POST", f"/api/2.0/mlflow/{method}", json=body))

    def post_traces(self, content: bytes, headers: Mapping[str, str]) -> None:
        """Sends spans, as an `ExportTraceServiceRequest` of OTLP."""
        request_headers = {"Content-Type": "application/x-protobuf", **headers}
        self._sent("POST", "/v1/traces", content=content, headers=request_headers)

    def close(self) -> None:
        self._client.close()

    def _sent(self, verb: str, path: str, **content: Any) -> httpx2.Response:
        try:
            answer = self._client.request(verb, self.uri + path, **content)
        except httpx2.InvalidURL as error:
            raise UserInputError(f"--uri: {self.uri!r} is malformed: {error}") from error
        except httpx2.HTTPError as error:
            reason = self._redactor.text(str(error)) or type(error).__name__
            raise TargetUnavailable(
                f"MLflow at {self.uri} does not answer: {reason}; start it, or name another"
            ) from error
        if answer.status_code == 200:
            return answer
        raise self._refusal(path, answer)

    def _refusal(self, path: str, answer: httpx2.Response) -> TargetRefused | TargetUnavailable:
        status, where = answer.status_code, f"{self.uri}{path}"
        text = self._redactor.text(" ".join(answer.text.split())[:SHOWN])
        if status >= 500 or status in LATER:
            return TargetUnavailable(f"{where} answers {status}: {text}")
        if status in {401, 403}:
            return TargetRefused(
                f"{where} answers {status}; set {USER} and {PASSWORD}, or {TOKEN}, in the file of --secret or the "
                "Secret of spec.telemetry.mlflow.secretRef"
            )
        if status == 404 and "RESOURCE_DOES_NOT_EXIST" in text:
            return NotFound(f"{where} answers {status}: {text}")
        if status in {404, 405}:
            return TargetRefused(
                f"{where} answers {status}: traces by OTLP need MLflow 3.6 or later; update the server"
            )
        return ContentRefused(f"{where} answers {status}: {text}")

    def _json(self, answer: httpx2.Response) -> dict[str, Any]:
        try:
            content: Any = answer.json()
        except json.JSONDecodeError:
            content = None
        if not isinstance(content, dict):
            raise TargetRefused(f"{self.uri} is no MLflow server: it answers {answer.text[:80]!r}")
        return cast("dict[str, Any]", content)


def _context(certificate: str | None) -> Any:
    """Settings of TLS with a server's own certificate authority; True for those of this machine."""
    import ssl

    return True if not certificate else ssl.create_default_context(cafile=certificate)
