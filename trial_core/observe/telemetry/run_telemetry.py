"""Switches telemetry on for a run, if OpenTelemetry's standard variables ask for it.

A signal (traces, metrics) is on if ``OTEL_TRACES_EXPORTER`` or ``OTEL_METRICS_EXPORTER`` names an
exporter, or an endpoint is set for it. ``none`` and ``OTEL_SDK_DISABLED=true`` switch off. The SDK
reads all other variables. It is imported only if a signal is on.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager

from trial_core.common.any_logger import AnyLogger
from trial_core.config import ExperimentConfig
from trial_core.observe.events.observers import Observer, Observers
from trial_core.observe.ledger.run_clock import RunClock
from trial_core.schedule.ending import Ending
from trial_core.schedule.stop_requests import StopHandler


def exporter_names(signal: str, variables: Mapping[str, str] = os.environ) -> list[str]:
    """The exporters that the variables name for ``traces`` or ``metrics``; empty if it is off."""
    if variables.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return []
    name = signal.upper()
    if chosen := variables.get(f"OTEL_{name}_EXPORTER", "").strip():
        return [each.strip() for each in chosen.split(",") if each.strip() not in ("", "none")]
    endpoints = ("OTEL_EXPORTER_OTLP_ENDPOINT", f"OTEL_EXPORTER_OTLP_{name}_ENDPOINT")
    return ["otlp"] if any(variables.get(each) for each in endpoints) else []


@contextmanager
def run_telemetry(
    config: ExperimentConfig,
    trial: str,
    clock: RunClock,
    stopping: StopHandler,
    ending: Ending,
    logger: AnyLogger,
) -> Iterator[Observer]:
    """Yield an observer that reports the run, or one that does nothing, for the block, whose end
    exports the rest. A failing backend is a warning, and does not end the run."""
    traces, metrics = exporter_names("traces"), exporter_names("metrics")
    if not (traces or metrics):
        yield Observer()
        return
    try:
        from trial_core.observe.telemetry.providers import providers
        from trial_core.observe.telemetry.run_metrics import RunMetrics
        from trial_core.observe.telemetry.run_trace import RunTrace
    except ImportError as error:
        logger.warning(
            "the run is not reported to OpenTelemetry, though its OTEL_ variables are set: %s. "
            "Install it with: pip install 'trialflow[otel]'", error,
        )  # fmt: skip
        yield Observer()
        return
    with (
        providers(traces, metrics, logger, ending) as (tracer_provider, meter_providers),
        ExitStack() as at_end,
    ):
        run_trace = RunTrace(tracer_provider, config.name, trial, stopping)
        at_end.push(run_trace.end)
        run_metrics = [RunMetrics(each, config.name, trial, clock) for each in meter_providers]
        for each in run_metrics:
            at_end.callback(each.note_slots)  # the last values
        yield Observers(run_trace, *run_metrics)
