"""The trace of a trial in a real backend: MLflow's server."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.driving import TRIAL, drive
from tests.support.mlflow_server import MlflowServer, mlflow_server
from tests.support.processes import descendants, kill, wait_until_gone
from tests.support.slots import toy_config
from tests.support.waiting import until
from trial_core.checkpoint.store import CheckpointStore
from trial_core.config import ExperimentConfig

if TYPE_CHECKING:
    from mlflow.entities import Trace

ROOT = Path(__file__).parents[4]
GUIDE = (ROOT / "docs/guides/opentelemetry.md").read_text().partition("## In MLflow")[2]
pytestmark = [pytest.mark.slots, pytest.mark.long]

DRIVING = """
import sys
from pathlib import Path
from tests.trial_core.observe.telemetry.test_in_mlflow import config
from tests.support.driving import drive
drive(config(Path(sys.argv[1]), 1_000_000))
"""


def config(folder: Path, batches: int) -> ExperimentConfig:
    """A trial of 2 ranks that saves every 4 batches."""
    return toy_config(folder, batches, scheduling_unit=4, min_checkpoint_period={"batches": 4})


def found(server: MlflowServer, monkeypatch: pytest.MonkeyPatch) -> Trace | None:
    """The trial's only trace, by the guide's filter; None: there is none yet."""
    from mlflow import search_traces  # takes seconds

    monkeypatch.setenv("MLFLOW_TRACKING_URI", server.url)
    (wanted,) = re.findall(r"``(span\.attributes.*?)``", GUIDE)
    wanted = re.sub("%.*%", f"%{TRIAL}%", wanted)
    traces = search_traces(locations=["0"], filter_string=wanted, return_type="list")
    assert len(traces) <= 1
    return next(iter(traces), None)


def test_the_trace_of_a_trial_whose_first_driver_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is found while the first attempt trains. The second one adds to it, with the root."""
    from mlflow.entities import SpanStatusCode, TraceState

    monkeypatch.setenv("TRIALFLOW_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", "60")  # a busy machine drops no span
    with mlflow_server(tmp_path) as server:
        for name, value in re.findall(r"^export (\w+)=(\S+)$", GUIDE, re.M):
            monkeypatch.setenv(name, value.replace("http://127.0.0.1:5000", server.url))
        with subprocess.Popen([sys.executable, "-c", DRIVING, str(tmp_path)], cwd=ROOT) as driver:
            try:
                live = until(lambda: found(server, monkeypatch), "a trace of a live run")
                store = CheckpointStore(config(tmp_path, 1).checkpoint_storage.url)
                until(lambda: store.newest(TRIAL), "a checkpoint")
            finally:
                pids = [driver.pid, *descendants(driver.pid)]
                kill(pids[:1], signal.SIGKILL)
        assert wait_until_gone(pids, 30) == []
        newest = store.newest(TRIAL)
        assert newest is not None
        drive(config(tmp_path, newest.progress.batches_trained + 4), take_over=True)
        ended = found(server, monkeypatch)
    assert live.info.state is TraceState.IN_PROGRESS
    assert ended is not None
    assert ended.info.trace_id == live.info.trace_id
    assert ended.info.state is TraceState.ERROR
    first, second = sorted(
        (span for span in ended.data.spans if span.name == "attempt"),
        key=lambda span: int(span.attributes["trialflow.attempt"]),
    )
    assert (first.parent_id, second.parent_id) == (None, first.span_id)
    assert [each.status.status_code for each in (first, second)] == [
        SpanStatusCode.ERROR, SpanStatusCode.UNSET,
    ]  # fmt: skip
    assert second.attributes["trialflow.batches"] == newest.progress.batches_trained + 4
    spans = {span.span_id: span for span in ended.data.spans}
    parents = [spans[span.parent_id].name for span in spans.values() if span.parent_id in spans]
    assert parents.count("launch") >= 5  # the stages of the second attempt
    assert {span.span_id for span in live.data.spans} <= spans.keys()
