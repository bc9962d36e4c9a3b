"""Protocol of an OTLP endpoint."""

from __future__ import annotations

import os
from typing import Literal
from urllib.parse import urlsplit

HTTP = "http/protobuf"
HTTP_PORT = 4318
Signal = Literal["traces", "metrics"]


def is_http(endpoint: str) -> bool:
    """Whether an endpoint takes OTLP/HTTP: one with OTLP's port for HTTP, 4318, or with a path. Others take
    OTLP/gRPC.
    """
    url = urlsplit(endpoint)
    return url.port == HTTP_PORT or url.path.strip("/") != ""


def signal_url(endpoint: str, signal: Signal) -> str:
    """URL of a signal below the base URL of an OTLP/HTTP endpoint."""
    return f"{endpoint.rstrip('/')}/v1/{signal}"


def traces_endpoint(endpoint: str) -> str:
    """Address that an engine sends traces to."""
    return signal_url(endpoint, "traces") if is_http(endpoint) else endpoint


def trace_environment(endpoint: str | None) -> dict[str, str]:
    """Protocol of an OTLP/HTTP endpoint, which engines take from the environment alone."""
    return {"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": HTTP} if endpoint and is_http(endpoint) else {}


def named_endpoint(signal: Signal) -> str | None:
    """Endpoint that the standard OTEL_* variables name."""
    return _variable(signal, "ENDPOINT")


def uses_http(endpoint: str | None, signal: Signal) -> bool:
    """Whether to send a signal by OTLP/HTTP to an endpoint, or to the one of the OTEL_* variables. Those that name a
    protocol come first.
    """
    protocol = _variable(signal, "PROTOCOL")
    return protocol == HTTP if protocol else is_http(endpoint or named_endpoint(signal) or "")


def _variable(signal: Signal, name: str) -> str | None:
    return os.environ.get(f"OTEL_EXPORTER_OTLP_{signal.upper()}_{name}") or os.environ.get(f"OTEL_EXPORTER_OTLP_{name}")
