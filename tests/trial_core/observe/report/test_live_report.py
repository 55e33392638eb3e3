"""The live report: its history over several runs, and failures to write it."""

from __future__ import annotations

import json
import logging
import shutil
import threading
from collections.abc import Callable
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import pytest

from tests.support.slots import toy_config
from tests.support.waiting import until
from trial_core.checkpoint.manifest import Topology
from trial_core.checkpoint.store import CheckpointStore
from trial_core.errors import RankFailed
from trial_core.observe.report.live_report import HISTORY, Report
from trial_core.schedule import ending
from trial_core.schedule.stop_requests import StopHandler

LOST = RankFailed(rank=1, host="here", during="train-workload", signal_name="SIGKILL")
LOGGER = "report-of-a-test"
NewReport = Callable[..., Report]


@pytest.fixture
def new_report(tmp_path: Path) -> NewReport:
    """Creates reports of one trial, as its successive runs do."""

    def new(run_dir: Path = tmp_path / "run", **arguments: Any) -> Report:
        run_dir.mkdir(exist_ok=True)
        config = toy_config(tmp_path, hyperparameters={"of": {"lr": 0.5}})
        logger = logging.getLogger(LOGGER)
        return Report(config, "toy-0000beef", run_dir, logger=logger, **arguments)

    return new


def train(report: Report, begin: int, end: int) -> None:
    """A run that reports every 10 batches and saves every 20."""
    report.run_started("toy-0000beef", 100, begin, 16)
    for batches in range(begin + 10, end + 1, 10):
        report.metrics_reported("training", batches, {"loss": 1000 / batches})
        if batches % 20 == 0:
            report.checkpoint_committed(f"uuid-{batches}", batches, 1024)


def curve(report: Report) -> list[int]:
    """The batches at which the report has a training loss."""
    return [point.batches for point in report._facts.history.curves["training"]]


def text(report: Report) -> str:
    return report.path.read_text(encoding="utf-8")


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [
        record.getMessage()
        for record in caplog.records
        if record.name == LOGGER and record.levelno == logging.WARNING
    ]


def test_a_resumed_run_has_the_curves_of_all_runs(new_report: NewReport) -> None:
    """Up to the checkpoint that it resumes from: later batches are trained again."""
    with new_report() as first:
        train(first, 0, 70)
        first.run_ended("stopped: preempted (SIGTERM)")
    with new_report() as second:
        train(second, 60, 80)
        assert curve(second) == [10, 20, 30, 40, 50, 60, 70, 80]
        second.run_ended("completed")
    why = "resumed from the last checkpoint; previous run: stopped: preempted (SIGTERM)"
    assert f"| 60 | {why} |" in text(second)
    assert "`uuid-20`" in text(second)
    assert "`uuid-80`" in text(second)


def test_the_report_begins_with_what_was_run_and_ends_with_links(new_report: NewReport) -> None:
    """Before the metrics: hyperparameters, slots, topology and code; links to pages are links."""
    page = "http://127.0.0.1:4200/v2/runs/flow-run/1"
    report = new_report(links={"Run": page, "Odd": "http://a> <b"})
    topology = Topology(world_size=4, data_parallel_size=2, zero_stage=1, batch_samples=16)
    report.trial_built(topology, {"torch": "2.13.0"}, "sha256:0123456789abcdef")
    train(report, 0, 20)
    report.write()
    begin, _, rest = text(report).partition("## Last metrics")
    assert "- hyperparameters: of.lr 0.5\n" in begin
    assert "- slots: 4 ranks (2 data-parallel, ZeRO stage 1), 16 samples a batch\n" in begin
    assert "`sha256:0123456789ab`, torch 2.13.0\n" in begin
    links = rest.partition("## Links")[2]
    assert f"- Run: <{page}>\n" in links
    assert "- Odd: `http://a> <b`\n" in links
    assert "report.html`" in links


def test_the_machine_is_measured_at_each_batch(
    new_report: NewReport, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In percent: several values at one batch are averaged, and none is kept before the run."""
    report = new_report()
    values = iter([10.0, 20.0, 40.0, 70.0])
    use = {"system/network_sent_bytes": 1.0, "system/gpu0_percent": None}
    monkeypatch.setattr(
        report._system, "measure", lambda: {**use, "system/cpu_percent": next(values)}
    )
    report._note_use()
    train(report, 60, 60)
    report._note_use()
    report._note_use()
    report.batches_trained(61)
    report._note_use()
    points = report._facts.history.curves["machine"]
    assert [(each.batches, each.values) for each in points] == [
        (60, {"system/cpu_percent": 30.0}), (61, {"system/cpu_percent": 70.0})
    ]  # fmt: skip
    report.write()
    assert "machine of the driver: processor and memory" in text(report)


def test_another_machine_reads_the_stored_history(new_report: NewReport, tmp_path: Path) -> None:
    """Of the local and the stored history, the newer one counts."""
    with new_report() as first:
        train(first, 0, 40)
        first.run_ended("completed")
    with new_report(tmp_path / "elsewhere") as second:
        train(second, 40, 60)
        assert curve(second) == [10, 20, 30, 40, 50, 60]
        second.run_ended("completed")
    with new_report() as third:  # the first machine again, with its older file
        train(third, 60, 80)
        assert curve(third) == [10, 20, 30, 40, 50, 60, 70, 80]


def test_a_restart_within_a_run(new_report: NewReport) -> None:
    """The curve continues from the checkpoint, and the report names the cause."""
    with new_report() as report:
        train(report, 0, 70)
        report.restarting("rank 1 was ended by SIGKILL", 1, 5)
        train(report, 60, 80)
        assert curve(report) == [10, 20, 30, 40, 50, 60, 70, 80]
        report.moving("saved, to continue on other nodes: node-1 drains\nat once")
        report.run_ended("completed")
    assert "| 80 | saved, to continue on other nodes: node-1 drains |" in text(report)
    assert "| 70 | restart 1 of at most 5: rank 1 was ended by SIGKILL |" in text(report)
    assert "| 60 | resumed from the last checkpoint |" in text(report)


def test_a_run_from_scratch_drops_the_history(new_report: NewReport) -> None:
    """Only how the earlier run ended is kept."""
    with new_report() as first:
        train(first, 0, 40)
        first.run_ended("failed: out of memory")
    with new_report() as second:
        train(second, 0, 20)
        assert curve(second) == [10, 20]
        second.run_ended("completed")
    assert "`uuid-40`" not in text(second)
    assert "| 0 | started from scratch; previous run: failed: out of memory |" in text(second)


def test_a_run_that_fails_before_training_keeps_the_history(new_report: NewReport) -> None:
    """The next run has all curves, and how the failed run ended."""
    with new_report() as first:
        train(first, 0, 40)
        first.run_ended("completed")
    with new_report() as second:
        second.write()
        second.run_ended("failed: no such module")
    with new_report() as third:
        train(third, 40, 60)
        assert curve(third) == [10, 20, 30, 40, 50, 60]
        third.run_ended("completed")
    end = "resumed from the last checkpoint; previous run: failed: no such module"
    assert f"| 40 | {end} |" in text(third)


def test_a_damaged_history_is_a_warning(
    new_report: NewReport, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The run continues with its own history."""
    with new_report() as first:
        train(first, 0, 40)
        first.run_ended("completed")
    first.path.with_name(HISTORY).write_text("{half")
    shutil.rmtree(tmp_path / "checkpoints")
    with new_report() as second:
        train(second, 40, 60)
        assert curve(second) == [50, 60]
    assert "the history of an earlier report cannot be read" in caplog.text


def test_the_run_after_a_killed_run_says_so(new_report: NewReport) -> None:
    """A killed run leaves no end in its history."""
    killed = new_report()
    train(killed, 0, 40)
    killed.write()
    with new_report() as second:
        train(second, 40, 60)
        second.run_ended("completed")
    assert "previous run: killed, or its machine was lost" in text(second)


class Refused(Exception):
    """What a publisher raises."""


def test_a_failed_publication_is_one_warning(
    new_report: NewReport, caplog: pytest.LogCaptureFixture
) -> None:
    """The file is written."""

    def publish(text: str) -> None:
        raise Refused("no answer")

    with new_report(publish=publish, publish_errors=(Refused,)) as report:
        report.batches_trained(10)
        report.run_ended(f"failed: {LOST}")
    assert f"**failed: {LOST}**" in text(report)
    (warning,) = warnings(caplog)
    assert "the report is not up to date" in warning
    assert "Refused: no answer" in warning


def test_the_report_is_published_in_the_context_of_its_run(new_report: NewReport) -> None:
    """Prefect's flow run is a context variable, and a thread publishes."""
    flow_run = ContextVar[str]("flow_run")
    flow_run.set("mine")
    published: list[tuple[str, bool]] = []

    with new_report(
        publish=lambda text: published.append((flow_run.get(), "**completed**" in text))
    ) as report:
        report.batches_trained(10)
        until(lambda: published, "an update")
        report.run_ended("completed")
    assert published == [("mine", False), ("mine", True)]


def test_a_publication_that_hangs(
    new_report: NewReport, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end waits for a limited time, begins no second one, and the report is stored."""
    monkeypatch.setattr(ending, "TOTAL_SECONDS", 2.0)
    published: list[str] = []
    answers = threading.Event()

    def publish(text: str) -> None:
        published.append(text)
        assert answers.wait(60)

    with new_report(publish=publish) as report:
        report.batches_trained(10)
        until(lambda: published, "an update")
        report.run_ended("completed")
    assert len(published) == 1
    assert "**completed**" in text(report)
    stored = CheckpointStore(f"file://{tmp_path}/checkpoints").storage
    assert stored.read("runs/toy-0000beef/report.md") == report.path.read_bytes()
    answers.set()
    report._thread.join(60)
    assert published[1:] == [text(report)]


def test_a_file_that_cannot_be_written(
    new_report: NewReport, caplog: pytest.LogCaptureFixture
) -> None:
    """As on a full disk: a warning."""
    report = new_report()
    report.path.mkdir()
    with report:
        report.run_ended(f"failed: {LOST}")
    assert "IsADirectoryError" in caplog.text


def test_a_storage_that_fails_at_the_end(
    new_report: NewReport, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The local report is complete, and a warning says that it is not stored."""
    report = new_report()
    (tmp_path / "checkpoints").write_text("not a folder")
    with report:
        report.run_ended("completed")
    assert "**completed**" in text(report)
    assert any("the report is not stored" in warning for warning in warnings(caplog))


def test_a_stopping_run_says_who_has_asked(new_report: NewReport) -> None:
    with StopHandler(60) as stopping:
        stopping.ask("cancelled", "in Prefect")
        assert stopping.wait(60)
        report = new_report(stopping=stopping)
        report.write()
    assert "**stopping: cancelled (in Prefect)**" in text(report)


def test_the_file_is_replaced_atomically(new_report: NewReport) -> None:
    """A reader that has opened it reads the earlier state, complete."""
    report = new_report()
    report.write()
    with report.path.open(encoding="utf-8") as reader:
        report.run_ended("completed")
        assert "**running**" in reader.read()
    assert "**completed**" in text(report)


def test_the_page_is_written_at_intervals(
    new_report: NewReport, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is large: at once, after a minute, and at the end. The report says where it is."""
    now = 1000.0
    monkeypatch.setattr("trial_core.observe.report.live_report.time.monotonic", lambda: now)
    report = new_report()
    page = report.path.with_name("report.html")

    def shown() -> str:
        report.write()
        return page.read_text(encoding="utf-8")

    assert "<strong>running</strong> · batch 0 of" in shown()
    train(report, 0, 40)
    now += 59
    assert "batch 0 of" in shown()
    now += 1
    assert "batch 40 of" in shown()
    with report:
        report.run_ended("completed")
    assert "<strong>completed</strong>" in page.read_text(encoding="utf-8")
    stored = CheckpointStore(f"file://{tmp_path}/checkpoints")
    assert f"- HTML report: `{stored.url}/runs/toy-0000beef/report.html`" in text(report)
    assert f": `{page}`" in text(report)
    assert stored.storage.read("runs/toy-0000beef/report.html") == page.read_bytes()


def test_learning_rates_are_drawn_by_optimizer(new_report: NewReport) -> None:
    """An engine without one has none; a single optimizer needs no number."""
    report = new_report()
    report.learning_rates_read(10, [0.5])
    report.learning_rates_read(20, [0.25, None, 0.125])
    report.learning_rates_read(30, [])
    values = [point.values for point in report._facts.history.curves["learning_rate"]]
    assert values == [
        {"learning rate": 0.5},
        {"learning rate of optimizer 0": 0.25, "learning rate of optimizer 2": 0.125},
        {},
    ]


def test_a_history_of_an_earlier_release_is_read(new_report: NewReport) -> None:
    """It has no learning rates."""
    with new_report() as first:
        train(first, 0, 40)
        first.run_ended("completed")
    path = first.path.with_name(HISTORY)
    written = json.loads(path.read_text())
    written["curves"] = {"training": written["curves"]["training"], "validation": [], "speed": []}
    path.write_text(json.dumps(written))
    with new_report() as second:
        train(second, 40, 60)
        assert curve(second) == [10, 20, 30, 40, 50, 60]


def test_tensorboard_files_are_reported_after_the_first_commit(
    new_report: NewReport, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the run ends, so that a failed run's report has them too."""
    monkeypatch.setattr("trial_core.observe.report.live_report.UPDATE_SECONDS", 0.01)
    store = CheckpointStore(f"file://{tmp_path}/checkpoints")
    with new_report() as report:
        (tmp_path / "run" / "tensorboard").mkdir()
        store.storage.write("runs/toy-0000beef/tensorboard/rank-0/events", b"event")
        report.checkpoint_committed("uuid-20", 20, 1024)
        line = f"TensorBoard: `{store.url}/runs/toy-0000beef/tensorboard`"
        until(lambda: report.path.exists() and line in text(report), line, 20)


def test_a_stage_that_takes_long_is_explained(new_report: NewReport) -> None:
    """A build of minutes does not look like a hang."""
    report = new_report()
    report.stage_started("build-trial", "")
    report.stage_takes_long("compiling DeepSpeed's operator cpu_adam, for 15 s")
    report.write()
    assert "build-trial: compiling DeepSpeed's operator cpu_adam, for 15 s …" in text(report)
    report.stage_ended("build-trial", "", 60.0)
    report.write()
    assert "compiling" not in text(report)


def test_the_nodes_of_the_ranks_are_shown(new_report: NewReport) -> None:
    """Where each rank is; a node that was replaced is an event. One node is not mentioned."""
    report = new_report()
    report.run_started("toy-0000beef", 40, 0, 4)
    report.ranks_placed(["gpu-7"] * 2)
    report.write()
    assert "gpu-7" not in text(report)
    for last in ("gpu-8", "gpu-9"):
        report.ranks_placed(["gpu-7", "gpu-7", last])
        report.batches_trained(10)
    report.write()
    assert text(report).count("ranks 0-1 on gpu-7, 2 on gpu-9") == 2
    assert "now ranks 0-1 on gpu-7, 2 on gpu-9" in text(report)
