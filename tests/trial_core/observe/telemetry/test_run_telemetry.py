"""When telemetry is on, what it needs, and what a backend that fails costs. Without ranks."""

from __future__ import annotations

import logging
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.trace import StatusCode

from tests.support.driving import drive
from tests.support.slots import toy_config
from tests.support.telemetry import MemorySpans, Receiver, install_memory
from tests.trial_core.driver.test_drive import FullMachine
from trial_core.errors import LaunchError
from trial_core.observe.events.observers import WorkloadTimes
from trial_core.observe.ledger.run_clock import RunClock
from trial_core.observe.ledger.time_ledger import RunTime
from trial_core.observe.telemetry.providers import OwnProvider
from trial_core.observe.telemetry.run_telemetry import exporter_names, run_telemetry
from trial_core.observe.telemetry.run_trace import derived_ids
from trial_core.schedule import ending
from trial_core.schedule.ending import Ending
from trial_core.schedule.stop_requests import StopHandler

ROOT = Path(__file__).parents[4]
GUIDE = ROOT / "docs/guides/opentelemetry.md"
ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"
TRIAL = "toy-0000beef"
logger = logging.getLogger("tests.telemetry")


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (ENDPOINT, "OTEL_TRACES_EXPORTER", "OTEL_METRICS_EXPORTER", "OTEL_SDK_DISABLED"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> type[MemorySpans]:
    install_memory(tmp_path / "packages")
    monkeypatch.syspath_prepend(str(tmp_path / "packages"))
    monkeypatch.setattr(MemorySpans, "ended", [])
    return MemorySpans


def report(
    folder: Path,
    attempt: int = 1,
    stopping: StopHandler | None = None,
    earlier: Sequence[RunTime] = (),
) -> None:
    """Report a run that trains 10 batches in a stage."""
    stopping = stopping or StopHandler(1.0)
    with run_telemetry(
        toy_config(folder), TRIAL, RunClock(), stopping, Ending(stopping), logger
    ) as observer:
        observer.trial_owned(attempt, earlier)
        observer.run_started(TRIAL, 10, 0, 4)
        observer.stage_started("train-workload", "[0→10]")
        observer.stage_ended("train-workload", "[0→10]", 0.5)
        observer.training_timed(WorkloadTimes(10, 0.5, [0.1, 0.2], [0.01, 0.02]))
        observer.learning_rates_read(10, [0.1, None])
        observer.metrics_reported("training", 10, {"loss": 0.5, "curve": [1, 2]})
        observer.stage_started("validate", "@10")
        observer.stage_ended("validate", "@10", 0.25)
        observer.metrics_reported("validation", 10, {"loss": 0.25})
        observer.stage_ended("checkpoint-save", "@10", 0.05)
        observer.stage_started("checkpoint-upload", "@10")
        observer.checkpoint_committed("4f0c21aa", 10, 2_000_000)
        observer.stage_ended("checkpoint-upload", "@10", 1.5)


@pytest.mark.parametrize(
    ("variables", "traces", "metrics"),
    [
        ({}, [], []),
        ({ENDPOINT: "http://collector:4318"}, ["otlp"], ["otlp"]),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://collector:4318"}, ["otlp"], []),
        ({"OTEL_METRICS_EXPORTER": "prometheus"}, [], ["prometheus"]),
        ({"OTEL_TRACES_EXPORTER": "otlp, console"}, ["otlp", "console"], []),
        ({ENDPOINT: "http://collector:4318", "OTEL_METRICS_EXPORTER": "none"}, ["otlp"], []),
        ({ENDPOINT: "http://collector:4318", "OTEL_SDK_DISABLED": "TRUE"}, [], []),
    ],
)
def test_the_standard_variables_switch_each_signal(
    variables: dict[str, str], traces: list[str], metrics: list[str]
) -> None:
    assert exporter_names("traces", variables) == traces
    assert exporter_names("metrics", variables) == metrics


REPORTING = """
import logging, sys
from pathlib import Path
{before}
from trial_core.config import ExperimentConfig
from trial_core.observe.ledger.run_clock import RunClock
from trial_core.observe.telemetry.run_telemetry import run_telemetry
from trial_core.schedule.ending import Ending
from trial_core.schedule.stop_requests import StopHandler
logging.basicConfig(format="%(message)s")
config = ExperimentConfig(name="toy", entrypoint="a:B", searcher=dict(
    name="single", metric="loss", max_length=dict(batches=1)))
with run_telemetry(
    config, "toy-1", RunClock(), StopHandler(1.0), Ending(), logging.getLogger()
) as observer:
    observer.trial_owned(1)
    observer.run_started("toy-1", 1, 0, 1)
    observer.batches_trained(1)
{after}
"""


def in_process(before: str, after: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Report a run in a process of its own."""
    return subprocess.run(
        [sys.executable, "-c", REPORTING.format(before=before, after=after)],
        env={"PYTHONPATH": ":".join(filter(None, sys.path)), "TRIALFLOW_HOME": "/nonexistent",
             **variables},
        capture_output=True, text=True, check=True, cwd=ROOT,
    )  # fmt: skip


def test_a_run_without_the_variables_does_not_import_opentelemetry() -> None:
    seen = in_process("", "print([m for m in sys.modules if m.startswith('opentelemetry')])")
    assert (seen.stdout.strip(), seen.stderr) == ("[]", "")


def test_missing_packages_are_one_warning_that_says_what_to_install() -> None:
    """And the run goes on."""
    missing = "sys.modules['opentelemetry.sdk'] = None"
    seen = in_process(missing, "print('trained')", **{ENDPOINT: "http://127.0.0.1:9"})
    assert seen.stdout.strip() == "trained"
    assert len(seen.stderr.splitlines()) == 1
    assert "Install it with: pip install 'trialflow[otel]'" in seen.stderr


GLOBAL = """
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
provider, spans = TracerProvider(), InMemorySpanExporter()
provider.add_span_processor(SimpleSpanProcessor(spans))
trace.set_tracer_provider(provider)
"""


def test_the_provider_that_the_process_has_is_used_and_stays_open() -> None:
    """Its exporters get the spans; a program's own spans before and after are as they were."""
    after = """
with trace.get_tracer("mine").start_as_current_span("own"): pass
print([(each.name, hex(each.context.trace_id)) for each in spans.get_finished_spans()])
"""
    seen = in_process(GLOBAL, after, OTEL_TRACES_EXPORTER="console")
    own_trace = hex(derived_ids("toy-1")[0])
    assert re.fullmatch(
        rf"\[\('launch', '{own_trace}'\), \('attempt', '{own_trace}'\), \('own', '0x\w+'\)\]",
        seen.stdout.strip(),
    )


def test_every_run_of_a_trial_is_an_attempt_that_is_reported(
    tmp_path: Path, memory: type[MemorySpans], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With its number, and an error if it failed; here, because the machine has no slots left."""
    monkeypatch.setenv("TRIALFLOW_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "memory")
    for _ in range(2):
        with pytest.raises(LaunchError):
            drive(toy_config(tmp_path), joining=FullMachine())
    first, second = (span for span in memory.ended if span.name == "attempt")
    assert second.parent is not None
    assert (first.parent, second.parent.span_id) == (None, first.context.span_id)
    for number, span in enumerate((first, second), start=1):
        assert dict(span.attributes or {})["trialflow.attempt"] == number
        assert (span.status.status_code, span.status.description) == (
            StatusCode.ERROR, "too few slots",
        )  # fmt: skip


def ran(is_over: bool) -> RunTime:
    """What the ledger has of a first attempt."""
    return RunTime(
        number=1, by="ada@east", began_at="2026-11-26T08:09:23.223686Z",
        until="2026-11-26T08:10:23.5Z", is_over=is_over, slots=2, trained_to=8,
        slot_milliseconds={},
    )  # fmt: skip


def test_the_root_of_a_killed_first_attempt_is_sent_by_the_second(
    tmp_path: Path, memory: type[MemorySpans], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its driver could not send it. The third attempt does not send it again."""
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "memory")
    for attempt in (2, 3):
        report(tmp_path, attempt, earlier=[ran(is_over=False)])
    root, second, third = (span for span in memory.ended if span.name == "attempt")
    assert (root.context.trace_id, root.context.span_id) == derived_ids(TRIAL)
    assert root.parent is None
    assert dict(root.attributes or {})["trialflow.attempt"] == 1
    assert root.status.status_code is StatusCode.ERROR
    assert "killed" in str(root.status.description)
    assert (root.start_time, root.end_time) == (1795680563223686000, 1795680623500000000)
    for later in (second, third):
        assert later.parent is not None
        assert later.parent.span_id == root.context.span_id


def test_the_root_of_a_first_attempt_that_ended_is_not_sent_again(
    tmp_path: Path, memory: type[MemorySpans], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "memory")
    report(tmp_path, attempt=2, earlier=[ran(is_over=True)])
    assert [span.name for span in memory.ended].count("attempt") == 1


def test_every_span_has_its_trial(
    tmp_path: Path, memory: type[MemorySpans], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run in progress has sent the spans of its stages alone, and is found by them."""
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "memory")
    report(tmp_path)
    seen = [dict(span.attributes or {}) for span in memory.ended]
    assert len(seen) == 5
    assert {each["trialflow.trial"] for each in seen} == {TRIAL}
    assert {each["trialflow.experiment"] for each in seen} == {"toy"}


def test_an_attempt_is_linked_to_the_span_around_it(
    tmp_path: Path, memory: type[MemorySpans], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not its child: attempts of a trial have one trace."""
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "memory")
    with TracerProvider().get_tracer("flow").start_as_current_span("flow") as flow:
        report(tmp_path)
    attempt = memory.ended[-1]
    assert [link.context for link in attempt.links] == [flow.get_span_context()]
    assert attempt.parent is None


def test_the_sampler_decides_once_for_all_attempts(
    tmp_path: Path, memory: type[MemorySpans], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "memory")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_traceidratio")
    for ratio, count in (("0", 0), ("1", 10)):
        monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", ratio)
        report(tmp_path, attempt=1)
        report(tmp_path, attempt=2)
        assert len(memory.ended) == count


def test_a_stop_is_said_and_is_no_error(
    tmp_path: Path, memory: type[MemorySpans], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "memory")
    with StopHandler(1.0) as stopping:
        stopping.ask("preempted", "SIGTERM")
        assert stopping.wait(10)
        report(tmp_path, stopping=stopping)
    attempt = memory.ended[-1]
    assert attempt.attributes is not None
    assert attempt.attributes["trialflow.stop_reason"] == "preempted (SIGTERM)"
    assert attempt.status.is_unset


def test_an_otlp_receiver_gets_both_signals_of_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With what the variables say of service, resource, headers and compression."""
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment=staging")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "gzip")
    with Receiver().listening() as receiver:
        monkeypatch.setenv(ENDPOINT, receiver.url)
        report(tmp_path)
    assert [span.name for span in receiver.spans] == [
        "train-workload", "validate", "checkpoint-upload", "launch", "attempt",
    ]  # fmt: skip
    assert {"trialflow.train.duration", "trialflow.data_wait.time"} <= receiver.metric_names
    attributes = receiver.traces[0].resource_spans[0].resource.attributes
    named = {each.key: each.value.string_value for each in attributes}
    assert named["service.name"] == "trialflow"
    assert named["deployment.environment"] == "staging"


def test_a_backend_that_is_down_is_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """For each signal; OpenTelemetry's own lines are left out, and keys in an endpoint's URL."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    for variable in (f"{ENDPOINT[:-8]}TRACES_ENDPOINT", f"{ENDPOINT[:-8]}METRICS_ENDPOINT"):
        monkeypatch.setenv(variable, f"http://127.0.0.1:{port}/v1?api-key=hidden-0123")
    report(tmp_path)
    warnings = [record.getMessage() for record in caplog.records]
    assert len(warnings) == 2
    for signal in ("traces", "metrics"):
        (warning,) = [each for each in warnings if f"gets no {signal}" in each]
        assert "training continues" in warning
        assert "refused" in warning
        assert "hidden" not in warning


def test_the_end_of_a_run_does_not_wait_for_a_backend_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor for retries: this one asks for them a day later, and the exporter would wait."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1000000")
    monkeypatch.setattr(ending, "TOTAL_SECONDS", 1e6)
    receiver = Receiver()
    receiver.refuses = True
    with receiver.listening():
        monkeypatch.setenv(ENDPOINT, receiver.url)
        report(tmp_path)
    assert receiver.refusals == 2


def wait_for_the_end() -> None:
    """Until what a run has left of telemetry is over."""
    for thread in threading.enumerate():
        if thread.name.startswith("telemetry-"):
            thread.join()


def test_an_exporter_that_is_cut_short_says_nothing_more(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Also if it ends at the same time: OpenTelemetry's exporters warn of a second shutdown."""

    class Exporter:
        def shutdown(self) -> None:
            for thread in threading.enumerate():
                if thread.name == "telemetry-end":
                    cut.set()
                    thread.join(0.2)  # it does not end before this has
            exports.warning("already shut down")

    def finish() -> None:
        exports.warning("not exported")
        cut.wait()

    cut, exports = threading.Event(), logging.getLogger(Exporter.__module__)
    provider = OwnProvider(finish, [Exporter()], "traces", logger)
    provider.end()
    provider.wait(Ending())
    wait_for_the_end()
    assert [each.rpartition(": ")[2] for each in caplog.messages] == ["not exported"]


def test_the_end_of_a_run_waits_a_limited_time_for_a_backend_that_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It accepts connections, and never answers. The run says so before it is over, once."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1000000")
    monkeypatch.setattr(ending, "TOTAL_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv(ENDPOINT, f"http://127.0.0.1:{server.getsockname()[1]}")
        report(tmp_path)
        warnings = list(caplog.messages)
    wait_for_the_end()
    assert caplog.messages == warnings
    for signal in ("traces", "metrics"):
        (warning,) = [each for each in warnings if f"gets no {signal}" in each]
        assert "does not wait longer" in warning
    assert len(warnings) == 2


def test_an_exporter_that_is_not_installed_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "zipkin")
    report(tmp_path)
    (warning,) = [record.getMessage() for record in caplog.records]
    assert "called 'zipkin'; there are: console, otlp_proto_http" in warning
    assert "correct OTEL_TRACES_EXPORTER" in warning


SCRAPING = """
import os, urllib.request
from tests.trial_core.observe.telemetry.test_run_telemetry import report
report(Path("/nonexistent"))  # a second run
port = os.environ["OTEL_EXPORTER_PROMETHEUS_PORT"]
print(urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics").read().decode())
"""


def test_prometheus_gets_the_names_that_the_guide_has() -> None:
    """Also of a second run in the process, which shares the port. No name is left out."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
    seen = in_process(
        "", SCRAPING, OTEL_METRICS_EXPORTER="prometheus",
        OTEL_EXPORTER_PROMETHEUS_HOST="127.0.0.1", OTEL_EXPORTER_PROMETHEUS_PORT=port,
    )  # fmt: skip
    assert seen.stderr == ""
    types = re.findall(r"^# TYPE (trialflow_\w+) (\w+)$", seen.stdout, re.M)
    assert ("trialflow_train_duration_seconds", "histogram") in types
    assert 'trialflow_batches_total{otel_scope_name="trialflow"' in seen.stdout
    for trial in ("toy-1", TRIAL):
        assert f'trialflow_trial="{trial}"' in seen.stdout
    table = re.findall(r"^\| `[\w.]+` \|.*\| `(trialflow_\w+)` \|$", GUIDE.read_text(), re.M)
    assert sorted(table) == sorted(name for name, _ in types)
