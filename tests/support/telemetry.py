"""What telemetry is sent to in tests: exporters in memory, and an OTLP receiver over HTTP."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.metrics.export import MetricExporter, MetricExportResult, MetricsData
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

ENTRY_POINTS = """\
[opentelemetry_traces_exporter]
memory = tests.support.telemetry:MemorySpans
[opentelemetry_metrics_exporter]
memory = tests.support.telemetry:MemoryMetrics
"""


def install_memory(folder: Path) -> None:
    """Make `folder` one in whose installed packages ``memory`` is an exporter of both signals."""
    package = folder / "memory_exporters-1.dist-info"
    package.mkdir(parents=True)
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: memory-exporters\nVersion: 1\n")
    (package / "entry_points.txt").write_text(ENTRY_POINTS)


class MemorySpans(SpanExporter):
    """Keeps the spans of all its instances."""

    ended: ClassVar[list[ReadableSpan]] = []

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.ended.extend(spans)
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        pass


class MemoryMetrics(MetricExporter):
    """Keeps the last export of each instance, which has what was recorded until then."""

    exports: ClassVar[dict[int, MetricsData]] = {}

    def export(
        self, metrics_data: MetricsData, timeout_millis: float = 10_000, **kwargs: Any
    ) -> MetricExportResult:
        self.exports[id(self)] = metrics_data
        return MetricExportResult.SUCCESS

    def shutdown(self, timeout_millis: float = 30_000, **kwargs: Any) -> None:
        pass

    def force_flush(self, timeout_millis: float = 10_000) -> bool:
        return True


def points(data: MetricsData) -> dict[str, list[Any]]:
    """The data points of each metric, by name."""
    found: dict[str, list[Any]] = {}
    for resource in data.resource_metrics:
        for scope in resource.scope_metrics:
            for metric in scope.metrics:
                found.setdefault(metric.name, []).extend(metric.data.data_points)
    return found


class Receiver:
    """An OTLP receiver.

    Attributes:
        url: for OTEL_EXPORTER_OTLP_ENDPOINT.
        traces, metrics: the requests that it got.
        refusals: how many requests it has refused.
        refuses: whether to answer 503, and to ask for a retry in a day.
    """

    def __init__(self) -> None:
        self.traces: list[ExportTraceServiceRequest] = []
        self.metrics: list[ExportMetricsServiceRequest] = []
        self.refuses = False
        self.refusals = 0
        self.url = ""

    @property
    def spans(self) -> list[Any]:
        """All spans that it got."""
        scopes = [scope for each in self.traces for r in each.resource_spans
                  for scope in r.scope_spans]  # fmt: skip
        return [span for scope in scopes for span in scope.spans]

    @property
    def metric_names(self) -> set[str]:
        """The names of all metrics that it got."""
        scopes = [scope for each in self.metrics for r in each.resource_metrics
                  for scope in r.scope_metrics]  # fmt: skip
        return {metric.name for scope in scopes for metric in scope.metrics}

    @contextmanager
    def listening(self) -> Iterator[Receiver]:
        """Receive during the block."""
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.headers.get("Content-Encoding") == "gzip":
                    body = gzip.decompress(body)
                receiver.take(self.path, body)
                self.send_response(503 if receiver.refuses else 200)
                if receiver.refuses:
                    self.send_header("Retry-After", "86400")
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: Any) -> None:
                pass

        with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
            self.url = f"http://127.0.0.1:{server.server_address[1]}"
            thread = threading.Thread(target=server.serve_forever, daemon=True)
            thread.start()
            try:
                yield self
            finally:
                server.shutdown()
                thread.join()

    def take(self, path: str, body: bytes) -> None:
        """Note a request."""
        if self.refuses:
            self.refusals += 1
        elif path == "/v1/traces":
            self.traces.append(ExportTraceServiceRequest.FromString(body))
        elif path == "/v1/metrics":
            self.metrics.append(ExportMetricsServiceRequest.FromString(body))
