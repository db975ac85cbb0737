"""A collector that receives OTLP over HTTP, and keeps spans and the values of metrics."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span


@dataclass(frozen=True, slots=True)
class SeenSpan:
    service: str
    instance_id: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    started_ns: int
    ended_ns: int
    kind: str  # SERVER, CLIENT or INTERNAL
    attributes: dict[str, str]


@dataclass(frozen=True, slots=True)
class SeenMetric:
    """The last state of a metric.

    `points` has a value for each set of labels. The value of a histogram is its count.
    """

    kind: str  # gauge, sum or histogram
    points: dict[frozenset[tuple[str, str]], float]


class OtlpCollector:
    def __init__(self) -> None:
        self.spans: list[SeenSpan] = []
        self.metrics: dict[tuple[str, str], SeenMetric] = {}  # by service and name
        self.bodies: list[bytes] = []
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.path == "/v1/traces":
                    collector.take(body)
                elif self.path == "/v1/metrics":
                    collector.take_metrics(body)
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def take(self, body: bytes) -> None:
        self.bodies.append(body)
        for resource_spans in ExportTraceServiceRequest.FromString(body).resource_spans:
            names = {a.key: a.value.string_value for a in resource_spans.resource.attributes}
            for scope in resource_spans.scope_spans:
                self.spans += [
                    SeenSpan(
                        service=names.get("service.name", ""),
                        instance_id=names.get("service.instance.id", ""),
                        name=span.name,
                        trace_id=span.trace_id.hex(),
                        span_id=span.span_id.hex(),
                        parent_id=span.parent_span_id.hex(),
                        kind=Span.SpanKind.Name(span.kind).removeprefix("SPAN_KIND_"),
                        started_ns=span.start_time_unix_nano,
                        ended_ns=span.end_time_unix_nano,
                        attributes={
                            a.key: str(getattr(a.value, str(a.value.WhichOneof("value"))))
                            for a in span.attributes
                        },
                    )
                    for span in scope.spans
                ]

    def take_metrics(self, body: bytes) -> None:
        for resource_metrics in ExportMetricsServiceRequest.FromString(body).resource_metrics:
            names = {a.key: a.value.string_value for a in resource_metrics.resource.attributes}
            for scope in resource_metrics.scope_metrics:
                for metric in scope.metrics:
                    kind = str(metric.WhichOneof("data"))
                    points = {
                        frozenset((a.key, a.value.string_value) for a in point.attributes): float(
                            point.count
                            if kind == "histogram"
                            else getattr(point, point.WhichOneof("value"))
                        )
                        for point in getattr(metric, kind).data_points
                    }
                    self.metrics[names["service.name"], metric.name] = SeenMetric(kind, points)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
