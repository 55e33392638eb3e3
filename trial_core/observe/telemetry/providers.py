"""OpenTelemetry's providers for a run: those of the process, or our own.

Exporters are found by the entry points of their packages, as in the SDK's own configuration.
Providers of our own are not set globally, so the providers of the user's program stay unchanged.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import entry_points
from typing import Any

from opentelemetry import metrics, trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import MetricReader, PeriodicExportingMetricReader
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor

from trial_core.checkpoint.storage.credentials import without_url_secrets
from trial_core.common.any_logger import AnyLogger
from trial_core.schedule.ending import Ending

SDK_LOGGERS = {
    "traces": "opentelemetry.sdk._shared_internal",
    "metrics": "opentelemetry.sdk.metrics._internal.export",
}
"""Loggers, by signal, of exporters that raise; exporters log to their own modules' loggers."""


# Metrics that Prometheus pulls; for all runs of the process, since the port is bound for good.
_pulled: dict[str, MeterProvider] = {}


@contextmanager
def providers(
    traces: list[str], metrics_: list[str], logger: AnyLogger, ending: Ending
) -> Iterator[tuple[trace.TracerProvider, list[metrics.MeterProvider]]]:
    """Yield the provider of traces and the providers of metrics, for these names of exporters. A
    signal without names is off."""
    own: list[OwnProvider] = []
    try:
        try:
            made = _tracer_provider(traces, own, logger), _meter_providers(metrics_, own, logger)
        except ValueError as error:  # a variable that the SDK cannot read
            logger.warning("the run is not reported to OpenTelemetry: %s", error)
            made = trace.NoOpTracerProvider(), []
        yield made
    finally:
        for each in own:
            each.end()
        for each in own:
            each.wait(ending)


class FirstFailure(logging.Filter):
    """Turns the many log lines of failing exporters, perhaps every few seconds, into one."""

    def __init__(self, signal: str, logger: AnyLogger) -> None:
        super().__init__()
        self._signal = signal
        self._logger = logger
        self._lock = threading.Lock()
        self._has_warned = False
        self.has_failed = threading.Event()

    def filter(self, record: logging.LogRecord) -> bool:
        """Pass on records below a warning; warn once of the others."""
        if record.levelno < logging.WARNING:
            return True
        self.warn(record.getMessage())
        self.has_failed.set()
        return False

    def warn(self, why: str) -> None:
        """Warn once. The URLs in `why` may have keys, which are not shown."""
        with self._lock:
            if self._has_warned:
                return
            self._has_warned = True
        self._logger.warning(
            "OpenTelemetry gets no %s (logged once; training continues): %s",
            self._signal,
            without_url_secrets(why),
        )


class OwnProvider:
    """A provider of our own, for one run. `finish` exports the rest, and may take long or raise;
    the exporters are cut short if it takes too long."""

    def __init__(
        self, finish: Callable[[], object], exporters: list[Any], signal: str, logger: AnyLogger
    ) -> None:
        self._finish = finish
        self._exporters = exporters
        self._failure = FirstFailure(signal, logger)
        self._thread = threading.Thread(target=self._run, name="telemetry-end", daemon=True)
        modules = {of.__module__ for each in exporters for of in type(each).__mro__}
        self._loggers = [logging.getLogger(each) for each in {SDK_LOGGERS[signal], *modules}]
        for each in self._loggers:
            each.addFilter(self._failure)
        self._lock = threading.Lock()
        self._has_ended = False
        self._cuts: list[threading.Thread] = []

    def end(self) -> None:
        """Begin to export the rest. Returns at once."""
        self._failure.has_failed.clear()
        self._thread.start()

    def wait(self, ending: Ending) -> None:
        """Wait until the rest is exported, or for a first failure; then cut the export short."""
        if not ending.wait(self._failure.has_failed.wait):  # it hangs, and may never say so
            self._failure.warn("the end of the run does not wait longer for the last of them")
        with self._lock:
            if self._has_ended:
                return
            self._cuts = [
                threading.Thread(target=each.shutdown, name="telemetry-cut", daemon=True)
                for each in self._exporters
            ]
            for each in self._cuts:
                each.start()

    def _run(self) -> None:
        try:
            self._finish()
        except Exception as error:  # noqa: BLE001 - the SDK raises bare ones, and the run is over
            self._loggers[0].warning("%s", error)
        finally:
            with self._lock:
                self._has_ended = True
            for cut in self._cuts:  # an exporter warns if it is shut down twice
                cut.join()
            for each in self._loggers:
                each.removeFilter(self._failure)
            self._failure.has_failed.set()


def _tracer_provider(
    names: list[str], own: list[OwnProvider], logger: AnyLogger
) -> trace.TracerProvider:
    if not names:
        return trace.NoOpTracerProvider()
    found = trace.get_tracer_provider()
    if not isinstance(found, (trace.ProxyTracerProvider, trace.NoOpTracerProvider)):
        return found
    provider = TracerProvider(resource=_resource(), shutdown_on_exit=False)
    exporters = []
    for _, exporter, processor in _made("traces", names, BatchSpanProcessor, logger):
        exporters.append(exporter)
        provider.add_span_processor(processor)
    own.append(OwnProvider(provider.shutdown, exporters, "traces", logger))
    return provider


def _meter_providers(
    names: list[str], own: list[OwnProvider], logger: AnyLogger
) -> list[metrics.MeterProvider]:
    if not names:
        return []
    found = metrics.get_meter_provider()
    if isinstance(found, MeterProvider):
        return [found]
    new = [name for name in names if name not in _pulled]
    made = _made("metrics", new, _reader, logger)
    pushed = {exporter: reader for _, exporter, reader in made if reader is not exporter}
    for name, exporter, reader in made:
        if reader is exporter:
            _pulled[name] = MeterProvider([reader], _resource(), shutdown_on_exit=False)
    provided: list[metrics.MeterProvider] = [_pulled[name] for name in names if name in _pulled]
    if pushed:
        provider = MeterProvider(list(pushed.values()), _resource(), shutdown_on_exit=False)
        own.append(OwnProvider(provider.shutdown, list(pushed), "metrics", logger))
        provided.append(provider)
    return provided


def _reader(exporter: Any) -> MetricReader:
    """A reader that exports the metrics; an exporter whose metrics are pulled is one itself."""
    is_reader = isinstance(exporter, MetricReader)
    return exporter if is_reader else PeriodicExportingMetricReader(exporter)


def _made(
    signal: str, names: list[str], wrap: Callable[[Any], Any], logger: AnyLogger
) -> list[tuple[str, Any, Any]]:
    """For each name its exporter and the result of `wrap`, without exporters that fail."""
    group, made = f"opentelemetry_{signal}_exporter", []
    for name in names:
        known = entry_points(group=group)
        found = next((each for each in known if each.name == _entry_point(signal, name)), None)
        if found is None:
            logger.warning(
                "no exporter of %s is installed that is called %r; there are: %s. Install its "
                "package, or correct OTEL_%s_EXPORTER",
                signal, name, ", ".join(sorted(each.name for each in known)), signal.upper(),
            )  # fmt: skip
            continue
        try:
            exporter = found.load()()
            made.append((name, exporter, wrap(exporter)))
        except Exception as error:  # noqa: BLE001 - code of another package, which ends no run
            logger.warning(
                "the exporter %r of %s cannot be made (training continues): %s: %s",
                name, signal, type(error).__name__, error,
            )  # fmt: skip
    return made


def _entry_point(signal: str, name: str) -> str:
    """The exporter's name. Without a protocol, ``otlp`` is HTTP, as OpenTelemetry advises; the
    SDK's own configuration would take gRPC, which `trialflow[otel]` does not install."""
    if name != "otlp":
        return name
    variables = (f"OTEL_EXPORTER_OTLP_{signal.upper()}_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
    protocol = next((set_ for each in variables if (set_ := os.environ.get(each))), "http/protobuf")
    return "otlp_proto_grpc" if protocol.strip() == "grpc" else "otlp_proto_http"


def _resource() -> Resource:
    """The variables' description of this process; by default the service is trialflow."""
    resource = Resource.create()
    if str(resource.attributes.get(SERVICE_NAME)).startswith("unknown_service"):
        return resource.merge(Resource({SERVICE_NAME: "trialflow"}))
    return resource
