"""Reports runs to OpenTelemetry: a trace of each trial, and metrics."""
