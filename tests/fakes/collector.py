"""An OTLP collector, by gRPC and by HTTP, that stores received spans."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any, cast

import grpc
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2 as metric_pb
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2_grpc as metric_stubs
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as pb
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as stubs

from kestrl._shared.telemetry.names import Attr

MAX_SPANS = 100_000


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenSpan:
    """A received span; ids in hex."""

    name: str
    service: str
    run: str
    """Run id of the sending process; empty for other programs."""
    trace_id: str
    span_id: str
    parent_id: str
    """Empty for a root."""
    attributes: dict[str, Any]
    failed: bool
    seconds: float


@dataclass(slots=True)
class Collector:
    """Received spans and metrics."""

    endpoint: str = ""
    """Endpoint of OTLP/gRPC."""
    http_endpoint: str = ""
    """Endpoint of OTLP/HTTP, with a path, as clients expect of one without port 4318."""
    spans: dict[str, SeenSpan] = field(default_factory=dict[str, SeenSpan])
    """Spans by span id, at most `MAX_SPANS`."""
    metrics: dict[str, set[str]] = field(default_factory=dict[str, set[str]])
    """Metric names by service."""
    credentials: list[str] = field(default_factory=list[str])
    """The header Authorization of each request that has one."""

    def path(self, span: SeenSpan) -> str:
        """Span names from the root: `job > step > update`, without the prefix `kestrl.`."""
        above = self.spans.get(span.parent_id)
        name = span.name.removeprefix("kestrl.")
        return f"{self.path(above)} > {name}" if above else name

    def paths(self) -> dict[str, set[str]]:
        """Paths of all spans, with the services that sent them."""
        seen: dict[str, set[str]] = {}
        for span in self.spans.values():
            seen.setdefault(self.path(span), set()).add(span.service)
        return seen


def _keep_credential(collector: Collector, context: Any) -> None:
    """Keeps the credential of a request, from the metadata of gRPC or the headers of HTTP."""
    sent = cast(Any, context) if isinstance(context, Message) else dict(context.invocation_metadata())
    credential = sent.get("authorization")
    collector.credentials += [] if credential is None else [credential]


class _Metrics(metric_stubs.MetricsServiceServicer):
    def __init__(self, collector: Collector) -> None:
        self._collector = collector

    def Export(
        self, request: metric_pb.ExportMetricsServiceRequest, context: Any
    ) -> metric_pb.ExportMetricsServiceResponse:
        _keep_credential(self._collector, context)
        for resource in request.resource_metrics:
            facts = {item.key: item.value.string_value for item in resource.resource.attributes}
            names = {metric.name for scope in resource.scope_metrics for metric in scope.metrics}
            self._collector.metrics.setdefault(facts.get("service.name", ""), set()).update(names)
        return metric_pb.ExportMetricsServiceResponse()


class _Servicer(stubs.TraceServiceServicer):
    def __init__(self, collector: Collector) -> None:
        self._collector = collector

    def Export(self, request: pb.ExportTraceServiceRequest, context: Any) -> pb.ExportTraceServiceResponse:
        _keep_credential(self._collector, context)
        for resource in request.resource_spans:
            facts = {item.key: item.value.string_value for item in resource.resource.attributes}
            for scope in resource.scope_spans:
                for span in scope.spans:
                    self._keep(span, facts)
        return pb.ExportTraceServiceResponse()

    def _keep(self, span: Any, facts: Mapping[str, str]) -> None:
        if len(self._collector.spans) >= MAX_SPANS:
            raise MemoryError(f"more than {MAX_SPANS} spans: trace less in this test")
        self._collector.spans[span.span_id.hex()] = SeenSpan(
            name=span.name,
            service=facts.get("service.name", ""),
            run=facts.get(Attr.RUN, ""),
            trace_id=span.trace_id.hex(),
            span_id=span.span_id.hex(),
            parent_id=span.parent_span_id.hex(),
            attributes={item.key: _plain(item.value) for item in span.attributes},
            failed=span.status.code == 2,
            seconds=(span.end_time_unix_nano - span.start_time_unix_nano) / 1e9,
        )


def _http_handler(servicers: Mapping[str, tuple[Any, Any]]) -> type[BaseHTTPRequestHandler]:
    """Handler of `POST /otlp/v1/SIGNAL`, by the servicer and the request message of each signal."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            servicer, message = servicers[self.path.removeprefix("/otlp/v1/")]
            assert self.headers["Content-Type"] == "application/x-protobuf"
            request = message.FromString(self.rfile.read(int(self.headers["Content-Length"])))
            answer = servicer.Export(request, self.headers)
            body = answer.SerializeToString()
            self.send_response(200)
            self.send_header("Content-Type", "application/x-protobuf")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class's name
            """Logs nothing."""

    return Handler


def _plain(value: Any) -> Any:
    kind = value.WhichOneof("value")
    return None if kind is None else getattr(value, kind)


@contextmanager
def collecting() -> Generator[Collector]:
    """A collector on free ports of the loopback."""
    collector = Collector()
    server = grpc.server(ThreadPoolExecutor(max_workers=2))
    add_servicer: Any = vars(stubs)["add_TraceServiceServicer_to_server"]  # no type stubs
    spans, metrics = _Servicer(collector), _Metrics(collector)
    add_servicer(spans, server)
    add_metrics: Any = vars(metric_stubs)["add_MetricsServiceServicer_to_server"]
    add_metrics(metrics, server)
    collector.endpoint = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    handler = _http_handler(
        {"traces": (spans, pb.ExportTraceServiceRequest), "metrics": (metrics, metric_pb.ExportMetricsServiceRequest)}
    )
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as http:
        collector.http_endpoint = f"http://127.0.0.1:{http.server_port}/otlp"
        serving = Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
        serving.start()
        try:
            yield collector
        finally:
            server.stop(grace=1).wait()
            http.shutdown()
            serving.join()
