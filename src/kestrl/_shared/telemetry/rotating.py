"""Exporters whose headers come from a file, such as one of a mounted Secret, and are in force once it has changed."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from opentelemetry.sdk.metrics.export import MetricExporter, MetricExportResult, MetricsData
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.util.re import parse_env_headers

from kestrl.errors import UserInputError

HEADERS_FILE = "KESTRL_OTLP_HEADERS_FILE"
"""Environment variable with the file, which is written as the value of OTEL_EXPORTER_OTLP_HEADERS."""
log = logging.getLogger(__name__)


class Exporter(Protocol):
    """What exporters of spans and of metrics have in common."""

    def shutdown(self) -> None: ...


Kind = TypeVar("Kind", bound=Exporter)
Make = Callable[[Mapping[str, str] | None], Kind]
"""Makes an exporter with headers; None for those of the OTEL_* variables."""


class Present(Generic[Kind]):
    """The exporter with the present headers. Used by one thread, as exporters are."""

    def __init__(self, make: Make[Kind], file: Path) -> None:
        """Makes the first one.

        Raises:
            UserInputError: The file cannot be read.
        """
        self._make, self._file = make, file
        try:
            self._text = file.read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise UserInputError(f"{HEADERS_FILE}: {file} cannot be read: {error}") from error
        self._exporter = make(_headers(self._text))

    def get(self) -> Kind:
        try:
            text = self._file.read_text()
        except (OSError, UnicodeDecodeError) as error:
            log.warning("%s: %s cannot be read: %s", HEADERS_FILE, self._file, error)
            return self._exporter
        if text != self._text:
            before, self._text, self._exporter = self._exporter, text, self._make(_headers(text))
            before.shutdown()
        return self._exporter


def _headers(text: str) -> Mapping[str, str]:
    return parse_env_headers(text.strip(), liberal=True)


class _Spans(SpanExporter):
    def __init__(self, exporter: Present[SpanExporter]) -> None:
        self._present = exporter

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        return self._present.get().export(spans)

    def shutdown(self) -> None:
        self._present.get().shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        return self._present.get().force_flush(timeout_millis)


class _Metrics(MetricExporter):
    def __init__(self, exporter: Present[MetricExporter]) -> None:
        first: Any = exporter.get()
        super().__init__(first._preferred_temporality, first._preferred_aggregation)
        self._present = exporter

    def export(self, metrics_data: MetricsData, timeout_millis: float = 10_000, **kwargs: Any) -> MetricExportResult:
        exporter: Any = self._present.get()
        exported: MetricExportResult = exporter.export(metrics_data, timeout_millis, **kwargs)
        return exported

    def force_flush(self, timeout_millis: float = 10_000) -> bool:
        return self._present.get().force_flush(timeout_millis)

    def shutdown(self, timeout_millis: float = 30_000, **kwargs: Any) -> None:
        exporter: Any = self._present.get()
        exporter.shutdown(timeout_millis, **kwargs)


def span_exporter(make: Make[SpanExporter]) -> SpanExporter:
    """An exporter of spans, with the headers of the file if one is named.

    Raises:
        UserInputError: The file cannot be read.
    """
    file = os.environ.get(HEADERS_FILE)
    return _Spans(Present(make, Path(file))) if file else make(None)


def metric_exporter(make: Make[MetricExporter]) -> MetricExporter:
    """As `span_exporter`, of metrics."""
    file = os.environ.get(HEADERS_FILE)
    return _Metrics(Present(make, Path(file))) if file else make(None)
